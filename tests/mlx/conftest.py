"""Tiny models and runners for the MLX suites, which are skipped where MLX is not installed."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract.backends import needs_mlx
from tests.mlx.tiny_models import KINDS, write_tiny_model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(needs_mlx)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("tiny-mlx")

    def folder_of(kind: str) -> Path:
        folder = root / kind.replace(" ", "-")
        return folder if folder.exists() else write_tiny_model(KINDS[kind], folder)

    return folder_of
