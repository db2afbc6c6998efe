"""The command on a pseudo-terminal: the live batch, Ctrl-C and Ctrl-D."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Self

import pytest

from tests.cli.harness import COMMAND, ENGINE, TINY, write_model

READ_S = 120.0
END_S = 60.0
PRESS_AGAIN_S = 5.0
FEW = ("--max-num-batched-tokens", 64)
PROMPTS = ("the quick brown", "one two", "three four five six seven the lazy dog")


class Terminal:
    """The command on a pseudo-terminal of its own, read until something is seen."""

    def __init__(self, *arguments: object, size: tuple[int, int] = (24, 80)) -> None:
        self._own, other = pty.openpty()
        lines, columns = size
        self.process = subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            stdin=other,
            stdout=other,
            stderr=other,
            close_fds=True,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm", "LINES": str(lines), "COLUMNS": str(columns)},
        )
        os.close(other)
        self.seen = ""
        self._num_consumed = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(END_S)
        os.close(self._own)

    def read_until(self, pattern: str) -> None:
        """Reads until `pattern` matches after where it matched the last time."""
        found = self._read_for(pattern, READ_S)
        assert found, f"{pattern!r} did not come; the last was {self.seen[-500:]!r}"

    def interrupt_until(self, pattern: str) -> None:
        """Presses Ctrl-C at an empty or half-typed line, and again while nothing comes of it.

        One press can be lost: readline's wait for a key does not see a signal that comes just
        before it (CPython's `readline_until_enter_or_signal`), and a person presses again too.
        """
        end_s = time.monotonic() + READ_S
        self.interrupt()
        while not self._read_for(pattern, PRESS_AGAIN_S):
            assert time.monotonic() < end_s, f"{pattern!r} did not come: {self.seen[-500:]!r}"
            self.interrupt()

    def write(self, text: str) -> None:
        os.write(self._own, text.encode())

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def end(self) -> int:
        """The exit code, once it has ended by itself; what it wrote last is read."""
        end_s = time.monotonic() + READ_S
        while part := self._read(end_s):
            self.seen += part
        return self.process.wait(END_S)

    def _read_for(self, pattern: str, most_s: float) -> bool:
        """Whether `pattern` came after where it matched the last time."""
        end_s = time.monotonic() + most_s
        while not (found := re.compile(pattern).search(self.seen, self._num_consumed)):
            if not (part := self._read(end_s)):
                return False
            self.seen += part
        self._num_consumed = found.end()
        return True

    def _read(self, end_s: float) -> str:
        """More of the output; "" at its end, and when nothing came in time."""
        ready, _, _ = select.select([self._own], [], [], max(0.0, end_s - time.monotonic()))
        try:
            return os.read(self._own, 65536).decode(errors="replace") if ready else ""
        except OSError:  # the other end was closed
            return ""


@pytest.mark.soak
def test_a_terminal_shows_rows_at_work_and_ends_with_a_table(model: Path):
    flags = ("--max-tokens", 60, "--ignore-eos", "-np", 2, "-c", 256, *FEW)
    with Terminal("generate", model, *PROMPTS, *flags) as shown:
        shown.read_until(r"loading the model")
        shown.read_until(r"/2 rows")
        shown.read_until(r"TTFT")
        shown.read_until(r"3 prompts on 2 rows, \d+ steps in [\d.]+ s")
        assert shown.end() == 0


def test_ctrl_c_in_the_live_view_keeps_what_was_written_and_ends_quietly_with_130(model: Path):
    flags = ("--max-tokens", 8000, "--ignore-eos", "-np", 1, "-c", 8192, *FEW)
    many = PROMPTS * 20  # minutes of work, however late the interrupt is
    with Terminal("generate", model, *many, *flags) as shown:
        shown.read_until(r"step [1-9]")
        shown.read_until(r"row 0 · [1-9]\d* tokens")
        shown.interrupt()
        assert shown.end() == 130
        assert "Traceback" not in shown.seen
    plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown.seen)
    result = plain[plain.rindex("1 the quick brown") :]
    assert re.search(r"TTFT.*tok/s(?s:.*)abort", result)
    assert "60 prompts on " in result
    answer = result[len("1 the quick brown") : result.index("2 one two")]
    assert answer.strip()


@pytest.mark.soak
def test_chat_lists_its_commands_and_ctrl_c_drops_a_line_that_is_typed(model: Path):
    with Terminal("chat", model, "-np", 1, "-c", 64, "--max-tokens", 4) as shown:
        shown.read_until(r"tiny: llama, \d+\.\d K parameters in float32, context of 64 tokens")
        shown.read_until(r"/help lists(?s:.*)> ")
        shown.write("/set temperature cold\n")
        shown.read_until(r"error: /set temperature 'cold'(?s:.*)> ")
        shown.write("/nonsense\n")
        shown.read_until(r"no command /nonsense; /help lists(?s:.*)> ")
        shown.write("/help\n")
        shown.read_until(r"/set NAME VALUE(?s:.*)/retry(?s:.*)> ")
        shown.write("/retry\n")
        shown.read_until(r"Nothing was asked yet(?s:.*)> ")
        shown.write("half a line")
        shown.read_until(r"half a line")
        shown.interrupt_until(r"> ")
        shown.write("/exit\n")
        assert shown.end() == 0


@pytest.mark.soak
def test_the_bundled_model_says_what_to_ask_it():
    with Terminal("chat", "-np", 1, "-c", 64) as shown:
        shown.read_until(r"3\.4 M parameters(?s:.*)Try: What is the capital of Japan\?(?s:.*)> ")
        shown.write("What is the capital of Japan?\n")
        shown.read_until(r"The capital of Japan is Tokyo\.(?s:.*)> ")
        shown.write("/retry\n")
        shown.read_until(r"Japan is Tokyo\.(?s:.*)does not change(?s:.*)> ")
        shown.write("\x04")
        assert shown.end() == 0


@pytest.mark.soak
def test_several_lines_are_one_message_if_they_are_pasted_or_quoted(model: Path):
    flags = ("--ignore-eos", "-np", 1, "-c", 128, "--max-tokens", 4, "--verbose", *FEW)
    typed = ("\x1b[200~the quick\nbrown fox\x1b[201~\n", '"""the quick\nbrown fox"""\n')
    with Terminal("chat", model, *flags) as shown:
        shown.read_until(r"> ")
        for num_answers, message in enumerate(typed, start=1):
            shown.write(message)
            shown.read_until(r"tok/s\)(?s:.*)> ")
            assert shown.seen.count("tok/s)") == num_answers
        shown.write("/bye\n")
        assert shown.end() == 0
    assert shown.seen.count("tok/s)") == len(typed)


def test_ctrl_c_in_chat_stops_the_answer_and_ctrl_d_ends(tmp_path: Path):
    # So deep that an answer is not over, however late the interrupt is.
    model = write_model(tmp_path / "deep", replace(TINY, num_layers=24))
    with Terminal("chat", model, "--ignore-eos", "-np", 1, "-c", 8192, "--verbose", *FEW) as shown:
        shown.read_until(r"> ")
        shown.write("hello\n")
        shown.read_until(r"hello\r\n(?s:.{200})")
        shown.write("/rese")  # meanwhile
        shown.read_until(r"(?s:.{200})")
        shown.interrupt()
        shown.read_until(r"\[stopped\]")
        answer = shown.seen[shown.seen.rindex("hello\r\n") : shown.seen.rindex("[stopped]")]
        assert "/rese" not in answer
        assert "^C" not in answer
        shown.read_until(r"tok/s\)(?s:.*)> (?s:.*)/rese")
        shown.write("t\n")
        shown.read_until(r"is forgotten(?s:.*)> ")
        shown.interrupt_until(r"> ")
        shown.write("\x04")
        assert shown.end() == 0
        assert "Traceback" not in shown.seen


def test_a_full_context_offers_to_drop_the_oldest_turns_and_the_history_outlives_the_process(
    model: Path,
):
    flags = ("--ignore-eos", "-np", 1, "-c", 64, "--max-tokens", 20, "--seed", 2, *FEW)
    with Terminal("chat", model, *flags) as shown:
        shown.read_until(r"> ")
        for word in ("the quick", "brown fox"):
            shown.write(f"{word}\n")
            shown.read_until(rf"{word}\r\n(?s:.*)> ")
        shown.write("one two\n")
        shown.read_until(r"of 64 tokens has no room for an answer\. Drop the \d oldest of \d")
        shown.write("maybe\n")
        shown.read_until(r"Answer y or n\.(?s:.*)has no room for an answer\. Drop")
        shown.write("y\n")
        shown.read_until(r"dropped the \d oldest question(?s:.*)> ")
        shown.write("/bye\n")
        assert shown.end() == 0
    with Terminal("chat", model, *flags) as shown:
        shown.read_until(r"> ")
        shown.write("\x1b[A\x1b[A")  # twice up: before /bye
        shown.read_until(r"one two")
        shown.write("\x15/bye\n")
        assert shown.end() == 0


@pytest.mark.soak
def test_json_on_a_terminal_is_json_alone(model: Path):
    with Terminal("generate", model, "the", "--max-tokens", 2, "--json", *ENGINE) as shown:
        assert shown.end() == 0
    objects = [json.loads(line)["object"] for line in shown.seen.splitlines()]
    assert objects == ["request", "summary"]
