"""The terminal of `cadenza chat`: broken lines, what is typed meanwhile, and the history of inputs.

Invariant: the terminal's settings are as before after `unechoed`, however it is left.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

NARROWEST = 20  # cells of a line below which the terminal breaks words

FENCE = "```"
MAX_LINES = 1000
MAX_COMPLETIONS = 200
_NO_BREAK_LENGTH = 8


def terminal_width() -> int:
    """Cells of a line; 0 where lines cannot be broken, because a word cannot be taken back."""
    return 0 if os.environ.get("TERM", "dumb") == "dumb" else shutil.get_terminal_size().columns


class WordWrap:
    """Writes text as it comes, with its lines broken between words. A word that does not fit is
    taken back and written on the next line. Lines of a code block are left as they are. The last
    cell stays free: after it, terminals differ in where the cursor is."""

    __slots__ = ("_cells", "_column", "_is_code", "_start", "_width", "_word", "_write")

    def __init__(
        self, write: Callable[[str], object], width: Callable[[], int] = terminal_width
    ) -> None:
        from rich.cells import cell_len  # not before a chat begins

        self._write, self._width, self._cells = write, width, cell_len
        self._column, self._word, self._start, self._is_code = 0, "", "", False

    def __call__(self, text: str) -> None:
        room = self._width() - 1
        if room < NARROWEST:
            self._write(text)
            return
        self._write("".join(self._put(char, room) for char in text))

    def _put(self, char: str, room: int) -> str:
        if char == "\n":
            if self._start.lstrip().startswith(FENCE):
                self._is_code = not self._is_code
            self._column, self._word, self._start = 0, "", ""
            return char
        if len(self._start) < _NO_BREAK_LENGTH:
            self._start += char
        size = self._cells(char)
        if self._is_code or self._column + size <= room:
            self._column += size
            self._word = "" if char == " " or size > 1 else self._word + char
            return char
        return self._break(char, size)

    def _break(self, char: str, size: int) -> str:
        if char == " ":
            self._column, self._word = 0, ""
            return "\n"
        back = self._cells(self._word) if size == 1 else 0
        if back == 0 or back >= self._column:  # nothing to take back, or a word as long as the line
            self._column, self._word = size, "" if size > 1 else char
            return f"\n{char}"
        word = self._word + char
        self._column, self._word = back + size, word
        return f"\x1b[{back}D\x1b[K\n{word}"


@contextmanager
def unechoed() -> Generator[None]:
    """The terminal shows nothing of what is typed, nor ^C; it is kept for the next line that is
    read."""
    try:
        import termios
    except ImportError:  # not on this system
        yield
        return
    try:
        before = termios.tcgetattr(sys.stdin.fileno())
    except termios.error:  # stdin is no terminal any more
        yield
        return
    quiet = [*before]
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, before)


def completions(line: str, commands: Sequence[str], with_file: str) -> list[str]:
    """Commands, or the one `with_file` with a file."""
    if line.startswith("/") and " " not in line:
        return [f"{name} " for name in commands if name.startswith(line)]
    if not line.startswith(f"{with_file} "):
        return []
    given = line.removeprefix(with_file).lstrip()
    folder, begun = os.path.split(given)
    with suppress(OSError, ValueError):
        found = sorted(Path(folder or ".").expanduser().iterdir())
        return [
            f"{with_file} {os.path.join(folder, each.name)}{'/' if each.is_dir() else ''}"
            for each in found
            if each.name.startswith(begun) and (begun or not each.name.startswith("."))
        ][:MAX_COMPLETIONS]
    return []


class InputHistory:
    """What was typed, in readline and in a file that only its owner can read, one JSON string a
    line; without a file until the process ends, without readline not at all."""

    __slots__ = ("_file", "_last")

    def __init__(self, file: Path | None) -> None:
        self._file, self._last = file, ""

    def load(self) -> None:
        """Leaves only the newest `MAX_LINES` in the file."""
        with suppress(ImportError):
            import readline

            readline.set_auto_history(False)
            for text in self._read():
                self._last = text
                readline.add_history(text)

    def add(self, text: str) -> None:
        if not text.strip() or text == self._last:
            return
        self._last = text
        with suppress(ImportError):
            import readline

            readline.add_history(text)
        if self._file is not None:
            with suppress(OSError):
                self._file.parent.mkdir(parents=True, exist_ok=True)
                _append(self._file, text)

    def _read(self) -> list[str]:
        if self._file is None or not self._file.is_file():
            return []
        found: list[str] = []
        with suppress(OSError):
            for line in self._file.read_text(encoding="utf-8", errors="replace").splitlines():
                with suppress(ValueError):
                    text: object = json.loads(line)
                    found += [text] if isinstance(text, str) else []
            if len(found) > 2 * MAX_LINES:
                other = self._file.with_name(f"{self._file.name}.{os.getpid()}")
                for text in found[-MAX_LINES:]:
                    _append(other, text)
                other.replace(self._file)
        return found[-MAX_LINES:]


def _append(file: Path, text: str) -> None:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    with open(os.open(file, flags, 0o600), "a", encoding="utf-8") as out:
        out.write(json.dumps(text) + "\n")
