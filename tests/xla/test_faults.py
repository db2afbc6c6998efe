"""Bar 11 on the real runner: the device fails at every step index in turn.

Each time the requests of the failed step are computed once more, so that every stream is exactly
what it is alone, no page leaks, and the next request is served. That a request which fails again
ends alone is shown by `tests/engine/test_faults.py`.
"""

from dataclasses import dataclass, replace

import pytest

from cadenza.backends.base import StepHandle
from cadenza.batch.step_schema import ModelInputs, StepOutput
from cadenza.config import SchedulerLoop
from cadenza.request import Request
from tests.xla.harness import (
    BASE,
    Lab,
    Mode,
    Served,
    Stream,
    new_engine,
    random_requests,
    replay,
    serve_alone,
    shout,
    take_events,
)
from tests.xla.recording import FaultyRunner, Moment

NEXT_REQUEST = random_requests(79, 1, BASE)[0]


def workload(num_requests: int) -> list[Request]:
    return [shout(r) for r in random_requests(71, num_requests, BASE, longest_output=20)]


def serve_through_a_fault(
    runner: FaultyRunner, requests: list[Request], mode: Mode
) -> tuple[Served, set[int]]:
    engine = new_engine(runner, BASE, mode)
    served = Served([Stream() for _ in [*requests, NEXT_REQUEST]], engine)
    index_of = {engine.submit(request): index for index, request in enumerate(requests)}
    is_sent = False
    while not engine.is_idle:
        take_events(engine, served, index_of)
        engine.check_invariants()
        if runner.has_failed and not is_sent:
            index_of[engine.submit(NEXT_REQUEST)] = len(requests)
            is_sent = True
        served.num_steps += 1
        assert served.num_steps < 10_000, "the engine hangs after a fault"
    failed = {i for i, s in enumerate(served.streams) if s.finish_reason == "error"}
    return served, failed


def check_fault(lab: Lab, requests: list[Request], runner: FaultyRunner, mode: Mode) -> bool:
    """Raises AssertionError when the fault spread or leaked; False when the run was too short."""
    served, failed = serve_through_a_fault(runner, requests, mode)
    if not runner.has_failed:
        return False
    where = f"{runner.moment} {runner.at}, {mode.loop}"
    assert not failed, f"{where}: {failed} were not retried"
    for index, (stream, request) in enumerate(
        zip(served.streams, [*requests, NEXT_REQUEST], strict=True)
    ):
        assert stream.finished is not None, f"{where}: request {index} has no end"
        expected = serve_alone(lab, BASE, request)
        assert stream.difference(expected) is None, f"{where}: request {index}"
    counts = served.engine.scheduler.kv_cache.pool.counts()
    assert (counts.live, counts.pinned) == (0, 0), f"{where}: pages leaked"
    return True


@pytest.mark.parametrize(("loop", "stride"), [("plain", 5), ("overlap", 3)])
@pytest.mark.parametrize("moment", ["launch", "result"])
def test_a_fault_at_every_step_index_changes_no_stream(
    lab: Lab, moment: Moment, loop: SchedulerLoop, stride: int
):
    replay("seed 71, 10 requests, a fault at each of 40 steps")
    requests = workload(10)
    for request in [*requests, NEXT_REQUEST]:
        serve_alone(lab, BASE, request)
    base = lab.runner()
    num_struck = 0
    for at in range(0, 40, stride):
        base.reset()
        num_struck += check_fault(lab, requests, FaultyRunner(base, at, moment), Mode(loop=loop))
    assert num_struck >= 35 // stride, f"only {num_struck} faults struck: the run is too short"


@pytest.mark.soak
@pytest.mark.parametrize("loop", ["plain", "overlap"])
@pytest.mark.parametrize("moment", ["launch", "result"])
def test_a_fault_at_every_step_index_of_a_run_of_200_steps(
    lab: Lab, moment: Moment, loop: SchedulerLoop
):
    replay("seed 71, 60 requests, a fault at each of 200 steps")
    requests = workload(60)
    mode = Mode(loop=loop, budget=20, num_pages=40, reserved_output=0.0)
    for request in [*requests, NEXT_REQUEST]:
        serve_alone(lab, BASE, request)
    base = lab.runner()
    num_struck = 0
    for at in range(200):
        base.reset()
        num_struck += check_fault(lab, requests, FaultyRunner(base, at, moment), mode)
    assert num_struck >= 195


def test_a_run_without_a_fault_is_told_from_one_with(lab: Lab):
    runner = FaultyRunner(lab.runner(), 10_000, "launch")
    served, failed = serve_through_a_fault(runner, workload(2), Mode())
    assert not runner.has_failed
    assert not failed
    assert served.streams[-1].finished is None


class LyingRunner(FaultyRunner):
    def launch(self, inputs: ModelInputs) -> StepHandle:
        handle = FaultyRunner.launch(self, inputs)
        return LyingHandle(handle, self.vocab_size) if self.has_failed else handle


@dataclass(frozen=True, slots=True)
class LyingHandle:
    handle: StepHandle
    vocab_size: int

    def result(self) -> StepOutput:
        output = self.handle.result()
        return replace(output, token_ids=(output.token_ids + 1) % self.vocab_size)


def test_a_stream_that_goes_on_wrongly_after_a_fault_is_caught(lab: Lab):
    with pytest.raises(AssertionError, match=r"request \d+"):
        check_fault(lab, workload(12), LyingRunner(lab.runner(), 5, "launch"), Mode())
