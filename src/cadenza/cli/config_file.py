"""`--config FILE`: flags from TOML, below the command line and the environment. Invariant: a name
that no command has is an error, and so is a value of another type than its flag's; a flag of
another command has no effect, as its variable has none.
"""

import json
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import Parameter
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, cast, get_args, get_origin

import typer

from cadenza.cli.words import begins_with_model
from cadenza.errors import ConfigError

NAME = "config_file"  # of the flag's parameter

MAX_BYTES = 1 << 20
MODEL_WORD = "folder"  # the parameter of a command's only word, its model
POSITIONAL = (MODEL_WORD, "models")  # parameters that name models beside the flag

_WORDS: Mapping[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile:
    """Values by the names of the command's parameters, and what these are called there."""

    path: Path
    values: Mapping[str, object]
    written: Mapping[str, str]

    def beside(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Without the file's model where the command line names one."""
        words = given.get("words") or ()  # of `generate`: prompts, or a model and prompts
        is_named = any(given.get(name) for name in POSITIONAL) or begins_with_model(words)
        is_from_file = given.get("model") is not None and given["model"] == self.values.get("model")
        return {**given, "model": None} if is_named and is_from_file else dict(given)

    def explained(self, error: ConfigError) -> ConfigError:
        """With the file where the error names a flag that the file sets."""
        text = str(error)
        names = [
            written
            for name, written in self.written.items()
            if f"--{name.replace('_', '-')} " in f"{text} "
        ]
        return ConfigError(f"{text} ({', '.join(names)} in {self.path})") if names else error


def config_parameter(flags: Mapping[str, Parameter], variable: str) -> Parameter:
    def read(context: typer.Context, path: str | None) -> ConfigFile | None:
        if path is None:
            return None
        known = _flag_names(context.find_root().command)
        file = read_config_file(Path(path).expanduser(), flags, known)
        context.default_map = {**(context.default_map or {}), **file.values}
        return file

    option = typer.Option(
        "--config",
        metavar="FILE",
        callback=read,
        is_eager=True,
        envvar=variable,
        show_envvar=False,
        help="Flags from a TOML file (docs/command-line.md); the command line and the environment "
        "come before it.",
    )
    annotation = Annotated[str | None, option]
    return Parameter(NAME, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def read_config_file(
    path: Path, flags: Mapping[str, Parameter], known: Collection[str] = ()
) -> ConfigFile:
    """`flags`: those of the command; `known`: names of other commands' flags. Raises
    ConfigError."""
    mine = {alias: name for name, each in flags.items() for alias in _names(name, each)}
    values: dict[str, object] = {}
    written: dict[str, str] = {}
    for key, value in _read(path).items():
        name = key.replace("-", "_")
        if name not in mine and name not in known:
            near = get_close_matches(name, {*mine, *known}, n=3, cutoff=0.6)
            hint = f"; did you mean {' or '.join(near)}?" if near else "; see --help"
            raise ConfigError(f"{path}: there is no flag {key!r}{hint}")
        if name not in mine:
            continue
        target = mine[name]
        if target in values:
            raise ConfigError(
                f"{path}: {written[target]} and {key} are the same flag; leave one out"
            )
        values[target] = _checked(f"{path}: {key}", value, flags[target])
        written[target] = key
    return ConfigFile(path=path, values=values, written=written)


def _read(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ConfigError(f"--config {path}: larger than {MAX_BYTES} bytes")
        return tomllib.loads(data.decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"--config {path}: {error}; write flags as TOML, such as max_num_seqs = 8"
        ) from error


def _names(name: str, parameter: Parameter) -> set[str]:
    """What a flag is called in a file; none of an argument, unless it is the model."""
    option = _option(parameter)
    if not hasattr(option, "is_eager") or getattr(option, "hidden", False):
        return set()
    if isinstance(option, typer.models.ArgumentInfo):
        return {name} if name == "model" else set()
    declared = [each for each in option.param_decls or () if each.startswith("--")]
    return {name, *(each.partition("/")[0][2:].replace("-", "_") for each in declared)}


def _flag_names(command: Any) -> set[str]:
    own = {
        option[2:].replace("-", "_")
        for each in command.params
        for option in each.opts
        if option.startswith("--") and not getattr(each, "hidden", False)
    }
    return own.union(*map(_flag_names, getattr(command, "commands", {}).values())) - {
        "help",
        "version",
        "config",
    }


def _option(parameter: Parameter) -> Any:
    extras = get_args(parameter.annotation)
    return extras[1] if get_origin(parameter.annotation) is Annotated else None


def _checked(where: str, value: object, parameter: Parameter) -> object:
    """As typer takes it. Raises ConfigError where its type is another."""
    hint = get_args(parameter.annotation)[0]
    kinds = {hint, *get_args(hint)} - {NoneType}
    option = _option(parameter)
    if option.parser is not None or ("JSON" in (option.metavar or "") and isinstance(value, dict)):
        return _as_text(where, cast(object, value))
    if list[str] in kinds:
        return _texts(where, value)
    kind = next((each for each in (bool, int, float) if each in kinds), str)
    allowed = (int, float) if kind is float else (kind,)
    if isinstance(value, allowed) and (kind is bool or not isinstance(value, bool)):
        return value
    raise ConfigError(f"{where} = {_shown(value)}: give {_WORDS[kind]}")


def _texts(where: str, value: object) -> list[object]:
    texts = cast("list[object]", value if isinstance(value, list) else [value])
    if not all(isinstance(each, str) for each in texts):
        raise ConfigError(f"{where} = {_shown(texts)}: give a text or a list of texts")
    return texts


def _as_text(where: str, value: object) -> str:
    """As on the command line: lists with commas, tables as JSON."""
    match value:
        case bool():
            return "true" if value else "false"
        case str() | int() | float():
            return str(value)
        case list():
            return ",".join(_as_text(where, each) for each in cast("list[object]", value))
        case dict():
            return json.dumps(value)
        case _:
            raise ConfigError(f"{where} = {_shown(value)}: give a text, a number or a table")


def _shown(value: object) -> str:
    try:
        return json.dumps(value)[:100]
    except (TypeError, ValueError):
        return str(value)[:100]
