"""One warm runner a session for each backend, reset before each test."""

import pytest

from tests.contract.backends import BACKEND_PARAMS, BACKENDS, LIMITS, LIMITS_OF, make_reference
from tests.contract.checks import Bench

REFERENCE = pytest.param("xla reference", marks=pytest.mark.soak)


@pytest.fixture(scope="session", params=[*BACKEND_PARAMS, REFERENCE])
def warm_bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    limits = LIMITS_OF.get(request.param, LIMITS)
    make = BACKENDS.get(request.param, make_reference)
    runner = make(limits, tmp_path_factory.mktemp("contract"))
    runner.warmup()
    return Bench(runner, limits)


@pytest.fixture
def bench(warm_bench: Bench) -> Bench:
    warm_bench.runner.reset()
    return warm_bench
