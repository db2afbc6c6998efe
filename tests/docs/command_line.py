"""Reads command lines as the programs that they call read them, without running anything."""

import inspect
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cache
from typing import Any, get_args

from typer.main import get_command

from cadenza.cli.app import build_app
from cadenza.cli.options import build
from tests.docs.documents import ROOT

ENVIRONMENT = re.compile(r"[A-Z][A-Z0-9_]*=.*")
SEPARATORS = {"|", "||", "&&", "&", ";"}
MAKE_TARGET = re.compile(r"^([\w./%$()-]+):(?!=)", re.MULTILINE)


def calls(command: str) -> Iterator[list[str]]:
    """The words of each program that a command line calls, without variables before its name."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars="|&;")
    lexer.whitespace_split = True
    lexer.commenters = ""
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word not in SEPARATORS:
            words.append(word)
            continue
        while words and ENVIRONMENT.fullmatch(words[0]):
            del words[0]
        if words:
            yield words
        words = []


def check(words: Sequence[str]) -> None:
    """Raises where a call of a program of this repository is none that it takes."""
    program = words[0].rpartition("/")[2]
    if program == "cadenza":
        parse(list(words[1:]))
    elif program == "make":
        check_make(list(words[1:]))
    elif program.startswith("python") and len(words) > 1:
        check_script(words[1:])


def parse(words: Sequence[str]) -> None:
    """As `cadenza` parses its words, and with the checks of the values of engine flags.

    Raises what the parser raises, and ConfigError.
    """
    found = find(words)
    if not hasattr(found.command, "commands"):
        taken = found.command.make_context(found.name, found.rest, parent=found.context)
        for group in groups_of(found.command.callback):
            build(group, taken.params)


@cache
def parser() -> Any:
    return get_command(build_app())


@dataclass(frozen=True, slots=True)
class Found:
    """A subcommand, the parser's context of the group that it is of, and the words behind it."""

    name: str
    command: Any
    context: Any
    rest: list[str]


def find(words: Sequence[str]) -> Found:
    """Raises what the parser raises where there is no such subcommand."""
    command: Any = parser()
    context: Any = None
    name, rest = "cadenza", list(words)
    while hasattr(command, "commands") and rest:
        # A group takes its own options here and leaves the rest.
        context = command.make_context(name, rest, parent=context)
        name, command, rest = command.resolve_command(context, rest)
    return Found(name, command, context, rest)


def groups_of(callback: Any) -> Iterator[type[Any]]:
    """The dataclasses of flags that a command takes."""
    for parameter in inspect.signature(inspect.unwrap(callback), eval_str=True).parameters.values():
        kind = (get_args(parameter.annotation) or (parameter.annotation,))[0]
        if isinstance(kind, type) and is_dataclass(kind):
            yield kind


def check_make(words: list[str]) -> None:
    folder = ROOT
    if words[:1] == ["-C"]:
        folder, words = ROOT / words[1], words[2:]
    text = (folder / "Makefile").read_text()
    targets = {name for line in MAKE_TARGET.findall(text) for name in line.split()}
    for target in words:
        if "=" not in target:
            known = target in targets or any(fits(each, target) for each in targets)
            assert known, f"make {target}: there is no such target in {folder}/Makefile"


def fits(pattern: str, target: str) -> bool:
    """Whether a target is of a pattern with `%` or a variable."""
    parts = re.split(r"%|\$\(\w+\)", pattern)
    return len(parts) > 1 and bool(re.fullmatch(".+".join(map(re.escape, parts)), target))


def check_script(words: Sequence[str]) -> None:
    """The script, or the module behind -m, is there and mentions each flag."""
    is_module = words[0] == "-m"
    name = words[1].replace(".", "/") + ".py" if is_module else words[0]
    if is_module and not name.startswith(("tests/", "tools/", "benchmarks/")):
        return
    source = (ROOT / name).read_text(encoding="utf-8")
    for flag in (word for word in words if word.startswith("--")):
        assert f'"{flag}"' in source, f"{name} knows no {flag}"
