"""`EngineCore`: the synchronous engine: submit, step and cancel; token ids in, events out. A step
depends only on the calls made so far, and on the injected clock. Invariants: request ids increase;
a refused submit changes nothing; each sample gets exactly one `Finished` unless it is cancelled."""

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from cadenza.backends.base import (
    PageCopier,
    ProvenRunner,
    Runner,
    StateCopier,
)
from cadenza.batch.packing import Packer
from cadenza.batch.sequence import Sequence, WaitReason
from cadenza.batch.step_cost import StepBound, StepCost
from cadenza.config import Batching, EngineLimits, SchedulerLoop
from cadenza.drafting.draft_ledger import DraftState
from cadenza.drafting.drafts import DraftCounts
from cadenza.engine.loop import LOOP_DEPTHS, Announce, StepLoop, StepRunner, Steps
from cadenza.engine.model_drafter import DraftModel, ModelDrafter
from cadenza.engine.new_sequences import Compiling, NewSequences, Resumption
from cadenza.engine.page_folder import PageFolder
from cadenza.engine.request_check import RequestCheck
from cadenza.engine.scoring_steps import PromptScorerModel, ScoringSteps
from cadenza.engine.step_works import StepWorks, WorkOptions
from cadenza.engine.stored_pages import StoredPages
from cadenza.errors import EngineClosedError, EngineStalledError, QueueFullError
from cadenza.events import Event, Finished
from cadenza.kernel_proof import KernelProof
from cadenza.kv.kv_cache_manager import KVCacheManager
from cadenza.kv.prefix_misses import PrefixMisses, log_text, miss_text
from cadenza.request import Request
from cadenza.scheduler.admission import RESERVED_OUTPUT, Admission
from cadenza.scheduler.scheduler import Scheduler, SchedulerOptions
from cadenza.scheduler.scoring_queue import ScoringQueue
from cadenza.scheduler.step_drafts import StepDrafts
from cadenza.scheduler.step_results import refuse_constraint
from cadenza.scheduler.turns import FCFS, TurnPolicy
from cadenza.sparse_prefill import LOOK_AHEAD_TOKENS
from cadenza.speculative_config import SpeculativeConfig
from cadenza.structured import CompileConstraint

logger = logging.getLogger(__name__)

# After so many steps in a row that compute nothing, although there is work, `step` raises: the
# engine would go on like this for ever.
MAX_EMPTY_STEPS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreOptions:
    """Only `eos_token_ids` and `seed` affect the streams."""

    # tokens that end a stream unless its request ignores them
    eos_token_ids: frozenset[int] = frozenset()
    # "overlap" launches a step before the previous one is read; "plain" does not
    loop: SchedulerLoop = "overlap"
    # fraction of a request's remaining output that admission reserves pages for
    reserved_output: float = RESERVED_OUTPUT["balanced"]
    seed: int = 0  # determines the seeds of requests without one
    secret: bytes | None = None  # key of the prefix cache's hashes; random if None
    policy: TurnPolicy = FCFS  # the order in which requests start
    batching: Batching = "continuous"  # "static" starts requests only when all that ran have ended
    step_bound: StepBound | None = None  # bounds the time of each step; None bounds only its tokens
    # seconds, monotonic; for the bound and for policies that count waiting time
    clock: Callable[[], float] = time.perf_counter
    speculation: SpeculativeConfig | None = None  # the drafts of its streams; None for none
    # the second model of `speculation`, if that has one; closed with the engine
    draft_model: DraftModel | None = None
    step_cost: StepCost | None = None  # what steps cost, where there is no bound; for drafts
    # of requests with a constraint; None refuses them
    compile_constraint: CompileConstraint | None = None
    # where pages of prompts are stored, whose secret takes the place of `secret`; the runner must
    # then be a `PageCopier`
    page_folder: PageFolder | None = None
    window: int | None = None  # of the model's layers with a window; for prompts that are pruned
    works: WorkOptions = field(default_factory=WorkOptions)


class EngineCore:
    """Over `runner` within `limits`. `steps`: computes batches in place of packing and launching
    them."""

    def __init__(
        self,
        runner: Runner,
        limits: EngineLimits,
        options: CoreOptions | None = None,
        steps: Steps | None = None,
    ) -> None:
        options = options or CoreOptions()
        self.runner = runner
        self.limits = limits
        self.eos_token_ids = options.eos_token_ids
        self.priority_s = options.policy.priority_s
        self.request_check = RequestCheck(
            limits=limits,
            vocab_size=runner.vocab_size,
            backend=runner.name,
            capabilities=runner.capabilities,
            has_priorities=options.policy.priority_s > 0,
            has_constraints=options.compile_constraint is not None,
            hidden_size=runner.hidden_size,
            scored_tokens=_scored_tokens(options.works.prompt_scorer),
        )
        kv_cache = KVCacheManager(limits, _secret_of(options))
        self.stored_pages = _stored_pages(runner, kv_cache, options.page_folder)
        self._draft_model = options.draft_model
        self._drafter = None
        if options.draft_model is not None:
            self._drafter = ModelDrafter(options.draft_model, kv_cache, options.clock)
        self.scheduler = self._scheduler_of(options, kv_cache)
        packer = Packer(limits, runner.vocab_size, options.window)
        scorer = options.works.prompt_scorer
        self._scoring = None
        if scorer is not None:
            self._scoring = ScoringSteps(scorer, self.scheduler.work(ScoringQueue))
        self.loop = StepLoop(
            self.scheduler,
            steps or StepRunner(runner, packer),
            depth=LOOP_DEPTHS[options.loop],
            scorer=self._scoring,
            clock=options.clock,
        )
        self._samples: dict[int, dict[int, Sequence]] = {}
        self._waits: dict[tuple[int, int], WaitReason] = {}  # As they were logged last
        self._speculation = options.speculation
        compile_constraint = options.compile_constraint
        self._compiling = None if compile_constraint is None else Compiling(compile_constraint)
        self._new_sequences = NewSequences(
            limits=limits,
            capabilities=runner.capabilities,
            eos_token_ids=options.eos_token_ids,
            max_num_tokens=self.request_check.max_num_tokens,
            seed=options.seed,
            clock=options.clock,
            speculation=options.speculation,
            acceptance=None if self._drafter is None else self._drafter.acceptance,
        )
        self._clock = options.clock
        self._next_request_id = 0
        self._is_closed = False

    def _scheduler_of(self, options: CoreOptions, kv_cache: KVCacheManager) -> Scheduler:
        works = StepWorks(
            runner=self.runner,
            limits=self.limits,
            kv_cache=kv_cache,
            options=options.works,
            step_bound=options.step_bound,
            drafter=self._drafter,
            on_drafts=self._log_drafts,
        )
        page_size = self.limits.page_size
        return Scheduler(
            self.limits,
            kv_cache,
            Admission(page_size=page_size, reserved_output=options.reserved_output),
            SchedulerOptions(
                step_bound=options.step_bound,
                step_cost=options.step_cost,
                policy=options.policy,
                batching=options.batching,
                on_prefix=_log_prefix,
                works=works.make,
            ),
        )

    @property
    def kernel_proof(self) -> KernelProof | None:
        """What was compared when the runner was warmed up."""
        return self.runner.proof if isinstance(self.runner, ProvenRunner) else None

    @property
    def is_idle(self) -> bool:
        """No request is open, no step in flight, no page waits to be stored."""
        is_storing = self.stored_pages is not None and self.stored_pages.is_busy
        return not (self.has_requests or is_storing)

    @property
    def has_requests(self) -> bool:
        return bool(self.scheduler.has_work or self.loop.in_flight or self._compiling)

    @property
    def num_steps(self) -> int:
        return self.scheduler.num_steps

    @property
    def num_queue_slots(self) -> int:
        """In samples; a request is accepted if there is one."""
        return max(0, self.limits.max_num_queued_reqs - self._num_waiting)

    def submit(self, request: Request) -> int:
        """Returns the request's id. Raises InvalidRequestError, QueueFullError,
        EngineClosedError."""
        self.check(request)
        self._check_queue()
        request_id = self.new_request_id()
        self.enqueue(request_id, request)
        return request_id

    def check(self, request: Request) -> None:
        """Raises the errors of `submit` except QueueFullError; changes nothing."""
        if self._is_closed:
            raise EngineClosedError("the engine is closed; make a new one")
        self.request_check.check(request)
        for work in self.scheduler.works:
            work.check(request)

    def new_request_id(self) -> int:
        self._next_request_id += 1
        return self._next_request_id - 1

    def enqueue(self, request_id: int, request: Request) -> None:
        """A request that has passed `check`, under an id that is not open."""
        self._add(self._new_sequences.of_request(request_id, request))

    def resume(self, request_id: int, request: Request, resumption: Resumption) -> None:
        """Queues a request that another engine began, under its id there, from which a seed may
        derive; no events for what `resumption` holds."""
        self._add(self._new_sequences.resumed(request_id, request, resumption))

    def is_open(self, request_id: int) -> bool:
        is_compiling = self._compiling is not None and request_id in self._compiling
        return is_compiling or request_id in self._samples

    def cancel(self, request_id: int, sample: int | None = None) -> bool:
        """Without events; False if it is not open."""
        if self._compiling and self._compiling.cancel(request_id, sample):
            return True
        samples = self._samples.get(request_id, {})
        ended = list(samples) if sample is None else [k for k in samples if k == sample]
        for each in ended:
            self.scheduler.end(samples[each])
            self._forget(request_id, each)
        return bool(ended)

    def launch_in_s(self) -> float:
        """For so long `step` may be put off, so that requests still to come are in it."""
        return self.loop.launch_in_s()

    def step(self, announce: Announce | None = None) -> list[Event]:
        """[] if there is nothing to do. `announce`: called with the requests that start, before
        anything of them is computed. Raises EngineClosedError, EngineStalledError."""
        if self._is_closed:
            raise EngineClosedError("the engine is closed; make a new one")
        refused = self._start_compiled() if self._compiling else []
        events = self._step(announce)
        if logger.isEnabledFor(logging.DEBUG):
            self._log_waits()
        if self.loop.num_empty_steps >= MAX_EMPTY_STEPS:
            raise EngineStalledError(self._stall_text())
        for event in events:
            if isinstance(event, Finished):
                self._forget(event.request_id, event.sample)
        return [*refused, *events] if refused else events

    def _log_waits(self) -> None:
        before, self._waits = self._waits, {}
        for sequence in self.scheduler.waiting:
            key, reason = (sequence.request_id, sequence.sample), self.scheduler.why_waits(sequence)
            self._waits[key] = reason
            if before.get(key) is not reason:
                logger.debug("request %d, sample %d waits: %s", *key, reason.value)

    def _step(self, announce: Announce | None) -> list[Event]:
        stored = self.stored_pages
        if stored is None:
            return self.loop.step(announce)
        stored.advance()
        events = self.loop.step(announce)
        if stored.is_awaited(self._clock()):
            self.loop.num_empty_steps = 0
        if not (events or self.loop.in_flight or self.scheduler.running) and stored.is_busy:
            stored.wait()
        return events

    def _stall_text(self) -> str:
        scheduler = self.scheduler
        pages = scheduler.kv_cache.pool.counts()
        waits = Counter(scheduler.why_waits(each).value for each in scheduler.waiting)
        reasons = ", ".join(f"{count} waits for: {reason}" for reason, count in waits.items())
        return (
            f"the engine computes nothing although requests are open ({len(scheduler.running)} "
            f"running, {len(scheduler.waiting)} waiting, {pages.free + pages.cached} of "
            f"{self.limits.num_pages} pages free; {reasons}): this is a fault of Cadenza's, please "
            f"report it with this line; a request that is sent again may succeed"
        )

    def close(self) -> None:
        """Ends all requests without events and frees the device's memory. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        for request_id in list(self._samples):
            self.cancel(request_id)
        self.loop.drop_in_flight()
        if self.stored_pages is not None:
            self.stored_pages.close()
        if self._draft_model is not None:
            self._draft_model.runner.close()
        if self._scoring is not None:
            self._scoring.close()
        self.runner.close()

    def check_invariants(self) -> None:
        self.scheduler.check_invariants()
        scheduled = {(s.request_id, s.sample) for s in self.scheduler.sequences}
        is_open = {(i, sample) for i, samples in self._samples.items() for sample in samples}
        assert scheduled == is_open, "open samples and scheduled sequences differ"

    @property
    def draft_counts(self) -> DraftCounts:
        return self._drafts.counts

    @property
    def _drafts(self) -> StepDrafts:
        return self.scheduler.work(StepDrafts)

    @property
    def draft_states(self) -> tuple[DraftState, ...]:
        """By how drafts are made and the number of rows, whether they are."""
        return tuple(map(self._named, self._drafts.ledger.states))

    def _named(self, state: DraftState) -> DraftState:
        if state.origin != "model" or self._speculation is None:
            return state
        return state._replace(origin=self._speculation.method)

    def _log_drafts(self, state: DraftState) -> None:
        state = self._named(state)
        if state.is_on:
            logger.info("drafts by %s pay again at %s rows", state.origin, state.rows)
        else:
            logger.info(
                "drafts by %s are off at %s rows: they cost %.0f %% of a step more than they save;"
                " they are tried again from time to time",
                state.origin,
                state.rows,
                -100 * state.gain,
            )

    def _start_compiled(self) -> list[Finished]:
        assert self._compiling is not None
        if not self.scheduler.has_work and not self.loop.in_flight:
            self._compiling.wait()
        refused: list[Finished] = []
        for samples, is_constrained in self._compiling.take():
            if is_constrained:
                self._queue(samples)
            else:
                refused += [refuse_constraint(each) for each in samples]
        return refused

    def _add(self, samples: list[Sequence]) -> None:
        if samples[0].request.constraint is not None and self._compiling is not None:
            self._compiling.add(samples)
        else:
            self._queue(samples)

    def _queue(self, samples: list[Sequence]) -> None:
        self._samples[samples[0].request_id] = {each.sample: each for each in samples}
        for sequence in samples:
            sequence.siblings = samples if len(samples) > 1 else []
            self.scheduler.add(sequence)

    @property
    def _num_waiting(self) -> int:
        return len(self.scheduler.waiting) + len(self._compiling or ())

    def _check_queue(self) -> None:
        if not self.num_queue_slots:
            raise QueueFullError(
                f"{self._num_waiting} requests wait already (each sample counts), the "
                f"most --max-num-queued-reqs allows; try again when some have finished"
            )

    def _forget(self, request_id: int, sample: int) -> None:
        samples = self._samples[request_id]
        del samples[sample]
        if not samples:
            del self._samples[request_id]


def _secret_of(options: CoreOptions) -> bytes:
    if options.page_folder is not None:
        return options.page_folder.key_secret
    return options.secret or secrets.token_bytes(32)


def _scored_tokens(scorer: PromptScorerModel | None) -> int | None:
    """Of the longest prompt that it scores: the tokens behind it are in its context, too."""
    return None if scorer is None else scorer.limits.max_model_len - LOOK_AHEAD_TOKENS


def _stored_pages(
    runner: Runner, kv_cache: KVCacheManager, folder: PageFolder | None
) -> StoredPages | None:
    if folder is None:
        return None
    copier = PageCopier if kv_cache.states is None else StateCopier
    assert isinstance(runner, copier), "the plan allows a folder only where pages can be copied"
    return StoredPages(runner, kv_cache, folder)


def _log_prefix(sequence: Sequence, misses: PrefixMisses) -> None:
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug(
            "request %d: %d of %d prompt tokens were in the prefix cache; not found: %s%s",
            sequence.request_id,
            sequence.num_cached_tokens,
            sequence.num_prompt_tokens,
            log_text(misses),
            miss_text(sequence.cache_miss, sequence.num_prompt_tokens),
        )
