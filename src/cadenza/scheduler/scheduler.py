"""`Scheduler`: decides how many tokens each sequence computes in a step, and applies the results.
Within one budget of tokens (and time, if bounded), running sequences come first (decodes, then
partial prompts), then waiting ones. Invariant: progress is counted at launch, tokens are appended
when read."""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeVar

from cadenza.batch.batch import Batch, BatchEntry
from cadenza.batch.sequence import RunningRows, Sequence, SequenceList, SequenceStatus, WaitReason
from cadenza.batch.step_cost import StepBound, StepCost
from cadenza.batch.step_schema import StepOutput
from cadenza.config import Batching, EngineLimits
from cadenza.events import Event
from cadenza.kv.kv_cache_manager import KVCacheManager
from cadenza.kv.prefix_misses import OnPrefix, PrefixCounts
from cadenza.scheduler.admission import Admission, Reservations
from cadenza.scheduler.fair_share import fair_share_of
from cadenza.scheduler.starts import Starts
from cadenza.scheduler.step_budget import PromptShares, StepBudget
from cadenza.scheduler.step_results import StepResults
from cadenza.scheduler.step_work import PromptQuanta, StepPlan, StepTimes, StepWork
from cadenza.scheduler.turns import FCFS, Turn, TurnPolicy, Turns

Work = TypeVar("Work", bound=StepWork)

_row_of = attrgetter("row")


def no_works(_: Turns) -> tuple[StepWork, ...]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """What decides who runs when, and never what comes of it."""

    step_bound: StepBound | None = None
    step_cost: StepCost | None = None
    policy: TurnPolicy = FCFS
    batching: Batching = "continuous"
    on_prefix: OnPrefix | None = None
    works: Callable[[Turns], Iterable[StepWork]] = no_works


class Scheduler:
    """Waiting and running sequences of one engine; counters never decrease."""

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
        self.running = RunningRows(limits.max_num_seqs)
        self.works = tuple(options.works(self.turns))
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_scheduled_tokens = 0
        self.prefix_counts = PrefixCounts(options.on_prefix)
        self._results = StepResults(kv_cache, self.end, limits.placeholder)
        self.times = StepTimes(options.step_bound, options.step_cost, self.works)
        self._may_finish_short = True
        self._reservations = Reservations(admission, self.running)
        self._starts = Starts(
            rows=self.running,
            turns=self.turns,
            kv_cache=kv_cache,
            reservations=self._reservations,
            works=self.works,
            counts=self.prefix_counts if limits.enable_prefix_caching else None,
            preempt=self._preempt,
        )

    @property
    def waiting(self) -> SequenceList:
        return self.turns.waiting

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def sequences(self) -> list[Sequence]:
        return [*self.waiting, *self.running]

    def work(self, of: type[Work]) -> Work:
        """Raises LookupError if there is none of the class."""
        for each in self.works:
            if isinstance(each, of):
                return each
        raise LookupError(f"the engine has no {of.__name__}")

    def why_waits(self, sequence: Sequence) -> WaitReason:
        if sequence.wait_reason is not None:
            return sequence.wait_reason
        if self.turns.is_retrying:
            return WaitReason.RETRY
        return WaitReason.TURN if self.running.has_free else WaitReason.ROW

    def must_follow(self) -> bool:
        """Whether the next step is to follow the newest tokens; asked once for a step."""
        number, cost = self.num_steps, self.times.cost
        return any(work.must_follow(self.running, number, cost) for work in self.works)

    def add(self, sequence: Sequence) -> None:
        self.turns.add(sequence)
        for work in self.works:
            work.add(sequence)

    def schedule(self, now_s: float = 0.0) -> Batch | None:
        """None if nothing can be computed. `now_s`: the clock of `arrived_s`."""
        plan = StepPlan(
            turns=self.turns.of_step(self.running, now_s),
            running=self.running,
            reservations=self._reservations,
            bound=self.step_bound,
            works=self.works,
        )
        for work in self.works:
            work.begin(plan)
        budget = StepBudget(
            self.limits.max_num_batched_tokens,
            self.step_bound,
            may_finish_short=self._may_finish_short,
            kept_share=plan.kept_share,
        )
        entries: list[BatchEntry] = []
        for turn in plan.turns.turns(plan.passed) if plan.has_tokens else ():
            entries = self._allocate_turn(turn, plan, budget)
            if entries or plan.quanta:
                break
        has_prompts = entries or plan.quanta
        if not (has_prompts or any(work.has_work(plan) for work in self.works)):
            # Who starts computes something in that step, or another one does.
            assert not self._has_page_copy(), "no step makes a page's copy"
            return None
        for work in self.works:
            work.extend(entries, budget.num_rows, self.num_steps, self.times.cost)
        return self._launched(plan, entries)

    def update(self, batch: Batch, output: StepOutput) -> list[Event]:
        """`output` has one entry per logit row of the batch."""
        self.unpin(batch)
        events = self._results.apply(batch, output)
        for work in self.works:
            work.settle(batch)
        return events

    def fail_batch(self, batch: Batch, error: str) -> list[Event]:
        """Each sequence is retried once, in steps of its own; a retried one ends with an error."""
        self.unpin(batch)
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

    def unpin(self, batch: Batch) -> None:
        """The pages of a step that was read, or will not be; `restart` recomputes its tokens."""
        self.kv_cache.unpin(batch.written_pages, batch.state_slots)
        for work in self.works:
            work.unpin(batch)

    def end(self, sequence: Sequence) -> None:
        """A waiting or running one, without an event."""
        if sequence.status is SequenceStatus.RUNNING:
            self._leave_row(sequence)
        else:
            self.turns.leave(sequence)
        sequence.status = SequenceStatus.FINISHED
        for work in self.works:
            work.remove(sequence)
        self.turns.under_share.close(sequence.tenant)

    def restart(self) -> None:
        """The device lost its pages."""
        for sequence in self.running[::-1]:
            self._rewind_to_waiting(sequence)
        for sequence in self.waiting:
            sequence.num_pending_tokens = sequence.num_void_choices = 0
        self.kv_cache.forget_all()
        for work in self.works:
            work.restart()

    def check_invariants(self) -> None:
        self.running.check_invariants()
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
        own = [sequence for work in self.works for sequence in work.holders]
        self.kv_cache.check_invariants([*self.running, *own])
        for work in self.works:
            work.check_invariants(self.sequences)

    def _has_page_copy(self) -> bool:
        return any(sequence.page_copy is not None for sequence in self.running)

    def _allocate_turn(self, turn: Turn, plan: StepPlan, budget: StepBudget) -> list[BatchEntry]:
        """None starts in a step that preempted."""
        num_preemptions = self.num_preemptions
        running = turn.running
        for work in self.works:
            running = work.ready(running)
        decodes, prompts = turn.split(running)
        entries = self._allocate_decodes(decodes, budget)
        has_row = self.running.has_free
        if self.num_preemptions == num_preemptions and self.turns.may_start(has_row=has_row):
            self._reservations.forget()
            if turn.joins:
                shares = self._prompt_shares(prompts, entries, budget)
                prompts += self._starts.start_beside(turn.waiting, shares, budget)
            else:
                prompts += self._starts.start_all(turn.waiting)
        entries += self._allocate_prompts(prompts, entries, plan, budget)
        # One with pages may have been preempted for another one's.
        if plan.quanta and plan.quanta.sequence.status is not SequenceStatus.RUNNING:
            plan.quanta = None
        return [entry for entry in entries if entry.sequence.status is SequenceStatus.RUNNING]

    def _allocate_decodes(self, sequences: list[Sequence], budget: StepBudget) -> list[BatchEntry]:
        entries: list[BatchEntry] = []
        num_forced = budget.num_forced(sequences)
        for sequence in sequences:
            count = 1 + min(num_forced, sequence.num_uncomputed_tokens - 1) if num_forced else 1
            if entry := self._try_allocate(sequence, count, budget):
                entries.append(entry)
                num_forced -= count - 1
        return entries

    def _allocate_prompts(
        self,
        sequences: list[Sequence],
        decodes: list[BatchEntry],
        plan: StepPlan,
        budget: StepBudget,
    ) -> list[BatchEntry]:
        prompts = [each for each in sequences if each.status is SequenceStatus.RUNNING]
        if not prompts:
            return []
        shares = self._prompt_shares(prompts, decodes, budget)
        self._may_finish_short = shares.may_finish_short
        if self.step_bound is not None and shares.left_ms < 0:
            self.step_bound.num_granted += 1
        entries = list[BatchEntry | None]()
        counts = zip(prompts, shares.counts, shares.quanta, strict=True)
        for index, (sequence, count, quanta) in enumerate(counts):
            if count:
                entries.append(self._try_allocate(sequence, count, budget))
            elif quanta and self._try_hold(sequence, shares.num_span_rows(index)):
                plan.quanta = PromptQuanta(sequence, quanta)
        return [entry for entry in entries if entry is not None]

    def _prompt_shares(
        self, prompts: list[Sequence], decodes: list[BatchEntry], budget: StepBudget
    ) -> PromptShares:
        num_new_tokens = sum([entry.num_new_tokens for entry in decodes])
        left = budget.beside([entry.sequence for entry in decodes], num_new_tokens)
        part_of = self._starts.part_of
        return PromptShares(left, [part_of(each, each.num_computed_tokens) for each in prompts])

    def _try_allocate(
        self, sequence: Sequence, count: int, budget: StepBudget
    ) -> BatchEntry | None:
        if sequence.status is not SequenceStatus.RUNNING:
            return None
        count = budget.take_rows(sequence, count)
        if not count or not self._allocate_or_preempt(sequence, count):
            return None
        row, start = sequence.row, sequence.num_computed_tokens
        assert row is not None
        # Positional: keyword arguments take three times as long, and this runs per row and step.
        return BatchEntry(sequence, row, start, count, 0, sequence.num_preemptions)

    def _try_hold(self, sequence: Sequence, count: int) -> bool:
        is_running = sequence.status is SequenceStatus.RUNNING
        return is_running and self._allocate_or_preempt(sequence, count)

    def _allocate_or_preempt(self, sequence: Sequence, count: int) -> bool:
        """Preempts others and finally itself. False if it was preempted, or if pages or slots are
        pinned by a launched step."""
        num_tokens = sequence.num_computed_tokens + count
        while not self.kv_cache.try_grow(sequence, num_tokens):
            candidates: SequenceOf[Sequence] = self.running
            if self.kv_cache.exceeds_quota(sequence, num_tokens):
                candidates = self.running.of_tenant(sequence.tenant.name)
            elif self.kv_cache.has_pinned:
                return False
            own = sequence.tenant if candidates is not self.running else None
            if any(work.give_up_pages(own) for work in self.works):
                continue
            victim = self.turns.victim(candidates)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _launched(self, plan: StepPlan, entries: list[BatchEntry]) -> Batch:
        """After all starts: a sample can only fork a prompt that an earlier step has computed."""
        batch = Batch(self.num_steps)
        batch.started, self._starts.started = self._starts.started, []
        batch.page_copies = self.kv_cache.take_copies(self.running)
        batch.written_pages = [copy.destination for copy in batch.page_copies]
        for entry in entries:
            entry.launch()
            batch.add(entry)
        self.kv_cache.place(batch)
        for work in self.works:
            self.num_scheduled_tokens += work.launch(plan, batch)
        self.turns.fair_share.charge_outputs(entries)
        for work in self.works:
            work.fill(plan, batch)
        batch.entries.sort(key=_row_of)
        self.kv_cache.pin(batch.written_pages)
        self.num_scheduled_tokens += batch.num_tokens
        self.num_steps += 1
        return batch

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preemptions += 1
        self._rewind_to_waiting(sequence)

    def _rewind_to_waiting(self, sequence: Sequence) -> None:
        sequence.num_preemptions += 1
        self._leave_row(sequence)
        sequence.status = SequenceStatus.WAITING
        self.turns.put_back(sequence)

    def _leave_row(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        for work in self.works:
            work.leave_row(sequence)
        self._reservations.forget()
        self.kv_cache.release(sequence)
