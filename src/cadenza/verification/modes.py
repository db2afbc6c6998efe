"""The modes of the gate, and running a workload in them: `Mode`, `play_showing`, `play_alone`.

Knows `EngineCore` and, for its counts, the scheduler's running sequences. Invariants: a sample that
does not end has the finish reason "unfinished"; a request has the same id in every mode, so that
seeds derived from ids are equal.
"""

import math
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, fields, replace

from cadenza.config import EngineLimits, SchedulerLoop
from cadenza.core.sequence import Sequence
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.events import Finished, PromptLogprobs, Started, Token, TokenLogprobs
from cadenza.frontend.progress import BatchProgress
from cadenza.request import Request
from cadenza.speculative_config import SpeculativeConfig
from cadenza.verification.workload import Arrival

MAX_GATE_STEPS = 1_000_000

MakeCore = Callable[[EngineLimits, CoreOptions], EngineCore]
"""Makes an engine on the runner under test, with its pages reset."""

OnProgress = Callable[[BatchProgress], object]

TokenRecord = tuple[int, float, int, tuple[int, ...], tuple[float, ...]]
"""(token id, logprob, rank, top ids, top logprobs), which are compared bit for bit.

Prompt tokens have their position instead of the id; without log probabilities the logprob is NaN.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """Limits and loop of an engine, and how many rounds of the workload it runs.

    `shows` names the fields of `Counts` that must be above zero for the mode to be meaningful;
    `alternatives` are limits to try if `limits` leave one of them at zero.
    """

    name: str
    limits: EngineLimits
    alternatives: tuple[EngineLimits, ...] = ()
    loop: SchedulerLoop = "overlap"
    reserved_output: float = 0.5
    rounds: int = 1
    shows: tuple[str, ...] = ()
    speculation: SpeculativeConfig | None = None


@dataclass(slots=True, eq=False)
class Stream:
    """The recorded stream of one sample; in this process only sample 0 has `prompt` records.

    `finish` is the finish reason, of a server with the stop reason beside it if there is one.
    """

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
    accepted_drafts: int = 0

    def add(self, other: "Counts") -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """All rounds of a mode; `seconds` is the duration of the last round.

    The streams of a round are ordered by request and sample.
    """

    rounds: tuple[tuple[Stream, ...], ...]
    counts: Counts
    seconds: float

    @property
    def num_tokens(self) -> int:
        """Number of tokens generated in the last round."""
        return sum(len(stream.tokens) for stream in self.rounds[-1])


def batched_modes(limits: EngineLimits, arrivals: tuple[Arrival, ...]) -> tuple[Mode, ...]:
    """Modes for both loops, chunk sizes, a cold and a hot prefix cache, and preemption.

    The last one needs several pages a sequence: one that has its own slot is never preempted.
    """
    without_cache = replace(limits, enable_prefix_caching=False)
    smallest = max(limits.max_num_seqs, limits.max_num_batched_tokens // 4)
    midstream = ("admitted_midstream", "rows_reused")
    modes = (
        Mode(name="plain loop", limits=without_cache, loop="plain", shows=midstream),
        Mode(name="overlapped loop", limits=without_cache, shows=midstream),
        Mode(
            name=f"chunks of {smallest}",
            limits=replace(without_cache, max_num_batched_tokens=smallest),
        ),
        Mode(
            name=f"chunks of {smallest + 1}, plain loop",
            limits=replace(
                without_cache,
                max_num_batched_tokens=min(smallest + 1, limits.max_num_batched_tokens),
            ),
            loop="plain",
        ),
    )
    if limits.max_pages_per_seq > 1:
        return modes + _paged_modes(limits, arrivals)
    return modes + _slot_modes(limits)


def with_drafts(modes: tuple[Mode, ...], speculation: SpeculativeConfig) -> tuple[Mode, ...]:
    """The same modes, in which steps verify drafts; some must be accepted in the second one."""
    drafting = [replace(mode, speculation=speculation) for mode in modes]
    drafting[1] = replace(drafting[1], shows=(*drafting[1].shows, "accepted_drafts"))
    return tuple(drafting)


def _slot_modes(limits: EngineLimits) -> tuple[Mode, ...]:
    """The mode with prefixes that are copied between slots, if the backend can. Snapshots of
    recurrent layers are of complete prompts, of which the workload need not repeat any."""
    if limits.slot_unit is None:
        return ()
    shows = ("cache_hits",) if limits.slot_unit == 1 else ()
    with_cache = replace(limits, enable_prefix_caching=True)
    return (Mode(name="prefix cache, cold then hot", limits=with_cache, rounds=2, shows=shows),)


def _paged_modes(limits: EngineLimits, arrivals: tuple[Arrival, ...]) -> tuple[Mode, ...]:
    """Modes with shared prefixes, and with a pool so small that sequences are preempted."""
    without_cache = replace(limits, enable_prefix_caching=False)
    with_cache = replace(limits, enable_prefix_caching=True)
    pools = _tight_pools(limits, arrivals)
    tight = tuple(replace(without_cache, num_pages=pool) for pool in pools)
    tight_with_cache = tuple(replace(with_cache, num_pages=pool) for pool in pools)
    return (
        Mode(
            name="prefix cache, cold then hot", limits=with_cache, rounds=2, shows=("cache_hits",)
        ),
        Mode(
            name="tight pool",
            limits=tight[0],
            alternatives=tight[1:],
            reserved_output=0.0,
            shows=("preempted",),
        ),
        Mode(
            name="tight pool, prefix cache",
            limits=tight_with_cache[0],
            alternatives=tight_with_cache[1:],
            loop="plain",
            reserved_output=0.0,
            rounds=2,
            shows=("preempted",),
        ),
    )


def play_showing(
    make_core: MakeCore, mode: Mode, arrivals: tuple[Arrival, ...], report: OnProgress
) -> Play:
    """Plays a mode, then its alternatives until all counts of `shows` are above zero."""
    played = play(make_core, mode, arrivals, report)
    for limits in mode.alternatives:
        if all(getattr(played.counts, name) for name in mode.shows):
            break
        played = play(make_core, replace(mode, limits=limits), arrivals, report)
    return played


def play(
    make_core: MakeCore,
    mode: Mode,
    arrivals: tuple[Arrival, ...],
    report: OnProgress = lambda _: None,
) -> Play:
    """Runs a workload in one engine, once for each round; reports each step's progress."""
    options = CoreOptions(
        loop=mode.loop, reserved_output=mode.reserved_output, speculation=mode.speculation
    )
    core = make_core(mode.limits, options)
    counts = Counts()
    rounds: list[tuple[Stream, ...]] = []
    seconds = 0.0
    for _ in range(mode.rounds):
        start = time.perf_counter()
        rounds.append(_play_round(core, dict(enumerate(arrivals)), counts, report))
        seconds = time.perf_counter() - start
    counts.preempted = core.scheduler.num_preemptions
    counts.accepted_drafts = core.scheduler.draft_counts.num_accepted_tokens
    core.check_invariants()
    return Play(rounds=tuple(rounds), counts=counts, seconds=seconds)


def play_alone(
    make_core: MakeCore, limits: EngineLimits, request_id: int, request: Request
) -> tuple[Stream, ...]:
    """Runs a request alone in a fresh engine: the expected streams of its samples."""
    core = make_core(replace(limits, enable_prefix_caching=False), CoreOptions(loop="plain"))
    return _play_round(core, {request_id: Arrival(0, request)}, Counts())


def _play_round(
    core: EngineCore,
    arrivals: Mapping[int, Arrival],
    counts: Counts,
    report: OnProgress = lambda _: None,
) -> tuple[Stream, ...]:
    """Runs arrivals (ordered by step) with their keys as request ids."""
    streams = {
        (request_id, sample): Stream(request=request_id, sample=sample)
        for request_id, arrival in arrivals.items()
        for sample in range(arrival.request.params.n)
    }
    coming = list(arrivals.items())
    watch, start_s = _RowWatch(), time.perf_counter()
    num_done = num_tokens = 0
    for step in range(MAX_GATE_STEPS):
        while coming and coming[0][1].step <= step:
            request_id, arrival = coming.pop(0)
            core.check(arrival.request)
            core.enqueue(request_id, arrival.request)
        if not coming and core.is_idle:
            break
        for event in core.step():
            if isinstance(event, Started):
                continue
            sample = 0 if isinstance(event, PromptLogprobs) else event.sample
            _record(streams[event.request_id, sample], event, counts)
            num_tokens += isinstance(event, Token)
            num_done += isinstance(event, Finished)
        watch.look(core.scheduler.running)
        report(
            BatchProgress(
                num_done=num_done,
                num_requests=len(streams),
                num_rows=len(core.scheduler.running),
                num_tokens=num_tokens,
                elapsed_s=time.perf_counter() - start_s,
            )
        )
    counts.admitted_midstream += watch.num_midstream
    counts.rows_reused += watch.num_reused
    return tuple(streams.values())


def _record(stream: Stream, event: Token | PromptLogprobs | Finished, counts: Counts) -> None:
    if isinstance(event, Finished):
        stream.finish = event.finish_reason
        stream.error = event.error
        counts.cache_hits += event.num_cached_tokens > 0
        return
    if isinstance(event, PromptLogprobs):
        for position, entry in enumerate(event.entries, event.start):
            stream.prompt.append(_as_record(position, entry))
        return
    stream.tokens.append(_as_record(event.token_id, event.logprobs))


def _as_record(token: int, found: TokenLogprobs | None) -> TokenRecord:
    if found is None:
        return (token, math.nan, 0, (), ())
    return (token, found.logprob, found.rank, found.top_ids, found.top_logprobs)


class _RowWatch:
    """Counts mid-stream admissions and reused rows, observed between steps."""

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


def _tight_pools(limits: EngineLimits, arrivals: tuple[Arrival, ...]) -> tuple[int, ...]:
    """Pool sizes in pages that should force preemption, from the largest request's need upwards.

    They include sizes that fit the longest prompt and one other prompt but none of their generated
    tokens: with few rows, only those are too small for two requests admitted together.
    """
    prompts = [len(arrival.request.prompt_token_ids) for arrival in arrivals]
    sizes = [
        prompt + (arrival.request.params.max_tokens or 0)
        for prompt, arrival in zip(prompts, arrivals, strict=True)
    ]
    largest = max(-(-size // limits.page_size) for size in sizes)
    pages = [-(-prompt // limits.page_size) for prompt in prompts]
    pools = [largest + largest * quarter // 4 for quarter in range(2 * limits.max_num_seqs)]
    pools += [max(largest, max(pages) + other) for other in pages]
    return tuple(sorted({min(pool, limits.num_pages) for pool in pools}))
