"""The table behind `--backend`: a backend is one package and one line here.

Each backend is given as a string and imported only when chosen, so that no other module depends on
a particular backend (import-linter enforces this).

Modules:

- `base`: the interfaces `Backend` and `Runner`
- `runner_thread`: the only thread in which some runners compute
- `token_choice`: penalties, biases, bans and sampling over an array library, JAX or MLX
- `exporting`: a model's step from `xla`, compiled for `iree`
- `fake`, `fake_memory`: a runner that stores tokens in place of KV, states and images
"""

import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

from cadenza.errors import ConfigError, show

if TYPE_CHECKING:
    from cadenza.backends.base import Backend

# `module:class` of each backend by its `--backend` name, in order of preference.
Backends = Mapping[str, str]

BACKENDS: Backends = MappingProxyType(
    {
        "xla": "cadenza.backends.xla.backend:XlaBackend",
        "mlx": "cadenza.backends.mlx.backend:MlxBackend",
        "iree": "cadenza.backends.iree.backend:IreeBackend",
    }
)

# Backends that have the code of their models, so that they need no `ModelConfig`.
OWN_MODEL_CODE = frozenset({"mlx"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What `auto` depends on."""

    is_apple_silicon: bool
    has_mlx: bool

    @classmethod
    def of_this_process(cls) -> "Machine":
        is_apple_silicon = sys.platform == "darwin" and platform.machine() == "arm64"
        return cls(
            is_apple_silicon=is_apple_silicon,
            has_mlx=is_apple_silicon and all(map(find_spec, ("mlx", "mlx_lm"))),
        )


def resolve_backend(
    name: str, backends: Backends = BACKENDS, machine: Machine | None = None
) -> str:
    """Checks the name and resolves `auto`: mlx on Apple silicon where it is installed, otherwise
    the first backend. Imports nothing. Raises ConfigError for an unknown name."""
    if name == "auto":
        machine = machine or Machine.of_this_process()
        is_mlx = "mlx" in backends and machine.is_apple_silicon and machine.has_mlx
        return "mlx" if is_mlx else next(iter(backends))
    if name in backends:
        return name
    allowed = ", ".join(("auto", *backends))
    raise ConfigError(f"--backend {show(name)} is not one of {allowed}")


def uses_own_model_code(name: str, backends: Backends = BACKENDS) -> bool:
    """Whether the backend called `name` needs no `ModelConfig`. Raises ConfigError if unknown."""
    return resolve_backend(name, backends) in OWN_MODEL_CODE


def find_backend(name: str, backends: Backends = BACKENDS) -> "Backend":
    """Imports the backend called `name`, or that of `auto`. Raises ConfigError if unknown."""
    module, _, attribute = backends[resolve_backend(name, backends)].partition(":")
    return cast("type[Backend]", getattr(import_module(module), attribute))()
