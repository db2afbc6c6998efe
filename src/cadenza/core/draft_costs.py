"""`DraftCosts`: what a step costs without drafts, and with so many of them, by number of rows.

`StepCost` is one line through steps of few tokens and of many. A few tokens more are nearly free
while a step waits for the weights, and dear where it computes: so both are measured here for each
number of decoding rows, and for several numbers of drafts. Knows no sequences and no clock.
"""

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from math import ceil, log2

from cadenza.core.step_cost import MAX_RATIO, SMALLEST_MS, StepCost, StepLoad

WEIGHT_OF_NEWEST, WEIGHT_OF_OLD = 0.3, 0.01
FIRST_PRICE = 1.25
"""Of a draft, as a multiple of what `StepCost` says, where none was measured."""

FIRST_HALF = 1 / 3
"""The share of what the fewest measured drafts cost, taken to be that of half as many: low, so
that fewer are tried where they may be nearly free."""

MAX_CHANGE, MAX_DRAFT_CHANGE = 1.25, 1.5
"""How far one measured time may be from what a step, or its drafts, are known to take; what is
further counts as so far: now and then a step takes twice as long, for reasons of the host."""

LEAST_CHANGE = 0.03
"""The same for drafts that are nearly free, as a share of the step."""

FAR_STEPS, FAR_SHARE = 3, 0.2
"""So many such times in succession count in full, as when other work on the machine began or ended.
Of steps with drafts, which are far from this share of the step on, they ask for some without."""

NUM_TRUSTED = 2
"""Measured times of so many drafts from which single ones count within those bounds."""

FORGET_STEPS = 32
"""Steps with other numbers of drafts after which what so many cost is forgotten: what was dear, by
chance or while the machine was slower, is not tried again before."""

MIN_PRICE, MAX_PRICE = 0.1, 4.0
FIRST_STEPS, REFRESH_STEPS = 4, 64
"""Steps with drafts after which one without is wanted, to measure what it costs: for the first
time, and later."""


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Milliseconds of one step with different numbers of drafts.

    Args:
        base_ms: without drafts.
        counts, more_ms: numbers of drafts, ascending from 0, and what they add; linear between
            them.
        draft_ms: each draft more than the last of `counts`.
    """

    base_ms: float
    counts: tuple[float, ...]
    more_ms: tuple[float, ...]
    draft_ms: float

    @classmethod
    def linear(cls, base_ms: float, draft_ms: float) -> "DecodeCost":
        return cls(base_ms, (0.0,), (0.0,), draft_ms)

    def added_ms(self, num_drafts: float) -> float:
        at = bisect_right(self.counts, num_drafts) - 1
        return self.more_ms[at] + self._draft_ms_from(at) * (num_drafts - self.counts[at])

    def added_up_to(self, num_drafts: int) -> list[float]:
        """`added_ms` of 0 to `num_drafts` drafts."""
        found: list[float] = []
        for at, end in enumerate((*self.counts[1:], num_drafts + 1)):
            count, ms, draft_ms = self.counts[at], self.more_ms[at], self._draft_ms_from(at)
            numbers = range(len(found), min(ceil(end), num_drafts + 1))
            found += [ms + draft_ms * (number - count) for number in numbers]
        return found

    def _draft_ms_from(self, at: int) -> float:
        """Of each draft between the number at this place in `counts` and the next."""
        if at + 1 == len(self.counts):
            return self.draft_ms
        return (self.more_ms[at + 1] - self.more_ms[at]) / (self.counts[at + 1] - self.counts[at])

    def fixed_ms(self, num_rows: int) -> float:
        """What the step costs whatever it holds, if its rows cost as much as so many drafts."""
        return max(0.0, self.base_ms - self.added_ms(num_rows))


@dataclass(slots=True, eq=False)
class _Point:
    """Milliseconds that about so many drafts add."""

    num_drafts: float
    ms: float
    num_measured: int = 0
    num_elsewhere: int = 0
    """Steps with other numbers of drafts since it was measured."""

    def learn(self, num_drafts: int, ms: float) -> None:
        self.num_measured += 1
        self.num_elsewhere = 0
        weight = max(WEIGHT_OF_NEWEST, 1 / (self.num_measured + 1))
        self.num_drafts += weight * (num_drafts - self.num_drafts)
        self.ms += weight * (ms - self.ms)


@dataclass(slots=True, eq=False)
class _Measured:
    """Of one number of rows: milliseconds of a step without drafts, when its rows attended to
    `num_keys`, and points of what drafts add, by `_bucket` of their number; None before any was
    measured."""

    base_ms: float | None = None
    num_keys: float = 0.0
    points: dict[int, _Point] = field(default_factory=dict[int, _Point])
    num_since_base: int = 0
    num_far: int = 0
    num_far_drafts: int = 0
    """Steps in succession, without drafts and with, that took far longer than known; negative:
    far shorter."""

    def learn_base(self, base_ms: float, known_ms: float, ms: float, num_keys: int) -> None:
        """A step took `ms`, and was known to take `known_ms`."""
        near_ms = min(MAX_CHANGE * known_ms, max(known_ms / MAX_CHANGE, ms))
        weight = WEIGHT_OF_NEWEST
        self.num_far = _in_succession(self.num_far, ms - near_ms)
        if abs(self.num_far) >= FAR_STEPS:
            weight, near_ms, self.num_far = 1.0, ms, 0
        self.base_ms = base_ms + weight * (near_ms - base_ms)
        self.num_keys += weight * (num_keys - self.num_keys)
        if not self.num_far:
            self.num_since_base = 0

    def is_trusted(self, num_drafts: int) -> bool:
        point = self.points.get(_bucket(num_drafts))
        return point is not None and point.num_measured >= NUM_TRUSTED

    def learn_drafts(self, num_drafts: int, old_ms: float, ms: float, slack_ms: float) -> None:
        """Drafts added `ms`, and were known to add `old_ms`."""
        bucket = _bucket(num_drafts)
        if self.is_trusted(num_drafts):
            ms = min(ms, max(MAX_DRAFT_CHANGE * old_ms, old_ms + slack_ms))
            ms = max(ms, min(old_ms / MAX_DRAFT_CHANGE, old_ms - slack_ms))
        self.points.setdefault(bucket, _Point(num_drafts, old_ms)).learn(num_drafts, ms)
        for other in [each for each in self.points if each != bucket]:
            self.points[other].num_elsewhere += 1
            if self.points[other].num_elsewhere > FORGET_STEPS:
                del self.points[other]


class DraftCosts:
    """Starts from what `StepCost` says."""

    def __init__(self) -> None:
        self._measured: dict[int, _Measured] = {}

    def observe(self, load: StepLoad, ms: float, cost: StepCost) -> None:
        """A step without drafts took `ms`; one with prompts says nothing.

        What drafts cost is slowly forgotten meanwhile, so that one measured time that was far too
        long does not end them.
        """
        if load.num_tokens != load.num_logits:
            return
        measured = self._measured.setdefault(load.num_logits, _Measured())
        predicted_ms = cost.predict_ms(load)
        ms = min(MAX_RATIO * predicted_ms, max(predicted_ms / MAX_RATIO, ms))
        if measured.base_ms is None:
            measured.base_ms, measured.num_keys = ms, load.num_keys
            measured.points.clear()
        measured.learn_base(measured.base_ms, self._base_ms(load, cost), ms, load.num_keys)
        first_ms = FIRST_PRICE * _own_ms(load, cost)
        for point in measured.points.values():
            point.ms += WEIGHT_OF_OLD * (first_ms * point.num_drafts - point.ms)

    def observe_drafts(self, load: StepLoad, num_drafts: int, ms: float, cost: StepCost) -> None:
        """A step of `load` and some drafts took `ms`; one with prompts says nothing."""
        if load.num_tokens != load.num_logits:
            return
        measured = self._measured.setdefault(load.num_logits, _Measured())
        measured.num_since_base += 1
        known = self.beside(load, cost)
        old_ms, own_ms = known.added_ms(num_drafts), num_drafts * _own_ms(load, cost)
        added_ms = min(MAX_PRICE * own_ms, max(MIN_PRICE * own_ms, ms - known.base_ms))
        error_ms, far_ms = ms - known.base_ms - old_ms, FAR_SHARE * known.base_ms
        is_far = measured.is_trusted(num_drafts) and abs(error_ms) > far_ms
        measured.learn_drafts(num_drafts, old_ms, added_ms, LEAST_CHANGE * known.base_ms)
        error_ms = error_ms if is_far else 0.0
        measured.num_far_drafts = _in_succession(measured.num_far_drafts, error_ms)
        if abs(measured.num_far_drafts) >= FAR_STEPS:
            measured.num_far_drafts = 0
            measured.num_since_base = max(measured.num_since_base, REFRESH_STEPS)

    def is_stale(self, load: StepLoad) -> bool:
        """Whether a step of `load` should go without drafts, to be measured."""
        measured = self._measured.get(load.num_logits)
        if measured is None or load.num_tokens != load.num_logits:
            return False
        return measured.num_since_base >= (
            FIRST_STEPS if measured.base_ms is None else REFRESH_STEPS
        )

    def beside(self, load: StepLoad, cost: StepCost) -> DecodeCost:
        """Of a step of `load`, which may hold prompts beside the rows, with drafts."""
        draft_ms, base_ms = FIRST_PRICE * _own_ms(load, cost), self._base_ms(load, cost)
        measured = self._measured.get(load.num_logits)
        if measured is None or not measured.points:
            return DecodeCost.linear(base_ms, draft_ms)
        points = [measured.points[bucket] for bucket in sorted(measured.points)]
        counts = [point.num_drafts for point in points]
        # Fewer drafts cost no more: a time that was too long by chance is corrected by others.
        more_ms = list(accumulate([point.ms for point in reversed(points)], min))[::-1]
        if counts[0] >= 2:
            counts.insert(0, counts[0] / 2)
            more_ms.insert(0, FIRST_HALF * more_ms[0])
        return DecodeCost(base_ms, (0.0, *counts), (0.0, *more_ms), draft_ms)

    def _base_ms(self, load: StepLoad, cost: StepCost) -> float:
        """Of `load`, which may hold prompts beside the rows."""
        measured, predicted_ms = self._measured.get(load.num_logits), cost.predict_ms(load)
        if measured is None or measured.base_ms is None:
            return predicted_ms
        rows = StepLoad(num_tokens=load.num_logits, num_logits=load.num_logits)
        more_ms = predicted_ms - cost.predict_ms(rows) - cost.key_ms * measured.num_keys
        return max(measured.base_ms / 2, measured.base_ms + more_ms, SMALLEST_MS)


def _bucket(num_drafts: int) -> int:
    """1, 2, 3, 4 to 5, 6 to 7, 8 to 11, ...: numbers of drafts that cost about the same each."""
    return int(2 * log2(num_drafts))


def _in_succession(number: int, error_ms: float) -> int:
    """Errors of the same sign, after one more; 0 ends them."""
    if error_ms > 0:
        return max(0, number) + 1
    return min(0, number) - 1 if error_ms < 0 else 0


def _own_ms(load: StepLoad, cost: StepCost) -> float:
    """Of one more token with a logit row, beside rows like those of `load`."""
    num_keys = max(0, load.num_keys) / load.num_logits if load.num_logits else 0.0
    return cost.token_ms + cost.logit_ms + cost.key_ms * num_keys
