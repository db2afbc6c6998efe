"""Runners that stand before another one: they record what is asked of it, or break it on cue.

Wrap any runner; they add nothing to its arithmetic.
"""

from dataclasses import dataclass, field
from typing import Literal

from cadenza.backends.base import Capability, Runner, StepHandle
from cadenza.batch.step_schema import ModelInputs, StepOutput
from cadenza.errors import RunnerError

Moment = Literal["launch", "result"]


@dataclass(slots=True, eq=False)
class RunnerInFront:
    runner: Runner

    @property
    def name(self) -> str:
        return self.runner.name

    @property
    def capabilities(self) -> frozenset[Capability]:
        return self.runner.capabilities

    @property
    def vocab_size(self) -> int:
        return self.runner.vocab_size

    @property
    def hidden_size(self) -> int | None:
        return self.runner.hidden_size

    @property
    def token_buckets(self) -> tuple[int, ...]:
        return self.runner.token_buckets

    def warmup(self) -> None:
        self.runner.warmup()

    def launch(self, inputs: ModelInputs) -> StepHandle:
        return self.runner.launch(inputs)

    def reset(self) -> None:
        self.runner.reset()

    def close(self) -> None:
        self.runner.close()


@dataclass(slots=True, eq=False)
class RecordingRunner(RunnerInFront):
    """`trace` holds ("launch" | "read", step id) in the order they happened."""

    trace: list[tuple[str, int]] = field(default_factory=list)
    inputs: list[ModelInputs] = field(default_factory=list)

    def launch(self, inputs: ModelInputs) -> StepHandle:
        self.trace.append(("launch", inputs.step_id))
        self.inputs.append(inputs)
        return RecordingHandle(self.runner.launch(inputs), self.trace, inputs.step_id)


@dataclass(frozen=True, slots=True)
class RecordingHandle:
    handle: StepHandle
    trace: list[tuple[str, int]]
    step_id: int

    def result(self) -> StepOutput:
        self.trace.append(("read", self.step_id))
        return self.handle.result()


@dataclass(slots=True, eq=False)
class FaultyRunner(RunnerInFront):
    """Raises once: at the launch, or at the result, of the launch with index `at`."""

    at: int
    moment: Moment
    num_launches: int = 0
    has_failed: bool = False

    def launch(self, inputs: ModelInputs) -> StepHandle:
        index, self.num_launches = self.num_launches, self.num_launches + 1
        if index != self.at:
            return self.runner.launch(inputs)
        if self.moment == "launch":
            self.fail()
        return FaultyHandle(self)

    def fail(self) -> None:
        self.has_failed = True
        raise RunnerError(f"injected at launch {self.at}")


@dataclass(frozen=True, slots=True)
class FaultyHandle:
    runner: FaultyRunner

    def result(self) -> StepOutput:
        self.runner.fail()
        raise AssertionError("fail() raises")
