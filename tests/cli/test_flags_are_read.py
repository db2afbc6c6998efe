"""No flag is accepted and ignored: each field of a group of flags is read by its command."""

import ast
import inspect
import json
from contextlib import closing
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from shutil import copytree
from types import ModuleType
from typing import Any

import pytest

from cadenza.cli.chat import ChatFlags
from cadenza.cli.generate import GenerateFlags
from cadenza.cli.serve_flags import ServeFlags
from cadenza.cli.verify import VerifyFlags
from cadenza.config import EngineConfig
from cadenza.engine.process.launch import FirstLaunch
from tests.by_day import by_day
from tests.cli.harness import Cadenza
from tests.cli.test_options import VALUES

chat, generate, serve, serve_flags, served_models, verify = (
    import_module(f"cadenza.cli.{name}")
    for name in ("chat", "generate", "serve", "serve_flags", "served_models", "verify")
)
NOWHERE = "http://127.0.0.1:1"

GROUPS: dict[str, tuple[type[Any], tuple[ModuleType, ...]]] = {
    "serve": (ServeFlags, (serve, serve_flags, served_models)),
    "generate": (GenerateFlags, (generate,)),
    "chat": (ChatFlags, (chat,)),
    "verify": (VerifyFlags, (verify,)),
}


def read_names(*modules: ModuleType) -> set[str]:
    """The attributes that the modules' sources read, of whatever."""
    trees = [ast.parse(inspect.getsource(module)) for module in modules]
    return {
        node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)
    }


@pytest.mark.parametrize("name", GROUPS)
def test_every_flag_of_a_command_is_read_by_it(name: str) -> None:
    group, modules = GROUPS[name]
    assert {field.name for field in fields(group)} <= read_names(*modules)


def test_a_flag_that_is_not_read_would_be_seen() -> None:
    assert "no_such_flag" not in read_names(serve)


def test_an_unknown_backend_is_refused_by_every_command(
    cadenza: Cadenza, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(*flags: str) -> None:
        for words in (["serve"], ["generate", "the"], ["chat"], ["verify"], ["info"]):
            ran = cadenza(*words, *flags)
            assert (ran.code, ran.out) == (2, "")
            assert "--backend 'tensor' is not one of auto, xla, mlx, iree" in ran.err

    check("--backend", "tensor")
    monkeypatch.setenv("CADENZA_BACKEND", "tensor")
    check()


SWITCH = {"enable_prefix_caching": ["--no-enable-prefix-caching"]}
OF_THE_ENGINE = {
    name: ["--" + name.replace("_", "-"), written] for name, (written, _) in VALUES.items()
} | SWITCH


@pytest.mark.parametrize(
    "name",
    by_day(
        [*sorted(OF_THE_ENGINE.keys() - {"seed"}), "reference"],
        {"max_num_seqs", "enable_prefix_caching", "reference"},
    ),
)
def test_a_flag_that_means_nothing_to_a_server_that_is_asked_is_refused(
    cadenza: Cadenza, name: str
) -> None:
    ran = cadenza("verify", "--url", NOWHERE, *OF_THE_ENGINE.get(name, ["--reference", "solo"]))
    assert ran.code == 2
    assert "changes nothing with --url" in ran.err


def test_a_variable_for_all_commands_is_no_wrong_use_where_a_server_is_asked(
    cadenza: Cadenza, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CADENZA_MAX_NUM_SEQS", "4")
    monkeypatch.setenv("CADENZA_API_KEY", "a key")
    said = f"--url {NOWHERE} does not answer: the connection is refused"
    assert said in cadenza("verify", "--url", NOWHERE).err


def test_info_tells_no_recommendation_that_is_not_followed(
    cadenza: Cadenza, model: Path, tmp_path: Path
) -> None:
    folder = copytree(model, tmp_path / "model")
    recommended = {"temperature": 0.25, "num_beams": 4}
    (folder / "generation_config.json").write_text(json.dumps(recommended))
    (told,) = cadenza("info", folder, "--json").objects
    assert told["text"]["generation_defaults"] == {"temperature": 0.25}
    assert told["text"]["not_applied"]
    (told,) = cadenza("info", folder, "--json", "--generation-config", "none").objects
    assert (told["text"]["generation_defaults"], told["text"]["not_applied"]) == ({}, [])


@pytest.mark.parametrize(("chosen", "temperature"), [("auto", 0.25), ("none", 1.0)])
def test_a_server_follows_generation_config_as_it_is_asked_to(
    model: Path, tmp_path: Path, chosen: str, temperature: float
) -> None:
    folder = copytree(model, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.25}))
    config = EngineConfig(generation_config=chosen)  # type: ignore[arg-type]
    flags = ServeFlags()
    with closing(FirstLaunch(("true",))) as first:
        places = served_models.local_places(flags, config, first)
        options = serve_flags.server_options(flags)
        service = served_models.make_service([str(folder)], flags, config, options, places)
    assert service.models.first.text.defaults.complete({}).temperature == temperature
