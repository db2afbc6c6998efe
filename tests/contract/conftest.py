"""One warm runner a session for each backend, reset before each test."""

import pytest

from cadenza.backends.base import Runner
from tests.contract.backends import BACKENDS, LIMITS
from tests.contract.checks import Bench


@pytest.fixture(scope="session", params=BACKENDS)
def warm_runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    runner = BACKENDS[request.param](LIMITS, tmp_path_factory.mktemp("contract"))
    runner.warmup()
    return runner


@pytest.fixture
def bench(warm_runner: Runner) -> Bench:
    warm_runner.reset()
    return Bench(warm_runner)
