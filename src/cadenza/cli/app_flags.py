"""`AppFlags`: the keywords of a Ray Serve application, which are the flags of `cadenza serve`."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from cadenza.cli.serve import ServeFlags
from cadenza.config import EngineConfig
from cadenza.errors import ConfigError

_OWN = ("engine_resources", "front_resources")
_MEANINGLESS = ("host", "port", "uds", "uds_mode", "ssl_certfile", "ssl_keyfile", "handover")
"""Flags of what Ray's ingress does."""


@dataclass(frozen=True, kw_only=True)
class AppFlags:
    """The keywords of an application, sorted. Raises ConfigError for one that is not known."""

    serve: ServeFlags
    config: EngineConfig
    engine_resources: Mapping[str, Any]
    front_resources: Mapping[str, Any]

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        of_serve = {each.name for each in fields(ServeFlags)}
        of_engine = {each.name for each in fields(EngineConfig)}
        for name in given:
            if name in _MEANINGLESS:
                raise ConfigError(f"{name} has no meaning here: Ray Serve's ingress listens")
            if name not in of_serve | of_engine | set(_OWN):
                near = difflib.get_close_matches(name, [*of_serve, *of_engine, *_OWN], 1)
                raise ConfigError(
                    f"there is no flag {name}{f' (did you mean {near[0]}?)' if near else ''}; the "
                    f"flags are those of `cadenza serve`, with _ for -, and {', '.join(_OWN)}"
                )
        return cls(
            serve=ServeFlags(**{name: given[name] for name in given if name in of_serve}),
            config=EngineConfig(**{name: given[name] for name in given if name in of_engine}),
            engine_resources=given.get("engine_resources", {"num_cpus": 1}),
            front_resources=given.get("front_resources", {"num_cpus": 0}),
        )
