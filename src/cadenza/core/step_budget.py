"""`StepBudget`: what one step may hold; `PromptShares`: how its prompts share what decodes leave.

Owns the limits of a step (tokens, milliseconds, logit rows, masks) and the rule by which prompts
share them. Invariant: the shares are those of all prompts given so far, in the order in which they
were given; how they were given does not matter.
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from math import inf

from cadenza.core.sequence import Sequence
from cadenza.core.step_cost import MIN_PROMPT_TOKENS, StepBound, StepCost, StepLoad
from cadenza.core.step_schema import NUM_EXTRA_LOGIT_ROWS

LEAST_SHARE = 1 / 16
"""Of a step's prompt tokens, for the oldest prompt beside those that come first; at least one."""

SHORT_SHARE = 0.5
"""Of a step's prompt tokens, for the shortest prompt behind an older one."""

FINISH_SHARE = 1 - LEAST_SHARE
"""What it may take in place of that where it is then whole; see `PromptBudget`."""

SURE_SHARE = 0.999
"""Of a step's time. Prompts that take no more fit whatever their order: the rest is far more than
the rounding of sums."""


MAX_STEP_MASKS, MAX_ROW_MASKS = 16, 8
"""Masks that a step makes for drafts of all constrained sequences, and of one. Each waits for the
one before it, and a grammar can be such that one takes 5 ms."""


def num_row_masks(sequences: Iterable[Sequence]) -> int:
    """How many masks each of a step's constrained sequences may have for its drafts."""
    num_drafting = sum(
        [each.constraint is not None and each.drafting is not None for each in sequences]
    )
    return min(MAX_ROW_MASKS, MAX_STEP_MASKS // max(1, num_drafting))


class StepBudget:
    """The budget of one step of up to `max_num_tokens` tokens, whose time `bound` bounds.

    `num_rows` are the logit rows that are left for prompts and drafts. `may_finish_short` is that
    of `PromptBudget`.
    """

    def __init__(
        self, max_num_tokens: int, bound: StepBound | None, *, may_finish_short: bool = True
    ) -> None:
        self.num_rows = NUM_EXTRA_LOGIT_ROWS
        self._max_num_tokens = max_num_tokens
        self._bound = bound
        self._may_finish_short = may_finish_short

    def take_rows(self, sequence: Sequence, count: int) -> int:
        """Takes the logit rows for the next `count` tokens; returns how many tokens have theirs."""
        progress, start = sequence.prompt_rows, sequence.num_computed_tokens
        if progress is None:
            return count
        count = progress.fit(start, count, self.num_rows)
        self.num_rows -= len(progress.positions(start, start + count))
        return count

    def num_forced(self, decodes: SequenceOf[Sequence]) -> int:
        """Forced tokens that fit beside one token of each of `decodes`."""
        if not any(sequence.constraint is not None for sequence in decodes):
            return 0
        left = self.beside(decodes, len(decodes))
        in_time = inf if left.cost is None else left.left_ms // left.cost.token_ms
        return int(max(0, min(left.num_tokens, in_time)))

    def beside(self, decodes: SequenceOf[Sequence], num_new_tokens: int) -> "PromptBudget":
        """What is left for prompts beside decodes that compute `num_new_tokens` together."""
        num_tokens = self._max_num_tokens - num_new_tokens
        budget = PromptBudget(num_tokens=num_tokens, may_finish_short=self._may_finish_short)
        if self._bound is not None:
            load = StepLoad(
                num_tokens=num_new_tokens,
                num_logits=len(decodes),
                num_keys=sum([sequence.num_computed_tokens + 1 for sequence in decodes]),
            )
            budget.left_ms, budget.cost = self._bound.left_ms(load), self._bound.cost
        return budget


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPart:
    """The uncomputed tokens of a prompt: `num_left` from position `start`.

    `has_logits`: each of them has a row of logits (prompt log probabilities). `is_first`: it comes
    before all prompts of which this is not said.
    """

    start: int
    num_left: int
    has_logits: bool = False
    is_first: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class PromptBudget:
    """What a step may still compute of prompts: tokens and, with a bound, milliseconds.

    `num_granted` tokens may be computed whatever time they take. `may_finish_short`: the shortest
    prompt may have more than half if it is whole then. The oldest must have had a step without a
    shorter one before that happens again, so that it has half of the steps' time on average.
    """

    num_tokens: int
    left_ms: float = inf
    cost: StepCost | None = None
    num_granted: int = MIN_PROMPT_TOKENS
    may_finish_short: bool = False

    def copy(self) -> "PromptBudget":
        return replace(self)

    def take(self, part: PromptPart, share: float = 1.0) -> int:
        """Takes as many tokens of `part` as fit `share` of what is left; returns their number."""
        if not part.num_left or not self.num_tokens:
            return 0
        count = min(part.num_left, int(self.num_tokens * share))
        if self.cost is not None:
            in_time = self.cost.most_tokens(
                part.start, self.left_ms * share, has_logits=part.has_logits
            )
            count = min(count, max(int(in_time), int(self.num_granted * share)))
            self.left_ms -= self.time_ms(part, count)
        self.num_tokens -= count
        self.num_granted = max(0, self.num_granted - count)
        return count

    def time_ms(self, part: PromptPart, count: int) -> float:
        """What `count` tokens of `part` add to a step; 0 where time is not bounded."""
        if self.cost is None:
            return 0.0
        load = StepLoad().plus(part.start, count, count if part.has_logits else 0)
        return self.cost.predict_ms(load) - self.cost.fixed_ms


class PromptShares:
    """What each of the prompts given takes of `budget`, oldest first.

    Those that are first take what they can, but for a part that keeps the oldest of the others
    going. Among them, and among the others, the prompt with the fewest tokens left gets up to half,
    so that a short prompt need not wait for a long one; the oldest gets the rest, and what it
    leaves goes to the others in order. Among the others the shortest may get more, if the budget
    says so.

    Adding a prompt takes constant time while all fit, and behind others of its group. One that is
    then shorter than all of its group, or that comes before others, has the group shared anew.
    """

    def __init__(self, budget: PromptBudget, parts: Iterable[PromptPart] = ()) -> None:
        self._budget = budget
        self._firsts = _Group()
        self._others = _Group()
        self._wanted_tokens = 0
        self._wanted_ms = 0.0
        self._order: list[_Group] = []
        for part in parts:
            self._append(part)

    @property
    def has_tokens(self) -> bool:
        """Whether there are any to share."""
        return self._budget.num_tokens > 0

    @property
    def counts(self) -> list[int]:
        """The tokens of each prompt."""
        self._share()
        firsts, others = iter(self._firsts.counts), iter(self._others.counts)
        return [next(firsts if group is self._firsts else others) for group in self._order]

    @property
    def left_ms(self) -> float:
        """What is left of the time; negative if the grant took more than there was."""
        self._share()
        return self._others.left.left_ms

    @property
    def may_finish_short(self) -> bool:
        """Whether the shortest prompt of the next step may have more than half."""
        self._share()
        if self._others.has_shorter:
            return self._budget.may_finish_short and not self._others.has_finished_short
        return True

    def add(self, part: PromptPart) -> int:
        """The tokens of one more prompt, behind those given so far."""
        self._append(part)
        if self._all_fit:
            return part.num_left
        group = self._share_firsts() if part.is_first else self._share()
        return group.counts[-1]

    def num_cut(self, *, are_first: bool) -> int:
        """Prompts of which the step computes a part only; `are_first`: of those that are first."""
        if self._all_fit:
            return 0
        if are_first:
            return self._share_firsts().num_cut
        return self._share().num_cut + self._firsts.num_cut

    @property
    def _all_fit(self) -> bool:
        return (
            self._wanted_tokens <= self._budget.num_tokens
            and self._wanted_ms <= SURE_SHARE * self._budget.left_ms
        )

    def _append(self, part: PromptPart) -> None:
        self._wanted_tokens += part.num_left
        self._wanted_ms += self._budget.time_ms(part, part.num_left)
        group = self._firsts if part.is_first else self._others
        if not group.parts:  # the oldest of the others may now have its part before the firsts
            self._firsts.is_shared = False
        group.append(part, is_sure=self._all_fit)
        self._order.append(group)
        if part.is_first:
            self._others.is_shared = False

    def _share(self) -> "_Group":
        """Brings all shares up to date; returns the others."""
        left = self._share_firsts().left
        if not self._others.is_shared:
            self._others.share(left.copy(), may_finish_short=self._budget.may_finish_short)
        return self._others

    def _share_firsts(self) -> "_Group":
        """Brings the shares of those that are first up to date; returns them."""
        firsts, others = self._firsts, self._others
        if not firsts.is_shared:
            budget = self._budget.copy()
            others.num_taken_before = 0
            if firsts.parts and others.parts and budget.num_tokens > 0:
                share = max(LEAST_SHARE, 1 / budget.num_tokens)
                others.num_taken_before = budget.take(others.parts[0], share)
            firsts.share(budget)
            others.is_shared = False
        return firsts


class _Group:
    """The prompts that are first, or the others, in their order.

    Where `is_shared`, `counts` are their shares, of which `num_cut` are not whole, and `left` is
    the budget behind them. `num_taken_before`: tokens that the oldest had before all others.
    `has_finished_short`: the shortest had more than half, and is whole.
    """

    def __init__(self) -> None:
        self.parts: list[PromptPart] = []
        self.is_shared = False
        self.num_taken_before = 0
        self.counts: list[int] = []
        self.num_cut = 0
        self.has_finished_short = False
        self.left = PromptBudget(num_tokens=0)
        self._shortest = 0

    @property
    def has_shorter(self) -> bool:
        """Whether one is shorter than the oldest."""
        return self._shortest > 0

    def append(self, part: PromptPart, *, is_sure: bool) -> None:
        """Adds a prompt and, unless it is sure to get all, its share."""
        self.parts.append(part)
        if part.num_left < self.parts[self._shortest].num_left:
            self._shortest = len(self.parts) - 1
            self.is_shared = False
        self.is_shared = self.is_shared and not is_sure
        if self.is_shared:
            self.counts.append(0)
            self._take(len(self.counts) - 1)

    def share(self, budget: PromptBudget, *, may_finish_short: bool = False) -> None:
        """Shares `budget` among all of them."""
        self.left, self.num_cut, self.is_shared = budget, 0, True
        self.has_finished_short = False
        self.counts = [0] * len(self.parts)
        if self.parts:
            self.counts[0] = self.num_taken_before
        if self._shortest:
            shortest, share = self.parts[self._shortest], SHORT_SHARE
            if may_finish_short and budget.copy().take(shortest, share) < shortest.num_left:
                has_all = budget.copy().take(shortest, FINISH_SHARE) == shortest.num_left
                self.has_finished_short = has_all
                share = FINISH_SHARE if has_all else share
            self.counts[self._shortest] = budget.take(shortest, share)
        for index in range(len(self.parts)):
            self._take(index)

    def _take(self, index: int) -> None:
        part, count = self.parts[index], self.counts[index]
        rest = part
        if count:
            rest = replace(part, start=part.start + count, num_left=part.num_left - count)
        count += self.left.take(rest)
        self.counts[index] = count
        self.num_cut += count < part.num_left
