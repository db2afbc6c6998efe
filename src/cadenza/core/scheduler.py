"""`Scheduler`: decides each step who computes how many tokens, and takes the results back.

It has no prefill phase and no decode phase: a sequence's computed tokens catch up with its tokens.
Running sequences come first (those that want one token, then the cut prompts), then waiting ones,
under one token budget. Pages come from the `KVCacheManager`; when they run out the newest running
sequence is preempted and recomputed later. Knows nothing of arrays, text, threads or time.

A step may be launched before the previous one is read (see `engine.loop`): progress is counted at
launch, tokens arrive in `update`, and entries whose sequence has ended meanwhile are dropped.
"""

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from cadenza.config import EngineLimits
from cadenza.core.admission import Admission
from cadenza.core.batch import NO_POSITIONS, Batch, BatchEntry
from cadenza.core.kv_cache_manager import KVCacheManager, Prefix
from cadenza.core.prompt_logprobs import PromptLogprobsBudget
from cadenza.core.sequence import Sequence, SequenceStatus
from cadenza.core.step_schema import NUM_PROMPT_LOGPROBS_ROWS, StepOutput
from cadenza.request import (
    ErrorKind,
    Event,
    Finished,
    FinishReason,
    PromptLogprobs,
    Started,
    Token,
    TokenLogprobs,
)

NOT_FINITE = "the model produced a non-finite value"
NONE_ALLOWED = (
    "no token may follow: allowed_token_ids, bad_words and min_tokens together rule out every one; "
    "loosen one of them"
)


class Scheduler:
    """Waiting and running sequences of one engine.

    Its counts only grow: steps, preemptions, tokens given to steps, and prompt tokens looked up
    (`num_prefix_queries`) and found (`num_prefix_hits`) in the prefix cache.
    """

    def __init__(
        self, limits: EngineLimits, kv_cache: KVCacheManager, admission: Admission
    ) -> None:
        self.limits = limits
        self.kv_cache = kv_cache
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.num_scheduled_tokens = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        self._admission = admission
        self._free_rows = list(range(limits.max_num_seqs))
        self._started: list[Started] = []
        self.num_steps = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def sequences(self) -> list[Sequence]:
        """All that wait or run."""
        return [*self.waiting, *self.running]

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self) -> Batch | None:
        """The next step's work, with its pages allocated; None when nothing can be computed."""
        self._started.clear()
        shares = share_budget(
            self.running,
            token_budget=self.limits.max_num_batched_tokens,
            max_entries=self.limits.max_num_seqs,
        )
        logprobs_budget = PromptLogprobsBudget(NUM_PROMPT_LOGPROBS_ROWS)
        fitted = [(sequence, _fit(sequence, count, logprobs_budget)) for sequence, count in shares]
        chosen, preempted = self._give_pages([share for share in fitted if share[1]])
        budget = self.limits.max_num_batched_tokens - sum(count for _, count in chosen)
        if not preempted:
            chosen += self._admit(budget, logprobs_budget)
        if not chosen:
            return None
        entries = sorted((self._enter(*share) for share in chosen), key=_row_of)
        self.num_scheduled_tokens += sum(entry.num_new_tokens for entry in entries)
        self.num_steps += 1
        return Batch(self.num_steps - 1, tuple(entries), tuple(self._started))

    def update(self, batch: Batch, output: StepOutput) -> list[Event]:
        """Takes a step's results; `output` has an entry for each logit row of the batch."""
        events: list[Event] = []
        token_ids = output.token_ids.tolist()
        is_finite = output.is_finite.tolist()
        has_choice = output.has_choice.tolist()
        index = 0
        for entry in batch.entries:
            self.kv_cache.pool.unpin(entry.pinned_pages)
            if entry.prompt_logprobs:
                indices = range(index, index + len(entry.prompt_logprobs))
                index = indices.stop
                if not entry.sequence.is_finished:
                    events += self._take_prompt_logprobs(entry, output, indices)
            if not entry.choices:
                continue
            if not entry.sequence.is_finished:
                if not is_finite[index]:
                    events.append(self._fail(entry.sequence, NOT_FINITE, "not_finite"))
                elif entry.sequence.is_prompt_only:
                    events.append(self._end_prompt(entry))
                elif not has_choice[index]:
                    events.append(self._fail(entry.sequence, NONE_ALLOWED, "none_allowed"))
                else:
                    count = entry.sequence.request.params.logprobs
                    logprobs = None if count is None else _logprobs_of(output, index, count)
                    self._take_token(entry, token_ids[index], logprobs, events)
            index += 1
        return events

    def fail_batch(self, batch: Batch, error: str) -> list[Event]:
        """Ends every sequence of a step that did not succeed, once each."""
        events: list[Event] = []
        for entry in batch.entries:
            self.kv_cache.pool.unpin(entry.pinned_pages)
            if not entry.sequence.is_finished:
                events.append(self._fail(entry.sequence, error, "step_failed"))
        return events

    def drop_batch(self, batch: Batch) -> None:
        """A launched step will never be read; `restart` recomputes what it would have given."""
        for entry in batch.entries:
            self.kv_cache.pool.unpin(entry.pinned_pages)

    def cancel(self, sequence: Sequence) -> None:
        """Frees a waiting or running sequence; no event follows."""
        self._end(sequence)

    def restart(self) -> None:
        """The device lost its pages: everything running is recomputed, nothing cached is kept."""
        for sequence in reversed(self.running.copy()):
            self._rewind_to_waiting(sequence)
        for sequence in self.waiting:
            sequence.num_pending_tokens = 0
        self.kv_cache.forget_all()

    def check_invariants(self) -> None:
        """Raises AssertionError when the scheduler's books do not balance."""
        rows = [sequence.row for sequence in self.running if sequence.row is not None]
        assert len(rows) == len(self.running), "a running sequence has no row"
        assert sorted([*rows, *self._free_rows]) == list(range(self.limits.max_num_seqs)), (
            "rows are lost or shared"
        )
        for sequence in self.running:
            assert sequence.status is SequenceStatus.RUNNING
            assert sequence.num_computed_tokens <= sequence.num_tokens
            most = len(sequence.page_table) * self.limits.page_size
            assert sequence.num_computed_tokens <= most, "computed tokens without pages"
        for sequence in self.waiting:
            assert sequence.status is SequenceStatus.WAITING
            assert not sequence.page_table, "a waiting sequence holds pages"
        self.kv_cache.check_invariants(self.running)

    def _give_pages(
        self, shares: list[tuple[Sequence, int]]
    ) -> tuple[list[tuple[Sequence, int]], bool]:
        """The shares that got their pages, oldest first, and whether any was preempted."""
        wanted = dict(shares)
        chosen: list[tuple[Sequence, int]] = []
        preempted = False
        for sequence in self.running.copy():
            count = wanted.get(sequence)
            if count is None or sequence.status is not SequenceStatus.RUNNING:
                continue
            grown = self.kv_cache.try_grow(sequence, sequence.num_computed_tokens + count)
            while not grown and not self.kv_cache.pool.num_pinned:
                victim = self.running[-1]
                self._preempt(victim)
                preempted = True
                if victim is sequence:
                    break
                grown = self.kv_cache.try_grow(sequence, sequence.num_computed_tokens + count)
            if grown:
                chosen.append((sequence, count))
        return chosen, preempted

    def _admit(
        self, budget: int, logprobs_budget: PromptLogprobsBudget
    ) -> list[tuple[Sequence, int]]:
        """Starts waiting sequences, first come first served, while rows, pages and budget last."""
        admitted: list[tuple[Sequence, int]] = []
        while self.waiting and self._free_rows and budget > 0:
            sequence = self.waiting[0]
            if sequence.num_pending_tokens or sequence.is_expecting_source:
                break
            if sequence.needs_prompt_logprobs and not logprobs_budget.num_rows:
                break
            if not self._try_start(sequence):
                break
            wanted = min(sequence.num_uncomputed_tokens, budget)
            count = _fit(sequence, wanted, logprobs_budget)
            budget -= count
            admitted.append((sequence, count))
        return admitted

    def _try_start(self, sequence: Sequence) -> bool:
        is_fork = sequence.fork_source is not None
        prefix = self.kv_cache.find_prefix(sequence)
        if not self._can_admit(sequence, prefix):
            return False
        if not self.kv_cache.try_adopt(sequence, prefix):
            return False
        if sequence.num_cached_tokens is None:
            if all(each.num_cached_tokens is None for each in sequence.siblings):
                self._started.append(Started(request_id=sequence.request_id))
            sequence.num_cached_tokens = prefix.num_cached_tokens
            if not is_fork:
                self._count_prefix(sequence, prefix.num_cached_tokens)
        self.waiting.popleft()
        sequence.row = heapq.heappop(self._free_rows)
        sequence.status = SequenceStatus.RUNNING
        self.running.append(sequence)
        return True

    def _can_admit(self, sequence: Sequence, prefix: Prefix) -> bool:
        def can_admit(*, shared: int) -> bool:
            available = self.kv_cache.pool.num_available
            return self._admission.can_admit(
                sequence, self.running, available=available, shared=shared
            )

        # Who waits mostly waits for pages of its own: those of its prefix are counted only then.
        num_pages = len(prefix.page_ids)
        return can_admit(shared=num_pages) and can_admit(
            shared=num_pages - self.kv_cache.num_unheld(prefix)
        )

    def _count_prefix(self, sequence: Sequence, num_hit_tokens: int) -> None:
        """Tokens looked up in the prefix cache and found there; a prompt counts once."""
        if self.limits.enable_prefix_caching:
            self.num_prefix_queries += sequence.num_prompt_tokens
            self.num_prefix_hits += num_hit_tokens

    def _enter(self, sequence: Sequence, count: int) -> BatchEntry:
        """Counts the share as launched and pins the pages it writes."""
        start = sequence.num_computed_tokens
        end = start + count
        samples = end == sequence.num_tokens
        size = self.limits.page_size
        table = sequence.page_table
        pinned = table[start // size : (end - 1) // size + 1]
        self.kv_cache.pool.pin(pinned)
        first_new_page = sequence.num_sent_pages
        sequence.num_sent_pages = len(table)
        sequence.num_computed_tokens = end
        if samples:
            sequence.num_pending_tokens += 1
        progress = sequence.prompt_logprobs_progress
        prompt_logprobs = NO_POSITIONS if progress is None else progress.launch(start, end)
        page_copy, sequence.page_copy = sequence.page_copy, None
        assert sequence.row is not None
        return BatchEntry(
            sequence=sequence,
            row=sequence.row,
            start=start,
            num_new_tokens=count,
            choices=range(end, end + 1) if samples else NO_POSITIONS,
            pinned_pages=pinned,
            first_new_page=first_new_page,
            page_copy=page_copy,
            prompt_logprobs=prompt_logprobs,
            num_preemptions=sequence.num_preemptions,
        )

    def _take_token(
        self,
        entry: BatchEntry,
        token_id: int,
        logprobs: TokenLogprobs | None,
        events: list[Event],
    ) -> None:
        sequence = entry.sequence
        reason = sequence.append(token_id)
        if entry.num_preemptions == sequence.num_preemptions:
            self.kv_cache.publish(sequence, entry.end)
        if reason != "stop":
            index = sequence.num_generated_tokens - 1
            events.append(
                Token(
                    request_id=sequence.request_id,
                    token_id=token_id,
                    index=index,
                    sample=sequence.sample,
                    logprobs=logprobs,
                    num_cached_tokens=sequence.num_cached_tokens if index == 0 else None,
                )
            )
        if reason is not None:
            own = reason == "stop" and token_id in sequence.request.params.stop_token_ids
            events.append(_finished(sequence, reason, token_id if own else None))
            self._end(sequence)

    def _end_prompt(self, entry: BatchEntry) -> Finished:
        """Ends a sequence that asked for no token; the one that the step drew is dropped.

        That its logits were finite is what its pages are published on.
        """
        sequence = entry.sequence
        sequence.num_pending_tokens -= 1
        if entry.num_preemptions == sequence.num_preemptions:
            self.kv_cache.publish(sequence, entry.end)
        self._end(sequence)
        return _finished(sequence, "length", None)

    def _take_prompt_logprobs(
        self, entry: BatchEntry, output: StepOutput, indices: range
    ) -> list[Finished] | list[PromptLogprobs]:
        """The description of prompt tokens that nobody was told of before."""
        sequence = entry.sequence
        if not output.is_finite[indices.start : indices.stop].all():
            return [self._fail(sequence, NOT_FINITE, "not_finite")]
        assert sequence.prompt_logprobs_progress is not None
        fresh = sequence.prompt_logprobs_progress.read(entry.prompt_logprobs)
        if not fresh:
            return []
        count = sequence.request.params.prompt_logprobs or 0
        entries = tuple(_logprobs_of(output, index, count) for index in indices[-len(fresh) :])
        return [PromptLogprobs(request_id=sequence.request_id, start=fresh.start, entries=entries)]

    def _fail(self, sequence: Sequence, error: str, kind: ErrorKind) -> Finished:
        self._end(sequence)
        finished = _finished(sequence, "error", None)
        return replace(finished, error=error, error_kind=kind)

    def _end(self, sequence: Sequence) -> None:
        if sequence.status is SequenceStatus.RUNNING:
            self._leave_row(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.status = SequenceStatus.FINISHED

    def _preempt(self, sequence: Sequence) -> None:
        """Gives back the pages of a running sequence; it waits first in line to be recomputed."""
        self.num_preemptions += 1
        self._rewind_to_waiting(sequence)

    def _rewind_to_waiting(self, sequence: Sequence) -> None:
        sequence.num_preemptions += 1
        self._leave_row(sequence)
        sequence.status = SequenceStatus.WAITING
        self.waiting.appendleft(sequence)

    def _leave_row(self, sequence: Sequence) -> None:
        assert sequence.row is not None
        heapq.heappush(self._free_rows, sequence.row)
        self.running.remove(sequence)
        self.kv_cache.release(sequence)


def share_budget(
    sequences: Iterable[Sequence], *, token_budget: int, max_entries: int
) -> list[tuple[Sequence, int]]:
    """Who gets how many tokens: first those that want a single one, then prompts in order.

    A prompt that does not fit is cut and stays in front. At most `max_entries` sequences and
    `token_budget` tokens; sequences that want nothing are left out.
    """
    shares: list[tuple[Sequence, int]] = []
    prompts: list[tuple[Sequence, int]] = []
    for sequence in sequences:
        wanted = sequence.num_uncomputed_tokens
        if wanted == 1:
            shares.append((sequence, 1))
        elif wanted > 1:
            prompts.append((sequence, wanted))
    del shares[min(token_budget, max_entries) :]
    budget = token_budget - len(shares)
    for sequence, wanted in prompts:
        if budget == 0 or len(shares) == max_entries:
            break
        count = min(wanted, budget)
        shares.append((sequence, count))
        budget -= count
    return shares


def _fit(sequence: Sequence, count: int, logprobs_budget: PromptLogprobsBudget) -> int:
    """`count` tokens, or fewer where there are no logit rows for their log probabilities."""
    progress = sequence.prompt_logprobs_progress
    return logprobs_budget.take(progress, sequence.num_computed_tokens, count)


def _row_of(entry: BatchEntry) -> int:
    return entry.row


def _logprobs_of(output: StepOutput, index: int, count: int) -> TokenLogprobs:
    return TokenLogprobs(
        logprob=float(output.logprobs[index]),
        rank=int(output.ranks[index]),
        top_ids=tuple(output.top_ids[index, :count].tolist()),
        top_logprobs=tuple(output.top_logprobs[index, :count].tolist()),
    )


def _finished(sequence: Sequence, reason: FinishReason, stop_token_id: int | None) -> Finished:
    return Finished(
        request_id=sequence.request_id,
        finish_reason=reason,
        stop_token_id=stop_token_id,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_generated_tokens=sequence.num_generated_tokens,
        num_cached_tokens=sequence.num_cached_tokens or 0,
        sample=sequence.sample,
    )
