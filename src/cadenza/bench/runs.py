"""One timed run of an engine, `run_decode` or `run_prefill`, and the profile of its steps. Knows
`EngineCore` and nothing below it. Invariant: the engine is idle before and after a run, and a rate
covers exactly the steps that these functions name."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from cadenza import EngineCore, Finished, Request, SamplingParams, Token
from cadenza.backends.base import OpTotals
from cadenza.bench import Clock
from cadenza.errors import ConfigError, RunnerError

# The sampling of a row that is not greedy.
SAMPLED: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 0.9,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
}

STEP_OP = "next_token"
# Operations that count the weights of the experts that they touch as read.
EXPERT_OPS = frozenset({"grouped_gated_linear", "grouped_linear"})

Prompt = tuple[int, ...]


class Profiler(Protocol):
    """Counts operations while the clock runs; see `backends.base.Instruments`."""

    def start_profile(self) -> None: ...

    def stop_profile(self) -> tuple[OpTotals, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A run between the clock's start and stop; `context` is a row's average KV length."""

    elapsed_s: float
    num_tokens: int
    num_steps: int
    context: float
    ops: tuple[OpTotals, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.elapsed_s


class _Requests:
    """Submitted as the queue has room."""

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
        return 0 if self._unsent else min(self._counts.values())

    @property
    def num_tokens(self) -> int:
        return sum(self._counts.values())

    @property
    def has_finished(self) -> bool:
        return self._num_finished > 0

    @property
    def all_finished(self) -> bool:
        return self._num_finished == self._num_requests

    def step(self) -> int:
        """Returns the number of tokens read."""
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
    """The requests of a decode run: `max_tokens` of each, enough for rows that start sooner than
    the last one; `num_sampled` rows are sampled as `SAMPLED` says, the others are greedy."""

    prompts: Sequence[Prompt]
    output_len: int
    max_tokens: int
    num_sampled: int = 0


def run_decode(
    core: EngineCore, task: DecodeTask, clock: Clock, profiler: Profiler | None = None
) -> Timed:
    """Times the steps in which every row decodes: all requests are submitted at once; the clock
    runs from the last one's first token to its `output_len`-th, without steps with prompts. Raises
    ConfigError: the engine did not keep all rows running at the same time; RunnerError."""
    rows = len(task.prompts)
    requests = _Requests(core, task.prompts, task.max_tokens, task.num_sampled)
    while requests.fewest_tokens < 1 and not requests.has_finished:
        requests.step()
    first_context = requests.num_tokens / rows + sum(map(len, task.prompts)) / rows
    start_s = _start(clock, profiler)
    num_tokens = num_steps = 0
    while requests.fewest_tokens < task.output_len and not requests.has_finished:
        read = requests.step()
        num_tokens += read
        num_steps += read > 0
    elapsed_s = clock() - start_s
    ops = () if profiler is None else profiler.stop_profile()
    requests.cancel()
    if num_tokens != rows * num_steps or num_steps != task.output_len - 1:
        raise ConfigError(
            f"the KV pool is too small for {rows} requests at the same time; raise "
            f"--kv-cache-memory-bytes or --num-pages, or lower --concurrency"
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
    """Submits all prompts at once for one token each; the clock runs from the first step until the
    last prompt's token is read. Raises RunnerError."""
    requests = _Requests(core, prompts, 1)
    num_steps_before = core.num_steps
    start_s = _start(clock, profiler)
    while not requests.all_finished:
        requests.step()
    elapsed_s = clock() - start_s
    ops = () if profiler is None else profiler.stop_profile()
    requests.cancel()
    num_tokens = sum(map(len, prompts))
    # Includes steps that return no token because they compute only part of a prompt.
    num_steps = core.num_steps - num_steps_before
    return Timed(
        elapsed_s=elapsed_s,
        num_tokens=num_tokens,
        num_steps=num_steps,
        context=num_tokens / len(prompts),
        ops=ops,
    )


def _start(clock: Clock, profiler: Profiler | None) -> float:
    if profiler is not None:
        profiler.start_profile()
    return clock()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpShare:
    """Of a step."""

    op: str
    calls: int
    ms: float
    read_bytes: int

    @property
    def read_gb_s(self) -> float:
        return self.read_bytes / self.ms / 1e6 if self.ms else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """The average step; `ops` in descending order of time, empty where no step was counted."""

    step_ms: float
    ops: tuple[OpShare, ...]

    @property
    def kernels_ms(self) -> float:
        return sum(share.ms for share in self.ops)

    @property
    def rest_ms(self) -> float:
        """In XLA, in the runner, and on the host where not overlapped."""
        return self.step_ms - self.kernels_ms

    @property
    def read_bytes(self) -> int:
        return sum(share.read_bytes for share in self.ops)


def calls_of_a_step(ops: Sequence[OpTotals]) -> dict[str, int]:
    """In proportion to `next_token`, called once a step."""
    num_steps = next((op.num_calls for op in ops if op.name == STEP_OP), 0)
    return {op.name: op.num_calls // num_steps for op in ops if op.num_calls and num_steps}


def touched_bytes(runs: Sequence[Timed]) -> float | None:
    """Bytes of experts that an average step touched, and of what they multiplied, which is little;
    None if no run counted them. Means of calls, as runs may cover steps in part."""
    totals = [op for run in runs for op in run.ops if op.num_calls]
    num_steps = sum(op.num_calls for op in totals if op.name == STEP_OP)
    num_bytes = 0.0
    for name in EXPERT_OPS:
        own = [op for op in totals if op.name == name]
        num_calls = sum(op.num_calls for op in own)
        if num_calls and num_steps:
            mean = sum(op.read_bytes for op in own) / num_calls
            num_bytes += mean * round(num_calls / num_steps)
    return num_bytes or None


def step_profile(timed: Timed, calls: Mapping[str, int]) -> StepProfile:
    """An operation's mean time for a call times the `calls` of a step, so that steps which the run
    covers in part do not distort it."""
    shares = [_share(op, calls.get(op.name, 0)) for op in timed.ops if op.num_calls]
    return StepProfile(
        step_ms=1e3 * timed.elapsed_s / max(1, timed.num_steps),
        ops=tuple(sorted(shares, key=lambda share: -share.ms)),
    )


def _share(op: OpTotals, calls: int) -> OpShare:
    return OpShare(
        op=op.name,
        calls=calls,
        ms=1e3 * op.elapsed_s / op.num_calls * calls,
        read_bytes=round(op.read_bytes / op.num_calls * calls),
    )


def text_ids(core: EngineCore) -> Sequence[int]:
    """All but that of the placeholders of images."""
    ids, images = range(core.runner.vocab_size), core.limits.images
    if images is None:
        return ids
    return [token_id for token_id in ids if token_id != images.token_id]
