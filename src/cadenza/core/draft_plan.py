"""`plan_drafts`: how many drafts each sequence of a step gets.

Weighs the tokens that a step is expected to give against its time. Pure arithmetic; knows no
sequence, no model and no clock. Invariant: without a gain there are no drafts.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import NamedTuple

from cadenza.core.draft_costs import DecodeCost
from cadenza.core.step_cost import StepCost

MIN_RATIO = 1.05
"""The expected rate with drafts, as a multiple of that without, from which they are tried. The
predictions leave out that a step with drafts is read before the next is launched."""

MARGIN = 1.15
"""What a draft that costs nothing else has to give, as a multiple of what verifying it costs: the
rows of a batch that drafts end at different times, which is not foreseen."""

LEAST_GAIN = 0.01
"""Tokens; of a draft that is never worth its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftChance:
    """One sequence: the chance that a draft is accepted if those before it were, how many drafts
    it may have, the keys that each attends to, and what a token of it is worth.
    """

    acceptance: float
    most: int
    num_keys: int
    worth: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftNumbers:
    """Numbers of drafts, the tokens that the step is then expected to give, and the tokens of all
    sequences for each millisecond, without and with; those of drafts count by their worth.
    """

    counts: list[int]
    num_tokens: float
    rate_without: float
    rate: float

    @property
    def saved_ms(self) -> float:
        """For each token that any of the sequences gets."""
        return 1 / self.rate_without - 1 / self.rate

    @property
    def saved_ms_of_step(self) -> float:
        return self.num_tokens * self.saved_ms


def plan_drafts(
    chances: SequenceOf[DraftChance],
    num_rows: int,
    target: DecodeCost,
    drafter: StepCost | None = None,
) -> DraftNumbers:
    """Takes the drafts in the order of what they are expected to give, as many as give the best
    rate.

    Args:
        num_rows: that sample a token each in the step without drafts.
        target: what the step costs.
        drafter: what drafting costs, of all sequences together; None for nothing: each draft then
            stands for itself, and has to be worth `MARGIN`.
    """
    margin, min_ratio = (MARGIN, 1.0) if drafter is None else (1.0, MIN_RATIO)
    if drafter is None and num_rows:
        # Sequences without drafts take as many steps as ever: what each step costs whatever it
        # holds is saved only as far as all sequences advance.
        share_left = max(0.0, 1 - len(chances) / num_rows)
        worth = 1 - share_left * target.fixed_ms(num_rows) / target.base_ms
        chances = [replace(each, worth=each.worth * worth) for each in chances]
    tokens, drafting_ms, deepest = float(num_rows), 0.0, 0
    first = best = _Taken(tokens, target.base_ms, 0)
    drafts = _drafts_of(chances)
    for number, (gained, depth, row) in enumerate(drafts, start=1):
        tokens += gained
        if drafter is not None:
            drafting_ms += (depth > deepest) * drafter.fixed_ms + _own_ms(drafter, chances[row])
            deepest = max(depth, deepest)
        ms = target.base_ms + target.added_ms(number) + drafting_ms
        is_worth = tokens - best.tokens >= margin * best.rate * (ms - best.ms)
        if is_worth and tokens / ms > best.rate:
            best = _Taken(tokens, ms, number)
    if best.rate < min_ratio * first.rate:
        best = first
    counts = [0] * len(chances)
    for _, _, row in drafts[: best.number]:
        counts[row] += 1
    return DraftNumbers(
        counts=counts, num_tokens=best.tokens, rate_without=first.rate, rate=best.rate
    )


class _Taken(NamedTuple):
    """The tokens and the time of a step with the first `number` drafts."""

    tokens: float
    ms: float
    number: int

    @property
    def rate(self) -> float:
        return self.tokens / self.ms


def _drafts_of(chances: SequenceOf[DraftChance]) -> list[tuple[float, int, int]]:
    """Of each draft that may be accepted: what it is expected to give, its depth and its row; the
    best first, and each behind those before it."""
    drafts = [
        (gained, depth, row)
        for row, chance in enumerate(chances)
        for depth in range(1, chance.most + 1)
        if (gained := chance.worth * chance.acceptance**depth) > LEAST_GAIN
    ]
    drafts.sort(key=lambda draft: (-draft[0], draft[1]))
    return drafts


def _own_ms(cost: StepCost, chance: DraftChance) -> float:
    """Of one token with a logit row."""
    return cost.token_ms + cost.logit_ms + cost.key_ms * chance.num_keys
