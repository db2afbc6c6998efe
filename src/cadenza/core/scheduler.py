"""`Scheduler`: decides how many tokens each sequence computes in a step, and applies the results.

There are no separate prefill and decode phases: each step computes tokens that have no KV yet.
Within one token budget, and the time of a step if that is bounded, running sequences come first
(those with one token to compute, then partially computed prompts), then waiting ones. Pages come
from the `KVCacheManager`; when it has too few, a running sequence is preempted and recomputed
later. The `QueuePolicy` says who starts next and who is preempted. Knows nothing of arrays, text or
threads, and reads no clock.

A step may be launched before the previous one is read (see `engine.loop`): progress is counted at
launch, tokens are appended in `update`, and results of sequences that have ended are dropped.
"""

import heapq
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from math import inf
from operator import attrgetter

from cadenza.config import Batching, EngineLimits
from cadenza.core.admission import Admission, Reservations
from cadenza.core.batch import Batch, BatchEntry, PageUpdate
from cadenza.core.drafts import DraftCounts
from cadenza.core.fair_share import fair_share_of
from cadenza.core.kv_cache_manager import KVCacheManager, Prefix
from cadenza.core.light_tenants import LightTenants
from cadenza.core.prefix_misses import OnPrefix, PrefixCounts
from cadenza.core.prompt_rows import PromptRowsBudget
from cadenza.core.prompt_shares import PromptBudget, PromptPart, PromptShares
from cadenza.core.queue_policy import FCFS, QueuePolicy
from cadenza.core.sequence import Sequence, SequenceStatus
from cadenza.core.sequence_list import SequenceList
from cadenza.core.step_cost import StepBound, StepCost, StepLoad, num_keys
from cadenza.core.step_drafts import NO_DRAFTS, Drafter, Proposal, Share, StepDrafts
from cadenza.core.step_reader import StepReader
from cadenza.core.step_schema import NUM_EXTRA_LOGIT_ROWS, StepOutput
from cadenza.events import Event, Started

_row_of = attrgetter("row")

MAX_CUT_PROMPTS = 2
"""Prompts that may be partially computed at the same time, unless preemption adds some; of light
tenants as many, whatever the others have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """What decides who runs when, and never what comes of it.

    Args:
        step_bound: bounds the time of steps; None bounds only their tokens.
        step_cost: what steps cost, where there is no bound; None if it is not known.
        drafter: drafts for the sequences that have no source of their own.
        batching: "static" starts sequences only when all that ran have ended, as many as there are
            rows and pages for.
        on_prefix: called with each sequence whose prompt was looked up, as it starts, and with why
            tokens were missing.
    """

    step_bound: StepBound | None = None
    step_cost: StepCost | None = None
    drafter: Drafter | None = None
    policy: QueuePolicy = FCFS
    batching: Batching = "continuous"
    on_prefix: OnPrefix | None = None


class Scheduler:
    """Waiting and running sequences of one engine.

    Its counters never decrease: steps, preemptions, scheduled tokens, and what its prompts found in
    the prefix cache (`prefix_counts`).
    """

    def __init__(
        self,
        limits: EngineLimits,
        kv_cache: KVCacheManager,
        admission: Admission,
        options: SchedulerOptions | None = None,
    ) -> None:
        options = options or SchedulerOptions()
        self.limits = limits
        self.step_bound = options.step_bound
        self._policy = options.policy
        self._is_static = options.batching == "static"
        self.kv_cache = kv_cache
        self.waiting = SequenceList()
        self.running = SequenceList()
        self.num_preemptions = 0
        self.num_scheduled_tokens = 0
        self.prefix_counts = PrefixCounts(options.on_prefix)
        self._fair_share = fair_share_of(options.step_bound, limits)
        self._light_tenants = LightTenants(limits)
        self._reader = StepReader(kv_cache, self._end)
        self._drafts = StepDrafts(limits, kv_cache, options.drafter)
        self._step_cost = options.step_cost
        self._may_finish_short = True
        self._admission = admission
        self._reservations = Reservations(admission, self.running)
        self._free_rows = list(range(limits.max_num_seqs))
        self._started: list[Started] = []
        """Of requests that have started, for the next step that computes anything."""
        self.num_steps = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def sequences(self) -> list[Sequence]:
        """All waiting and running sequences."""
        return [*self.waiting, *self.running]

    @property
    def draft_counts(self) -> DraftCounts:
        return self._reader.draft_counts

    def decide_wait(self) -> bool:
        """Whether the next step is to follow the newest tokens, because running sequences would
        draft and can only behind these. To be asked once for a step, for answers are counted: what
        a wait costs is measured now and then, and a no holds for some steps."""
        return self._drafts.need_newest_tokens(self.running, self.num_steps, self.step_cost)

    def observe(self, batch: Batch, measured_ms: float, idle_ms: float | None = None) -> None:
        """A step took `measured_ms`, after `idle_ms` if it waited for the newest tokens.

        One with drafts corrects what drafts cost, and no more.
        """
        cost = self.step_cost
        if cost is None:
            return
        self._drafts.observe(batch, measured_ms, cost, idle_ms)
        if self.step_bound is None:
            if not batch.has_drafts:
                self._step_cost = cost.corrected(batch.load, measured_ms)
        elif batch.has_drafts:
            self.step_bound.count(measured_ms)
        else:
            self.step_bound.observe(batch.load, measured_ms)

    @property
    def step_cost(self) -> StepCost | None:
        return self._step_cost if self.step_bound is None else self.step_bound.cost

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)
        self._fair_share.join(sequence.request.tenant)
        self._light_tenants.open(sequence.request.tenant)

    def schedule(self, now_s: float = 0.0) -> Batch | None:
        """The next step, with its pages allocated; None if nothing can be computed.

        `now_s` is a reading of the clock by which sequences' `arrived_s` were set.
        """
        rows_budget = PromptRowsBudget(NUM_EXTRA_LOGIT_ROWS)
        shares = self._share_with_retried(rows_budget)
        if shares is None:
            shares = self._share_among_all(now_s, rows_budget)
        # A sequence with a share may have been preempted for another one's pages.
        shares = [share for share in shares if share[0].status is SequenceStatus.RUNNING]
        if not shares:
            # Who starts computes something in that step, or another one does.
            assert not self._has_page_copy(), "no step makes a page's copy"
            return None
        batch = Batch(self.num_steps)
        batch.started, self._started = self._started, []
        # Entered after admission, which must not count tokens of this step as computed: a sample
        # can only fork a prompt that an earlier step has computed.
        num_rows = rows_budget.num_rows
        drafts = self._drafts.propose(shares, num_rows, self.num_steps, self.step_cost)
        batch.page_copies = self.kv_cache.take_copies(self.running)
        batch.written_pages = [copy.destination for copy in batch.page_copies]
        for sequence, count in shares:
            self._enter(batch, sequence, count, drafts.get(sequence, NO_DRAFTS))
        self._fair_share.charge_outputs(batch.entries)
        batch.entries.sort(key=_row_of)
        self.kv_cache.pool.pin(batch.written_pages)
        self.num_scheduled_tokens += batch.num_tokens
        self.num_steps += 1
        return batch

    def update(self, batch: Batch, output: StepOutput) -> list[Event]:
        """Applies a step's results; `output` has one entry per logit row of the batch."""
        self.kv_cache.pool.unpin(batch.written_pages)
        return self._reader.read(batch, output)

    def fail_batch(self, batch: Batch, error: str) -> list[Event]:
        """A step failed: each of its sequences is retried once, in steps of its own. One that was
        being retried is ended with an error event.
        """
        self.drop_batch(batch)
        events: list[Event] = []
        for entry in batch.entries:
            sequence = entry.sequence
            if sequence.is_finished:
                continue
            if sequence.is_retried:
                events.append(self._reader.fail(sequence, error, "step_failed"))
            sequence.is_retried = True
        return events

    def drop_batch(self, batch: Batch) -> None:
        """Unpins the pages of a step that will not be read; `restart` recomputes its tokens."""
        self.kv_cache.pool.unpin(batch.written_pages)

    def cancel(self, sequence: Sequence) -> None:
        """Ends a waiting or running sequence without an event."""
        self._end(sequence)

    def restart(self) -> None:
        """After the device lost its pages: requeues running sequences, empties the prefix cache.

        Sequences to be retried come first.
        """
        newest_first = self.running[::-1]
        newest_first.sort(key=lambda sequence: sequence.is_retried)
        for sequence in newest_first:
            self._rewind_to_waiting(sequence)
        for sequence in self.waiting:
            sequence.num_pending_tokens = sequence.num_void_choices = 0
        self.kv_cache.forget_all()

    def check_invariants(self) -> None:
        """Raises AssertionError if rows, statuses, progress and pages are inconsistent."""
        rows = [sequence.row for sequence in self.running if sequence.row is not None]
        assert len(rows) == len(self.running), "a running sequence has no row"
        assert sorted([*rows, *self._free_rows]) == list(range(self.limits.max_num_seqs)), (
            "rows are lost or shared"
        )
        assert not self._has_page_copy(), "a page's copy was put off, its source may be gone"
        for sequence in self.running:
            assert sequence.status is SequenceStatus.RUNNING
            assert sequence.num_computed_tokens <= sequence.num_tokens
            most = len(sequence.page_table) * self.limits.page_size
            assert sequence.num_computed_tokens <= most, "computed tokens without pages"
        for sequence in self.waiting:
            assert sequence.status is SequenceStatus.WAITING
            assert not sequence.page_table, "a waiting sequence holds pages"
        self.prefix_counts.check_invariants()
        self._fair_share.check_invariants(self.waiting)
        self._light_tenants.check_invariants(self.sequences)
        self.kv_cache.check_invariants(self.running)

    def _has_page_copy(self) -> bool:
        return any(sequence.page_copy is not None for sequence in self.running)

    def _share_with_retried(self, rows_budget: PromptRowsBudget) -> list[Share] | None:
        """The share of a sequence that is retried after a failed step, which has the step alone;
        None if there is no such sequence, or if the others must run before it can start.
        """
        running = [sequence for sequence in self.running if sequence.is_retried]
        if not running and self.waiting and self.waiting[0].is_retried:
            sequence = self.waiting[0]
            is_pending = sequence.num_pending_tokens or sequence.is_expecting_source
            self._reservations.forget()
            if not is_pending and self._try_start(sequence):
                running = [sequence]
        if not running:
            return None
        decodes, prompts = _split(running[:1])
        shares = self._share_among_decodes(decodes, rows_budget)
        return shares + self._share_among_prompts(prompts, shares, rows_budget)

    def _share_among_all(self, now_s: float, rows_budget: PromptRowsBudget) -> list[Share]:
        """Shares of running sequences, and of waiting ones that start in this step."""
        num_preemptions = self.num_preemptions
        decodes, prompts = _split(self.running)
        shares = self._share_among_decodes(decodes, rows_budget)
        may_start = self._free_rows or self._light_tenants.has_any(self._fair_share.waiting_names)
        if self.num_preemptions == num_preemptions and self.waiting and may_start:
            self._reservations.forget()
            ordered = self._policy.ordered(self.waiting, now_s, self.kv_cache.num_uncached_tokens)
            waiting = self._fair_share.in_turns(ordered)
            if self._is_static:
                in_order = list(waiting)
                num_ready = sum(1 for _ in self._not_being_read(in_order, now_s))
                if self.running or num_ready == len(in_order):
                    prompts += self._admit_batch(in_order)
            else:
                budget = self._prompt_budget(shares)
                ready = self._not_being_read(waiting, now_s)
                self._admit(ready, prompts, budget, rows_budget)
        return shares + self._share_among_prompts(prompts, shares, rows_budget)

    def _not_being_read(self, waiting: Iterable[Sequence], now_s: float) -> Iterator[Sequence]:
        """The sequences without those that wait for pages which a store has."""
        return (each for each in waiting if not self.kv_cache.is_being_read(each, now_s))

    def _share_among_decodes(
        self, sequences: list[Sequence], rows_budget: PromptRowsBudget
    ) -> list[Share]:
        """One token of each, oldest first, with its page, and forced ones if there is time."""
        shares: list[Share] = []
        room = self._room_for_forced(sequences)
        for sequence in sequences:
            count = 1 + min(room, sequence.num_uncomputed_tokens - 1)
            is_running = sequence.status is SequenceStatus.RUNNING
            if is_running and _fit(sequence, count, rows_budget) and self._reach(sequence, count):
                shares.append((sequence, count))
                room -= count - 1
        return shares

    def _room_for_forced(self, decodes: list[Sequence]) -> int:
        """Tokens that the step may compute beside one of each of `decodes`."""
        if not any(sequence.constraint is not None for sequence in decodes):
            return 0
        budget = self._prompt_budget([(sequence, 1) for sequence in decodes])
        in_time = inf if budget.cost is None else budget.left_ms // budget.cost.token_ms
        return int(max(0, min(budget.num_tokens, in_time)))

    def _share_among_prompts(
        self,
        sequences: list[Sequence],
        decodes: list[Share],
        rows_budget: PromptRowsBudget,
    ) -> list[Share]:
        """What the step computes of sequences with several uncomputed tokens, beside `decodes`."""
        prompts = [each for each in sequences if each.status is SequenceStatus.RUNNING]
        if not prompts:
            return []
        parts = [self._part_of(sequence) for sequence in prompts]
        budgeted_shares = PromptShares(self._prompt_budget(decodes), parts)
        self._may_finish_short = budgeted_shares.may_finish_short
        if self.step_bound is not None and budgeted_shares.left_ms < 0:
            self.step_bound.num_granted += 1
        shares: list[Share] = []
        for sequence, budgeted in zip(prompts, budgeted_shares.counts, strict=True):
            count = _fit(sequence, budgeted, rows_budget) if budgeted else 0
            is_running = sequence.status is SequenceStatus.RUNNING
            if count and is_running and self._reach(sequence, count):
                shares.append((sequence, count))
        return shares

    def _prompt_budget(self, decodes: list[Share]) -> PromptBudget:
        """What is left for prompts beside the tokens of `decodes`."""
        num_new = sum([count for _, count in decodes])
        num_tokens = self.limits.max_num_batched_tokens - num_new
        budget = PromptBudget(num_tokens=num_tokens, may_finish_short=self._may_finish_short)
        if self.step_bound is None:
            return budget
        load = StepLoad(
            num_tokens=num_new,
            num_logits=len(decodes),
            num_keys=sum([sequence.num_computed_tokens + 1 for sequence, _ in decodes]),
        )
        budget.left_ms, budget.cost = self.step_bound.left_ms(load), self.step_bound.cost
        return budget

    def _reach(self, sequence: Sequence, count: int) -> bool:
        """Allocates the pages that the next `count` tokens lack, preempting other sequences and
        finally itself, as the policy says.

        False if it was preempted, or if pages are still pinned by a launched step.
        """
        num_tokens = sequence.num_computed_tokens + count
        while not self.kv_cache.try_grow(sequence, num_tokens):
            rivals: SequenceOf[Sequence] = self.running
            if self.kv_cache.exceeds_share(sequence, num_tokens):
                rivals = self.running.of_tenant(sequence.request.tenant.name)
            elif self.kv_cache.pool.num_pinned:
                return False
            victim = self._policy.victim(rivals, self._fair_share.counter_of)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _admit(
        self,
        waiting: Iterable[Sequence],
        prompts: list[Sequence],
        budget: PromptBudget,
        rows_budget: PromptRowsBudget,
    ) -> None:
        """Starts `waiting` sequences in order while rows and pages remain, and as long as the next
        one would compute something in this step; adds them to `prompts`.

        At most two prompts stay incomplete, and two more of light tenants. Sequences that wait for
        a prefix, which another one is computing, are passed, and so are all of a tenant whose next
        one does not fit its share.
        """
        full: set[str] = set()
        shares = PromptShares(budget, [self._part_of(sequence) for sequence in prompts])
        for sequence in waiting:
            is_first = self._light_tenants.is_light(sequence.request.tenant.name)
            if not (self._free_rows or is_first) or budget.num_tokens <= 0:
                break
            if sequence.num_pending_tokens or sequence.is_retried:
                break
            if sequence.request.tenant.name in full:
                continue
            if sequence.is_expecting_source or self.kv_cache.is_prefix_coming(sequence):
                continue
            if sequence.needs_prompt_rows and not rows_budget.num_rows:
                break
            if shares.num_cut(are_first=is_first) >= MAX_CUT_PROMPTS:
                break
            prefix = self.kv_cache.find_prefix(sequence)
            if not self._fits_share(sequence, prefix):
                full.add(sequence.request.tenant.name)
                continue
            part = PromptPart(
                start=prefix.num_tokens,
                num_left=sequence.num_tokens - prefix.num_tokens,
                has_logits=sequence.needs_prompt_rows,
                is_first=is_first,
            )
            if not shares.add(part) or not self._start_or_displace(sequence):
                break
            prompts.append(sequence)

    def _start_or_displace(self, sequence: Sequence) -> bool:
        """Starts a waiting sequence, in place of running ones of heavier tenants if need be."""
        while not (self._free_rows and self._try_start(sequence)):
            has_row = bool(self._free_rows)
            rivals = self._light_tenants.rivals(sequence, self.running, lacks_row=not has_row)
            # Pages of a preempted one are free once the steps in flight have been read.
            if not rivals or (has_row and self.kv_cache.pool.num_pinned):
                return False
            self._preempt(self._policy.victim(rivals, self._fair_share.counter_of))
        return True

    def _part_of(self, sequence: Sequence) -> PromptPart:
        return PromptPart(
            start=sequence.num_computed_tokens,
            num_left=sequence.num_uncomputed_tokens,
            has_logits=sequence.needs_prompt_rows,
            is_first=self._light_tenants.is_light(sequence.request.tenant.name),
        )

    def _admit_batch(self, waiting: Iterable[Sequence]) -> list[Sequence]:
        """Starts `waiting` sequences in order while rows and pages remain, if none is running.

        Later only samples start whose request is running, when its prompt has been computed.
        """
        is_new = not self.running
        started: list[Sequence] = []
        for sequence in waiting:
            if not self._free_rows or sequence.num_pending_tokens or sequence.is_retried:
                break
            is_of_batch = is_new or sequence.fork_source is not None
            if not is_of_batch or sequence.is_expecting_source:
                continue
            if not self._try_start(sequence):
                break
            started.append(sequence)
        return started

    def _try_start(self, sequence: Sequence) -> bool:
        is_fork = sequence.fork_source is not None
        prefix = self.kv_cache.find_prefix(sequence)
        if not self._fits_share(sequence, prefix) or not self._can_admit(sequence, prefix):
            return False
        is_looked_up = (
            self.limits.enable_prefix_caching and sequence.num_cached_tokens is None and not is_fork
        )
        misses = self.kv_cache.misses_of(sequence, prefix) if is_looked_up else None
        miss = self.kv_cache.cache_miss_of(sequence, prefix) if is_looked_up else None
        if not self.kv_cache.try_adopt(sequence, prefix):
            return False
        if not sequence.has_started:
            if not any(each.has_started for each in sequence.siblings):
                self._started.append(Started(request_id=sequence.request_id))
            sequence.has_started = True
            num_left = sequence.num_prompt_tokens - prefix.num_tokens
            self._fair_share.charge_prompt(sequence, max(0, num_left))
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = prefix.num_cached_tokens
        if misses is not None:
            sequence.cache_miss = miss
            self.prefix_counts.add(sequence, misses)
        self._leave_queue(sequence)
        sequence.row = heapq.heappop(self._free_rows)
        sequence.status = SequenceStatus.RUNNING
        self.running.append(sequence)
        return True

    def _can_admit(self, sequence: Sequence, prefix: Prefix) -> bool:
        # Most rejections occur even if the prefix costs nothing, so its unreferenced pages are
        # counted only after that cheaper check has passed.
        available, shared = self.kv_cache.pool.num_available, len(prefix.page_ids)
        can_admit = self._reservations.can_admit
        return can_admit(sequence, available=available, shared=shared) and can_admit(
            sequence, available=available, shared=shared - self.kv_cache.num_unheld(prefix)
        )

    def _fits_share(self, sequence: Sequence, prefix: Prefix) -> bool:
        """Whether the tenant's share holds the sequence beside those of the tenant that run."""
        tenant = sequence.request.tenant
        if tenant.page_share == 1.0:
            return True
        shares = self.kv_cache.page_shares
        return self._admission.can_admit(
            sequence,
            self.running.of_tenant(tenant.name),
            available=shares.num_left(tenant),
            shared=shares.num_held(tenant, prefix.page_ids),
        )

    def _enter(
        self, batch: Batch, sequence: Sequence, count: int, proposal: Proposal
    ) -> BatchEntry:
        """Adds the next `count` tokens of a sequence and its drafts to the batch and counts them as
        launched.
        """
        row, start = sequence.row, sequence.num_computed_tokens
        assert row is not None
        drafts, masks = proposal
        end = start + count
        num_choices = 1 if end == sequence.num_tokens else 0
        if drafts:
            num_drafts = len(drafts)
            end, count, num_choices = end + num_drafts, count + num_drafts, 1 + num_drafts
            batch.has_drafts = True
        sequence.num_pending_tokens += num_choices
        sequence.num_computed_tokens = end
        # Positional: keyword arguments take three times as long, and this runs per row and step.
        preemptions = sequence.num_preemptions
        entry = BatchEntry(sequence, row, start, count, num_choices, preemptions, drafts, masks)
        batch.entries.append(entry)
        batch.num_tokens += count
        batch.num_keys += num_keys(start, count)
        batch.num_choices += num_choices
        if num_choices and sequence.constraint is not None:
            batch.needs_masks = True
        size, table = self.limits.page_size, sequence.page_table
        batch.written_pages += table[start // size : (end - 1) // size + 1]
        if sequence.num_sent_pages < len(table):
            new = range(sequence.num_sent_pages, len(table))
            batch.page_updates += [PageUpdate(row, index, table[index]) for index in new]
            sequence.num_sent_pages = len(table)
        if sequence.prompt_rows is not None:
            entry.prompt_rows = sequence.prompt_rows.launch(start, end)
            batch.num_prompt_rows += len(entry.prompt_rows)
        if sequence.pool is not None:
            batch.has_pooled = True
        return entry

    def _end(self, sequence: Sequence) -> None:
        if sequence.status is SequenceStatus.RUNNING:
            self._leave_row(sequence)
        else:
            self._leave_queue(sequence)
        sequence.status = SequenceStatus.FINISHED
        self._light_tenants.close(sequence.request.tenant)

    def _leave_queue(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        self._fair_share.leave(sequence.request.tenant)

    def _preempt(self, sequence: Sequence) -> None:
        """Frees a running sequence's pages and puts it at the head of the queue."""
        self.num_preemptions += 1
        self._rewind_to_waiting(sequence)

    def _rewind_to_waiting(self, sequence: Sequence) -> None:
        sequence.num_preemptions += 1
        self._leave_row(sequence)
        sequence.status = SequenceStatus.WAITING
        self.waiting.appendleft(sequence)
        self._fair_share.join(sequence.request.tenant)

    def _leave_row(self, sequence: Sequence) -> None:
        assert sequence.row is not None
        heapq.heappush(self._free_rows, sequence.row)
        self.running.remove(sequence)
        self._reservations.forget()
        self.kv_cache.release(sequence)


def _split(sequences: Iterable[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
    """Those with one token to compute, or with forced ones behind it, and those with several, in
    their order."""
    decodes: list[Sequence] = []
    prompts: list[Sequence] = []
    for sequence in sequences:
        num_uncomputed = sequence.num_uncomputed_tokens
        if num_uncomputed == 1 or sequence.has_forced_tokens:
            decodes.append(sequence)
        elif num_uncomputed:
            prompts.append(sequence)
    return decodes, prompts


def _fit(sequence: Sequence, count: int, rows_budget: PromptRowsBudget) -> int:
    """`count`, reduced if the logit rows for prompt log probabilities do not suffice."""
    progress = sequence.prompt_rows
    return rows_budget.take(progress, sequence.num_computed_tokens, count)
