"""What is shown of a long command's progress: lines in a pipe, a spinner on a terminal."""

import queue

import pytest
from rich.console import Console

from cadenza.cli.status import PlainStatus, progress_bar, status_line

ONCE_S = 0.001


@pytest.fixture
def lines() -> "queue.Queue[str]":
    return queue.Queue()


def test_in_a_pipe_a_line_says_what_is_done_and_another_what_is_done_then(
    lines: "queue.Queue[str]",
):
    with PlainStatus("loading", ONCE_S, lines.put) as status:
        assert lines.get(timeout=10) == "cadenza: loading"
        status("run 1 of 2, about 2 min left")
        assert lines.get(timeout=10) == "cadenza: run 1 of 2, about 2 min left"
    assert lines.empty()


def test_what_goes_on_is_said_once(lines: "queue.Queue[str]"):
    with PlainStatus("loading", ONCE_S, lines.put) as status:
        for text in ("loading", "loading", "running"):
            status(text)
        assert lines.get(timeout=10) in ("cadenza: loading", "cadenza: running")
    assert lines.qsize() <= 1


def test_a_pipe_that_nobody_reads_is_no_error():
    def write(_: str) -> None:
        raise BrokenPipeError

    with PlainStatus("loading", ONCE_S, write) as status:
        status("running")


@pytest.mark.parametrize("shown", [status_line, progress_bar])
def test_a_short_command_says_nothing_in_a_pipe(shown: object, capsys: pytest.CaptureFixture[str]):
    with shown("loading"):  # type: ignore[operator]
        pass
    assert capsys.readouterr() == ("", "")


def test_lines_of_the_result_go_to_stdout_at_once(capsys: pytest.CaptureFixture[str]):
    with status_line("running") as status:
        status.print("1  23.4")
        assert capsys.readouterr() == ("1  23.4\n", "")


def test_on_a_terminal_lines_of_the_result_go_to_stdout_and_the_spinner_to_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert Console(stderr=True).is_terminal
    with status_line("running") as status:
        status.print("1  23.4")
        status("running still")
    captured = capsys.readouterr()
    assert captured.out == "1  23.4\n"
    assert "running" in captured.err
