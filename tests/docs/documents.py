"""What README.md, docs/*.md and the cookbook show: code in fences, indented code, and code within
sentences."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT / "docs", ROOT / "docs" / "cookbook")
PAGES = (ROOT / "README.md", *(page for folder in FOLDERS for page in sorted(folder.glob("*.md"))))

FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?<=\n\n)((?: {4}.*\n|\n(?= {4}))+)")
SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
COMMENT = re.compile(r"(?:^|\s+)#\s.*$")
PROMPT = "$ "
ASSIGNMENT = re.compile(r'(\w+)="(.*)"')
SHELLS = {"", "console", "sh", "bash"}


@dataclass(frozen=True, slots=True)
class Code:
    """A piece of code of a page. `language` is a fence's; "" of a fence without one and
    elsewhere."""

    page: str
    line: int  # of its first line, from 1
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

    Where some lines have a prompt, the others are what the commands print. A line `name="…"` is
    put into the lines below it that have `$name`.
    """
    lines = code.text.splitlines()
    if any(line.startswith(PROMPT) for line in lines):
        lines = [line.removeprefix(PROMPT) for line in lines if line.startswith(PROMPT)]
    found: list[str] = []
    variables: dict[str, str] = {}
    open_line = ""
    for line in lines:
        open_line = f"{open_line}\n{line}" if open_line else line.strip()
        if not is_complete(open_line):
            continue
        command, open_line = as_one_line(open_line), ""
        for name, value in variables.items():
            command = command.replace(f"${name}", value)
        if assigned := ASSIGNMENT.fullmatch(command):
            variables[assigned[1]] = assigned[2]
        elif command:
            found.append(command)
    assert not open_line, f"{code.place}: a command that does not end: {open_line}"
    return found


def shown_commands() -> dict[str, str]:
    """Each command that a page shows apart from its sentences, and where it comes first."""
    found: dict[str, str] = {}
    for page in PAGES:
        blocks = [code for code in fences(page) if code.language in SHELLS]
        for code in [*blocks, *indented(page)]:
            for command in commands(code):
                found.setdefault(command, code.place)
    return found


def shown_outputs() -> dict[str, str]:
    """What a page shows below a command that it shows with a prompt; no command without any."""
    found: dict[str, str] = {}
    for page in PAGES:
        for code in fences(page):
            if code.language not in SHELLS:
                continue
            for part in re.split(r"^\$ ", code.text, flags=re.MULTILINE)[1:]:
                command, _, output = part.partition("\n")
                if output.strip():
                    found.setdefault(as_one_line(command), output)
    return found


def is_as_shown(printed: str, shown: str) -> bool:
    """Whether a command printed what a page shows, in which … stands for anything."""
    pattern = ".*".join(map(re.escape, shown.strip().split("…")))
    return re.fullmatch(pattern, printed.strip(), re.DOTALL) is not None


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
