"""What README.md and docs/*.md show: code in fences, indented code, and code within sentences."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?<=\n\n)((?: {4}.*\n|\n(?= {4}))+)")
SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
COMMENT = re.compile(r"(?:^|\s+)#\s.*$")
PROMPT = "$ "


@dataclass(frozen=True, slots=True)
class Code:
    """A piece of code of a page. `language` is a fence's; "" of a fence without one and elsewhere.

    Args:
        line: of its first line, from 1.
    """

    page: str
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def _found(page: Path, text: str, start: int, language: str, code: str) -> Code:
    name = page.relative_to(ROOT).as_posix()
    return Code(name, text.count("\n", 0, start) + 1, language, code)


def _without(text: str, pattern: re.Pattern[str]) -> str:
    """What fits is replaced by as many empty lines."""
    return pattern.sub(lambda found: "\n" * found[0].count("\n"), text)


def fences(page: Path) -> Iterator[Code]:
    text = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        yield _found(page, text, found.start(3), found[2], found[3])


def indented(page: Path) -> Iterator[Code]:
    text = _without(page.read_text(encoding="utf-8"), FENCE)
    for found in INDENTED.finditer(text):
        yield _found(page, text, found.start(), "", found[1])


def spans(page: Path) -> Iterator[Code]:
    """Code within sentences, on one line."""
    text = _without(_without(page.read_text(encoding="utf-8"), FENCE), INDENTED)
    for found in SPAN.finditer(text):
        yield _found(page, text, found.start(), "", " ".join(found[1].split()))


def commands(code: Code) -> list[str]:
    """The command lines of code for a shell, without prompts and comments.

    Where some lines have a prompt, the others are what the commands print.
    """
    lines = code.text.splitlines()
    if any(line.lstrip().startswith(PROMPT) for line in lines):
        lines = [line.lstrip().removeprefix(PROMPT) for line in lines if PROMPT in line[:6]]
    found: list[str] = []
    open_line = ""
    for line in lines:
        open_line = f"{open_line}\n{line}" if open_line else line.strip()
        if is_complete(open_line):
            found += [command] if (command := as_one_line(open_line)) else []
            open_line = ""
    assert not open_line, f"{code.place}: a command that does not end: {open_line}"
    return found


def is_complete(command: str) -> bool:
    """Whether quotes are closed, and no line follows a backslash."""
    if command.endswith("\\"):
        return False
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return False
    return True


def as_one_line(command: str) -> str:
    joined = re.sub(r"\s*\\\n\s*", " ", command)
    return COMMENT.sub("", joined).strip() if "\n" not in joined else joined.strip()
