"""`StepResults`: applies a step's output to its sequences, and makes the events: which samples
count, which drafts stay, what ends a sequence. Publishes in the KV cache what is known to be right.
Invariant: an entry whose sequence has ended changes nothing."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cadenza.batch.batch import Batch, BatchEntry
from cadenza.batch.sequence import MAX_FORCED_TOKENS, Sequence, SequenceStatus
from cadenza.batch.step_schema import StepOutput
from cadenza.batch.token_rules import may_be_forced, ruling_fields
from cadenza.events import (
    ErrorKind,
    Event,
    Finished,
    FinishReason,
    PromptLogprobs,
    Token,
    TokenLogprobs,
)
from cadenza.kv.kv_cache_manager import KVCacheManager

NOT_FINITE = "the model produced a non-finite value"
CONSTRAINT_FAILED = "the structured output is too complex to be followed any further; simplify it"


class DraftOutcome(NamedTuple):
    """Whether a token was drafted, and how many drafts it has taken the place of."""

    is_draft: bool
    num_rejected: int


NO_DRAFT = DraftOutcome(is_draft=False, num_rejected=0)


class StepChoices(NamedTuple):
    """`hidden_places`: indices in `StepOutput.hidden` by logit row."""

    output: StepOutput
    token_ids: list[int]
    is_finite: list[bool]
    has_choice: list[bool]
    hidden_places: Mapping[int, int]

    @classmethod
    def of(cls, output: StepOutput, hidden_rows: SequenceOf[int] = ()) -> "StepChoices":
        return cls(
            output,
            output.token_ids.tolist(),
            output.is_finite.tolist(),
            output.has_choice.tolist(),
            {row: index for index, row in enumerate(hidden_rows)},
        )

    def hidden(self, indices: range) -> npt.NDArray[np.float32]:
        """[N, E] of consecutive logit rows of one pooled sequence."""
        first = self.hidden_places[indices.start]
        return self.output.hidden[first : first + len(indices)]

    def logprobs(self, index: int, count: int) -> TokenLogprobs:
        """With those of the row's `count` likeliest tokens."""
        output = self.output
        return TokenLogprobs(
            logprob=float(output.logprobs[index]),
            rank=int(output.ranks[index]),
            top_ids=tuple(output.top_ids[index, :count].tolist()),
            top_logprobs=tuple(output.top_logprobs[index, :count].tolist()),
        )


class StepResults:
    """`end` gives back a row and pages; `placeholder` is never generated."""

    def __init__(
        self,
        kv_cache: KVCacheManager,
        end: Callable[[Sequence], None],
        placeholder: int | None = None,
    ) -> None:
        self._kv_cache = kv_cache
        self._end = end
        self._placeholder = placeholder

    def apply(self, batch: Batch, output: StepOutput) -> list[Event]:
        events: list[Event] = []
        choices = StepChoices.of(output, batch.hidden_rows)
        if batch.num_prompt_rows:
            self._take_prompt_rows(batch, choices, events)
        index = batch.num_prompt_rows
        for entry in batch.entries:
            if entry.drafts:
                self._verify_drafts(entry, choices, index, events)
            elif entry.num_choices:
                self._take_choice(entry, choices, index, events)
            index += entry.num_choices
        return events

    def _take_choice(
        self,
        entry: BatchEntry,
        choices: StepChoices,
        index: int,
        events: list[Event],
        outcome: DraftOutcome = NO_DRAFT,
    ) -> None:
        sequence = entry.sequence
        if sequence.status is SequenceStatus.FINISHED:
            return
        if sequence.num_void_choices:
            sequence.num_void_choices -= 1
        elif not choices.is_finite[index]:
            events.append(self.fail(sequence, NOT_FINITE, "not_finite"))
        elif sequence.is_prompt_only:
            events.append(self._end_prompt(entry, choices, index))
        elif sequence.constraint is not None and sequence.constraint.has_failed:
            events.append(self.fail(sequence, CONSTRAINT_FAILED, "constraint_failed"))
        elif not choices.has_choice[index]:
            named = " and ".join(ruling_fields(sequence)) or "the rules of the request"
            error = f"no token may follow: {named} rule out every one; loosen one of them"
            events.append(self.fail(sequence, error, "none_allowed"))
        else:
            count = sequence.request.params.logprobs
            logprobs = None if count is None else choices.logprobs(index, count)
            self._take_token(entry, choices.token_ids[index], logprobs, events, outcome)

    def _verify_drafts(
        self, entry: BatchEntry, choices: StepChoices, first: int, events: list[Event]
    ) -> None:
        """Tokens while drafts match, and one more; later logit rows are ignored."""
        sequence, num_accepted = entry.sequence, 0
        for index, draft in enumerate(entry.drafts, first):
            is_draft = choices.token_ids[index] == draft
            num_rejected = 0 if is_draft else len(entry.drafts) - num_accepted
            outcome = DraftOutcome(is_draft=is_draft, num_rejected=num_rejected)
            self._take_choice(entry, choices, index, events, outcome)
            if sequence.is_finished or not is_draft:
                break
            num_accepted += 1
            if sequence.constraint is not None:
                # Its limits count the masks that it made: as many as without drafts.
                sequence.constraint.allowed()
        else:
            self._take_choice(entry, choices, first + len(entry.drafts), events)
        entry.num_accepted = num_accepted
        if not sequence.is_finished:
            assert sequence.drafting is not None
            sequence.drop_drafts()
            self._kv_cache.settle_drafts(sequence)
            sequence.drafting.learn(sequence.num_tokens, len(entry.drafts), num_accepted)
            self._take_forced(sequence, events)

    def _take_token(
        self,
        entry: BatchEntry,
        token_id: int,
        logprobs: TokenLogprobs | None,
        events: list[Event],
        outcome: DraftOutcome,
    ) -> None:
        sequence = entry.sequence
        reason = sequence.append(token_id)
        if entry.num_preemptions == sequence.num_preemptions:
            self._kv_cache.publish(sequence, len(sequence.token_ids) - 1)
        if sequence.constraint is not None and sequence.constraint.has_failed:
            events.append(self.fail(sequence, CONSTRAINT_FAILED, "constraint_failed"))
            return
        events += self._token_events(sequence, token_id, reason, logprobs, outcome)
        if not entry.drafts:
            self._take_forced(sequence, events)

    def _take_forced(self, sequence: Sequence, events: list[Event]) -> None:
        if sequence.constraint is None or sequence.is_finished or not may_be_forced(sequence):
            return
        for token_id in sequence.constraint.forced()[:MAX_FORCED_TOKENS]:
            if token_id == self._placeholder:
                break
            events += self._token_events(sequence, token_id, sequence.append_forced(token_id))
            if sequence.is_finished:
                break

    def _token_events(
        self,
        sequence: Sequence,
        token_id: int,
        reason: FinishReason | None,
        logprobs: TokenLogprobs | None = None,
        outcome: DraftOutcome = NO_DRAFT,
    ) -> list[Event]:
        events: list[Event] = []
        if token_id not in sequence.stop_token_ids:
            index = sequence.num_generated_tokens - 1
            events.append(
                Token(
                    request_id=sequence.request_id,
                    token_id=token_id,
                    index=index,
                    sample=sequence.sample,
                    logprobs=logprobs,
                    num_cached_tokens=sequence.num_cached_tokens if index == 0 else None,
                    cache_miss=sequence.cache_miss if index == 0 else None,
                    is_draft=outcome.is_draft,
                    num_rejected_drafts=outcome.num_rejected,
                )
            )
        if reason is not None:
            own = token_id in sequence.request.params.stop_token_ids
            events.append(finished_event(sequence, reason, stop_token_id=token_id if own else None))
            self._end(sequence)
        return events

    def _end_prompt(self, entry: BatchEntry, choices: StepChoices, index: int) -> Finished:
        """With `max_tokens` 0; pages are published only if logits are finite."""
        sequence, pool = entry.sequence, entry.sequence.prompt.pool
        sequence.num_pending_tokens -= 1
        if pool is not None:
            pool.add(choices.hidden(range(index, index + 1)))
            if not pool.finish():
                return self.fail(sequence, NOT_FINITE, "not_finite")
        if entry.num_preemptions == sequence.num_preemptions:
            self._kv_cache.publish(sequence, entry.end)
        self._end(sequence)
        return finished_event(sequence, "length" if pool is None else "stop")

    def _take_prompt_rows(self, batch: Batch, choices: StepChoices, events: list[Event]) -> None:
        output, stop = choices.output, 0
        for entry in batch.entries:
            indices = range(stop, stop + len(entry.prompt_rows))
            stop = indices.stop
            sequence, progress = entry.sequence, entry.sequence.prompt.rows
            if not indices or sequence.is_finished:
                continue
            if not output.is_finite[indices.start : indices.stop].all():
                events.append(self.fail(sequence, NOT_FINITE, "not_finite"))
                continue
            assert progress is not None
            fresh = progress.read(entry.prompt_rows)
            if not fresh:
                continue
            indices = indices[-len(fresh) :]
            if sequence.prompt.pool is not None:
                sequence.prompt.pool.add(choices.hidden(indices))
                continue
            count = sequence.request.params.prompt_logprobs or 0
            found = tuple(choices.logprobs(index, count) for index in indices)
            events.append(
                PromptLogprobs(request_id=sequence.request_id, start=fresh.start, entries=found)
            )

    def fail(self, sequence: Sequence, error: str, kind: ErrorKind) -> Finished:
        self._end(sequence)
        return finished_event(sequence, "error", error=error, kind=kind)


def refuse_constraint(sequence: Sequence) -> Finished:
    return finished_event(sequence, "error", error=CONSTRAINT_FAILED, kind="constraint_failed")


def finished_event(
    sequence: Sequence,
    reason: FinishReason,
    *,
    stop_token_id: int | None = None,
    error: str | None = None,
    kind: ErrorKind | None = None,
) -> Finished:
    """`stop_token_id`: a token that its request named."""
    return Finished(
        request_id=sequence.request_id,
        finish_reason=reason,
        stop_token_id=stop_token_id,
        num_prompt_tokens=len(sequence.request.prompt_token_ids),
        num_generated_tokens=sequence.num_generated_tokens,
        num_cached_tokens=sequence.num_cached_tokens or 0,
        sample=sequence.sample,
        error=error,
        error_kind=kind,
        error_fields=ruling_fields(sequence) if kind == "none_allowed" else (),
        cache_miss=sequence.cache_miss,
        embedding=None if sequence.prompt.pool is None else sequence.prompt.pool.embedding,
    )
