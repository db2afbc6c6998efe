"""Fixtures of the command line's suites: models on disk, a clean environment, `cadenza` itself."""

import io
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cadenza.cli import main
from cadenza.loading.engine_plan import EnginePlan
from tests.checkpoint.config_writer import write_random_checkpoint
from tests.cli.harness import TINY, Cadenza, Ran, write_model

KEPT = frozenset({"CADENZA_REQUIRE_NATIVE", "CADENZA_CPU_ISA"})


@pytest.fixture(scope="session", autouse=True)
def clean_environment(tmp_path_factory: pytest.TempPathFactory):
    """No flag comes from the environment that the tests run in; programs are cached apart."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("CADENZA_")]:
            if name not in KEPT:
                patch.delenv(name)
        patch.setenv("CADENZA_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def bare_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without tokenizer and chat template."""
    folder = tmp_path_factory.mktemp("models") / "bare"
    write_random_checkpoint(replace(TINY, vocab_size=67), folder, seed=4, dtype="float32")
    return folder


@pytest.fixture
def cadenza(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cadenza:
    """Runs the command in this process, its three streams redirected."""

    def run(*arguments: object, stdin: str = "") -> Ran:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return run


class PlanRecords(logging.Handler):
    """Keeps the plans that are logged when an engine is built."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.plans: list[EnginePlan] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.plans += [each for each in record.args or () if isinstance(each, EnginePlan)]


@pytest.fixture
def plans() -> Iterator[list[EnginePlan]]:
    """The plans of the engines that the test's commands have built, in their order."""
    source, records = logging.getLogger("cadenza.loading.build"), PlanRecords()
    before = source.level
    source.addHandler(records)
    source.setLevel(logging.DEBUG)
    yield records.plans
    source.removeHandler(records)
    source.setLevel(before)
