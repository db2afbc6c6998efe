"""One warm runner a session for each backend, reset before each test."""

import pytest

from tests.contract.backends import BACKEND_PARAMS, BACKENDS, LIMITS_OF
from tests.contract.checks import Bench


@pytest.fixture(scope="session", params=BACKEND_PARAMS)
def warm_bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    limits = LIMITS_OF[request.param]
    runner = BACKENDS[request.param](limits, tmp_path_factory.mktemp("contract"))
    runner.warmup()
    return Bench(runner, limits)


@pytest.fixture
def bench(warm_bench: Bench) -> Bench:
    warm_bench.runner.reset()
    return warm_bench
