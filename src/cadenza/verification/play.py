"""Running a workload in a mode: `Mode`, `play_showing`, `play_alone`. Invariants: a sample that
does not end has the finish reason "unfinished"; a request has the same id in every mode, so that
seeds derived from ids are equal."""

import math
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, fields, replace

from cadenza.batch.sequence import Sequence
from cadenza.config import EngineLimits, SchedulerLoop
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.engine.new_sequences import ResumedSample
from cadenza.events import Event, Finished, PromptLogprobs, Started, TokenLogprobs
from cadenza.frontend.progress import BatchProgress
from cadenza.request import Request
from cadenza.scheduler.image_queue import ImageQueue
from cadenza.scheduler.scoring_queue import ScoringQueue
from cadenza.speculative_config import SpeculativeConfig
from cadenza.verification.workload import Arrival

MAX_GATE_STEPS = 1_000_000

# Makes an engine on the runner under test, with its pages reset.
MakeCore = Callable[[EngineLimits, CoreOptions], EngineCore]

OnProgress = Callable[[BatchProgress], object]

# (token id, logprob, rank, top ids, top logprobs), which are compared bit for bit. Prompt tokens
# have their position instead of the id; without log probabilities the logprob is NaN.
TokenRecord = tuple[int, float, int, tuple[int, ...], tuple[float, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """Limits and loop of an engine, and how many rounds of the workload it runs. `shows`: the
    fields of `Counts` that must be above zero for the mode to be meaningful; `alternatives`: limits
    to try if one is zero; `or_serial`: then, the requests one after the other, `is_serial`.
    `requests`: those that it plays, None for all. `adapt` changes the options of its engines;
    `interrupt` is called between steps, once for a request whose image is being encoded, and gives
    the engine that goes on."""

    name: str
    limits: EngineLimits
    alternatives: tuple[EngineLimits, ...] = ()
    or_serial: bool = False
    is_serial: bool = False
    loop: SchedulerLoop = "overlap"
    reserved_output: float = 0.5
    rounds: int = 1
    shows: tuple[str, ...] = ()
    speculation: SpeculativeConfig | None = None
    requests: tuple[int, ...] | None = None
    adapt: Callable[[CoreOptions], CoreOptions] | None = None
    interrupt: "Callable[[Interruption], EngineCore] | None" = None


@dataclass(slots=True, eq=False)
class Stream:
    """One sample; in this process only sample 0 has `prompt` records. `finish`: the finish reason,
    of a server with the stop reason as well if there is one."""

    tokens: list[TokenRecord] = field(default_factory=list[TokenRecord])
    finish: str = "unfinished"
    prompt: list[TokenRecord] = field(default_factory=list[TokenRecord])
    request: int = 0
    sample: int = 0
    error: str | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(record[0] for record in self.tokens)


@dataclass(slots=True, eq=False, kw_only=True)
class Counts:
    """How often the events that modes are meant to show occurred."""

    admitted_midstream: int = 0
    rows_reused: int = 0
    preempted: int = 0
    cache_hits: int = 0
    hits_in_image: int = 0
    interrupted: int = 0
    accepted_drafts: int = 0
    rejected_drafts: int = 0
    scored: int = 0

    def add(self, other: "Counts") -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """All rounds of a mode, their streams ordered by request and sample; `seconds`: of the last
    round."""

    rounds: tuple[tuple[Stream, ...], ...]
    counts: Counts
    seconds: float

    @property
    def num_tokens(self) -> int:
        return sum(len(stream.tokens) for stream in self.rounds[-1])


def play_showing(
    make_core: MakeCore, mode: Mode, arrivals: tuple[Arrival, ...], report: OnProgress
) -> Play:
    """Plays the alternatives until all counts of `shows` are above zero."""
    played = play(make_core, mode, arrivals, report)
    others = [replace(mode, limits=limits) for limits in mode.alternatives]
    if mode.or_serial:
        others.append(replace(mode, is_serial=True))
    for other in others:
        if all(getattr(played.counts, name) for name in mode.shows):
            break
        played = play(make_core, other, arrivals, report)
    return played


def play(
    make_core: MakeCore,
    mode: Mode,
    arrivals: tuple[Arrival, ...],
    report: OnProgress = lambda _: None,
) -> Play:
    """Runs a workload in one engine, once for each round."""
    options = CoreOptions(
        loop=mode.loop, reserved_output=mode.reserved_output, speculation=mode.speculation
    )
    if mode.adapt is not None:
        options = mode.adapt(options)
    chosen = range(len(arrivals)) if mode.requests is None else mode.requests
    core = make_core(mode.limits, options)
    rounds: list[tuple[Stream, ...]] = []
    counts, seconds = Counts(), 0.0
    for _ in range(mode.rounds):
        start = time.perf_counter()
        own = {index: arrivals[index] for index in chosen}
        played = Round(own, counts, is_serial=mode.is_serial)
        if mode.interrupt is not None:
            played.interrupt_by(mode.interrupt, lambda: make_core(mode.limits, options))
        core = played.run(core, report)
        rounds.append(tuple(played.streams.values()))
        seconds = time.perf_counter() - start
    counts.preempted = core.scheduler.num_preemptions
    counts.scored = sum(
        [each.counts.num_scored for each in core.scheduler.works if isinstance(each, ScoringQueue)]
    )
    drafts = core.draft_counts
    counts.accepted_drafts = drafts.num_accepted_tokens
    counts.rejected_drafts = drafts.num_draft_tokens - drafts.num_accepted_tokens
    core.check_invariants()
    return Play(rounds=tuple(rounds), counts=counts, seconds=seconds)


def play_alone(
    make_core: MakeCore, limits: EngineLimits, request_id: int, request: Request
) -> tuple[Stream, ...]:
    core = make_core(replace(limits, enable_prefix_caching=False), CoreOptions(loop="plain"))
    played = Round({request_id: Arrival(0, request)}, Counts())
    played.run(core)
    return tuple(played.streams.values())


# Of the requests whose image is being encoded between two steps, one of so many is interrupted.
INTERRUPT_EVERY = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """A request whose image is being encoded, in a round that an engine plays. `make_core`: another
    engine on the same runner, which loses what the runner holds."""

    core: EngineCore
    request_id: int
    round: "Round"
    make_core: Callable[[], EngineCore]


class Round:
    """One run of arrivals (ordered by step), whose keys are the ids of their requests; `is_serial`:
    each is sent when those before it have ended, whatever its step."""

    def __init__(
        self, arrivals: Mapping[int, Arrival], counts: Counts, *, is_serial: bool = False
    ) -> None:
        self.arrivals = arrivals
        self._is_serial = is_serial
        self.streams = {
            (request_id, sample): Stream(request=request_id, sample=sample)
            for request_id, arrival in arrivals.items()
            for sample in range(arrival.request.params.n)
        }
        self.sent: list[int] = []
        self._counts = counts
        self._interrupt: Callable[[Interruption], EngineCore] | None = None
        self._make_core: Callable[[], EngineCore] | None = None
        self._seen: dict[int, None] = {}

    def interrupt_by(
        self, interrupt: Callable[[Interruption], EngineCore], make_core: Callable[[], EngineCore]
    ) -> None:
        self._interrupt, self._make_core = interrupt, make_core

    def run(self, core: EngineCore, report: OnProgress = lambda _: None) -> EngineCore:
        """Returns the engine that ended them."""
        coming = list(self.arrivals.items())
        watch, start_s = _RowWatch(), time.perf_counter()
        for step in range(MAX_GATE_STEPS):
            while coming and (core.is_idle if self._is_serial else coming[0][1].step <= step):
                request_id, arrival = coming.pop(0)
                core.check(arrival.request)
                core.enqueue(request_id, arrival.request)
                self.sent.append(request_id)
            if not coming and core.is_idle:
                break
            for event in core.step():
                self._take(event)
            watch.look(core.scheduler.running)
            report(self._progress(len(core.scheduler.running), start_s))
            core = self._interrupted(core)
        self._counts.admitted_midstream += watch.num_midstream
        self._counts.rows_reused += watch.num_reused
        return core

    def forget(self, request_id: int) -> None:
        for sample in range(self.arrivals[request_id].request.params.n):
            self.streams[request_id, sample] = Stream(request=request_id, sample=sample)

    def open_samples(self, request_id: int) -> tuple[ResumedSample, ...]:
        return tuple(
            ResumedSample(sample=sample, token_ids=stream.token_ids)
            for (request, sample), stream in self.streams.items()
            if request == request_id and stream.finish == Stream().finish
        )

    def num_prompt_logprobs(self, request_id: int) -> int:
        return len(self.streams[request_id, 0].prompt)

    def _take(self, event: Event) -> None:
        if isinstance(event, Started):
            return
        sample = 0 if isinstance(event, PromptLogprobs) else event.sample
        stream = self.streams[event.request_id, sample]
        if isinstance(event, Finished):
            stream.finish = event.finish_reason
            stream.error = event.error
            self._count_hits(event)
        elif isinstance(event, PromptLogprobs):
            for position, entry in enumerate(event.entries, event.start):
                stream.prompt.append(_as_record(position, entry))
        else:
            stream.tokens.append(_as_record(event.token_id, event.logprobs))

    def _count_hits(self, event: Finished) -> None:
        found = event.num_cached_tokens
        attachments = self.arrivals[event.request_id].request.attachments
        self._counts.cache_hits += found > 0
        self._counts.hits_in_image += any(each.start < found < each.end for each in attachments)

    def _progress(self, num_rows: int, start_s: float) -> BatchProgress:
        streams = self.streams.values()
        return BatchProgress(
            num_done=sum(stream.finish != Stream().finish for stream in streams),
            num_requests=len(streams),
            num_rows=num_rows,
            num_tokens=sum(len(stream.tokens) for stream in streams),
            elapsed_s=time.perf_counter() - start_s,
        )

    def _interrupted(self, core: EngineCore) -> EngineCore:
        if self._interrupt is None or self._make_core is None:
            return core
        sequence = core.scheduler.work(ImageQueue).encoding_for
        if sequence is None:
            return core
        request_id = sequence.request_id
        if request_id in self._seen:
            return core
        self._seen[request_id] = None
        if len(self._seen) % INTERRUPT_EVERY != 1:
            return core
        self._counts.interrupted += 1
        return self._interrupt(
            Interruption(core=core, request_id=request_id, round=self, make_core=self._make_core)
        )


def _as_record(token: int, found: TokenLogprobs | None) -> TokenRecord:
    if found is None:
        return (token, math.nan, 0, (), ())
    return (token, found.logprob, found.rank, found.top_ids, found.top_logprobs)


class _RowWatch:
    """Observed between steps."""

    def __init__(self) -> None:
        self.num_midstream = 0
        self.num_reused = 0
        self._seen: set[tuple[int, int]] = set()
        self._used_rows: set[int] = set()

    def look(self, running: SequenceOf[Sequence]) -> None:
        is_streaming = any(
            sequence.num_generated_tokens and _name_of(sequence) in self._seen
            for sequence in running
        )
        for sequence in running:
            if _name_of(sequence) in self._seen or sequence.row is None:
                continue
            self._seen.add(_name_of(sequence))
            self.num_midstream += is_streaming
            self.num_reused += sequence.row in self._used_rows
            self._used_rows.add(sequence.row)


def _name_of(sequence: Sequence) -> tuple[int, int]:
    return sequence.request_id, sequence.sample
