"""The step loop of the engine process: messages in, a report out after each step.

Owns when a report is due. Knows a core and a link, no process and no signal. Invariants: events
leave in the frame of the step that made them; an engine that has work reports at least every
`BEAT_EVERY_S` between two steps, an idle one every `IDLE_BEAT_S`.
"""

import time
from collections.abc import Callable, Sequence
from itertools import chain, islice
from typing import Protocol

from cadenza.engine.batch_engine import check_step_errors
from cadenza.engine.core import EngineCore
from cadenza.engine.process.forecast import StepForecast
from cadenza.engine.process.messages import Cancel, FromEngine, Report, Submit, ToEngine, WireError
from cadenza.engine.stats import StepMeter
from cadenza.request import Event, Finished, PromptLogprobs, Started, Token

BEAT_EVERY_S = 0.25
IDLE_BEAT_S = 1.0
STATS_EVERY_S = 0.1
SLOW_STEP_S = 0.4
"""A step forecast to be slower is announced before it runs, so that nobody takes it for a hang."""


class EngineLink(Protocol):
    """The engine's end of the connection."""

    def receive(self, timeout_s: float) -> list[ToEngine] | None:
        """What has arrived, waiting at most so long for a first message; None to stop."""
        ...

    def send(self, message: FromEngine) -> None: ...


class Worker:
    """Serves `core` over `link` until it is told to stop."""

    def __init__(
        self,
        core: EngineCore,
        link: EngineLink,
        *,
        clock: Callable[[], float] = time.monotonic,
        count_compiles: Callable[[], int] = lambda: 0,
    ) -> None:
        self._core = core
        self._link = link
        self._clock = clock
        self._forecast = StepForecast()
        self._last_launched = 0
        self._announced_s = 0.0
        self._reported_at_s = clock()
        self._stats_at_s = clock()
        self._has_news = False
        self.meter = StepMeter(core, clock, count_compiles)

    def serve(self) -> None:
        """Returns when told to stop. Raises RunnerError after too many failed steps in a row."""
        while True:
            timeout_s = IDLE_BEAT_S if self._core.is_idle else 0.0
            messages = self._link.receive(timeout_s)
            if messages is None:
                return
            for message in messages:
                self._handle(message)
            if self._core.is_idle:
                self._report(())
                continue
            if self._has_news:  # otherwise the newest report has the forecast of this step
                self._announce_slow_step()
            self._step()
            check_step_errors(self._core)

    def _handle(self, message: ToEngine) -> None:
        self._has_news = True
        if isinstance(message, Submit):
            self._core.enqueue(message.request_id, message.request)
        elif isinstance(message, Cancel):
            self._core.cancel(message.request_id, message.sample)
        else:
            raise WireError(f"a {type(message).__name__} came to an engine that serves")

    def _step(self) -> None:
        scheduler = self._core.scheduler
        before, start_s = scheduler.num_scheduled_tokens, self._clock()
        events = self.meter.step()
        now_s = self._clock()
        launched = scheduler.num_scheduled_tokens - before
        # An overlapped step is waited for in the call after the one that launched it.
        if launched + self._last_launched:
            self._forecast.record(launched + self._last_launched, now_s - start_s)
        self._last_launched = launched
        self._has_news = True
        is_due = now_s - self._reported_at_s >= BEAT_EVERY_S
        if events or is_due or self._core.is_idle:
            self._report(events)

    def _announce_slow_step(self) -> None:
        predicted_s = self._predicted_s()
        if predicted_s > SLOW_STEP_S and predicted_s > self._announced_s:
            self._report(())

    def _predicted_s(self) -> float:
        """Of the next step: it takes what runs, and of what waits as many as there are rows."""
        scheduler, limits = self._core.scheduler, self._core.limits
        budget = limits.max_num_batched_tokens
        candidates = chain(scheduler.running, islice(scheduler.waiting, limits.max_num_seqs))
        wanted = sum(sequence.num_uncomputed_tokens for sequence in candidates)
        return self._forecast.predict_s(min(budget, wanted) + self._last_launched)

    def _report(self, events: Sequence[Event]) -> None:
        now_s, is_idle = self._clock(), self._core.is_idle
        has_stats = (is_idle and self._has_news) or now_s - self._stats_at_s >= STATS_EVERY_S
        self._announced_s = 0.0 if is_idle else self._predicted_s()
        self._link.send(
            Report(
                num_steps=self._core.num_steps,
                is_idle=is_idle,
                predicted_s=self._announced_s,
                started=tuple([each for each in events if isinstance(each, Started)]),
                prompt_logprobs=tuple(
                    [each for each in events if isinstance(each, PromptLogprobs)]
                ),
                tokens=tuple([each for each in events if isinstance(each, Token)]),
                finished=tuple([each for each in events if isinstance(each, Finished)]),
                stats=self.meter.stats() if has_stats else None,
            )
        )
        self._reported_at_s = now_s
        if has_stats:
            self._stats_at_s = now_s
        self._has_news = False
