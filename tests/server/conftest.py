"""Servers over a scripted engine and over the bundled model, each started once."""

import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.config import EngineConfig
from cadenza.frontend.loaded_model import LoadedModel, load_model
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.server.operations.log_output import JsonLines, TextLines
from tests.cli.harness import write_model
from tests.server.harness import RunningServer, Serve, WatchedService, running_server
from tests.server.scripted_engine import ScriptedEngine

SCRIPT_TEXT = "the quick brown fox jumps over the lazy dog "


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextFrontend:
    folder: Path = write_model(tmp_path_factory.mktemp("models") / "tiny")
    return TextFrontend(open_checkpoint(folder))


@pytest.fixture(scope="session")
def script(text: TextFrontend) -> tuple[int, ...]:
    return text.encode(SCRIPT_TEXT)


@pytest.fixture
def engine(script: tuple[int, ...]) -> ScriptedEngine:
    return ScriptedEngine(script)


@pytest.fixture
def server(engine: ScriptedEngine, text: TextFrontend) -> Iterator[RunningServer]:
    with running_server(engine, text) as running:
        yield running


@pytest.fixture
def serve(script: tuple[int, ...], text: TextFrontend) -> Iterator[Serve]:
    with ExitStack() as started:
        yield Serve(script, text, started)


@pytest.fixture(scope="session")
def scripted(script: tuple[int, ...], text: TextFrontend) -> Iterator[RunningServer]:
    """Shared by tests that leave it as it was."""
    with running_server(ScriptedEngine(script), text) as running:
        yield running


@pytest.fixture(scope="session")
def loaded() -> Iterator[LoadedModel]:
    """The bundled model, of whose step one program is compiled."""
    config = EngineConfig(max_num_seqs=8, max_num_queued_reqs=64, max_num_batched_tokens=64)
    loaded = load_model(None, config)
    yield loaded
    loaded.close()


@pytest.fixture(scope="session")
def watched(loaded: LoadedModel) -> WatchedService:
    """The engine of `bundled`."""
    return WatchedService(loaded.core, loaded.fingerprint)


@pytest.fixture(scope="session")
def bundled(watched: WatchedService, loaded: LoadedModel) -> Iterator[RunningServer]:
    """A server of the bundled model, its engine in this process."""
    with running_server(watched, loaded.text) as running:
        yield running


@pytest.fixture
def lines() -> Iterator[list[dict]]:
    """The lines of requests, as they are logged."""
    found: list[dict] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(json.loads(JsonLines().format(record)))
            assert "\n" not in TextLines().format(record)

    logger, keep = logging.getLogger("cadenza.requests"), Keep()
    logger.addHandler(keep)
    level = logger.level
    logger.setLevel(logging.INFO)
    yield found
    logger.setLevel(level)
    logger.removeHandler(keep)
