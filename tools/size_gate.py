"""Fails if a function has more than 70 lines, a file of src more than 500 or another more than 600,
and lists the longest.

Owns the limits and the measurement: Python by its syntax tree, C++ by its braces. Invariant: a file
that cannot be measured is a fault, never skipped.
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_FUNCTION_LINES = 70
MAX_SOURCE_LINES = 500  # of a file of src
MAX_FILE_LINES = 600  # of another one
NUM_WORST = 5

ROOTS = ("src", "training", "tests", "tools", "benchmarks", "csrc", "setup.py")
PYTHON_SUFFIXES = frozenset({".py", ".pyi"})
CPP_SUFFIXES = frozenset({".c", ".cc", ".cpp", ".cxx", ".h", ".hh", ".hpp", ".inc"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A function or a file (`line` is None) with its length in lines."""

    name: str
    path: Path
    line: int | None
    num_lines: int
    most_of_file: int = MAX_FILE_LINES

    @property
    def is_function(self) -> bool:
        return self.line is not None

    @property
    def limit(self) -> int:
        return MAX_FUNCTION_LINES if self.is_function else self.most_of_file

    def __str__(self) -> str:
        place = f"{self.path}:{self.line} {self.name}" if self.is_function else str(self.path)
        return f"{self.num_lines:5d} of {self.limit} lines  {place}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmeasured(Exception):
    """A file that cannot be measured, and why."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


def main(arguments: list[str]) -> int:
    """Measures the tree at `arguments[0]`, or the current folder; returns 0 if within limits."""
    root = Path(arguments[0]) if arguments else Path()
    measured: list[Measured] = []
    faults: list[str] = []
    for path in source_files(root):
        try:
            is_source = path.is_relative_to(root / "src")
            measured += measure(path, MAX_SOURCE_LINES if is_source else MAX_FILE_LINES)
        except Unmeasured as unmeasured:
            faults.append(f"cannot measure {unmeasured}")
    faults += [f"too long: {thing}" for thing in measured if thing.num_lines > thing.limit]
    for is_function in (True, False):
        print(f"size gate: the longest {'functions' if is_function else 'files'}")
        for thing in worst(measured, is_function=is_function):
            print(f"  {thing}")
    for fault in faults:
        print(f"size gate: {fault}", file=sys.stderr)
    print(f"size gate: {len(measured)} measured, {len(faults)} at fault")
    return 1 if faults else 0


def source_files(root: Path) -> Iterator[Path]:
    """Every Python and C++ file under the roots, in a fixed order."""
    for name in ROOTS:
        top = root / name
        paths = [top] if top.is_file() else sorted(top.rglob("*"))
        for path in paths:
            if path.is_file() and path.suffix in PYTHON_SUFFIXES | CPP_SUFFIXES:
                yield path


def measure(path: Path, most_of_file: int = MAX_FILE_LINES) -> list[Measured]:
    """The file itself and each function in it.

    Raises:
        Unmeasured: the file is not UTF-8, does not parse, or its braces do not balance.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise Unmeasured(path=path, reason="not UTF-8") from error
    count = len(text.splitlines())
    file = Measured(
        name=path.name, path=path, line=None, num_lines=count, most_of_file=most_of_file
    )
    functions = python_functions if path.suffix in PYTHON_SUFFIXES else cpp_functions
    return [file, *functions(path, text)]


def worst(measured: list[Measured], *, is_function: bool) -> list[Measured]:
    """The `NUM_WORST` longest functions or files, longest first."""
    kind = [thing for thing in measured if thing.is_function is is_function]
    return sorted(kind, key=lambda thing: (-thing.num_lines, str(thing)))[:NUM_WORST]


def python_functions(path: Path, text: str) -> Iterator[Measured]:
    """Every function and method, including nested ones, from `def` to its last line."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise Unmeasured(path=path, reason=f"does not parse: {error}") from error
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            end = node.end_lineno or node.lineno
            yield Measured(
                name=node.name, path=path, line=node.lineno, num_lines=end - node.lineno + 1
            )


# --- C++: without a parser, every block not recognised as something else counts as a function -----

_CPP_TOKEN = re.compile(
    r"""
    (?P<comment>  //(?:[^\n\\]|\\.)* | /\*.*?\*/ )
  | (?P<raw>      \b(?:u8|[uUL])?R"(?P<delimiter>[^()\\\s]{0,16})\(.*?\)(?P=delimiter)" )
  | (?P<string>   (?:\b(?:u8|[uUL]))?"(?:[^"\\\n]|\\.)*" )
  | (?P<number>   \b\d(?:[\w.]|'\w)* )
  | (?P<character>(?:\b(?:u8|[uUL]))?'(?:[^'\\\n]|\\.)+' )
  | (?P<directive>^[ \t]*\#(?:[^\n\\]|\\.)* )
    """,
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
_ATTRIBUTE = re.compile(
    r"\[\[.*?\]\]|\b(?:alignas|__attribute__|__declspec)\s*\((?:[^()]|\(.*?\))*\)"
)
_TEMPLATE = re.compile(
    r"^\s*(?:template\s*<[^;{}]*?>\s*(?=\b(?:class|struct|union)\b))+", re.DOTALL
)
_CONTAINER = re.compile(
    r'^\s*(?:(?:inline\s+)?namespace\b|extern\s*"|(?:class|struct|union)\b(?!.*\())', re.DOTALL
)
_DATA = re.compile(r"(?:=\s*$)|(?:^\s*(?:typedef\s+)?enum\b)", re.DOTALL)


def cpp_functions(path: Path, text: str) -> Iterator[Measured]:
    """Every macro, and every outermost block except namespaces, classes, enums and `= {…}`.

    A block is measured from the first line of its declaration to its closing brace.
    """
    code = _without_literals(text)
    yield from _macros(path, text)
    containers: list[bool] = []  # for each open brace: whether it contains declarations
    start = 0
    block_start = 0
    for match in re.finditer(r"[{};]", code):
        inside_block = bool(containers) and not containers[-1]
        here = match.start()
        if match.group() == "{":
            head = code[start:here]
            is_container = not inside_block and _opens_container(head)
            if not inside_block and not is_container:
                block_start = start if not _DATA.search(_bare(head)) else -1
            containers.append(is_container)
        elif match.group() == "}":
            if not containers:
                raise Unmeasured(path=path, reason="braces do not balance")
            closes_block = not containers.pop() and (not containers or containers[-1])
            if closes_block and block_start >= 0:
                yield _cpp_block(path, code, block_start, here)
        if not containers or containers[-1]:
            start = here + 1
    if containers:
        raise Unmeasured(path=path, reason="braces do not balance")


def _cpp_block(path: Path, code: str, start: int, end: int) -> Measured:
    head = code[start:end]
    start += len(head) - len(head.lstrip())
    line = code.count("\n", 0, start) + 1
    name = re.search(r"([\w:~]+)\s*\(", code[start:end])
    return Measured(
        name=name.group(1) if name else "block",
        path=path,
        line=line,
        num_lines=code.count("\n", start, end) + 1,
    )


def _macros(path: Path, text: str) -> Iterator[Measured]:
    for match in _CPP_TOKEN.finditer(text):
        if match.lastgroup == "directive" and "define" in match.group():
            yield Measured(
                name="macro",
                path=path,
                line=text.count("\n", 0, match.start()) + 1,
                num_lines=match.group().count("\n") + 1,
            )


def _without_literals(text: str) -> str:
    """The code with comments, literals and directives replaced by spaces; line breaks are kept."""

    def blank(match: re.Match[str]) -> str:
        found = match.group()
        if match.lastgroup == "number":
            return found.replace("'", "_")
        if match.lastgroup == "string":
            return (
                f'"{" " * (len(found) - 2)}"' if "\n" not in found else re.sub(r"[^\n]", " ", found)
            )
        return re.sub(r"[^\n]", " ", found)

    return _CPP_TOKEN.sub(blank, text)


def _bare(head: str) -> str:
    return _TEMPLATE.sub("", _ATTRIBUTE.sub("", head))


def _opens_container(head: str) -> bool:
    return bool(_CONTAINER.search(_bare(head)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
