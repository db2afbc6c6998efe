"""Runners over the bundled model's modules, for the IREE suites, which are skipped where IREE's
runtime is not installed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.backends import COMPILED_LIMITS, make_iree, needs_iree
from tests.contract.checks import Bench


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(needs_iree)


@pytest.fixture(scope="session")
def warm_iree() -> Iterator[Bench]:
    runner = make_iree(COMPILED_LIMITS, Path())
    runner.warmup()
    yield Bench(runner, COMPILED_LIMITS)
    runner.close()


@pytest.fixture
def bench(warm_iree: Bench) -> Bench:
    warm_iree.runner.reset()
    return warm_iree
