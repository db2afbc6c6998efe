"""`DraftCosts`: what a step costs without drafts, and with so many of them, by number of rows.

A few tokens more are nearly free while a step waits for the weights, and dear where it computes: no
line as `StepCost`. The median of the newest times of each kind counts.
"""

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import log2
from statistics import fmean, median

from cadenza.batch.step_cost import SMALLEST_MS, StepCost, StepLoad

NUM_KEPT = 5  # times of steps that are alike, the newest
# Steps after which what some drafts cost is forgotten, if it is not measured again: what was dear,
# by chance or while the machine was slower, is tried again some time.
FORGET_STEPS = 128
# Of a draft, as a multiple of what it costs where the most were measured, or else of what
# `StepCost` says: of those beyond, and at least.
FIRST_PRICE, MIN_PRICE = 1.25, 0.1
# The share of what the fewest measured drafts cost, taken to be that of half as many: low, so
# that fewer are tried where they may be nearly free.
FIRST_HALF = 1 / 3
# At most so many where none were measured, or one for each row, and then this multiple of the most
# that were: one step with many that cost far more than was known would be a loss of many steps.
FIRST_DRAFTS, MORE_DRAFTS = 4, 2
# Steps with drafts after which one without is wanted, to measure what it costs: for the first
# time, and later.
FIRST_STEPS, REFRESH_STEPS = 4, 128
# A step without drafts that is further from the others of its kind is followed by another one.
FAR_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Milliseconds of one step with different numbers of drafts."""

    base_ms: float  # without drafts
    counts: tuple[float, ...]  # numbers of drafts, ascending from 0
    more_ms: tuple[float, ...]  # that these add; linear between them
    draft_ms: float  # each draft more than the last of `counts`
    most: int | None = None  # drafts whose cost is known well enough; None: any number

    @classmethod
    def linear(cls, base_ms: float, draft_ms: float, most: int | None = None) -> "DecodeCost":
        return cls(base_ms, (0.0,), (0.0,), draft_ms, most)

    def added_ms(self, num_drafts: float) -> float:
        counts, more_ms = self.counts, self.more_ms
        at = bisect_right(counts, num_drafts) - 1
        draft_ms = self.draft_ms
        if at + 1 < len(counts):
            draft_ms = (more_ms[at + 1] - more_ms[at]) / (counts[at + 1] - counts[at])
        return more_ms[at] + draft_ms * (num_drafts - counts[at])

    def behind(self, num_tokens: int, least_ms: float) -> "DecodeCost":
        """Of a step with so many tokens of prompts: as if its drafts came behind as many others,
        each at `least_ms` or more."""
        first_ms = self.added_ms(num_tokens)
        beyond = [
            (count - num_tokens, ms - first_ms)
            for count, ms in zip(self.counts, self.more_ms, strict=True)
            if count > num_tokens
        ]
        return DecodeCost(
            self.base_ms,
            (0.0, *[count for count, _ in beyond]),
            (0.0, *[max(ms, least_ms * count) for count, ms in beyond]),
            max(self.draft_ms, least_ms),
            self.most,
        )

    def saved_share(self, num_drafting: int, num_rows: int) -> float:
        """Of a row's share of the step, what an accepted draft saves. Rows without drafts take as
        many steps as ever: what each costs whatever it holds, if rows cost as much as so many
        drafts, is saved only as far as all rows advance."""
        fixed_ms = max(0.0, self.base_ms - self.added_ms(num_rows))
        share_left = max(0.0, 1 - num_drafting / max(1, num_rows))
        return 1 - share_left * fixed_ms / self.base_ms


@dataclass(slots=True, eq=False)
class _Table:
    """Steps of one number of rows: the newest times without drafts, and with, by `_bucket` of their
    number; those of keys are taken off. `newest` says when one of a bucket was measured."""

    base: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_KEPT))
    drafts: dict[int, deque[tuple[int, float]]] = field(
        default_factory=dict[int, deque[tuple[int, float]]]
    )
    newest: dict[int, int] = field(default_factory=dict[int, int])
    num_steps: int = 0
    num_since_base: float = 0.0

    def observe(self, num_drafts: int, ms: float, known_ms: float, waited: float) -> None:
        """A step took `ms`; until such steps were measured, they were known to take `known_ms`.
        It waited for `waited` times as long."""
        self.num_steps += 1
        if num_drafts:
            self.num_since_base += 1 + waited
            bucket = _bucket(num_drafts)
            first = deque([(num_drafts, known_ms)], NUM_KEPT)
            self.drafts.setdefault(bucket, first).append((num_drafts, ms))
            self.newest[bucket] = self.num_steps
        else:
            self.base.append(ms)
            base_ms = median(self.base)
            if abs(ms - base_ms) <= FAR_SHARE * base_ms:
                self.num_since_base = 0
        for bucket, at in list(self.newest.items()):
            if self.num_steps - at > FORGET_STEPS:
                del self.drafts[bucket], self.newest[bucket]

    def points(self, base_ms: float, least_ms: float) -> list[tuple[float, float]]:
        """Numbers of drafts, ascending, and what they add to `base_ms`; each adds `least_ms`."""
        points: list[tuple[float, float]] = []
        for bucket in sorted(self.drafts):
            times = self.drafts[bucket]
            num_drafts = fmean([number for number, _ in times])
            added_ms = median([ms for _, ms in times]) - base_ms
            points.append((num_drafts, max(least_ms * num_drafts, added_ms)))
        return points


class DraftCosts:
    """Starts from what `StepCost` says."""

    def __init__(self) -> None:
        self._tables: dict[int, _Table] = {}

    def observe(
        self, load: StepLoad, num_drafts: int, ms: float, cost: StepCost, waited_ms: float = 0.0
    ) -> None:
        """A step of `load` and `num_drafts` drafts took `ms`; one with prompts says nothing.

        `waited_ms`, in which a second model drafted, counts like steps until one without drafts is
        wanted: where that takes long, the time of one would be known from long ago.
        """
        if load.num_tokens != load.num_logits:
            return
        known, keys_ms = self.beside(load, cost), cost.key_ms * load.num_keys
        known_ms = known.base_ms + known.added_ms(num_drafts)
        table = self._tables.setdefault(load.num_logits, _Table())
        waited = waited_ms / max(SMALLEST_MS, ms)
        table.observe(num_drafts, ms - keys_ms, known_ms - keys_ms, waited)

    def has_base(self, load: StepLoad) -> bool:
        """Whether steps like one of `load` were measured without drafts."""
        table = self._tables.get(load.num_logits)
        return table is not None and bool(table.base) and load.num_tokens == load.num_logits

    def has_drafts(self, load: StepLoad) -> bool:
        """Whether steps with drafts were measured at the number of rows of `load`."""
        table = self._tables.get(load.num_logits)
        return table is not None and bool(table.drafts)

    def is_stale(self, load: StepLoad) -> bool:
        """Whether a step of `load` should go without drafts, to be measured."""
        table = self._tables.get(load.num_logits)
        if table is None or load.num_tokens != load.num_logits:
            return False
        return table.num_since_base >= (REFRESH_STEPS if table.base else FIRST_STEPS)

    def beside(self, load: StepLoad, cost: StepCost) -> DecodeCost:
        """Of the rows of a step of `load`, with drafts. What it holds of prompts is not theirs: it
        is computed anyway, and a draft saves none of it, but the drafts come behind it."""
        num_keys = max(0, load.num_keys) / load.num_logits if load.num_logits else 0.0
        own_ms = cost.row_ms(num_keys)
        decodes = self._of_rows(replace(load, num_tokens=load.num_logits), cost, own_ms)
        num_prompt_tokens = load.num_tokens - load.num_logits
        return decodes.behind(num_prompt_tokens, own_ms) if num_prompt_tokens > 0 else decodes

    def _of_rows(self, load: StepLoad, cost: StepCost, own_ms: float) -> DecodeCost:
        """`own_ms`: what `cost` says of a draft."""
        price_ms = FIRST_PRICE * own_ms
        most = max(FIRST_DRAFTS, load.num_logits)
        table = self._tables.get(load.num_logits)
        if table is None:
            return DecodeCost.linear(cost.predict_ms(load), price_ms, most)
        keys_ms = cost.key_ms * load.num_keys
        rows_ms = median(table.base) if table.base else cost.predict_ms(load) - keys_ms
        base_ms = max(SMALLEST_MS, rows_ms + keys_ms)
        points = table.points(rows_ms, MIN_PRICE * own_ms)
        if not points:
            return DecodeCost.linear(base_ms, price_ms, most)
        counts = [count for count, _ in points]
        # Fewer drafts cost no more: a time that was too long by chance is corrected by others.
        more_ms = list(accumulate([ms for _, ms in reversed(points)], min))[::-1]
        if counts[0] >= 2:
            counts.insert(0, counts[0] / 2)
            more_ms.insert(0, FIRST_HALF * more_ms[0])
        price_ms = FIRST_PRICE * more_ms[-1] / counts[-1]
        most = max(most, int(MORE_DRAFTS * counts[-1]))
        return DecodeCost(base_ms, (0.0, *counts), (0.0, *more_ms), price_ms, most)


def _bucket(num_drafts: int) -> int:
    # 1, 2, 3, 4 to 5, 6 to 7, 8 to 11, ...: numbers of drafts that cost about the same each
    return int(2 * log2(num_drafts))
