"""Plays requests under a `BatchPolicy`, which says when waiting requests are submitted, so that all
modes run on one engine with the same kernels. Invariant: the engine is idle before and after; a
request's tokens are those of its own answer, whatever its mode computes beyond them.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cadenza import EngineCore, Finished, Request, SamplingParams, Token
from cadenza.bench import Clock
from cadenza.bench.workloads import PlannedRequest
from cadenza.errors import RunnerError
from cadenza.events import Started
from cadenza_bench.batching.plan import BatchingMode


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPolicy:
    """`joins`: requests start beside running ones; otherwise a batch starts when all of the one
    before have ended. `is_single`: a batch has one request. `is_padded`: finished rows go on until
    the longest of their batch has. `is_whole`: all answers of a batch are handed over when it ends.
    """

    joins: bool = False
    is_single: bool = False
    is_padded: bool = False
    is_whole: bool = False


POLICIES: Mapping[BatchingMode, BatchPolicy] = {
    "continuous": BatchPolicy(joins=True),
    "static": BatchPolicy(),
    "static-whole": BatchPolicy(is_whole=True),
    "sequential": BatchPolicy(is_single=True),
    "padded": BatchPolicy(is_padded=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The clock of the runs, and what waits for an arrival."""

    clock: Clock = time.perf_counter
    sleep: Callable[[float], object] = time.sleep


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayTask:
    """The requests of one run, with when they arrive. `rows`: the most requests of a batch;
    `clients`: this many requests arrive at the start, and the next one whenever an answer has been
    handed over; None: at their `after_s`; `salts`: of each request; those of other salts share no
    prefix with it."""

    policy: BatchPolicy
    rows: int
    requests: Sequence[PlannedRequest]
    salts: Sequence[str]
    clients: int | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class PlayedRequest:
    """Times are seconds from the start of the run. `content_s`: when each token was handed over,
    all at once in a mode that hands over whole batches; `start_s`, `start_step`: before the step in
    which it got its row."""

    index: int
    due_s: float
    planned: PlannedRequest
    token_ids: list[int] = field(default_factory=list[int])
    content_s: list[float] = field(default_factory=list[float])
    num_cached_tokens: int = 0
    start_s: float = 0.0
    start_step: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.planned.prompt_token_ids)

    @property
    def has_all(self) -> bool:
        return len(self.token_ids) == self.planned.max_tokens


class BatchPlayer:
    """One run of a task on an engine; `on_done` is called with how many answers are complete."""

    def __init__(
        self,
        core: EngineCore,
        task: PlayTask,
        timing: Timing,
        on_done: Callable[[int], object] = lambda _: None,
    ) -> None:
        self._core, self._task = core, task
        self._timing, self._on_done = timing, on_done
        self._start_s = timing.clock()
        self._start_step = core.num_steps
        self._coming = deque(enumerate(task.requests))
        self._waiting: deque[PlayedRequest] = deque()
        self._open: dict[int, PlayedRequest] = {}
        self._batch: list[PlayedRequest] = []
        self._done: list[PlayedRequest] = []

    @property
    def num_steps(self) -> int:
        return self._core.num_steps - self._start_step

    def play(self) -> list[PlayedRequest]:
        """All requests, in the order of arrival; rows that go on are left to `drain`. Raises
        RunnerError when one fails or ends early."""
        if self._task.clients is not None:
            self._arrive(self._task.clients, 0.0)
        while len(self._done) < len(self._task.requests):
            self._arrive_by(self._now_s())
            self._submit()
            if self._open:
                before_s, before_step = self._now_s(), self.num_steps
                events = self._core.step()
                now_s = self._now_s()
                for event in events:
                    if isinstance(event, Started):
                        request = self._open[event.request_id]
                        request.start_s, request.start_step = before_s, before_step
                    self._take(event, now_s)
            else:
                self._timing.sleep(max(0.0, self._coming[0][1].after_s - self._now_s()))
        return sorted(self._done, key=lambda each: each.index)

    def drain(self) -> None:
        while not self._core.is_idle:
            self._core.step()

    def _now_s(self) -> float:
        return self._timing.clock() - self._start_s

    def _arrive_by(self, now_s: float) -> None:
        if self._task.clients is None:
            while self._coming and self._coming[0][1].after_s <= now_s:
                self._arrive(1, self._coming[0][1].after_s)

    def _arrive(self, count: int, due_s: float) -> None:
        for _ in range(min(count, len(self._coming))):
            index, planned = self._coming.popleft()
            self._waiting.append(PlayedRequest(index=index, due_s=due_s, planned=planned))

    def _submit(self) -> None:
        policy, waiting = self._task.policy, self._waiting
        if policy.joins:
            while waiting and self._core.num_queue_slots:
                request = waiting.popleft()
                self._start(request, request.planned.max_tokens)
        elif not self._open and waiting:
            size = 1 if policy.is_single else min(self._task.rows, self._core.num_queue_slots)
            self._batch = [waiting.popleft() for _ in range(min(size, len(waiting)))]
            longest = max(each.planned.max_tokens for each in self._batch)
            for each in self._batch:
                self._start(each, longest if policy.is_padded else each.planned.max_tokens)

    def _start(self, request: PlayedRequest, max_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        sent = Request(
            prompt_token_ids=request.planned.prompt_token_ids,
            params=params,
            cache_salt=self._task.salts[request.index],
        )
        self._open[self._core.submit(sent)] = request

    def _take(self, event: object, now_s: float) -> None:
        if isinstance(event, Token):
            request = self._open[event.request_id]
            if request.has_all:
                return
            if not request.token_ids:
                request.num_cached_tokens = event.num_cached_tokens or 0
            request.token_ids.append(event.token_id)
            request.content_s.append(now_s)
            if request.has_all and not self._task.policy.is_whole:
                self._hand_over(request, now_s)
        elif isinstance(event, Finished):
            self._end(event, now_s)

    def _end(self, event: Finished, now_s: float) -> None:
        request = self._open.pop(event.request_id)
        if event.finish_reason != "length" or not request.has_all:
            raise RunnerError(
                f"request {request.index} of the benchmark ended by {event.finish_reason} after "
                f"{len(request.token_ids)} of {request.planned.max_tokens} tokens: {event.error}"
            )
        if self._task.policy.is_whole and not self._open:
            for each in self._batch:
                each.content_s = [now_s] * len(each.content_s)
                self._hand_over(each, now_s)

    def _hand_over(self, request: PlayedRequest, now_s: float) -> None:
        """The last of an answer: its client sends its next request."""
        self._done.append(request)
        self._on_done(len(self._done))
        if self._task.clients is not None:
            self._arrive(1, now_s)
