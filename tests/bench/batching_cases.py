"""Batches of the token-storing runner on a clock of steps, shared by the suites of batching."""

from dataclasses import dataclass, replace

from cadenza import EngineCore
from cadenza.backends.fake import FakeRunner, FakeStepHandle
from cadenza.batch.step_schema import ModelInputs
from cadenza.bench.workloads import PlannedRequest
from cadenza.config import EngineLimits
from cadenza.engine.core import CoreOptions
from cadenza_bench.batching.plan import BatchingLoad, BatchingPlan
from cadenza_bench.batching.player import Timing
from cadenza_bench.batching.rounds import BatchingResult, Compared, compare_modes

ROWS = 2
AT_ONCE = BatchingLoad()
ANSWERS = (2, 6, 3, 3)  # two static batches of two rows, of 6 and 3 steps


class RowDependentRunner(FakeRunner):
    """Its tokens are others where more than one row is computed."""

    def launch(self, inputs: ModelInputs) -> FakeStepHandle:
        handle = super().launch(inputs)
        if inputs.num_logits > 1:
            token_ids = (handle.output.token_ids + 1) % self.vocab_size
            handle.output = replace(handle.output, token_ids=token_ids)
        return handle


def make_core(runner: type[FakeRunner] = FakeRunner, num_pages: int = 64) -> EngineCore:
    limits = EngineLimits(
        max_num_seqs=ROWS,
        max_num_batched_tokens=64,
        max_model_len=256,
        page_size=16,
        num_pages=num_pages,
        max_num_queued_reqs=16,
    )
    made = runner(
        max_num_seqs=ROWS,
        max_num_batched_tokens=64,
        max_pages_per_seq=limits.max_pages_per_seq,
        num_pages=num_pages,
        page_size=16,
    )
    return EngineCore(made, limits, CoreOptions(loop="plain"))


@dataclass(slots=True, eq=False)
class StepClock:
    """Seconds are steps launched, and what was slept."""

    core: EngineCore
    slept_s: float = 0.0

    def __call__(self) -> float:
        runner = self.core.runner
        assert isinstance(runner, FakeRunner)
        return self.slept_s + sum(kind == "launch" for kind, _ in runner.trace)

    def sleep(self, seconds: float) -> None:
        self.slept_s += seconds

    @property
    def timing(self) -> Timing:
        return Timing(clock=self, sleep=self.sleep)


def planned(answers: tuple[int, ...], length: int = 4) -> list[PlannedRequest]:
    return [
        PlannedRequest(
            prompt_token_ids=tuple((7 * at + place) % 97 for place in range(length)),
            max_tokens=answer,
        )
        for at, answer in enumerate(answers)
    ]


def small_plan(**changes: object) -> BatchingPlan:
    plan = BatchingPlan(
        rows=ROWS,
        loads=(BatchingLoad(clients=2), AT_ONCE),
        num_requests=5,
        prompt_lens=(3, 20),
        output_lens=(2, 9),
        repeats=2,
    )
    return replace(plan, **changes)  # type: ignore[arg-type]


def compared(plan: BatchingPlan, runner: type[FakeRunner] = FakeRunner) -> Compared:
    core = make_core(runner)
    return compare_modes(core, plan, lambda _: None, StepClock(core).timing)


def result(plan: BatchingPlan, found: Compared) -> BatchingResult:
    machine = {"cpu": "m", "cores": 2, "isa": None, "threads": None, "load_average": 0.0}
    workload: dict[str, object] = {"model": "m", "dtype": "float32", "ops": "stored"}
    return BatchingResult(machine=machine, workload=workload, plan=plan, compared=found)
