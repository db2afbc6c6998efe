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

from cadenza.config import EngineLimits
from cadenza.core.admission import Admission
from cadenza.core.batch import Batch, BatchEntry, StepOutput
from cadenza.core.kv_cache_manager import KVCacheManager
from cadenza.core.sequence import Sequence, SequenceStatus
from cadenza.request import Event, Finished, FinishReason, Token, TokenLogprobs


class Scheduler:
    """Waiting and running sequences of one engine."""

    def __init__(
        self, limits: EngineLimits, kv_cache: KVCacheManager, admission: Admission
    ) -> None:
        self.limits = limits
        self.kv_cache = kv_cache
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._admission = admission
        self._free_rows = list(range(limits.max_num_seqs))
        self.num_steps = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self) -> Batch | None:
        """The next step's work, with its pages allocated; None when nothing can be computed."""
        shares = share_budget(
            self.running,
            token_budget=self.limits.max_num_batched_tokens,
            max_entries=self.limits.max_num_seqs,
        )
        chosen, preempted = self._give_pages(shares)
        budget = self.limits.max_num_batched_tokens - sum(count for _, count in chosen)
        if not preempted:
            chosen += self._admit(budget)
        if not chosen:
            return None
        entries = sorted((self._enter(*share) for share in chosen), key=_row_of)
        self.num_steps += 1
        return Batch(self.num_steps - 1, tuple(entries))

    def update(self, batch: Batch, output: StepOutput) -> list[Event]:
        """Takes a step's results; `output` has one entry for each entry that samples."""
        events: list[Event] = []
        token_ids = output.token_ids.tolist()
        is_finite = output.is_finite.tolist()
        index = 0
        for entry in batch.entries:
            self.kv_cache.pool.unpin(entry.pinned_pages)
            if not entry.samples:
                continue
            if not entry.sequence.is_finished:
                if is_finite[index]:
                    logprobs = _logprobs_of(entry.sequence, output, index)
                    self._take_token(entry, token_ids[index], logprobs, events)
                else:
                    self._fail(entry.sequence, "the model produced a non-finite value", events)
            index += 1
        return events

    def fail_batch(self, batch: Batch, error: str) -> list[Event]:
        """Ends every sequence of a step that did not succeed, once each."""
        events: list[Event] = []
        for entry in batch.entries:
            self.kv_cache.pool.unpin(entry.pinned_pages)
            if not entry.sequence.is_finished:
                self._fail(entry.sequence, error, events)
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
            room = len(sequence.page_table) * self.limits.page_size
            assert sequence.num_computed_tokens <= room, "computed tokens without pages"
        for sequence in self.waiting:
            assert sequence.status is SequenceStatus.WAITING
            assert not sequence.page_table, "a waiting sequence holds pages"
        self.kv_cache.check_invariants(self.running)

    def _give_pages(
        self, shares: list[tuple[Sequence, int]]
    ) -> tuple[list[tuple[Sequence, int]], bool]:
        """The shares that got their pages, oldest first, and whether any was preempted."""
        wanted = {sequence.request_id: count for sequence, count in shares}
        chosen: list[tuple[Sequence, int]] = []
        preempted = False
        for sequence in self.running.copy():
            count = wanted.get(sequence.request_id)
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

    def _admit(self, budget: int) -> list[tuple[Sequence, int]]:
        """Starts waiting sequences, first come first served, while rows, pages and budget last."""
        admitted: list[tuple[Sequence, int]] = []
        while self.waiting and self._free_rows and budget > 0:
            sequence = self.waiting[0]
            if sequence.num_pending_tokens or not self._try_start(sequence):
                break
            count = min(sequence.num_uncomputed_tokens, budget)
            budget -= count
            admitted.append((sequence, count))
        return admitted

    def _try_start(self, sequence: Sequence) -> bool:
        hit = self.kv_cache.find_prefix(sequence)
        unheld = self.kv_cache.num_unheld(hit)
        if not self._admission.has_room(
            sequence,
            self.running,
            available=self.kv_cache.pool.num_available,
            shared=len(hit.page_ids) - unheld,
        ):
            return False
        self.kv_cache.adopt(sequence, hit)
        if not self.kv_cache.try_grow(sequence, sequence.num_tokens):
            self.kv_cache.release(sequence)
            return False
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = hit.num_tokens
        self.waiting.popleft()
        sequence.row = heapq.heappop(self._free_rows)
        sequence.status = SequenceStatus.RUNNING
        self.running.append(sequence)
        return True

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
        assert sequence.row is not None
        return BatchEntry(
            sequence,
            sequence.row,
            start,
            count,
            samples,
            pinned,
            first_new_page,
            sequence.num_preemptions,
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
                    logprobs=logprobs,
                )
            )
        if reason is not None:
            own = reason == "stop" and token_id in sequence.request.params.stop_token_ids
            events.append(_finished(sequence, reason, token_id if own else None))
            self._end(sequence)

    def _fail(self, sequence: Sequence, error: str, events: list[Event]) -> None:
        events.append(_finished(sequence, "error", None, error))
        self._end(sequence)

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


def _row_of(entry: BatchEntry) -> int:
    return entry.row


def _logprobs_of(sequence: Sequence, output: StepOutput, index: int) -> TokenLogprobs | None:
    count = sequence.request.params.logprobs
    if count is None:
        return None
    return TokenLogprobs(
        logprob=float(output.logprobs[index]),
        rank=int(output.ranks[index]),
        top_ids=tuple(output.top_ids[index, :count].tolist()),
        top_logprobs=tuple(output.top_logprobs[index, :count].tolist()),
    )


def _finished(
    sequence: Sequence, reason: FinishReason, stop_token_id: int | None, error: str | None = None
) -> Finished:
    return Finished(
        request_id=sequence.request_id,
        finish_reason=reason,
        stop_token_id=stop_token_id,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_generated_tokens=sequence.num_generated_tokens,
        num_cached_tokens=sequence.num_cached_tokens or 0,
        error=error,
    )
