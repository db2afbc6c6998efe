"""An engine process does not outlive its front end, whatever it is doing when that is killed."""

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.by_day import by_day
from tests.engine.process.scripted_child import HOLD_LOCK, SPIN

FRONT = Path(__file__).with_name("lonely_front.py")
WITHIN_S = 60.0


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def engine_of_killed_front(script: str, command: int) -> int:
    """The engine's process id, after its front end was killed."""
    front = subprocess.Popen(
        [sys.executable, str(FRONT), script, str(command)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert front.stdout is not None
    with front.stdout:
        engine = int(front.stdout.readline())
        assert is_alive(engine)
        front.kill()
        front.wait()
    return engine


def wait_gone(pid: int) -> bool:
    end_s = time.monotonic() + WITHIN_S
    while is_alive(pid) and time.monotonic() < end_s:
        select.select([], [], [], 0.01)
    return not is_alive(pid)


STATES: dict[str, tuple[dict[str, float], int]] = {
    "busy": ({"step_s": 0.01}, 1),
    "loading": ({"load_s": 3600}, 1),
    "stuck in a step": ({}, SPIN),
    "stuck with the interpreter's lock": ({}, HOLD_LOCK),
}
HARDEST = "stuck with the interpreter's lock" if sys.platform == "linux" else "stuck in a step"
"""Where only the kernel can end it; elsewhere there is no such signal."""


@pytest.mark.parametrize("state", by_day(STATES, {HARDEST}))
def test_an_engine_ends_with_its_front_end(tmp_path: Path, state: str):
    script, command = STATES[state]
    told = json.dumps({**script, "stuck": str(tmp_path / "stuck")})
    assert wait_gone(engine_of_killed_front(told, command))


def test_a_process_that_goes_on_would_be_seen():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        assert is_alive(process.pid)
        process.kill()
