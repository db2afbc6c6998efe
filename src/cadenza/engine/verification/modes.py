"""The ways a workload is played, and the playing: `Mode`, `play`, `play_alone`.

Knows the engine's face and, for its counts, the scheduler's lists. Invariant: whatever the mode,
every request ends, or the play says that it did not.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from cadenza.config import EngineLimits, SchedulerLoop
from cadenza.core.sequence import Sequence
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.engine.verification.workload import Arrival
from cadenza.request import Finished, Token

MAX_STEPS = 1_000_000

MakeCore = Callable[[EngineLimits, CoreOptions], EngineCore]
"""A fresh engine on the runner under test, its pages reset."""

TokenRecord = tuple[int, float, int, tuple[int, ...], tuple[float, ...]]
"""Token, logprob, rank, top ids, top logprobs: what is compared bit for bit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One way to play: limits, loop, and how often the same engine plays the workload.

    `shows` names the counts that must not be zero for the mode to have shown anything;
    `alternatives` are limits to try where the first ones did not bring them about.
    """

    name: str
    limits: EngineLimits
    alternatives: tuple[EngineLimits, ...] = ()
    loop: SchedulerLoop = "overlap"
    reserved_output: float = 0.5
    rounds: int = 1
    shows: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class Stream:
    """What one request gave."""

    tokens: list[TokenRecord] = field(default_factory=list[TokenRecord])
    finish: str = "unfinished"

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(record[0] for record in self.tokens)


@dataclass(slots=True, eq=False, kw_only=True)
class Counts:
    """How often the things that a mode claims really happened."""

    admitted_midstream: int = 0
    rows_reused: int = 0
    preempted: int = 0
    cache_hits: int = 0

    def add(self, other: "Counts") -> None:
        self.admitted_midstream += other.admitted_midstream
        self.rows_reused += other.rows_reused
        self.preempted += other.preempted
        self.cache_hits += other.cache_hits


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """All rounds of a mode: streams by round and request, counts, seconds in the last round."""

    rounds: tuple[tuple[Stream, ...], ...]
    counts: Counts
    seconds: float

    @property
    def num_tokens(self) -> int:
        """Of the last round."""
        return sum(len(stream.tokens) for stream in self.rounds[-1])


def batched_modes(limits: EngineLimits, arrivals: tuple[Arrival, ...]) -> tuple[Mode, ...]:
    """Chunk sizes, both loops, the cache cold and hot, and a pool that forces preemption."""
    without_cache = replace(limits, enable_prefix_caching=False)
    with_cache = replace(limits, enable_prefix_caching=True)
    smallest = max(limits.max_num_seqs, limits.max_num_batched_tokens // 4)
    pools = _tight_pools(limits, arrivals)
    tight = tuple(replace(without_cache, num_pages=pool) for pool in pools)
    tight_with_cache = tuple(replace(with_cache, num_pages=pool) for pool in pools)
    midstream = ("admitted_midstream", "rows_reused")
    return (
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


def play(make_core: MakeCore, mode: Mode, arrivals: tuple[Arrival, ...]) -> Play:
    """Plays a workload together, once for each round, in one engine."""
    core = make_core(mode.limits, CoreOptions(loop=mode.loop, reserved_output=mode.reserved_output))
    counts = Counts()
    rounds: list[tuple[Stream, ...]] = []
    seconds = 0.0
    for _ in range(mode.rounds):
        start = time.perf_counter()
        rounds.append(_play_round(core, arrivals, counts))
        seconds = time.perf_counter() - start
    counts.preempted = core.scheduler.num_preemptions
    core.check_invariants()
    return Play(rounds=tuple(rounds), counts=counts, seconds=seconds)


def play_alone(
    make_core: MakeCore, limits: EngineLimits, arrivals: tuple[Arrival, ...]
) -> Iterator[Stream]:
    """Each request in an engine of its own: what its stream has to be."""
    alone = replace(limits, enable_prefix_caching=False)
    for arrival in arrivals:
        core = make_core(alone, CoreOptions(loop="plain"))
        yield _play_round(core, (Arrival(0, arrival.request),), Counts())[0]


def _play_round(
    core: EngineCore, arrivals: tuple[Arrival, ...], counts: Counts
) -> tuple[Stream, ...]:
    streams = tuple(Stream() for _ in arrivals)
    stream_of: dict[int, Stream] = {}
    watch = _RowWatch()
    submitted = 0
    for step in range(MAX_STEPS):
        while submitted < len(arrivals) and arrivals[submitted].step <= step:
            request_id = core.submit(arrivals[submitted].request)
            stream_of[request_id] = streams[submitted]
            submitted += 1
        if submitted == len(arrivals) and core.is_idle:
            break
        for event in core.step():
            _record(stream_of[event.request_id], event, counts)
        watch.look(core.scheduler.running)
    counts.admitted_midstream += watch.num_midstream
    counts.rows_reused += watch.num_reused
    return streams


def _record(stream: Stream, event: Token | Finished, counts: Counts) -> None:
    if isinstance(event, Finished):
        stream.finish = event.finish_reason
        counts.cache_hits += event.num_cached_tokens > 0
        return
    found = event.logprobs
    assert found is not None, "every request of the workload asks for log probabilities"
    stream.tokens.append(
        (event.token_id, found.logprob, found.rank, found.top_ids, found.top_logprobs)
    )


class _RowWatch:
    """Counts what can be seen of the rows between steps."""

    def __init__(self) -> None:
        self.num_midstream = 0
        self.num_reused = 0
        self._seen: set[int] = set()
        self._used_rows: set[int] = set()

    def look(self, running: list[Sequence]) -> None:
        is_streaming = any(
            sequence.num_generated_tokens and sequence.request_id in self._seen
            for sequence in running
        )
        for sequence in running:
            if sequence.request_id in self._seen or sequence.row is None:
                continue
            self._seen.add(sequence.request_id)
            self.num_midstream += is_streaming
            self.num_reused += sequence.row in self._used_rows
            self._used_rows.add(sequence.row)


def _tight_pools(limits: EngineLimits, arrivals: tuple[Arrival, ...]) -> tuple[int, ...]:
    """Pool sizes over which requests must fight, from the largest request's need upwards."""
    sizes = [
        len(arrival.request.prompt_token_ids) + (arrival.request.params.max_tokens or 0)
        for arrival in arrivals
    ]
    largest = max(-(-size // limits.page_size) for size in sizes)
    pools = [largest + largest * quarter // 4 for quarter in range(2 * limits.max_num_seqs)]
    return tuple(sorted({min(pool, limits.num_pages) for pool in pools}))
