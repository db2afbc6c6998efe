"""`tools/timed.sh`: what is shown of a long command, its output and its exit code."""

import os
import pty
import select
import signal
import subprocess
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.gates


TIMED = Path(__file__).parents[2] / "tools" / "timed.sh"
END_S = 60.0


def run_timed(*command: str, each_s: int = 15) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(TIMED), "compiling", *command],
        capture_output=True,
        text=True,
        timeout=END_S,
        check=False,
        env={**os.environ, "TIMED_EACH_S": str(each_s)},
    )


def test_a_command_that_works_leaves_its_time_and_not_its_output():
    ran = run_timed("echo", "noise")
    first, last = ran.stdout.splitlines()
    assert (ran.returncode, ran.stderr, first) == (0, "", "compiling …")
    assert last.startswith("compiling: done in ")


def test_a_command_that_fails_shows_its_output_and_has_its_exit_code():
    ran = run_timed("sh", "-c", "echo told; echo why >&2; exit 3")
    assert ran.returncode == 3
    assert "told\nwhy\n" in ran.stderr
    assert "compiling: failed after " in ran.stderr


def test_without_a_terminal_a_line_comes_now_and_then():
    ran = run_timed("sleep", "2", each_s=1)
    assert "compiling … 1 s\n" in ran.stdout


def test_on_a_terminal_the_seconds_count_up_in_place():
    own, other = pty.openpty()
    with subprocess.Popen([str(TIMED), "compiling", "sleep", "2"], stdout=other) as process:
        os.close(other)
        seen = ""
        while "done in" not in seen:
            ready, _, _ = select.select([own], [], [], END_S)
            assert ready, seen
            seen += os.read(own, 4096).decode()
        assert process.wait(END_S) == 0
    os.close(own)
    assert "\rcompiling … 1 s " in seen


def test_an_interrupt_ends_the_command_too(tmp_path: Path):
    own_id = tmp_path / "pid"
    command = [str(TIMED), "compiling", "sh", "-c", f"echo $$ > {own_id}; exec sleep 600"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        end_s = time.monotonic() + END_S
        while not own_id.exists() or not own_id.read_text().endswith("\n"):
            assert time.monotonic() < end_s
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_S) == 130
    assert not Path(f"/proc/{own_id.read_text().strip()}").exists()
