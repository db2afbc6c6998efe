"""`--config FILE`: a flag comes before the environment, the environment before the file."""

from collections.abc import Mapping
from dataclasses import fields
from inspect import Parameter
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from cadenza.cli.app import build_app
from cadenza.cli.config_file import read_config_file
from cadenza.cli.options import EngineFlags, flags_of
from cadenza.cli.sampling_flags import SamplingFlags
from cadenza.cli.serve_flags import ServeFlags
from cadenza.config import EngineConfig
from cadenza.errors import ConfigError
from tests.cli.harness import Cadenza, Group, taken
from tests.cli.test_options import ALIASES, VALUES

DEFAULT = EngineConfig()
# For each flag a value as TOML has it.
TYPES = {
    name: meant if isinstance(meant, int | float) else written
    for name, (written, meant) in VALUES.items()
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "engine.toml"


def toml(values: Mapping[str, object]) -> str:
    """Numbers as they are, texts in quotes."""
    lines = (
        f"{name} = {value}" if isinstance(value, int | float) else f"{name} = '{value}'"
        for name, value in values.items()
    )
    return "\n".join(lines)


CONFIG, SAMPLING, SERVE = (
    Group("config", EngineFlags),
    Group("own", SamplingFlags),
    Group("own", ServeFlags),
)


def parsed(*arguments: object, own: Group = SAMPLING) -> tuple[EngineConfig, Any]:
    """What a command sees. Raises what it raises."""
    found = taken((CONFIG, own), arguments)
    return found["config"], found["own"]


def test_the_file_sets_every_flag_of_the_engine_by_its_name(file: Path):
    file.write_text(toml(TYPES))
    of_file = parsed("--config", file)[0]
    file.write_text(toml({name.replace("_", "-"): value for name, value in TYPES.items()}))
    for name, (_, meant) in VALUES.items():
        assert getattr(of_file, name) == meant
    assert parsed("--config", file)[0] == of_file


def test_the_file_sets_switches_lists_and_tables(file: Path):
    file.write_text(
        'enable_prefix_caching = false\nstop = ["a", "b"]\nstop_token_ids = [5, 6]\n'
        "logit_bias = {12 = -5}\nspeculative_config = {method = 'ngram'}\nspeculative = false\n"
    )
    config, sampling = parsed("--config", file)
    assert not config.enable_prefix_caching
    assert config.speculative_config == VALUES["speculative_config"][1]
    assert (sampling.stop, sampling.stop_token_ids) == (["a", "b"], (5, 6))
    assert (sampling.logit_bias, sampling.speculative) == ({12: -5}, False)


def test_an_alias_means_its_flag(file: Path):
    for alias, name in (each for each in ALIASES if each[0][:2] == "--"):
        file.write_text(toml({alias[2:]: TYPES[name]}))
        assert getattr(parsed("--config", file)[0], name) == VALUES[name][1]


def test_a_flag_comes_first_then_the_environment_then_the_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
):
    file.write_text("max_num_seqs = 3\npage_size = 32\n")
    assert parsed("--config", file)[0].max_num_seqs == 3
    monkeypatch.setenv("CADENZA_MAX_NUM_SEQS", "5")
    assert parsed("--config", file)[0].max_num_seqs == 5
    found = parsed("--config", file, "-np", 7)[0]
    assert (found.max_num_seqs, found.page_size) == (7, 32)
    monkeypatch.setenv("CADENZA_CONFIG", str(file))
    assert parsed()[0].page_size == 32


def test_the_server_takes_its_own_flags_and_keys_from_the_file(file: Path):
    file.write_text("port = 0\napi_key = ['one', 'two']\nhost = '::1'\nqueue_timeout = 3\n")
    flags = parsed("--config", file, own=SERVE)[1]
    assert (flags.port, flags.host, flags.queue_timeout) == (0, "::1", 3.0)
    assert flags.api_key == ["one", "two"]


WRONG = {
    "max_num_seq = 3": "there is no flag 'max_num_seq'; did you mean max_num_seqs",
    "zzz = 3": "there is no flag 'zzz'; see --help",
    "config = 'other'": "there is no flag 'config'",
    'port = "x"': 'port = "x": give a whole number',
    "port = true": "port = true: give a whole number",
    "port = 1.5": "port = 1.5: give a whole number",
    "port = 70000": "port in {file}",
    "queue_timeout = 'x'": 'queue_timeout = "x": give a number',
    "host = 3": "host = 3: give a text",
    "api-key = [3]": "api-key = [3]: give a text or a list of texts",
    "handover = 1": "handover = 1: give true or false",
    "num_pages = 1979-05-27": "num_pages = 1979-05-27: give a text, a number or a table",
    "[serve]\nport = 1": "there is no flag 'serve'",
    "max_num_seqs = 'many'": "max_num_seqs in {file}': 'many' is neither",
    "max-num-seqs = 0": "--max-num-seqs 0 must be",
    "max-num-seqs = -1": "(max-num-seqs in {file})",
    "parallel = 2\nmax_num_seqs = 3": "parallel and max_num_seqs are the same flag",
    "max_num_seqs = ": "write flags as TOML",
    "# \udcff": "--config {file}: ",
}


def test_what_cannot_work_names_the_file_and_the_name(cadenza: Cadenza, file: Path):
    for text, said in WRONG.items():
        file.write_text(text, errors="surrogateescape")
        ran = cadenza("serve", "--config", file)
        assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
        assert said.format(file=file) in ran.err
        assert str(file) in ran.err


def test_a_file_that_is_not_there_is_named(cadenza: Cadenza, file: Path):
    ran = cadenza("info", "--config", file)
    assert (ran.code, f"--config {file}: No such file" in ran.err) == (2, True)


def test_a_flag_of_another_command_has_no_effect_and_the_models_is_taken(
    cadenza: Cadenza, model: Path, bare_model: Path, file: Path
):
    file.write_text(f"port = 0\nmax_num_seqs = 3\nmodel = '{model}'\n")
    (told,) = cadenza("info", "--config", file, "--json").objects
    assert told["model"]["name"] == str(model)
    (told,) = cadenza("info", bare_model, "--config", file, "--json").objects
    assert told["model"]["name"] == str(bare_model)


def test_a_word_that_is_a_model_comes_before_the_files(
    cadenza: Cadenza, model: Path, bare_model: Path, file: Path
):
    file.write_text(f"model = '{bare_model}'\nmax_tokens = 2\n")
    words = ("--max-num-batched-tokens", 64, "--num-pages", 16, "-c", 64, "--seed", 1, "--json")
    (ran, _) = cadenza("generate", model, "the quick", "--config", file, *words).objects
    assert (ran["prompt"], len(ran["token_ids"])) == ("the quick", 2)
    assert cadenza("generate", "the quick", "--config", file, *words).code == 2  # no tokenizer


def test_every_command_with_the_engines_flags_has_the_file():
    app: Any = get_command(build_app())
    commands, bench = app.commands, app.commands["bench"].commands
    for command in [*commands.values(), *bench.values()]:
        options = {option for each in command.params for option in each.opts}
        assert ("--config" in options) is ("--backend" in options)


def test_a_flag_of_no_command_is_not_known(file: Path):
    flags: dict[str, Parameter] = {each.name: each for each in flags_of(ServeFlags, {})}
    file.write_text("port = 1\nelsewhere = 2\n")
    with pytest.raises(ConfigError, match="no flag 'elsewhere'"):
        read_config_file(file, flags)
    assert read_config_file(file, flags, {"elsewhere"}).values == {"port": 1}
    assert {field.name for field in fields(ServeFlags)} == set(flags)
