"""The backends by name, and the choice among them. A backend is one package and one line here.

Owns the table behind `--backend`. Names each backend as a string and imports it when it is chosen,
so that no other module depends on a particular one (import-linter enforces it).
"""

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

from cadenza.errors import ConfigError, show

if TYPE_CHECKING:
    from cadenza.backends.base import Backend

Backends = Mapping[str, str]
"""Where each backend is, as `module:class`, by the name that `--backend` takes; best first."""

BACKENDS: Backends = MappingProxyType(
    {
        "xla": "cadenza.backends.xla.backend:XlaBackend",
    }
)

PLANNED = ("mlx",)
"""Backends that are not built yet, and refused as such."""


def resolve_backend(name: str, backends: Backends = BACKENDS) -> str:
    """The name of the backend that `name` chooses; `auto` is the first one. Imports nothing.

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
    """Imports the backend that `name` chooses. Raises ConfigError as `resolve_backend`."""
    module, _, attribute = backends[resolve_backend(name, backends)].partition(":")
    return cast("type[Backend]", getattr(import_module(module), attribute))()
