"""The table behind `--backend`: a backend is one package and one line here.

Each backend is given as a string and imported only when chosen, so that no other module depends on
a particular backend (import-linter enforces this).
"""

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

from cadenza.errors import ConfigError, show

if TYPE_CHECKING:
    from cadenza.backends.base import Backend

Backends = Mapping[str, str]
"""`module:class` of each backend by its `--backend` name, in order of preference."""

BACKENDS: Backends = MappingProxyType(
    {
        "xla": "cadenza.backends.xla.backend:XlaBackend",
    }
)

PLANNED = ("mlx",)
"""Backends that are planned but not implemented; the error message says so."""


def resolve_backend(name: str, backends: Backends = BACKENDS) -> str:
    """Resolves `auto` to the first backend and checks the name. Imports nothing.

    Raises:
        ConfigError: there is no such backend.
    """
    if name == "auto":
        return next(iter(backends))
    if name in backends:
        return name
    unbuilt = f"; {name} is not built yet" if name in PLANNED else ""
    allowed = ", ".join(("auto", *backends))
    raise ConfigError(f"--backend {show(name)} is not one of {allowed}{unbuilt}")


def find_backend(name: str, backends: Backends = BACKENDS) -> "Backend":
    """Imports the backend called `name`, or the first for `auto`. Raises ConfigError if unknown."""
    module, _, attribute = backends[resolve_backend(name, backends)].partition(":")
    return cast("type[Backend]", getattr(import_module(module), attribute))()
