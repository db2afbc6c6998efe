"""A folder with a `cadenza` on its PATH, and one server that the pages' requests are sent to."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli.harness import COMMAND, Ran, write_model
from tests.docs.documents import ROOT
from tests.docs.places import GGUF, PORT, SEEING
from tests.faces.seeing import write_seeing_model
from tests.server.serve_process import ServeProcess, serve_process
from tools.real_models import cache_folder

# What makes the bundled model's engine quick to start. A command's own flags come first.
SMALL = {"CADENZA_MAX_NUM_SEQS": "4", "CADENZA_MAX_MODEL_LEN": "1024"}
TIMEOUT_S = 1200.0
TRAINED = cache_folder(os.environ) / "smollm2-135m-instruct.gguf"


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of commands: no flag from outside, a `cadenza` that is this one."""
    programs = tmp_path_factory.mktemp("bin")
    python, code = COMMAND[0], COMMAND[2]
    (programs / "cadenza").write_text(f'#!/bin/sh\nexec "{python}" -c "{code}" "$@"\n')
    (programs / "cadenza").chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CADENZA_")}
    return {
        **kept,
        **SMALL,
        "CADENZA_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
        "HF_HUB_CACHE": str(tmp_path_factory.mktemp("hub")),
        "PATH": os.pathsep.join((str(programs), str(Path(sys.executable).parent), kept["PATH"])),
    }


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def served() -> Iterator[ServeProcess]:
    """`cadenza serve`, ready."""
    with serve_process(CADENZA_MAX_MODEL_LEN=SMALL["CADENZA_MAX_MODEL_LEN"]) as server:
        server.wait_ready()
        yield server


@dataclass(frozen=True, slots=True)
class Shell:
    """bash in a folder of its own."""

    folder: Path
    environment: dict[str, str]
    tiny: Path

    def with_stand_ins(self, command: str, instead: dict[str, str]) -> str:
        for name, other in instead.items():
            command = command.replace(name, other)
        if GGUF in command:
            if not TRAINED.is_file():
                pytest.skip(f"{TRAINED} is absent: run `make real`")
            (self.folder / GGUF).symlink_to(TRAINED)
        if SEEING in command:
            folder = self.folder / "seeing"
            if not folder.is_dir():
                write_seeing_model(folder)
            command = command.replace(SEEING, str(folder))
        return command.replace("{tiny}", str(self.tiny)).replace("{root}", str(ROOT))

    def run(self, command: str, stdin: str = "") -> Ran:
        ran = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", command],
            cwd=self.folder,
            env=self.environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        return Ran(ran.returncode, ran.stdout, ran.stderr)


@pytest.fixture
def shell(tmp_path: Path, small: dict[str, str], tiny: Path) -> Shell:
    return Shell(tmp_path, small, tiny)


def at(text: str, server: ServeProcess) -> str:
    """With the server's address in place of the pages'."""
    return text.replace(f"http://{PORT}", server.url)
