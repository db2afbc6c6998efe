"""The contract suite: every backend does what `backends.base` promises."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cadenza.backends.base import PageCopier, Runner
from cadenza.batch.step_schema import ModelInputs
from cadenza.errors import RunnerError
from tests.by_day import by_day
from tests.contract.backends import (
    BACKEND_PARAMS,
    BACKENDS,
    COMPILING_BACKENDS,
    LIMITS,
    LIMITS_OF,
    make_fake,
    make_reference,
    make_xla,
)
from tests.contract.checks import CHECKS, Bench
from tests.contract.steps import Geometry, Stream, run_step

EMPTY = ModelInputs.empty(bucket=LIMITS.max_num_batched_tokens, num_rows=LIMITS.max_num_seqs)


@pytest.mark.parametrize("name", CHECKS)
def test_a_runner_keeps_the_contract(bench: Bench, name: str):
    CHECKS[name](bench)


@pytest.mark.parametrize("backend", COMPILING_BACKENDS)
def test_a_launch_before_warm_up_is_a_runner_error(backend: str, tmp_path: Path):
    runner = BACKENDS[backend](LIMITS_OF[backend], tmp_path)
    with pytest.raises(RunnerError, match="warm"):
        runner.launch(EMPTY)


@pytest.mark.parametrize("backend", BACKEND_PARAMS)
def test_a_launch_after_close_is_a_runner_error_and_closing_twice_is_harmless(
    backend: str, tmp_path: Path
):
    runner = BACKENDS[backend](LIMITS_OF[backend], tmp_path)
    runner.close()
    runner.close()
    with pytest.raises(RunnerError):
        runner.launch(EMPTY)


GEOMETRY = Geometry(
    bucket=LIMITS.max_num_batched_tokens, num_rows=LIMITS.max_num_seqs, page_size=LIMITS.page_size
)
PROMPT = np.random.default_rng(5).integers(3, 90, 48).tolist()

COPIERS = {
    "fake": make_fake,
    "xla": partial(make_xla, dtype="bfloat16"),  # whose pages the native table keeps as bits
    "xla, float32": make_xla,
    "xla reference": make_reference,
}


@pytest.fixture(scope="module", params=by_day(COPIERS, {"fake", "xla"}))
def warm_runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    runner = COPIERS[request.param](LIMITS, tmp_path_factory.mktemp("pages"))
    runner.warmup()
    return runner


@pytest.fixture
def runner(warm_runner: Runner) -> Any:
    warm_runner.reset()
    assert isinstance(warm_runner, PageCopier)
    return warm_runner


def prefill(runner: Runner, stream: Stream, prompt: list[int]) -> None:
    for start in range(0, len(prompt), 16):
        run_step(runner, [stream.chunk(prompt[start : start + 16], samples=True)], GEOMETRY)


def test_a_stream_goes_on_over_pages_that_were_copied_to_another_runner(runner: Any):
    source = Stream(row=0, pages=[5, 2, 7, 9])
    prefill(runner, source, PROMPT)
    contents = runner.read_pages([5, 2, 7])
    expected = run_step(runner, [source.chunk([4], samples=True)], GEOMETRY)
    assert runner.read_pages([7, 5, 2]) == [contents[2], contents[0], contents[1]]
    runner.reset()
    runner.write_pages([11, 3, 8], contents)
    assert runner.read_pages([11, 3, 8]) == contents
    copy = Stream(row=2, pages=[11, 3, 8, 1], num_computed=len(PROMPT))
    found = run_step(runner, [copy.chunk([4], samples=True)], GEOMETRY)
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert found.logprobs.tobytes() == expected.logprobs.tobytes()


def test_more_pages_than_a_call_copies_keep_their_places(runner: Any):
    contents = runner.read_pages(range(LIMITS.num_pages))
    size = len(contents[0])
    marked = [bytes([0, index]) * (size // 2) for index in range(LIMITS.num_pages)]
    order = [*range(LIMITS.num_pages)][::-1]
    runner.write_pages(order[:20], marked[:20])
    after = runner.read_pages(order)
    assert after[:20] == marked[:20]
    assert after[20:] == [contents[page] for page in order[20:]]


def test_contents_of_another_size_are_refused(runner: Any):
    content = runner.read_pages([3])[0]
    with pytest.raises(RunnerError, match="bytes, not"):
        runner.write_pages([3], [content[:-1]])
    assert runner.read_pages([3]) == [content]
