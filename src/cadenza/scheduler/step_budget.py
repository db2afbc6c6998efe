"""`StepBudget`: a step's limits (tokens, milliseconds, logit rows, masks); `PromptShares`: how
prompts share what decodes leave. Invariant: shares depend on all prompts given so far and their
order, not on how they were given."""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from math import inf

from cadenza.batch.sequence import Sequence
from cadenza.batch.step_cost import MIN_PROMPT_TOKENS, StepBound, StepCost, StepLoad
from cadenza.batch.step_schema import NUM_EXTRA_LOGIT_ROWS
from cadenza.batch.whole_spans import SpanRest, WholeSpan, cut_within, fitting_count

LEAST_SHARE = 1 / 16  # Of prompt tokens, for the oldest prompt with prioritised ones; at least one.

SHORT_SHARE = 0.5  # Of a step's prompt tokens, for the shortest prompt after an older one.

# What it may take in place of that where it is then whole; see `PromptBudget`.
FINISH_SHARE = 1 - LEAST_SHARE

# Of a step's time: prompts that take no more fit in any order, with room for rounding.
SURE_SHARE = 0.999


# Masks for drafts of all constrained sequences, and of one; each waits for the last and may take 5
# ms.
MAX_STEP_MASKS, MAX_ROW_MASKS = 16, 8


def num_row_masks(sequences: Iterable[Sequence]) -> int:
    """Masks for drafts of each of a step's constrained sequences."""
    num_drafting = sum(
        [each.constraint is not None and each.drafting is not None for each in sequences]
    )
    return min(MAX_ROW_MASKS, MAX_STEP_MASKS // max(1, num_drafting))


class StepBudget:
    """`num_rows` logit rows for prompts and drafts; `kept_share` of the time after decodes for
    encoding and scoring."""

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
        return not self.num_rows and sequence.needs_prompt_rows

    def take_rows(self, sequence: Sequence, count: int) -> int:
        """For the next `count` tokens; returns how many have theirs."""
        progress, start = sequence.prompt.rows, sequence.num_computed_tokens
        if progress is None:
            return count
        count = progress.fit(start, count, self.num_rows)
        count = fitting_count(sequence.prompt.spans, start, count, most=0)
        self.num_rows -= len(progress.positions(start, start + count))
        return count

    def num_forced(self, decodes: SequenceOf[Sequence]) -> int:
        if not any(sequence.constraint is not None for sequence in decodes):
            return 0
        left = self.beside(decodes, len(decodes))
        in_time = inf if left.cost is None else left.left_ms // left.cost.token_ms
        return int(max(0, min(left.num_tokens, in_time)))

    def beside(self, decodes: SequenceOf[Sequence], num_new_tokens: int) -> "PromptBudget":
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
    """`num_left` tokens of a prompt from `start`. `spans` are not cut; with `has_quanta` one that
    does not fit is left to work items, of which `rest` may be computed now."""

    start: int
    num_left: int
    has_logits: bool = False
    is_first: bool = False
    spans: tuple[WholeSpan, ...] = ()
    has_quanta: bool = False
    rest: SpanRest | None = None

    @property
    def has_begun(self) -> bool:
        return self.rest is not None and self.rest.has_begun

    @property
    def begins_in_span(self) -> bool:
        return cut_within(self.spans, self.start + 1) is not None


@dataclass(slots=True, eq=False, kw_only=True)
class PromptBudget:
    """Tokens and milliseconds left for prompts, `num_granted` tokens in any case.
    `may_finish_short`: the shortest prompt may take more than half if that completes it; not again
    before the oldest had a step without a shorter one, so that it keeps half of the time."""

    num_tokens: int
    left_ms: float = inf
    cost: StepCost | None = None
    num_granted: int = MIN_PROMPT_TOKENS
    may_finish_short: bool = False

    def copy(self) -> "PromptBudget":
        return replace(self)

    def take(self, part: PromptPart, share: float = 1.0) -> int:
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
        """Those that fit `share` of the time; where tokens are granted at least one or, with no
        time left, as many as these are worth."""
        granted = int(self.num_granted * share)
        count = rest.num_within(self.left_ms * share)
        if not count and granted and rest.num_left:
            count = 1 if self.left_ms > 0 else max(1, rest.num_worth(granted))
        self.left_ms -= rest.predict_ms(count)
        self.num_granted -= granted if count else 0
        return count

    def time_ms(self, part: PromptPart, count: int) -> float:
        """0 where time is not bounded."""
        if self.cost is None:
            return 0.0
        load = StepLoad().plus(part.start, count, count if part.has_logits else 0)
        return self.cost.predict_ms(load) - self.cost.fixed_ms


class PromptShares:
    """Oldest first; prioritised ones take all they can but for a part that keeps the oldest other
    going. In each group the shortest gets up to half, the oldest the rest, and what is left goes to
    the others. Adding a prompt takes constant time while all fit."""

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
        return self._budget.num_tokens > 0

    @property
    def counts(self) -> list[int]:
        return self._share().counts

    @property
    def quanta(self) -> list[int]:
        return self._share().quanta

    def num_span_rows(self, index: int) -> int:
        rest = self._parts[index].rest
        assert rest is not None, "a prompt without a span has no quanta"
        return rest.num_rows

    @property
    def left_ms(self) -> float:
        """Negative if the grant took more than there was."""
        return self._share().left.left_ms

    @property
    def may_finish_short(self) -> bool:
        shared = self._share()
        if shared.has_shorter:
            return self._budget.may_finish_short and not shared.has_finished_short
        return True

    def add(self, part: PromptPart) -> int:
        self._append(part)
        if self._all_fit:
            return part.num_left
        shared = self._share()
        return shared.counts[-1] or shared.quanta[-1]

    def num_cut(self, *, are_first: bool) -> int:
        """Prompts computed in part; `are_first`: of those that are first."""
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
    """`has_shorter`: than the oldest not prioritised; `has_finished_short`: that one had more than
    half, and is whole."""

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
