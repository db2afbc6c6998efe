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
from cadenza.core.whole_spans import SpanRest, WholeSpan, cut_within, fitting_count

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
    of `PromptBudget`. `kept_share` is kept for encoding and scoring, of the time that decodes
    leave.
    """

    def __init__(
        self,
        max_num_tokens: int,
        bound: StepBound | None,
        *,
        may_finish_short: bool = True,
        kept_share: float = 0.0,
    ) -> None:
        self.num_rows = NUM_EXTRA_LOGIT_ROWS
        self._max_num_tokens = max_num_tokens
        self._bound = bound
        self._may_finish_short = may_finish_short
        self._kept_share = kept_share

    def lacks_rows(self, sequence: Sequence) -> bool:
        """Whether a sequence needs logit rows of its prompt, and none is left."""
        return not self.num_rows and sequence.needs_prompt_rows

    def take_rows(self, sequence: Sequence, count: int) -> int:
        """Takes the logit rows for the next `count` tokens; returns how many tokens have theirs."""
        progress, start = sequence.prompt_rows, sequence.num_computed_tokens
        if progress is None:
            return count
        count = progress.fit(start, count, self.num_rows)
        count = fitting_count(sequence.whole_spans, start, count, most=0)
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
            left_ms = self._bound.left_ms(load)
            budget.left_ms = left_ms * (1 - self._kept_share) if left_ms > 0 else left_ms
            budget.cost = self._bound.cost
        return budget


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPart:
    """The uncomputed tokens of a prompt: `num_left` from position `start`.

    `has_logits`: each of them has a row of logits (prompt log probabilities). `is_first`: it comes
    before all prompts of which this is not said. `spans` are not cut; with `has_quanta` one that
    does not fit is left to quanta, of which `rest` are those that may be computed now.
    """

    start: int
    num_left: int
    has_logits: bool = False
    is_first: bool = False
    spans: tuple[WholeSpan, ...] = ()
    has_quanta: bool = False
    rest: SpanRest | None = None

    @property
    def has_begun(self) -> bool:
        """Whether quanta of its span are computed."""
        return self.rest is not None and self.rest.has_begun

    @property
    def begins_in_span(self) -> bool:
        return cut_within(self.spans, self.start + 1) is not None


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
        """Takes as many tokens of `part` as fit `share` of what is left; returns their number.
        Without quanta that is the span that it begins with, as long as there are tokens for it."""
        if not part.num_left or not self.num_tokens:
            return 0
        count = min(part.num_left, int(self.num_tokens * share))
        if self.cost is not None:
            in_time = self.cost.most_tokens(
                part.start, self.left_ms * share, has_logits=part.has_logits
            )
            count = min(count, max(int(in_time), int(self.num_granted * share)))
        most = 0 if part.has_quanta else self.num_tokens
        count = fitting_count(part.spans, part.start, count, most)
        if self.cost is not None:
            self.left_ms -= self.time_ms(part, count)
        self.num_tokens -= count
        self.num_granted = max(0, self.num_granted - count)
        return count

    def take_quanta(self, rest: SpanRest, share: float) -> int:
        """Takes as many quanta of a span as fit `share` of the time, and at least one where tokens
        are granted; without any time as much as these. Returns their number."""
        granted = int(self.num_granted * share)
        count = rest.num_within(self.left_ms * share)
        if not count and granted and rest.num_left:
            count = 1 if self.left_ms > 0 else max(1, rest.num_worth(granted))
        self.left_ms -= rest.predict_ms(count)
        self.num_granted -= granted if count else 0
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
    says so. Adding a prompt takes constant time while all fit.
    """

    def __init__(self, budget: PromptBudget, parts: Iterable[PromptPart] = ()) -> None:
        self._budget = budget
        self._parts: list[PromptPart] = []
        self._wanted_tokens = 0
        self._wanted_ms = 0.0
        self._has_begun = False
        self._shared: _Shared | None = None
        for part in parts:
            self._append(part)

    @property
    def has_tokens(self) -> bool:
        """Whether there are any to share."""
        return self._budget.num_tokens > 0

    @property
    def counts(self) -> list[int]:
        """The tokens of each prompt."""
        return self._share().counts

    @property
    def quanta(self) -> list[int]:
        """The quanta of each prompt's span, in place of tokens."""
        return self._share().quanta

    def num_span_rows(self, index: int) -> int:
        """Rows of the span of a prompt that has quanta."""
        rest = self._parts[index].rest
        assert rest is not None, "a prompt without a span has no quanta"
        return rest.num_rows

    @property
    def left_ms(self) -> float:
        """What is left of the time; negative if the grant took more than there was."""
        return self._share().left.left_ms

    @property
    def may_finish_short(self) -> bool:
        """Whether the shortest prompt of the next step may have more than half."""
        shared = self._share()
        if shared.has_shorter:
            return self._budget.may_finish_short and not shared.has_finished_short
        return True

    def add(self, part: PromptPart) -> int:
        """The tokens, or quanta, of one more prompt, behind those given so far."""
        self._append(part)
        if self._all_fit:
            return part.num_left
        shared = self._share()
        return shared.counts[-1] or shared.quanta[-1]

    def num_cut(self, *, are_first: bool) -> int:
        """Prompts of which the step computes a part only; `are_first`: of those that are first."""
        if self._all_fit:
            return 0
        pairs = zip(self._parts, self._share().counts, strict=True)
        return sum(count < part.num_left for part, count in pairs if part.is_first or not are_first)

    @property
    def _all_fit(self) -> bool:
        return (
            not self._has_begun
            and self._wanted_tokens <= self._budget.num_tokens
            and self._wanted_ms <= SURE_SHARE * self._budget.left_ms
        )

    def _append(self, part: PromptPart) -> None:
        self._wanted_tokens += part.num_left
        self._wanted_ms += self._budget.time_ms(part, part.num_left)
        self._has_begun |= part.has_begun
        self._parts.append(part)
        self._shared = None

    def _share(self) -> "_Shared":
        if self._shared is None:
            self._shared = _Shared(self._budget.copy(), self._parts, all_fit=self._all_fit)
        return self._shared


class _Shared:
    """The shares of all prompts, and the budget that is `left` behind them.

    `has_shorter`: one that is not first is shorter than the oldest of these; `has_finished_short`:
    it had more than half, and is whole.
    """

    def __init__(self, budget: PromptBudget, parts: list[PromptPart], *, all_fit: bool) -> None:
        self.left = budget
        self.counts = [0] * len(parts)
        self.quanta = [0] * len(parts)
        self._all_fit = all_fit
        self.has_shorter = self.has_finished_short = False
        self._parts = parts
        firsts = [index for index, part in enumerate(parts) if part.is_first]
        others = [index for index, part in enumerate(parts) if not part.is_first]
        if firsts and others and budget.num_tokens > 0:
            self._take(others[0], max(LEAST_SHARE, 1 / budget.num_tokens))
        if firsts:
            self._share_among(firsts, may_finish_short=False)
        if others:
            self._share_among(others, may_finish_short=budget.may_finish_short)

    def _share_among(self, indices: list[int], *, may_finish_short: bool) -> None:
        shortest = min(indices, key=lambda index: self._parts[index].num_left)
        self.has_shorter = self._parts[shortest].num_left < self._parts[indices[0]].num_left
        oldest = self._rest(indices[0])
        is_whole = oldest.begins_in_span and not oldest.has_quanta
        if self.has_shorter and is_whole and self.left.num_tokens > 0:
            # The span may be more than the half that a shorter prompt would leave.
            self._take(indices[0], 1 / self.left.num_tokens)
        if self.has_shorter:
            part, share = self._parts[shortest], SHORT_SHARE
            if may_finish_short and self.left.copy().take(part, share) < part.num_left:
                self.has_finished_short = self.left.copy().take(part, FINISH_SHARE) == part.num_left
                share = FINISH_SHARE if self.has_finished_short else share
            self._take(shortest, share)
        for index in indices:
            self._take(index)

    def _take(self, index: int, share: float = 1.0) -> None:
        """Tokens, or quanta of the span that does not fit."""
        part = self._rest(index)
        count = 0 if part.has_begun else self.left.take(part, share)
        self.counts[index] += count
        if part.rest is not None and not (count or self._all_fit):
            self.quanta[index] += self.left.take_quanta(part.rest, share)

    def _rest(self, index: int) -> PromptPart:
        part, count, quanta = self._parts[index], self.counts[index], self.quanta[index]
        if count:
            left = part.num_left - count
            return replace(part, start=part.start + count, num_left=left, rest=None)
        if quanta and part.rest is not None:
            return replace(part, rest=part.rest.behind(quanta))
        return part
