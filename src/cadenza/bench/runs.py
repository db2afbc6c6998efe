"""One run of an engine, timed: `run_decode` and `run_prefill`.

Owns where the clock starts and stops. Knows `EngineCore` and nothing below it. Invariant: the
engine is idle before and after a run, and a figure covers exactly the steps that it names.

Decode: all requests are sent at once. The clock starts when the last of them has its first token
and stops when that one has `output_len`; so every step in between gave each row one token, and the
steps in which prompts were still computed are left out. Rows that started sooner go on until then.

Prefill: all prompts are sent at once and want one token each. The clock starts before the first
step and stops when the last prompt's token has been read.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from cadenza import EngineCore, Finished, Request, SamplingParams, Token
from cadenza.backends.base import OpTotals
from cadenza.errors import ConfigError, RunnerError

SAMPLED: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 0.9,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
}
"""How a row that is not greedy chooses its tokens."""

Clock = Callable[[], float]
Prompt = tuple[int, ...]


class Profiler(Protocol):
    """Counts operations while the clock runs; see `backends.base.Instruments`."""

    def start_profile(self) -> None: ...

    def stop_profile(self) -> tuple[OpTotals, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """What happened while the clock ran. `context` is a row's average KV length in a step."""

    elapsed_s: float
    num_tokens: int
    num_steps: int
    context: float
    ops: tuple[OpTotals, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.elapsed_s


class _Window:
    """The clock, and the profiler where there is one."""

    def __init__(self, clock: Clock, profiler: Profiler | None) -> None:
        self._clock = clock
        self._profiler = profiler
        if profiler is not None:
            profiler.start_profile()
        self._start_s = clock()

    def close(self) -> tuple[float, tuple[OpTotals, ...]]:
        elapsed_s = self._clock() - self._start_s
        return elapsed_s, () if self._profiler is None else self._profiler.stop_profile()


class _Players:
    """The requests of one run, sent as the engine's queue has room, and their tokens so far."""

    def __init__(
        self, core: EngineCore, prompts: Sequence[Prompt], max_tokens: int, num_sampled: int = 0
    ) -> None:
        greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        sampled = replace(greedy, **SAMPLED)
        self._core = core
        self._unsent = deque(
            Request(prompt_token_ids=each, params=sampled if index < num_sampled else greedy)
            for index, each in enumerate(prompts)
        )
        self._num_requests = len(prompts)
        self._num_finished = 0
        self._counts: dict[int, int] = {}

    @property
    def fewest_tokens(self) -> int:
        """Of any request; 0 while one is still to be sent."""
        return 0 if self._unsent else min(self._counts.values())

    @property
    def num_tokens(self) -> int:
        return sum(self._counts.values())

    @property
    def has_finished(self) -> bool:
        """Whether any request has ended."""
        return self._num_finished > 0

    @property
    def all_finished(self) -> bool:
        return self._num_finished == self._num_requests

    def step(self) -> int:
        """Sends what the queue takes, advances the engine once; how many tokens came back."""
        while self._unsent and self._core.num_queue_slots:
            self._counts[self._core.submit(self._unsent.popleft())] = 0
        num_tokens = 0
        for event in self._core.step():
            if isinstance(event, Token):
                self._counts[event.request_id] += 1
                num_tokens += 1
            elif isinstance(event, Finished):
                self._end(event)
        return num_tokens

    def cancel(self) -> None:
        """Ends what still runs and reads what is in flight."""
        for request_id in self._counts:
            self._core.cancel(request_id)
        while not self._core.is_idle:
            self._core.step()

    def _end(self, event: Finished) -> None:
        self._num_finished += 1
        if event.finish_reason == "error":
            raise RunnerError(f"a request of the benchmark failed: {event.error}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTask:
    """`max_tokens` bounds the rows that start sooner than the last one; `num_sampled` rows are
    sampled with penalties (`SAMPLED`), the others are greedy.
    """

    prompts: Sequence[Prompt]
    output_len: int
    max_tokens: int
    num_sampled: int = 0


def run_decode(
    core: EngineCore, task: DecodeTask, clock: Clock, profiler: Profiler | None = None
) -> Timed:
    """Steps in which every row decodes.

    Raises:
        ConfigError: the engine did not keep all rows running at the same time.
        RunnerError: a request failed.
    """
    rows = len(task.prompts)
    players = _Players(core, task.prompts, task.max_tokens, task.num_sampled)
    while players.fewest_tokens < 1 and not players.has_finished:
        players.step()
    first_context = players.num_tokens / rows + sum(map(len, task.prompts)) / rows
    window = _Window(clock, profiler)
    num_tokens = num_steps = 0
    while players.fewest_tokens < task.output_len and not players.has_finished:
        read = players.step()
        num_tokens += read
        num_steps += read > 0
    elapsed_s, ops = window.close()
    players.cancel()
    if num_tokens != rows * num_steps or num_steps != task.output_len - 1:
        raise ConfigError(
            f"the KV pool did not hold {rows} requests at the same time, so there were not enough "
            f"steps in which all of them decoded; give it more --kv-cache-memory-bytes or "
            f"--num-pages, or lower --concurrency"
        )
    return Timed(
        elapsed_s=elapsed_s,
        num_tokens=num_tokens,
        num_steps=num_steps,
        context=first_context + (num_steps - 1) / 2,
        ops=ops,
    )


def run_prefill(
    core: EngineCore, prompts: Sequence[Prompt], clock: Clock, profiler: Profiler | None = None
) -> Timed:
    """All prompts, one token each; `num_tokens` counts the prompts'. Raises RunnerError."""
    players = _Players(core, prompts, 1)
    window = _Window(clock, profiler)
    num_steps = 0
    while not players.all_finished:
        num_steps += players.step() > 0
    elapsed_s, ops = window.close()
    players.cancel()
    num_tokens = sum(map(len, prompts))
    return Timed(
        elapsed_s=elapsed_s,
        num_tokens=num_tokens,
        num_steps=num_steps,
        context=num_tokens / len(prompts),
        ops=ops,
    )
