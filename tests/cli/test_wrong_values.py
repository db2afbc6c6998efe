"""A wrong value of a flag is one line that names the flag, whatever the command."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from cadenza.cli.app import build_app
from tests.cli.harness import Cadenza

# What the help shows of a flag with a few words for values.
CHOICES = re.compile(r"[a-z0-9_]+(\|[a-z0-9_\[\]:]+)+")


def commands_of(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """All that do something, with their names."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield path, command
    for name, each in (inner or {}).items():
        yield from commands_of(each, (*path, name))


def takes_any_text(option: Any) -> bool:
    """Whether "nonsense" may be a value of it."""
    is_number = option.type_descriptor.annotation in (int, float)
    return not is_number and not CHOICES.fullmatch(option.metavar or "")


def flags_of(command: Any) -> list[str]:
    """Those that do not take any text; numbers first."""
    options = [each for each in command.params if each.param_type_name == "option"]
    kept = [each for each in options if not (each.is_flag or each.hidden or takes_any_text(each))]
    kept.sort(key=lambda each: each.type_descriptor.annotation not in (int, float))
    return [each.opts[0] for each in kept]


def needed(command: Any, folder: Path) -> list[object]:
    """What the command is not run without: it is refused before what it names is looked at."""
    found: list[object] = []
    for each in command.params:
        if each.required:
            word = "http://127.0.0.1:9" if each.name == "url" else str(folder / "out")
            found += [word] if each.param_type_name == "argument" else [each.opts[0], "x"]
    return found


COMMANDS = dict(commands_of(get_command(build_app())))


def test_the_commands_and_their_flags_are_found():
    assert {("serve",), ("generate",), ("bench", "throughput")} <= COMMANDS.keys()
    found = set(flags_of(COMMANDS["serve",]))
    assert {"--port", "--max-num-seqs", "--max-itl-ms", "--device", "--log-level"} <= found


TWO_SERVERS = ("--url", "a=http://127.0.0.1:9", "--url", "b=http://127.0.0.1:9")


def check(cadenza: Cadenza, path: tuple[str, ...], flag: str, folder: Path) -> None:
    given = TWO_SERVERS if path == ("bench", "compare") else needed(COMMANDS[path], folder)
    ran = cadenza(*path, *given, flag, "nonsense")
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1), ran
    assert flag in ran.err


def test_a_wrong_value_of_a_flag_is_one_line_that_names_it(cadenza: Cadenza, tmp_path: Path):
    """The first number, and the last flag with a few words for values."""
    for path, command in COMMANDS.items():
        flags = flags_of(command)
        for flag in {*flags[:1], *flags[-1:]}:
            check(cadenza, path, flag, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_a_wrong_value_of_any_flag_is_one_line_that_names_it(
    cadenza: Cadenza, path: tuple[str, ...], tmp_path: Path
):
    for flag in flags_of(COMMANDS[path]):
        check(cadenza, path, flag, tmp_path)
