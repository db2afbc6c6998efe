"""Commands, flags, units and files of README.md and docs/*.md are what the programs take; each
command is run, or is parsed where it cannot be."""

import importlib.util
import re
import shlex
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer

from cadenza.errors import ConfigError
from cadenza.server.access import ApiKeys
from cadenza.server.tenants import read_tenants
from tests.docs import command_line
from tests.docs.conftest import Shell, at
from tests.docs.documents import (
    PAGES,
    ROOT,
    fences,
    is_as_shown,
    shown_commands,
    shown_outputs,
    spans,
)
from tests.docs.places import PLACES, PORT, First, NoCommand, Parsed, Post, Run, Serve, Shared
from tests.ports import kept_port
from tests.server.serve_process import PLAIN, ServeProcess, serve_process

SHOWN = shown_commands()
OUTPUTS = shown_outputs()
# Of calls within sentences, which tell what may be given.
STAND_INS = {"[": "", "]": "", "FILE…": "FILE", "…": "none", "NAME|FILE": "NAME"} | {
    " URL": f" http://{PORT}",
    " COMMAND ": " serve ",
}


NAME = re.compile(r"[a-z]+(-[a-z]+)*")
# What the parser raises; typer exports its child alone.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def placed(kind: type[Any]) -> list[Any]:
    """The commands of a place, as parameters; those of `make soak` are marked."""
    soak = kind is Serve
    return [
        pytest.param(command, place, marks=pytest.mark.soak if getattr(place, "soak", soak) else ())
        for command, place in PLACES.items()
        if isinstance(place, kind)
    ]


@pytest.mark.parametrize("command", SHOWN)
def test_every_command_of_the_pages_has_a_place(command: str) -> None:
    assert command in PLACES, f"{SHOWN[command]}: say in tests/docs/places.py how it is run"


@pytest.mark.parametrize("command", PLACES)
def test_every_place_is_of_a_command_that_a_page_shows(command: str) -> None:
    assert command in SHOWN


@pytest.mark.parametrize("command", [c for c, p in PLACES.items() if not isinstance(p, NoCommand)])
def test_what_a_command_calls_takes_its_flags(command: str) -> None:
    check_all(command.replace("[FOLDER]", "FOLDER"))


def called_in_sentences() -> list[str]:
    programs = ("cadenza ", "python benchmarks", "python examples", "python tools", "make ")
    texts = {code.text for page in PAGES for code in spans(page)}
    return sorted(text for text in texts if text.startswith(programs))


@pytest.mark.parametrize("text", called_in_sentences())
def test_what_a_sentence_calls_takes_its_flags(text: str) -> None:
    for name, other in STAND_INS.items():
        text = text.replace(name, other)
    for words in command_line.calls(text):
        names = words[1:-1] if words[-1] == "--help" else words[1:]
        if words[0] == "cadenza" and all(map(NAME.fullmatch, names)):
            assert command_line.find(names).rest == []
        else:
            command_line.check(words)


@pytest.mark.parametrize(
    "command",
    [
        "cadenza serve --no-such-flag",
        "cadenza bench throughput --shape smollm2-135m --no-such-flag 3",
        "cadenza serve --quantization int3",
        "echo x | cadenza generate --max-tokens many",
        "make no-such-target",
        "python benchmarks/predict.py --no-such-flag",
    ],
)
def test_a_call_with_a_wrong_flag_or_value_is_seen(command: str) -> None:
    with pytest.raises((ConfigError, AssertionError, UsageError)):
        check_all(command)


def check_all(command: str) -> None:
    for words in command_line.calls(command):
        command_line.check(words)


@pytest.mark.parametrize(("command", "place"), placed(Parsed))
def test_what_is_not_run_names_files_that_are_there(command: str, place: Parsed) -> None:
    assert place.why
    for path in place.paths:
        assert path in command or path == "Dockerfile"
        assert (ROOT / path).is_file()
    if place.arguments:
        assert command.endswith(shlex.join(place.arguments[1:]))
        command_line.parse(list(place.arguments))


@pytest.mark.parametrize(("command", "place"), placed(First))
def test_a_command_that_is_run_first_is_run(command: str, place: First) -> None:
    then = PLACES[place.of]
    assert isinstance(then, Run)
    assert command in then.before.splitlines()


@pytest.mark.parametrize(("command", "place"), placed(Run))
def test_a_command_does_what_its_page_says(
    request: pytest.FixtureRequest, shell: Shell, command: str, place: Run
) -> None:
    skip_without(place.needs)
    command_of_page = command
    if f"http://{PORT}" in command:
        command = at(command, request.getfixturevalue("served"))
    both = "\n".join(filter(None, (place.before, command)))
    ran = shell.run(shell.with_stand_ins(both, dict(place.instead)), place.stdin)
    assert ran.code == 0, ran.out + ran.err
    assert place.prints in ran.out
    if command_of_page in OUTPUTS and not place.stdin:
        ran_all = (*place.before.splitlines(), command_of_page)
        shown = "".join(OUTPUTS.get(each, "") for each in ran_all)
        assert is_as_shown(ran.out, shown), ran.out


def test_the_readme_shows_what_make_run_prints(shell: Shell) -> None:
    (recipe,) = re.findall(
        r"^run:.*\n\t\$\(BIN\)/(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    ran = shell.run(recipe.replace("examples/", f"{ROOT}/examples/"))
    texts = [code.text for code in fences(ROOT / "README.md") if "$ make run\n" in code.text]
    (shown,) = [text.partition("$ make run\n")[2] for text in texts]
    for answer in shown.strip().split("\n\n"):
        assert " ".join(answer.split()) in " ".join(ran.out.split())


@pytest.mark.parametrize(
    ("printed", "shown", "is_same"),
    [("a\n", "a\n", True), ("a b\nc", "a …", True), ("ab", "a", False), ("a", "b", False)],
)
def test_an_output_is_compared_whole(printed: str, shown: str, is_same: bool) -> None:
    assert is_as_shown(printed, shown) == is_same


@pytest.mark.parametrize(("command", "place"), placed(Serve))
def test_a_server_starts_and_answers(shell: Shell, command: str, place: Serve) -> None:
    skip_without(place.needs)
    for name, text in place.files.items():
        (shell.folder / name).write_text(text)
    started = shell.with_stand_ins(command, dict(place.instead))
    # Of the command that would be run otherwise, the flags behind `serve` are added.
    script = f'cd {shlex.quote(str(shell.folder))}; shift 3; exec env {started} "$@"'
    with ExitStack() as held:
        if "--port 8000" in command:
            script += f" --port {held.enter_context(kept_port())}"
        server = held.enter_context(
            serve_process(before=("bash", "-c", script), **shell.environment)
        )
        server.wait_ready()
        headers = {"authorization": f"Bearer {place.key}"} if place.key else {}
        body = {"prompt": "the quick", "max_tokens": 4}
        said = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, **PLAIN)
        assert said.status_code == 200, said.text
        server.terminate()
        assert server.wait() == 0


@pytest.mark.parametrize(("command", "place"), placed(Post))
def test_a_request_of_curl_is_answered(served: ServeProcess, command: str, place: Post) -> None:
    words = [word for word in shlex.split(at(command, served))[1:] if word != "-s"]
    url, options = words[0], dict(zip(words[1::2], words[2::2], strict=True))
    assert set(options) <= {"-H", "-d"}
    name, _, value = options.get("-H", "accept: */*").partition(": ")
    method = "POST" if "-d" in options else "GET"
    body = options.get("-d")
    answer = httpx.request(method, url, content=body, headers={name: value}, **PLAIN)
    assert answer.status_code == 200, answer.text
    assert place.part in answer.text


def test_the_shared_server_is_started_as_the_pages_say() -> None:
    for command in (command for command, place in PLACES.items() if isinstance(place, Shared)):
        words = shlex.split(command.removesuffix(" &"))
        assert (words[0].rpartition("/")[2], words[1:]) == ("cadenza", ["serve"])


def skip_without(package: str) -> None:
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


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
