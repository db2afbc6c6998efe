"""Ends of a runner and of its process: nothing is left on the device, and no exit aborts."""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from cadenza.backends.xla.in_flight import InFlight
from cadenza.backends.xla.runner import XlaRunner
from cadenza.batch.step_schema import ModelInputs
from cadenza.errors import RunnerError
from tests.by_day import by_day
from tests.xla.harness import BASE, Lab

TIMEOUT_S = 300


class Result:
    """A step's result that records being waited for; `failures` are raised first, one a wait."""

    def __init__(self, *failures: BaseException) -> None:
        self.num_waits = 0
        self.num_copies = 0
        self._failures = list(failures)

    def block_until_ready(self) -> "Result":
        self.num_waits += 1
        if self._failures:
            raise self._failures.pop(0)
        return self

    def copy_to_host_async(self) -> None:
        self.num_copies += 1

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        return np.arange(self.num_waits)


class Owner:
    """Stands for a runner."""


def in_flight_with(owner: Owner, *results: Result) -> InFlight:
    in_flight = InFlight(owner)
    for key, result in enumerate(results):
        assert in_flight.add(result) == key  # pyright: ignore[reportArgumentType]
    return in_flight


def test_closing_waits_once_for_each_step_that_was_not_read() -> None:
    owner, results = Owner(), [Result() for _ in range(4)]
    in_flight = in_flight_with(owner, *results)
    in_flight.read(1)
    in_flight.close()
    in_flight.close()
    assert [result.num_waits for result in results] == [1, 1, 1, 1]


def test_a_read_waits_before_it_converts() -> None:
    owner, result = Owner(), Result()
    (read,) = in_flight_with(owner, result).read(0)
    assert read.tolist() == [0], "the array was made before the wait"


def test_a_failed_step_does_not_keep_the_others_from_being_waited_for() -> None:
    owner, results = Owner(), [Result(RuntimeError("device")), Result()]
    in_flight_with(owner, *results).close()
    assert [result.num_waits for result in results] == [1, 1]


def test_a_wait_that_was_interrupted_is_made_up_for_by_the_next() -> None:
    owner, results = Owner(), [Result(KeyboardInterrupt()), Result()]
    in_flight = in_flight_with(owner, *results)
    with pytest.raises(KeyboardInterrupt):
        in_flight.close()
    in_flight.close()
    assert [result.num_waits for result in results] == [2, 1]


def test_a_read_that_was_interrupted_leaves_its_step_to_be_waited_for() -> None:
    owner, result = Owner(), Result(KeyboardInterrupt())
    in_flight = in_flight_with(owner, result)
    with pytest.raises(KeyboardInterrupt):
        in_flight.read(0)
    in_flight.close()
    assert result.num_waits == 2


def test_results_are_dropped_while_the_lock_is_held_and_what_was_read_is_a_copy() -> None:
    owner, was_held = Owner(), list[bool]()
    in_flight = InFlight(owner)

    class Watched(Result):
        def __del__(self) -> None:
            was_held.append(in_flight.lock._is_owned())  # pyright: ignore[reportAttributeAccessIssue]

        def __array__(self, *_: object, **__: object) -> np.ndarray:
            self.values = np.arange(3)
            return self.values

    keys = [in_flight.add(Watched()) for _ in range(3)]  # pyright: ignore[reportArgumentType]
    (read,) = in_flight.read(keys[1])
    assert was_held == [True]
    assert read.base is None
    in_flight.finish()
    assert was_held == [True, True, True]


def test_a_step_that_was_dropped_is_not_read() -> None:
    owner, result = Owner(), Result()
    in_flight = in_flight_with(owner, result)
    in_flight.finish()
    with pytest.raises(RunnerError, match="dropped"):
        in_flight.read(0)


def test_an_owner_that_is_collected_has_its_steps_waited_for() -> None:
    owner, result = Owner(), Result()
    in_flight_with(owner, result)
    del owner
    gc.collect()
    assert result.num_waits == 1


def test_nothing_is_launched_once_the_interpreter_exits() -> None:
    owner, result = Owner(), Result()
    in_flight = in_flight_with(owner, result)
    in_flight.check_open()
    in_flight.finish_at_exit()
    assert result.num_waits == 1
    with pytest.raises(RunnerError, match="exiting"):
        in_flight.check_open()


def launch_one(lab: Lab, result: Result) -> XlaRunner:
    runner = lab.runner_with(lab.weights(BASE.shape))
    step = {BASE.bucket: lambda _weights, state, _wire: (state, result, None)}
    runner._programs = replace(runner.programs, step=step)
    runner.launch(ModelInputs.empty(bucket=BASE.bucket, num_rows=BASE.num_rows))
    return runner


@pytest.mark.parametrize("end", [XlaRunner.close, XlaRunner.reset])
def test_the_end_of_a_runners_work_waits_for_what_was_launched(
    lab: Lab, end: Callable[[XlaRunner], None]
) -> None:
    result = Result()
    runner = launch_one(lab, result)
    end(runner)
    assert result.num_waits == 1
    assert runner.vocab_size, "it was not collected meanwhile"


def test_on_a_cpu_a_launch_asks_for_no_copy(lab: Lab) -> None:
    """With jax 0.11 one of XLA's threads would ask for the GIL after the step."""
    result = Result()
    launch_one(lab, result).close()
    assert result.num_copies == 0


PROGRAMS = {
    "a finished generate": """
for output in llm.generate(["The capital of France is", "12 + 30 ="], params):
    print(output.outputs[0].text)
""",
    "the command": """
from cadenza.cli import main
llm.close()
flags = ["--max-num-seqs", "4", "--max-model-len", "256", "--max-num-batched-tokens", "64"]
sys.exit(main(["generate", "The capital of France is", "--max-tokens", "8", *flags]))
""",
    "an exception in the middle of a stream": """
next(llm.stream("The capital of France is", params))
raise SystemExit(0)
""",
    "Ctrl-C in the middle of a stream": """
for output in llm.stream("The capital of France is", params):
    os.kill(os.getpid(), signal.SIGINT)
""",
    "a stream that is half read when its engine closes": """
stream = llm.stream("The capital of France is", params)
next(stream)
llm.close()
llm.close()
try:
    for _ in stream: pass
except EngineClosedError:
    sys.exit(0)
sys.exit("the stream went on")
""",
    "a daemon thread that steps": """
started = threading.Event()
def step():
    while True:
        for _ in llm.stream(["The capital of France is"] * 4, params):
            started.set()
threading.Thread(target=step, daemon=True).start()
started.wait()
""",
    "a forked child that closes its parent's engine": """
lock, held = llm.core.runner._in_flight.lock, threading.Event()
def hold():
    with lock:
        held.set()
        threading.Event().wait()
threading.Thread(target=hold, daemon=True).start()
held.wait()
child = os.fork()
if child == 0:
    signal.alarm(20)
    llm.core.runner._in_flight.finish_at_exit()
    llm.close()
os._exit(0 if child == 0 else os.waitpid(child, 0)[1])
""",
}
HEAD = """
import os, signal, sys, threading, warnings
from cadenza import LLM, SamplingParams
from cadenza.errors import EngineClosedError
warnings.simplefilter("ignore")
llm = LLM(max_num_seqs=4, max_model_len=256, max_num_batched_tokens=64)
params = SamplingParams(max_tokens=64, ignore_eos=True)
"""
INTERRUPTED = "Ctrl-C in the middle of a stream"
# With steps in flight on the main thread and on another, and in a child. Each test of the command
# in `tests/cli` is one of its exit code.
BY_DAY = {
    (INTERRUPTED, 0),
    ("a daemon thread that steps", 0),
    ("a forked child that closes its parent's engine", 0),
}


@pytest.fixture(scope="module")
def load() -> Generator[None]:
    forever = [sys.executable, "-c", "import os\nos.nice(5)\nwhile True: pass"]
    with subprocess.Popen(forever) as busy:
        yield
        busy.kill()


@pytest.mark.slow
@pytest.mark.usefixtures("load")
@pytest.mark.parametrize(
    "case", by_day(product(PROGRAMS, range(2)), BY_DAY), ids=lambda case: f"{case[0]}-{case[1]}"
)
def test_a_process_that_never_closed_its_engine_exits_without_an_abort(
    case: tuple[str, int],
) -> None:
    """Twice in `make soak`: those that could abort did so more often than not."""
    name, _ = case
    run = subprocess.run(
        [sys.executable, "-c", HEAD + PROGRAMS[name]],
        env={**os.environ, "PYTHONFAULTHANDLER": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    expected = -signal.SIGINT if name == INTERRUPTED else 0
    assert run.returncode == expected, run.stderr
    assert "terminate" not in run.stderr
