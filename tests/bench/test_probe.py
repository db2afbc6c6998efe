"""A fresh process is asked once; how one that failed or hung has ended is told."""

import pytest

from cadenza.bench.probe import run_probe
from cadenza.errors import RunnerError


def test_a_probe_that_fails_is_told_with_its_last_line():
    with pytest.raises(RunnerError, match=r"a look failed with exit code 1: .*JSONDecodeError"):
        run_probe("cadenza.bench.load_probe", "no json", what="a look", timeout_s=60.0)


def test_a_probe_that_does_not_end_is_ended():
    with pytest.raises(RunnerError, match=r"a look took more than 0 s"):
        run_probe("tests.bench.endless", "{}", what="a look", timeout_s=0.01)
