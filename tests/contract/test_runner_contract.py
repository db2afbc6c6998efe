"""The contract suite: every backend does what `backends.base` promises."""

from pathlib import Path

import pytest

from cadenza.batch.step_schema import ModelInputs
from cadenza.errors import RunnerError
from tests.contract.backends import BACKEND_PARAMS, BACKENDS, COMPILING_BACKENDS, LIMITS, LIMITS_OF
from tests.contract.checks import CHECKS, Bench

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
