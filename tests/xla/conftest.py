"""One laboratory a session: checkpoints are written and runners compiled once."""

from pathlib import Path

import pytest

from tests.xla.harness import Lab


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    folder: Path = tmp_path_factory.mktemp("checkpoints")
    return Lab(folder)
