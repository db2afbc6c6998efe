"""What the benchmark suites share: a tiny random checkpoint, and a cache folder of their own."""

import json
from pathlib import Path

import pytest

from tests.bench.shapes import TINY
from tests.checkpoint.config_writer import format_model_config


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CADENZA_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def shape_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shapes") / "tiny.json"
    path.write_text(json.dumps(format_model_config(TINY)))
    return path
