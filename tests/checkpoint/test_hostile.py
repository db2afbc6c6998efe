"""Every folder of the hostile corpus is a named error: soon, in little memory, with nothing run."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.hostile import CORPUS, write_corpus

MAX_SECONDS = 2.0
LENIENT = 10
"""Times what the bar allows, in `make test`: on some machines a standstill counts as computing."""
MAX_BYTES = 256 << 20
MAX_MESSAGE = 600


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    root = tmp_path_factory.mktemp("hostile")
    write_corpus(root)
    command = [sys.executable, "-m", "tests.checkpoint.hostile", str(root)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path.cwd())
    assert ran.returncode == 0, ran.stderr
    assert not list(root.rglob("ran"))
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    return dict(zip(CORPUS, lines, strict=True))


REFUSALS = ("CheckpointError", "InvalidRequestError", "MessagesRefusedError")


@pytest.mark.parametrize("name", CORPUS)
def test_a_hostile_folder_is_a_named_error(name: str, outcomes: dict[str, dict[str, Any]]):
    outcome = outcomes[name]
    assert outcome["error"] in REFUSALS, outcome
    assert outcome["message"]
    assert len(outcome["message"]) < MAX_MESSAGE
    assert "secret of another" not in outcome["message"]
    with pytest.raises(AssertionError, match=CORPUS[name][0]):
        raise AssertionError(outcome["message"])
    assert outcome["seconds"] < LENIENT * MAX_SECONDS
    assert outcome["peak"] < MAX_BYTES
    assert outcome["events"] == []


@pytest.mark.soak
def test_every_hostile_folder_is_refused_within_two_seconds(outcomes: dict[str, dict[str, Any]]):
    assert max(outcome["seconds"] for outcome in outcomes.values()) < MAX_SECONDS


def test_an_honest_folder_passes_and_the_watch_sees_what_is_done(tmp_path: Path):
    """The controls: the same program has no error here, and notices code, files and memory."""
    code = (
        "import os, sys, pathlib\n"
        "from tests.checkpoint import hostile\n"
        "from tests.checkpoint.files import write_folder\n"
        "root = pathlib.Path(sys.argv[1])\n"
        "write_folder(root / '0')\n"
        "hostile.CORPUS = {'honest': None}\n"
        "if len(sys.argv) > 2:\n"
        "    def use(folder):\n"
        "        os.system('true'); (root / 'x').write_bytes(bytes(1)); bytearray(300 << 20)\n"
        "    hostile.use_everything = use\n"
        "hostile.main(root)\n"
    )
    honest, caught = (
        json.loads(
            subprocess.run(
                [sys.executable, "-c", code, str(tmp_path), *more],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
        for more in ((), ("watch",))
    )
    assert (honest["error"], honest["events"]) == (None, [])
    assert len(caught["events"]) == 2
    assert caught["peak"] > MAX_BYTES
