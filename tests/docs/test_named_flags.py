"""Flags, units and files that the pages name outside of commands are what the programs take."""

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from cadenza.errors import ConfigError
from cadenza.server.access import ApiKeys
from cadenza.server.tenants import read_tenants
from tests.docs import command_line
from tests.docs.documents import PAGES, ROOT, fences

FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
OF_OTHERS = {
    *("--no-deps", "--modelfile", "--weight-format", "--spec-draft-n-max", "--xla_cpu_max_isa"),
    *("--tag", "--rm", "--publish", "--volume", "--env", "--time", "--no-healthcheck"),
    *("--cap-add", "--cpunodebind", "--membind", "--xla_force_host_platform_device_count"),
    *("--include_path", "--tasks", "--model_args", "--log_samples", "--apply_chat_template"),
    *(
        "--rows",
        "--threads",
        "--prefill",
        "--only",
        "--layers",
        "--context",
        "--weights",
        "--kv-int8",
    ),  # of the kernels' own programs
}
DOCS = ROOT / "docs"


def flags_of(command: Any) -> Iterator[str]:
    for each in command.params:
        yield from (*each.opts, *each.secondary_opts)
    for child in getattr(command, "commands", {}).values():
        yield from flags_of(child)


def flags_of_scripts() -> Iterator[str]:
    for folder in ("benchmarks", "tools", "examples"):
        for script in (ROOT / folder).rglob("*.py"):
            yield from re.findall(r'"(--[a-z][\w-]*)"', script.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_flag_that_a_page_names_is_one_of_a_program(page: Path) -> None:
    known = {*flags_of(command_line.parser()), *flags_of_scripts(), *OF_OTHERS, "--help"}
    named = set(FLAG.findall(page.read_text(encoding="utf-8")))
    assert named - known == set()


def block(page: str, language: str) -> str:
    """The only one of the page in that language."""
    (text,) = [code.text for code in fences(DOCS / page) if code.language == language]
    return text


def test_the_unit_of_systemd_starts_the_command_with_flags_that_it_has() -> None:
    unit = block("serving.md", "ini")
    (started,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    (more,) = re.findall(r"^# .*, add:(.*)$", unit, re.MULTILINE)
    command_line.check(shlex.split(f"{started} {more}"))


def test_the_tenants_of_the_page_are_read(tmp_path: Path) -> None:
    toml = block("serving.md", "toml")
    (tmp_path / "tenants.toml").write_text(toml.replace("3f0a…", "3f" * 32))
    found = read_tenants(tmp_path / "tenants.toml")
    assert set(found.named) == {"web", "batch"}
    assert found.named["web"].tenant.weight == 4
    assert len(found.keys) == 3


def test_every_flag_of_the_file_on_the_page_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "cadenza.toml"
    text = block("command-line.md", "toml")
    file.write_text(text)
    command_line.parse(["serve", "--config", str(file)])
    assert not ApiKeys(tomllib.loads(text)["api_key"]).is_open  # keys that are long enough
    file.write_text(text.replace("max_model_len", "max_modle_len"))
    with pytest.raises((ConfigError, typer.BadParameter), match="max_modle_len"):
        command_line.parse(["serve", "--config", str(file)])
