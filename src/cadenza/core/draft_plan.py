"""`plan_drafts`: how many drafts each sequence of a step gets.

Weighs the tokens that a step is expected to give against its time. Pure arithmetic; knows no
sequence, no model and no clock. Invariant: without a gain there are no drafts.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

from cadenza.core.step_cost import StepCost, StepLoad

MIN_RATIO = 1.05
"""The expected rate with drafts, as a multiple of that without, from which they are tried. The
predictions leave out that a step with drafts is read before the next is launched."""

MARGIN = 1.15
"""What a draft that costs nothing else has to give, as a multiple of what verifying it costs: the
rows of a batch that drafts end at different times, which is not foreseen."""

FREE = StepCost(fixed_ms=0.0, token_ms=0.0, logit_ms=0.0, key_ms=0.0)


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
    load: StepLoad,
    target: StepCost,
    drafter: StepCost | None = None,
) -> DraftNumbers:
    """Adds one draft to each sequence for which it pays, again and again, while the rate rises.

    Args:
        load: of the step without drafts, which samples a token for each of its logit rows.
        drafter: what drafting costs, of all sequences together; None for nothing: each draft then
            stands for itself, and has to be worth `MARGIN`.
    """
    margin, min_ratio = (MARGIN, 1.0) if drafter is None else (1.0, MIN_RATIO)
    tokens, ms = float(load.num_logits), target.predict_ms(load)
    if drafter is None and load.num_logits:
        # Sequences without drafts take as many steps as ever: what each step costs whatever it
        # holds is saved only as far as all sequences advance.
        share_left = max(0.0, 1 - len(chances) / load.num_logits)
        worth = 1 - share_left * max(0.0, target.fixed_ms) / ms
        chances = [replace(each, worth=each.worth * worth) for each in chances]
    drafter = drafter or FREE
    first_rate = rate = tokens / ms
    num_tokens = tokens
    counts, best = [0] * len(chances), [0] * len(chances)
    rows = list(range(len(chances)))
    for depth in range(1, max((each.most for each in chances), default=0) + 1):
        prices = {
            row: _own_ms(target, chances[row]) + _own_ms(drafter, chances[row]) for row in rows
        }
        rows = [
            row
            for row in rows
            if depth <= chances[row].most
            and _gained(chances[row], depth) >= margin * rate * prices[row]
        ]
        tokens += sum(_gained(chances[row], depth) for row in rows)
        ms += drafter.fixed_ms + sum(prices[row] for row in rows)
        if not rows or tokens / ms <= rate:
            break
        rate, num_tokens = tokens / ms, tokens
        for row in rows:
            counts[row] = depth
        best = counts.copy()
    if rate <= first_rate or rate < min_ratio * first_rate:
        none, num_tokens = [0] * len(chances), float(load.num_logits)
        return DraftNumbers(
            counts=none, num_tokens=num_tokens, rate_without=first_rate, rate=first_rate
        )
    return DraftNumbers(counts=best, num_tokens=num_tokens, rate_without=first_rate, rate=rate)


def _gained(chance: DraftChance, depth: int) -> float:
    """Of a draft behind `depth` - 1 others."""
    return chance.worth * chance.acceptance**depth


def _own_ms(cost: StepCost, chance: DraftChance) -> float:
    """Of one token with a logit row."""
    return cost.token_ms + cost.logit_ms + cost.key_ms * chance.num_keys
