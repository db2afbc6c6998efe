"""`Scheduler`: decides how many tokens each sequence computes in a step, and applies the results.

There are no separate prefill and decode phases: each step computes tokens that have no KV yet.
Within one budget of tokens, and of time if that is bounded, running sequences come first (those
with one token to compute, then partially computed prompts), then waiting ones. `Turns` says who
goes next and who is preempted where the `KVCacheManager` has too few pages; who is preempted is
recomputed later.

A step may be launched before the previous one is read (see `engine.loop`): progress is counted at
launch, tokens are appended in `update`, and results of sequences that have ended are dropped.
"""

import heapq
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from operator import attrgetter

from cadenza.config import Batching, EngineLimits
from cadenza.core.admission import Admission, Reservations
from cadenza.core.batch import Batch, BatchEntry
from cadenza.core.draft_ledger import OnDrafts
from cadenza.core.drafts import DraftCounts
from cadenza.core.fair_share import fair_share_of
from cadenza.core.image_cost import ImageCost
from cadenza.core.image_queue import ImageQueue, WorkOf
from cadenza.core.kv_cache_manager import KVCacheManager
from cadenza.core.prefix import Prefix
from cadenza.core.prefix_misses import OnPrefix, PrefixCounts
from cadenza.core.scoring_queue import ScoringOptions, ScoringQueue
from cadenza.core.sequence import Sequence, SequenceStatus
from cadenza.core.sequence_list import SequenceList
from cadenza.core.span_queue import SpanQueue
from cadenza.core.step_budget import PromptPart, PromptShares, StepBudget
from cadenza.core.step_cost import StepBound, StepCost
from cadenza.core.step_drafts import Drafter, StepDrafts
from cadenza.core.step_results import StepResults
from cadenza.core.step_schema import StepOutput
from cadenza.core.step_times import StepTimes
from cadenza.core.turns import FCFS, Turn, TurnPolicy, Turns
from cadenza.core.whole_spans import SpanShape
from cadenza.events import Event, Started

_row_of = attrgetter("row")

MAX_PARTIAL_PREFILLS = 2
"""Prompts that may be partially computed at the same time, unless preemption adds some. Tenants
under their share may have as many, whatever the others have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """What decides who runs when, and never what comes of it.

    Args:
        step_bound: bounds the time of steps; None bounds only their tokens.
        step_cost: what steps cost, where there is no bound; None if it is not known.
        drafter: drafts for the sequences that have no source of their own.
        on_drafts: called when drafts begin or cease to pay.
        batching: "static" starts sequences only when all that ran have ended, as many as there are
            rows and pages for.
        on_prefix: called with each sequence whose prompt was looked up, as it starts, and with why
            tokens were missing.
        image_work: what encoding an image takes; needed where `EngineLimits.images` are encoded.
        image_cost: what its operations cost; None if that was not measured.
        scoring: of the model that scores prompts; None without one.
        span_shape: how the runner computes spans in quanta; None if it does not.
    """

    step_bound: StepBound | None = None
    step_cost: StepCost | None = None
    drafter: Drafter | None = None
    on_drafts: OnDrafts | None = None
    policy: TurnPolicy = FCFS
    batching: Batching = "continuous"
    on_prefix: OnPrefix | None = None
    image_work: WorkOf | None = None
    image_cost: ImageCost | None = None
    scoring: ScoringOptions | None = None
    span_shape: SpanShape | None = None


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
        self.kv_cache = kv_cache
        self.turns = Turns(
            limits,
            kv_cache,
            fair_share_of(options.step_bound, limits),
            options.policy,
            options.batching,
        )
        self.running = SequenceList()
        self.images = ImageQueue(
            limits.images, kv_cache, self.turns.fair_share, options.image_work, options.image_cost
        )
        self.scoring = ScoringQueue(options.scoring, kv_cache, self.turns.fair_share)
        self.spans = SpanQueue(options.span_shape, options.step_bound)
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_scheduled_tokens = 0
        self.prefix_counts = PrefixCounts(options.on_prefix)
        self._results = StepResults(kv_cache, self._end, limits.placeholder)
        self.drafts = StepDrafts(limits, kv_cache, options.drafter, options.on_drafts)
        self._times = StepTimes(
            options.step_bound,
            options.step_cost,
            (self.images, self.spans, self.scoring, self.drafts),
        )
        self._may_finish_short = True
        self._reservations = Reservations(admission, self.running)
        self._free_rows = list(range(limits.max_num_seqs))
        self._started: list[Started] = []
        """Of requests that have started, for the next step that computes anything."""

    @property
    def waiting(self) -> SequenceList:
        return self.turns.waiting

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def sequences(self) -> list[Sequence]:
        """All waiting and running sequences."""
        return [*self.waiting, *self.running]

    @property
    def draft_counts(self) -> DraftCounts:
        return self._results.draft_counts

    def decide_wait(self) -> bool:
        """Whether the next step is to follow the newest tokens, because running sequences would
        draft and can only behind these. To be asked once for a step, for answers are counted: what
        a wait costs is measured now and then, and a no holds for some steps."""
        return self.drafts.decide_wait(self.running, self.num_steps, self.step_cost)

    def observe(self, batch: Batch, measured_ms: float, idle_ms: float | None = None) -> None:
        """A step took `measured_ms`, after `idle_ms` if it waited for the newest tokens."""
        self._times.observe(batch, measured_ms, idle_ms)

    def predict_ms(self, batch: Batch) -> float | None:
        """What a step is to take; None if that is not known."""
        return self._times.predict_ms(batch)

    @property
    def step_cost(self) -> StepCost | None:
        return self._times.cost

    def add(self, sequence: Sequence) -> None:
        self.turns.add(sequence)
        self.images.add(sequence)
        self.scoring.add(sequence)

    def schedule(self, now_s: float = 0.0) -> Batch | None:
        """The next step, with its pages allocated; None if nothing can be computed.

        `now_s` is a reading of the clock by which sequences' `arrived_s` were set.
        """
        who = self.turns.of_step(self.running, now_s)
        plan = self.images.plan(self.running, who.retried, who.startable)
        self.spans.start_step(None if plan.passed else who.retried)
        self.scoring.begin(who.startable, self._reservations)
        budget = StepBudget(
            self.limits.max_num_batched_tokens,
            self.step_bound,
            may_finish_short=self._may_finish_short,
            kept_share=max(plan.share, self.scoring.share),
        )
        entries: list[BatchEntry] = []
        for turn in who.turns(plan.passed) if plan.has_tokens else ():
            entries = self._allocate_turn(turn, budget)
            if entries or self.spans.is_planned:
                break
        has_text = bool(entries) or self.spans.is_planned
        if not (has_text or self.images.may_encode(plan) or self.scoring.has_work):
            # Who starts computes something in that step, or another one does.
            assert not self._has_page_copy(), "no step makes a page's copy"
            return None
        self.drafts.propose(entries, budget.num_rows, self.num_steps, self.step_cost)
        batch = self._launched(entries)
        span_ms = self.spans.predict_ms(batch)
        self.images.encode(plan, batch, self.step_bound, span_ms)
        self.scoring.fill(batch, self.step_bound, span_ms + self.images.predict_ms(batch))
        return batch

    def update(self, batch: Batch, output: StepOutput) -> list[Event]:
        """Applies a step's results; `output` has one entry per logit row of the batch."""
        self._unpin(batch)
        events = self._results.apply(batch, output)
        self.drafts.settle(batch)
        return events

    def fail_batch(self, batch: Batch, error: str) -> list[Event]:
        """A step failed: each of its sequences is retried once, in steps of its own. One that was
        being retried is ended with an error event.
        """
        self.drop_batch(batch)
        events: list[Event] = []
        computed = [entry.sequence for entry in batch.entries]
        for sequence in dict.fromkeys([*computed, *batch.quanta_for]):
            if sequence.is_finished:
                continue
            if sequence.is_retried:
                events.append(self._results.fail(sequence, error, "step_failed"))
            else:
                self.turns.retry(sequence)
        return events

    def drop_batch(self, batch: Batch) -> None:
        """Unpins the pages of a step that will not be read; `restart` recomputes its tokens."""
        self._unpin(batch)

    def _unpin(self, batch: Batch) -> None:
        self.kv_cache.unpin(batch.written_pages, batch.state_slots)
        self.images.unpin(batch)

    def cancel(self, sequence: Sequence) -> None:
        """Ends a waiting or running sequence without an event."""
        self._end(sequence)

    def restart(self) -> None:
        """After the device lost its pages: requeues running sequences, empties the prefix cache and
        the image slots."""
        for sequence in self.running[::-1]:
            self._rewind_to_waiting(sequence)
        for sequence in self.waiting:
            sequence.num_pending_tokens = sequence.num_void_choices = 0
        self.kv_cache.forget_all()
        self.images.restart()
        self.scoring.restart()

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
        self.turns.check_invariants(self.running)
        self.kv_cache.check_invariants([*self.running, *self.scoring.sequences])
        self.scoring.check_invariants(self.waiting)
        self.images.check_invariants(self.waiting, self.running)
        self.spans.check_invariants()

    def _has_page_copy(self) -> bool:
        return any(sequence.page_copy is not None for sequence in self.running)

    def _allocate_turn(self, turn: Turn, budget: StepBudget) -> list[BatchEntry]:
        """The entries of running sequences, and of waiting ones that start; all have their pages.
        No sequence starts in a step for which one was preempted."""
        num_preemptions = self.num_preemptions
        decodes, prompts = turn.split()
        if self.images.is_used:
            decodes = [each for each in decodes if self.images.can_go_on(each)]
            prompts = [each for each in prompts if self.images.can_go_on(each)]
        entries = self._allocate_decodes(decodes, budget)
        has_row = bool(self._free_rows)
        if self.num_preemptions == num_preemptions and self.turns.may_start(has_row=has_row):
            self._reservations.forget()
            if turn.joins:
                self._start_beside(turn.waiting, prompts, entries, budget)
            else:
                self._start_all(turn.waiting, prompts)
        entries += self._allocate_prompts(prompts, entries, budget)
        # One with pages may have been preempted for another one's.
        return [entry for entry in entries if entry.sequence.status is SequenceStatus.RUNNING]

    def _allocate_decodes(self, sequences: list[Sequence], budget: StepBudget) -> list[BatchEntry]:
        """One token of each, oldest first, and forced ones if there is time."""
        entries: list[BatchEntry] = []
        num_forced = budget.num_forced(sequences)
        for sequence in sequences:
            count = 1 + min(num_forced, sequence.num_uncomputed_tokens - 1) if num_forced else 1
            if entry := self._try_allocate(sequence, count, budget):
                entries.append(entry)
                num_forced -= count - 1
        return entries

    def _allocate_prompts(
        self, sequences: list[Sequence], decodes: list[BatchEntry], budget: StepBudget
    ) -> list[BatchEntry]:
        """What the step computes of sequences with several uncomputed tokens, beside `decodes`."""
        prompts = [each for each in sequences if each.status is SequenceStatus.RUNNING]
        if not prompts:
            return []
        shares = self._prompt_shares(prompts, decodes, budget)
        self._may_finish_short = shares.may_finish_short
        if self.step_bound is not None and shares.left_ms < 0:
            self.step_bound.num_granted += 1
        entries = list[BatchEntry | None]()
        for sequence, count, quanta in zip(prompts, shares.counts, shares.quanta, strict=True):
            if count:
                entries.append(self._try_allocate(sequence, count, budget))
            elif quanta:
                self._try_allocate_span(sequence, quanta)
        return [entry for entry in entries if entry is not None]

    def _prompt_shares(
        self, prompts: list[Sequence], decodes: list[BatchEntry], budget: StepBudget
    ) -> PromptShares:
        num_new_tokens = sum([entry.num_new_tokens for entry in decodes])
        left = budget.beside([entry.sequence for entry in decodes], num_new_tokens)
        return PromptShares(
            left, [self._part_of(each, each.num_computed_tokens) for each in prompts]
        )

    def _part_of(self, sequence: Sequence, start: int) -> PromptPart:
        num_left = self.images.reachable(sequence, start) - start
        has_quanta = self.spans.serves(sequence)
        return PromptPart(
            start=start,
            num_left=num_left,
            has_logits=sequence.needs_prompt_rows,
            is_first=self.turns.under_share.is_under_share(sequence.tenant.name),
            spans=sequence.whole_spans,
            has_quanta=has_quanta,
            rest=self.spans.rest_of(sequence, start) if has_quanta and num_left else None,
        )

    def _try_allocate(
        self, sequence: Sequence, count: int, budget: StepBudget
    ) -> BatchEntry | None:
        """The next `count` tokens of a sequence, or fewer if it lacks logit rows, with their pages;
        None if it has been preempted, or lacks all."""
        if sequence.status is not SequenceStatus.RUNNING:
            return None
        count = budget.take_rows(sequence, count)
        if not count or not self._allocate_or_preempt(sequence, count):
            return None
        row, start = sequence.row, sequence.num_computed_tokens
        assert row is not None
        # Positional: keyword arguments take three times as long, and this runs per row and step.
        return BatchEntry(sequence, row, start, count, 0, sequence.num_preemptions)

    def _try_allocate_span(self, sequence: Sequence, count: int) -> None:
        """Plans the next `count` quanta of a sequence's span, with the pages of all its rows."""
        if sequence.status is SequenceStatus.RUNNING:
            num_rows = self.spans.num_rows_of(sequence)
            if self._allocate_or_preempt(sequence, num_rows):
                self.spans.plan(sequence, count)

    def _allocate_or_preempt(self, sequence: Sequence, count: int) -> bool:
        """Allocates what the next `count` tokens lack, preempting other sequences and finally
        itself.

        False if it was preempted, or if pages or slots are still pinned by a launched step.
        """
        num_tokens = sequence.num_computed_tokens + count
        while not self.kv_cache.try_grow(sequence, num_tokens):
            candidates: SequenceOf[Sequence] = self.running
            if self.kv_cache.exceeds_quota(sequence, num_tokens):
                candidates = self.running.of_tenant(sequence.tenant.name)
            elif self.kv_cache.has_pinned:
                return False
            own = sequence.tenant if candidates is not self.running else None
            if self.scoring.preempt(own):
                continue
            victim = self.turns.victim(candidates)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _start_all(self, waiting: Iterable[Sequence], prompts: list[Sequence]) -> None:
        """Starts `waiting` sequences in order while rows and pages remain."""
        for sequence in waiting:
            if sequence.is_expecting_source or self.images.is_awaited_by(sequence):
                continue
            if sequence.awaits_kept and not self.scoring.lacks_pages(sequence):
                continue
            if sequence.awaits_kept or not self._free_rows or not self._try_start(sequence):
                break
            prompts.append(sequence)

    def _start_beside(
        self,
        waiting: Iterable[Sequence],
        prompts: list[Sequence],
        decodes: list[BatchEntry],
        budget: StepBudget,
    ) -> None:
        """Starts `waiting` sequences in order while rows and pages remain, and as long as the next
        one would compute something in this step; adds them to `prompts`.

        At most `MAX_PARTIAL_PREFILLS` prompts stay incomplete. Sequences that wait for a prefix,
        which another one is computing, are passed, and so are all of a tenant whose next one does
        not fit its quota.
        """
        full: set[str] = set()
        shares = self._prompt_shares(prompts, decodes, budget)
        for sequence in waiting:
            name = sequence.tenant.name
            is_first = self.turns.under_share.is_under_share(name)
            if not (self._free_rows or is_first) or not shares.has_tokens:
                break
            if name in full or sequence.is_expecting_source:
                continue
            if self.scoring.lacks_pages(sequence):
                break
            if self.scoring.is_full(sequence.tenant):
                full.add(name)
            if sequence.awaits_kept:
                continue
            if self.images.is_known_to_wait(sequence):
                continue
            if self.kv_cache.is_prefix_coming(sequence):
                continue
            if sequence.needs_prompt_rows and not budget.num_rows:
                break
            if shares.num_cut(are_first=is_first) >= MAX_PARTIAL_PREFILLS:
                break
            prefix = self.kv_cache.find_prefix(sequence)
            if not self.images.may_start(sequence, prefix.num_tokens):
                continue
            if not self._reservations.fits_quota(self.kv_cache, sequence, prefix):
                full.add(name)
                continue
            part = self._part_of(sequence, prefix.num_tokens)
            if not shares.add(part) or not self._start_or_displace(sequence):
                break
            prompts.append(sequence)

    def _start_or_displace(self, sequence: Sequence) -> bool:
        """Starts a waiting sequence, in place of those of tenants above their share if need be."""
        while not (self._free_rows and self._try_start(sequence)):
            has_row = bool(self._free_rows)
            preemptable = self.turns.under_share.preemptable_for(
                sequence, self.running, lacks_row=not has_row
            )
            # Pages of a preempted one are free once the steps in flight have been read.
            if not preemptable or (has_row and self.kv_cache.has_pinned):
                return False
            self._preempt(self.turns.victim(preemptable))
        return True

    def _try_start(self, sequence: Sequence) -> bool:
        """Gives a waiting sequence a row and the pages of all its tokens; False without pages."""
        is_fork = sequence.fork_source is not None
        prefix = self.kv_cache.find_prefix(sequence)
        if not self._reservations.can_start(self.kv_cache, sequence, prefix):
            return False
        is_looked_up = (
            self.limits.enable_prefix_caching and sequence.num_cached_tokens is None and not is_fork
        )
        misses = self.kv_cache.misses_of(sequence, prefix) if is_looked_up else None
        if not self.kv_cache.try_adopt(sequence, prefix):
            return False
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = prefix.num_cached_tokens
        if misses is not None:
            by_reason, sequence.cache_miss = misses
            self.prefix_counts.add(sequence, by_reason)
        self.images.note_start(sequence, prefix, is_fork=is_fork)
        self._note_start(sequence, prefix)
        self.turns.leave(sequence)
        sequence.row = heapq.heappop(self._free_rows)
        sequence.status = SequenceStatus.RUNNING
        self.running.append(sequence)
        return True

    def _note_start(self, sequence: Sequence, prefix: Prefix) -> None:
        """The event and the charge of the first time that a sequence starts."""
        if sequence.has_started:
            return
        if not any(each.has_started for each in sequence.siblings):
            self._started.append(_started_event(sequence))
        sequence.has_started = True
        num_left = sequence.num_prompt_tokens - prefix.num_tokens
        self.turns.fair_share.charge_prompt(sequence, max(0, num_left))

    def _launched(self, entries: list[BatchEntry]) -> Batch:
        """The step with these entries, which counts them as launched.

        They are added after all starts, which must not count tokens of this step as computed: a
        sample can only fork a prompt that an earlier step has computed.
        """
        batch = Batch(self.num_steps)
        batch.started, self._started = self._started, []
        batch.page_copies = self.kv_cache.take_copies(self.running)
        batch.written_pages = [copy.destination for copy in batch.page_copies]
        for entry in entries:
            self._add_to_batch(batch, entry)
        if self.spans.is_planned:
            self._add_span(batch)
        self.turns.fair_share.charge_outputs(entries)
        batch.entries.sort(key=_row_of)
        self.kv_cache.pin(batch.written_pages)
        self.images.pin(batch)
        self.num_scheduled_tokens += batch.num_tokens
        self.num_steps += 1
        return batch

    def _add_to_batch(self, batch: Batch, entry: BatchEntry) -> None:
        """Adds an entry with its drafts to the batch and counts its tokens as launched."""
        sequence, start = entry.sequence, entry.start
        num_drafts = len(entry.drafts)
        if start + entry.num_new_tokens == sequence.num_tokens:
            entry.num_choices = 1 + num_drafts
        entry.num_new_tokens += num_drafts
        end = start + entry.num_new_tokens
        sequence.num_pending_tokens += entry.num_choices
        sequence.num_computed_tokens = end
        if sequence.state is not None:
            placed = self.kv_cache.place_state(sequence, start, end, num_drafts)
            entry.state_start, entry.kept_states = placed.start, placed.kept
            batch.state_slots += placed.slots
        if sequence.prompt_rows is not None:
            entry.prompt_rows = sequence.prompt_rows.launch(start, end)
        if sequence.request.attachments:
            entry.images = self.images.seen(sequence, start, end)
        batch.add(entry)
        batch.write_pages(sequence, start, end, self.limits.page_size)

    def _add_span(self, batch: Batch) -> None:
        """Adds the planned quanta of a span, and counts it as computed with the last of them."""
        span = self.spans.launch(batch)
        assert span is not None, "no quanta are planned"
        sequence, start, stop = span.sequence, span.start, span.stop
        found = self.images.seen if span.is_first else self.images.images_of
        batch.span = replace(span, images=found(sequence, start, stop))
        batch.write_pages(sequence, start, stop, self.limits.page_size)
        self.num_scheduled_tokens += sequence.num_computed_tokens - start

    def _end(self, sequence: Sequence) -> None:
        if sequence.status is SequenceStatus.RUNNING:
            self._leave_row(sequence)
        else:
            self.turns.leave(sequence)
        sequence.status = SequenceStatus.FINISHED
        self.images.remove(sequence)
        self.scoring.remove(sequence)
        self.turns.under_share.close(sequence.tenant)

    def _preempt(self, sequence: Sequence) -> None:
        """Frees a running sequence's pages and puts it at the head of the queue."""
        self.num_preemptions += 1
        self._rewind_to_waiting(sequence)

    def _rewind_to_waiting(self, sequence: Sequence) -> None:
        sequence.num_preemptions += 1
        self._leave_row(sequence)
        sequence.status = SequenceStatus.WAITING
        self.turns.put_back(sequence)

    def _leave_row(self, sequence: Sequence) -> None:
        assert sequence.row is not None
        heapq.heappush(self._free_rows, sequence.row)
        self.running.remove(sequence)
        self.spans.remove(sequence)
        self._reservations.forget()
        self.kv_cache.release(sequence)


def _started_event(sequence: Sequence) -> Started:
    return Started(
        request_id=sequence.request_id,
        kept=None if sequence.kept is None else sequence.kept.mask,
        whole_because=sequence.whole_because,
    )
