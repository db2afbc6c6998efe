"""`StepLoop`: launches and reads steps, one at a time or overlapped, and recovers from a failed
one. Invariants: steps are read in launch order; after a failed step all sequences are recomputed
from their tokens, those of that step one at a time, and one that then fails is ended once."""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol

from cadenza.backends.base import LateStepHandle, Runner, StepHandle
from cadenza.batch.batch import Batch
from cadenza.batch.packing import Packer
from cadenza.batch.step_schema import StepOutput
from cadenza.config import SchedulerLoop
from cadenza.engine.scoring_steps import ScoringSteps
from cadenza.errors import RunnerError
from cadenza.events import Event, Preparing, Started
from cadenza.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

# Called before the launch of a step with the requests that start in it, and those whose prompts
# begin to be scored.
Announce = Callable[[Sequence[Started | Preparing]], object]

OUTPUT_FIELDS = tuple(field.name for field in fields(StepOutput) if field.name != "hidden")

# The part of the predicted time of a step after which the next one is launched: few steps end
# earlier than that.
LAUNCH_AT = 0.75
LAUNCH_S = 0.003  # What scheduling and packing a step may take on the host
MIN_WAIT_S = 0.005
MAX_WAIT_S = 1.0

STEP_FAILED = "the step failed on the device; the engine's log has the cause"


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A launched step that has not been read."""

    batch: Batch
    num_logits: int
    handle: StepHandle
    launched_s: float = 0.0
    num_hidden: int = 0
    scoring: StepHandle | None = None  # Of `Batch.scored`
    # How long the device had nothing to do before `launched_s`, if the step waited for the one
    # before it to be read; its launch is part of that time and of no other.
    idle_s: float | None = None
    failure: Exception | None = None  # That of its launch: nothing of it was computed


class Steps(Protocol):
    """Computes batches, in the order of their launches."""

    @property
    def has_late_masks(self) -> bool:
        """Whether a step can be launched before its masks are known."""
        ...

    def launch(self, batch: Batch, now_s: float, *, masks_follow: bool) -> LaunchedStep:
        """`masks_follow`: the masks depend on steps that are not read; see `choose`."""
        ...

    def choose(self, step: LaunchedStep) -> None:
        """Gives the step, launched last, its masks: all steps before it are read."""
        ...

    def read(self, step: LaunchedStep) -> StepOutput:
        """Has an entry for each of the batch's logit rows."""
        ...

    def reset(self) -> None: ...


class _NoStep:
    """Of a step in which the target computes nothing."""

    def result(self) -> StepOutput:
        return StepOutput.empty()


NO_STEP = _NoStep()


class StepRunner:
    """Packs and launches batches, and validates the runner's output."""

    def __init__(self, runner: Runner, packer: Packer) -> None:
        self._runner = runner
        self._packer = packer
        self._buckets = runner.token_buckets

    @property
    def has_late_masks(self) -> bool:
        return "late_masks" in self._runner.capabilities

    def launch(self, batch: Batch, now_s: float, *, masks_follow: bool) -> LaunchedStep:
        if not (batch.entries or batch.has_quanta):
            return LaunchedStep(batch, 0, NO_STEP, now_s)
        num_tokens = batch.num_tokens
        bucket = next(size for size in self._buckets if size >= num_tokens)
        inputs = self._packer.pack(batch, bucket, masks_follow=masks_follow)
        handle, num_hidden = self._runner.launch(inputs), len(inputs.hidden_rows)
        return LaunchedStep(batch, inputs.num_logits, handle, now_s, num_hidden)

    def choose(self, step: LaunchedStep) -> None:
        assert isinstance(step.handle, LateStepHandle), "the runner has the capability late_masks"
        step.handle.choose(self._packer.late_masks(step.batch))

    def read(self, step: LaunchedStep) -> StepOutput:
        """Raises RunnerError if the output violates the runner contract."""
        output = step.handle.result()
        if not isinstance(output, StepOutput):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RunnerError(f"step {step.batch.step_id} returned {type(output).__name__}")
        for name in OUTPUT_FIELDS:
            rows = getattr(output, name)
            if len(rows) != step.num_logits:
                raise RunnerError(
                    f"step {step.batch.step_id} returned {len(rows)} {name} for "
                    f"{step.num_logits} rows"
                )
        shape = (step.num_hidden, self._runner.hidden_size)
        if step.num_hidden and output.hidden.shape != shape:
            raise RunnerError(
                f"step {step.batch.step_id} returned hidden states of {output.hidden.shape} for "
                f"{shape}"
            )
        in_range = (output.token_ids >= 0) & (output.token_ids < self._runner.vocab_size)
        if not (in_range | ~output.is_finite).all():
            raise RunnerError(f"step {step.batch.step_id} returned a token id out of range")
        return output

    def reset(self) -> None:
        self._packer.forget_rows()
        self._runner.reset()


class StepLoop:
    """Keeps at most `depth` launched steps unread. Depth 0 (launch, read) is the reference for
    depth 1, which launches step n + 1 before step n is read; a step whose masks depend on an unread
    token chooses its tokens later, or is read first if the runner cannot do this."""

    def __init__(
        self,
        scheduler: Scheduler,
        step_runner: Steps,
        *,
        depth: int,
        scorer: ScoringSteps | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.in_flight: deque[LaunchedStep] = deque()
        self.num_failed_steps = 0
        self.num_consecutive_failures = 0
        # In a row: nothing was in flight, and nothing was computed although there was work.
        self.num_empty_steps = 0
        self._scheduler = scheduler
        self._step_runner = step_runner
        self._depth = depth
        self._scorer = scorer
        self._clock = clock
        self._last_read_s = clock()

    def launch_in_s(self) -> float:
        """For so long the next step may be put off without a pause of the device. 0 if nothing is
        in flight, or its time is not known (with drafts it is too inaccurate)."""
        if not self.in_flight or self.in_flight[-1].batch.has_drafts:
            return 0.0
        newest = self.in_flight[-1]
        started_s = max(newest.launched_s, self._last_read_s)
        predicted_ms = self._scheduler.times.predict_ms(newest.batch)
        if predicted_ms is None:
            return 0.0
        after_s = LAUNCH_AT * predicted_ms / 1000 - LAUNCH_S
        wait_s = started_s + min(MAX_WAIT_S, after_s) - self._clock()
        return wait_s if wait_s >= MIN_WAIT_S else 0.0

    def step(self, announce: Announce | None = None) -> list[Event]:
        """Launches the next step, and reads the oldest if it is due. A request's `Started` comes
        with the launch of its first step."""
        is_resting = not self.in_flight
        has_waited = not is_resting and self._must_read_first()
        events = self._read_all() if has_waited else []
        batch = self._scheduler.schedule(self._clock())
        if announce is not None and batch is not None and (batch.started or batch.preparing):
            announce([*batch.started, *batch.preparing])
        is_empty = batch is None and is_resting and self._scheduler.has_work
        self.num_empty_steps = self.num_empty_steps + 1 if is_empty else 0
        if batch is not None:
            events += [*batch.started, *self._launch(batch, has_waited=has_waited)]
        if len(self.in_flight) > self._depth or (batch is None and self.in_flight):
            events += self._read_oldest()
        return events

    def drop_in_flight(self) -> None:
        """Their sequences' KV must not be used afterwards."""
        while self.in_flight:
            self._scheduler.unpin(self.in_flight.popleft().batch)

    def _must_read_first(self) -> bool:
        return (
            self.in_flight[-1].batch.has_drafts
            or (self._decides_masks and not self._step_runner.has_late_masks)
            or self._scheduler.must_follow()
        )

    @property
    def _decides_masks(self) -> bool:
        return any(step.batch.needs_masks for step in self.in_flight)

    def _launch(self, batch: Batch, *, has_waited: bool) -> list[Event]:
        masks_follow = batch.needs_masks and not batch.has_drafts and self._decides_masks
        try:
            step = self._step_runner.launch(batch, self._clock(), masks_follow=masks_follow)
            if has_waited:
                now_s = self._clock()
                step = replace(step, launched_s=now_s, idle_s=now_s - self._last_read_s)
            if self._scorer is not None and batch.scored is not None:
                step = replace(step, scoring=self._scorer.launch(batch.scored))
            self.in_flight.append(step)
        except Exception as failure:  # noqa: BLE001  it is raised and logged when it is read
            # The steps before it are read first: if one of them is lost, too, it is dropped with
            # them, and its sequences have failed once.
            self.in_flight.append(LaunchedStep(batch, 0, NO_STEP, failure=failure))
            return self._read_all()
        return self._choose_newest() if masks_follow else []

    def _read_all(self) -> list[Event]:
        events: list[Event] = []
        while self.in_flight:
            events += self._read_oldest()
        return events

    def _choose_newest(self) -> list[Event]:
        events: list[Event] = []
        while len(self.in_flight) > 1:
            events += self._read_oldest()
        if not self.in_flight:  # one of them has failed
            return events
        try:
            self._step_runner.choose(self.in_flight[-1])
        except Exception:
            step = self.in_flight.pop()
            logger.exception("choosing the tokens of step %d failed", step.batch.step_id)
            events += self._recover(step.batch)
        return events

    def _read_oldest(self) -> list[Event]:
        step = self.in_flight.popleft()
        try:
            if step.failure is not None:
                raise step.failure
            output = self._step_runner.read(step)
        except Exception:
            what = "step" if step.failure is None else "launching step"
            logger.exception("%s %d failed", what, step.batch.step_id)
            return self._recover(step.batch)
        self.num_consecutive_failures = 0
        scored = None
        if self._scorer is not None and step.scoring is not None:
            scored = self._scorer.read(step.batch.step_id, step.scoring)
        self._observe(step)
        if self._scorer is not None and scored is not None:
            self._scorer.apply(step.batch, scored)
        return self._scheduler.update(step.batch, output)

    def _observe(self, step: LaunchedStep) -> None:
        now_s = self._clock()
        started_s = max(step.launched_s, self._last_read_s)
        idle_ms = None if step.idle_s is None else 1000 * step.idle_s
        self._scheduler.times.observe(step.batch, 1000 * (now_s - started_s), idle_ms)
        self._last_read_s = now_s

    def _recover(self, failed: Batch) -> list[Event]:
        self.num_failed_steps += 1
        self.num_consecutive_failures += 1
        events = self._scheduler.fail_batch(failed, STEP_FAILED)
        self.drop_in_flight()
        self._step_runner.reset()
        if self._scorer is not None:
            self._scorer.reset()
        self._scheduler.restart()
        return events


LOOP_DEPTHS: dict[SchedulerLoop, int] = {"plain": 0, "overlap": 1}
