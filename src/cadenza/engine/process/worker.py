"""The step loop of the engine process: commands in, `EngineOutputs` out after each step.
Invariants: events leave with the step that made them; an engine that has work sends outputs at
least every `BEAT_EVERY_S` between two steps, an idle one every `IDLE_BEAT_S`; a request's `Started`
is sent before anything of it is computed."""

import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Protocol

from cadenza.engine.batch_engine import (
    Cancel,
    Command,
    Resume,
    Submit,
    check_step_errors,
    run_steps,
)
from cadenza.engine.core import EngineCore
from cadenza.engine.process.messages import EngineOutputs, FromEngine, ToEngine, WireError
from cadenza.engine.route_report import RouteReport, RouteReporter
from cadenza.engine.stats import StepMeter
from cadenza.engine.step_watch import Watch
from cadenza.events import Event, Preparing, Started

BEAT_EVERY_S = 0.25
IDLE_BEAT_S = 1.0
# A step with a longer forecast is announced before it runs, so that it is not taken for a hang.
SLOW_STEP_S = 0.4

UNMEASURED_STEP_S = 6.0  # The forecast before the first step was measured
FADING = 0.98  # A slow step's share of the forecast after each faster one of its size.


class FrontLink(Protocol):
    """The engine's way to its front end."""

    def receive(self, timeout_s: float) -> list[ToEngine] | None:
        """Waits up to `timeout_s` for a message. None to stop."""
        ...

    def send(self, message: FromEngine) -> None: ...


class StepForecast:
    """The slowest recent step for each power of two of tokens, never below one of that size or
    smaller."""

    def __init__(self) -> None:
        self._slowest_s: dict[int, float] = {}

    def record(self, num_tokens: int, seconds: float) -> None:
        size = num_tokens.bit_length()
        self._slowest_s[size] = max(seconds, FADING * self._slowest_s.get(size, 0.0))

    def predict_s(self, num_tokens: int) -> float:
        """Above the largest measured size the time is taken to grow with the tokens."""
        if not num_tokens:
            return 0.0
        if not self._slowest_s:
            return UNMEASURED_STEP_S
        size, largest = num_tokens.bit_length(), max(self._slowest_s)
        known = [seconds for each, seconds in self._slowest_s.items() if each <= size]
        slowest_s = max(known or self._slowest_s.values())
        return slowest_s * max(1, 1 << (size - largest)) if size > largest else slowest_s


class Worker:
    """Until `Stop`. With a `reporter`, outputs with statistics carry its reports."""

    def __init__(
        self,
        core: EngineCore,
        link: FrontLink,
        reporter: RouteReporter | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        count_compiles: Callable[[], int] = lambda: 0,
    ) -> None:
        self._core = core
        self._link = link
        self._reporter = reporter
        self._clock = clock
        self._forecast = StepForecast()
        self._last_launched = 0
        self._announced_s = 0.0
        self._sent_at_s = clock()
        self._is_idle = True
        self._has_changed = False  # A command or a step came after the newest outputs were sent
        self.meter = StepMeter(core, clock, count_compiles)

    def serve(self) -> None:
        """Raises RunnerError after too many failed steps in a row."""
        for events in run_steps(self._core, self._receive, self._step):
            self._is_idle = self._core.is_idle
            is_due = self._clock() - self._sent_at_s >= BEAT_EVERY_S
            is_due = is_due or self.meter.summary_due_in_s() == 0.0
            if events or self._is_idle or is_due:
                self._send(events)
            check_step_errors(self._core)

    def _receive(self, wait_s: float) -> list[Command] | None:
        if wait_s:
            self._announce_slow_step()
        start_s = self._clock()
        messages = self._link.receive(self._idle_wait_s() if self._is_idle else wait_s)
        if wait_s:
            self.meter.add_wait(self._clock() - start_s)
        if not messages:
            return None if messages is None else []
        commands: list[Command] = []
        for message in messages:
            if isinstance(message, Watch):
                self.meter.watch(message.first_label)
                continue
            if not isinstance(message, Submit | Resume | Cancel):
                raise WireError(f"a {type(message).__name__} came to an engine that serves")
            commands.append(message)
            if self._reporter is not None and not isinstance(message, Cancel):
                self._reporter.received(message.request_id)
        self._has_changed = True
        return commands

    def _idle_wait_s(self) -> float:
        due_in_s = self.meter.summary_due_in_s()
        return IDLE_BEAT_S if due_in_s is None else min(due_in_s, IDLE_BEAT_S)

    def _step(self) -> list[Event]:
        if self._is_idle and self._core.is_idle:
            return []
        self._is_idle = False
        self._announce_slow_step()
        scheduler = self._core.scheduler
        before = scheduler.num_scheduled_tokens
        events = self.meter.step(self._announce_starts)
        launched = scheduler.num_scheduled_tokens - before
        # An overlapped step is waited for in the call after the one that launched it.
        if launched + self._last_launched:
            self._forecast.record(launched + self._last_launched, self.meter.last_s)
        self._last_launched = launched
        self._has_changed = True
        return events

    def _announce_slow_step(self) -> None:
        if not self._has_changed:
            return  # the newest outputs hold the forecast of this step
        predicted_s = self._predicted_s()
        if predicted_s > SLOW_STEP_S and predicted_s > self._announced_s:
            self._send(())

    def _announce_starts(self, started: Sequence[Started | Preparing]) -> None:
        """Before the step, which may end this process."""
        self._link.send(
            EngineOutputs(
                num_steps=self._core.num_steps - 1,  # the step is progress when it is done
                is_idle=False,
                predicted_s=self._announced_s,
                events=tuple(started),
            )
        )

    def _predicted_s(self) -> float:
        scheduler, limits = self._core.scheduler, self._core.limits
        candidates = [*scheduler.running, *islice(scheduler.waiting, limits.max_num_seqs)]
        wanted = sum([sequence.num_uncomputed_tokens for sequence in candidates])
        budget = limits.max_num_batched_tokens
        return self._forecast.predict_s(min(budget, wanted) + self._last_launched)

    def _send(self, events: Sequence[Event]) -> None:
        # An engine that only stores pages makes no steps, and does not hang.
        now_s, is_idle = self._clock(), not self._core.has_requests
        stats = self.meter.due_stats(now_s, is_last=is_idle and self._has_changed)
        self._announced_s = 0.0 if is_idle else self._predicted_s()
        self._link.send(
            EngineOutputs(
                num_steps=self._core.num_steps,
                is_idle=is_idle,
                predicted_s=self._announced_s,
                # `Started` was sent before the step was computed.
                events=tuple([each for each in events if not isinstance(each, Started)]),
                stats=stats,
                summary=self.meter.take_summary(),
                route=None if stats is None else self._report(now_s),
            )
        )
        self._sent_at_s = now_s
        self._has_changed = False

    def _report(self, now_s: float) -> RouteReport | None:
        return None if self._reporter is None else self._reporter.report(now_s)
