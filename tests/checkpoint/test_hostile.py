"""Every folder of the hostile corpus is a named error: soon, in little memory, with nothing run."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.hostile import CORPUS, write_corpus

MAX_SECONDS = 2.0
LENIENT = 10
"""Times what the bar allows, in `make test`: on some machines a standstill counts as computing."""
MAX_BYTES = 256 << 20
MAX_MESSAGE = 600


SLOW = ("template: much time", "template: blocks in blocks", "tensor: shape of 1,000,000 axes")
BY_DAY = tuple(name for name in CORPUS if name not in SLOW)
REFUSALS = ("CheckpointError", "InvalidRequestError", "MessagesRefusedError")

Outcomes = dict[str, dict[str, Any]]


def open_corpus(root: Path, names: Sequence[str]) -> Outcomes:
    """What the watch saw of each folder."""
    write_corpus(root, names)
    command = [sys.executable, "-m", "tests.checkpoint.hostile", str(root), str(len(names))]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path.cwd())
    assert ran.returncode == 0, ran.stderr
    assert not list(root.rglob("ran"))
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    return dict(zip(names, lines, strict=True))


def check_refusals(outcomes: Outcomes, max_seconds: float) -> None:
    for name, outcome in outcomes.items():
        told = f"{name}: {outcome}"
        assert outcome["error"] in REFUSALS, told
        assert 0 < len(outcome["message"]) < MAX_MESSAGE, told
        assert "secret of another" not in outcome["message"]
        assert re.search(CORPUS[name][0], outcome["message"]), told
        assert outcome["seconds"] < max_seconds, told
        assert outcome["peak"] < MAX_BYTES, told
        assert outcome["events"] == [], told


def test_a_hostile_folder_is_a_named_error(tmp_path: Path):
    check_refusals(open_corpus(tmp_path, BY_DAY), LENIENT * MAX_SECONDS)


@pytest.mark.soak
def test_every_hostile_folder_is_refused_within_two_seconds(tmp_path: Path):
    check_refusals(open_corpus(tmp_path, tuple(CORPUS)), MAX_SECONDS)


def test_an_honest_folder_passes_and_the_watch_sees_what_is_done(tmp_path: Path):
    """The controls: the same program has no error here, and notices code, files and memory."""
    code = (
        "import os, sys, pathlib\n"
        "from tests.checkpoint import hostile\n"
        "from tests.checkpoint.files import write_folder\n"
        "root, use_honestly = pathlib.Path(sys.argv[1]), hostile.use_everything\n"
        "write_folder(root / '0')\n"
        "def use(folder):\n"
        "    if folder.name != '1':\n"
        "        return use_honestly(folder)\n"
        "    os.system('true'); (root / 'x').write_bytes(bytes(1)); bytearray(300 << 20)\n"
        "hostile.use_everything = use\n"
        "hostile.main(root, 2)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    honest, caught = map(json.loads, ran.stdout.splitlines())
    assert (honest["error"], honest["events"]) == (None, [])
    assert len(caught["events"]) == 2
    assert caught["peak"] > MAX_BYTES
