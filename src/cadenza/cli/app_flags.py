"""`AppFlags`: the keywords of a Ray Serve application: the flags of `cadenza serve`, and Ray's: how
many front ends, when there are to be more engines or fewer, and what each of both takes.
"""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self, cast

import typer
import typer.main

from cadenza.cli.options import EngineFlags, with_flags
from cadenza.cli.serve_flags import ServeFlags
from cadenza.cli.served_models import most_waiting
from cadenza.cluster.scale_policy import ScaleOptions
from cadenza.config import DEFAULT_MAX_NUM_SEQS, EngineConfig
from cadenza.errors import ConfigError, show

_OWN = ("fronts", "autoscaling", "engine_resources", "front_resources")
MAX_FRONTS = 16
# Open at the same time, such as of /metrics and /health, beside requests of the model.
OTHER_CALLS = 1000

# What the parser raises; typer exports its child alone.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

# Flags of `cadenza serve` that an application cannot follow, and why.
_NOT_HERE: Mapping[str, str] = {
    **dict.fromkeys(
        ("host", "port", "uds", "uds_mode", "ssl_certfile", "ssl_keyfile", "handover"),
        "Ray Serve's ingress listens",
    ),
    "metrics_port": "Ray Serve's ingress listens, and has /metrics too",
    "allowed_hosts": "Ray Serve's ingress listens, and front ends take any name",
    "log_format": "Ray has logs of its own",
    "log_level": "Ray has logs of its own",
    "otlp_traces_endpoint": "spans are not sent from there",
}


@dataclass(frozen=True, kw_only=True)
class AppFlags:
    """The keywords of an application, sorted; `scale` None: as many engines as `replicas` says,
    else at most so many. Raises ConfigError for one that is not known."""

    serve: ServeFlags
    config: EngineConfig
    fronts: int
    scale: ScaleOptions | None
    engine_resources: Mapping[str, Any]
    front_resources: Mapping[str, Any]

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        of_serve = {each.name for each in fields(ServeFlags)}
        of_engine = {each.name for each in fields(EngineConfig)}
        for name in given:
            if name in _NOT_HERE:
                raise ConfigError(f"{name} has no meaning here: {_NOT_HERE[name]}")
            if name not in of_serve | of_engine | set(_OWN):
                near = difflib.get_close_matches(name, [*of_serve, *of_engine, *_OWN], 1)
                raise ConfigError(
                    f"there is no flag {name}{f' (did you mean {near[0]}?)' if near else ''}; the "
                    f"flags are those of `cadenza serve`, with _ for -, and {', '.join(_OWN)}"
                )
        own = {name: _read(given[name]) for name in _OWN if name in given}
        serve, config = _parsed({name: given[name] for name in given if name not in own})
        if serve.max_loaded_models != 1:
            raise ConfigError("an application serves one model; deploy one for each")
        return cls(
            serve=serve,
            config=config,
            fronts=_fronts(own.get("fronts", 1)),
            scale=_scale(own.get("autoscaling"), serve.replicas),
            engine_resources=_resources("engine", own.get("engine_resources", {"num_cpus": 1})),
            front_resources=_resources("front", own.get("front_resources", {"num_cpus": 0})),
        )

    @property
    def max_ongoing_requests(self) -> int:
        """Open calls of a front end: more than its own limits, which answer with 429 where the
        ingress would let callers wait without a word."""
        num_rows = self.config.max_num_seqs or DEFAULT_MAX_NUM_SEQS
        return self.serve.replicas * (num_rows + most_waiting(self.config)) + OTHER_CALLS


def _read(value: Any) -> Any:
    """`serve run` passes texts, in which numbers and mappings are JSON."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _parsed(given: Mapping[str, Any]) -> tuple[ServeFlags, EngineConfig]:
    """As the command line parses and bounds them, without its environment. Raises ConfigError."""

    def take(*, flags: ServeFlags, config: EngineFlags) -> tuple[ServeFlags, EngineConfig]:
        return flags, config

    parser = typer.Typer(add_completion=False, rich_markup_mode=None)
    parser.command()(with_flags(take))
    command: Any = typer.main.get_command(parser)
    words: list[str] = []
    for parameter in command.params:
        parameter.envvar = None
        if given.get(parameter.name) is not None:
            words += _words(parameter, given[parameter.name])
    try:
        return command.main(words, prog_name="serve", standalone_mode=False)
    except UsageError as error:
        raise ConfigError(cast(Any, error).format_message()) from None


def _words(parameter: Any, value: Any) -> list[str]:
    (name, *_), no_name = parameter.opts, parameter.secondary_opts[:1]
    if parameter.is_flag:
        asked = _read(value)
        if not isinstance(asked, bool):
            raise ConfigError(f"{parameter.name} {show(value)} must be true or false")
        return [name] if asked else no_name
    if parameter.multiple:
        listed = cast(list[Any], value) if isinstance(value, list) else [value]
        return [word for each in listed for word in (name, str(each))]
    return [name, json.dumps(value) if isinstance(value, Mapping) else str(value)]


def _resources(whose: str, given: Any) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise ConfigError(f"{whose}_resources {show(given)} must be a mapping, such as num_cpus: 8")
    return cast(Mapping[str, Any], given)


def _fronts(given: Any) -> int:
    if not isinstance(given, int) or not 1 <= given <= MAX_FRONTS:
        raise ConfigError(f"fronts {show(given)} must be a number from 1 to {MAX_FRONTS}")
    return given


def _scale(given: Any, most: int) -> ScaleOptions | None:
    if given is None:
        return None
    known = [each.name for each in fields(ScaleOptions) if each.name != "max_replicas"]
    named = cast(Mapping[str, Any], given) if isinstance(given, Mapping) else None
    if named is None or not set(named) <= set(known):
        raise ConfigError(
            f"autoscaling {show(cast(object, given))} must be a mapping, with {', '.join(known)} "
            f"alone; the most engines are replicas"
        )
    for name, value in named.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"autoscaling's {name} {show(value)} must be a number")
    return ScaleOptions(**{"min_replicas": 1, **named, "max_replicas": most})
