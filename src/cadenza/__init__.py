"""Cadenza's public names, each loaded from its own module when it is first used.

Owns the list of names that callers may rely on, and the version. Knows nothing of what they do.
Invariant: importing this module loads no other module of Cadenza and no third-party package, so
that a program which only asks for the version, or a command that only prints its help, starts at
once.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cadenza.config import EngineConfig
    from cadenza.engine.core import EngineCore
    from cadenza.frontend.async_engine import AsyncEngine
    from cadenza.frontend.llm import LLM
    from cadenza.outputs import CompletionOutput, Logprob, RequestOutput
    from cadenza.request import Finished, Request, SamplingParams, Token
    from cadenza.verification.reference import ReferenceEngine

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "EngineConfig",
    "EngineCore",
    "Finished",
    "Logprob",
    "ReferenceEngine",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "Token",
    "__version__",
]

_HOMES = {
    "AsyncEngine": "cadenza.frontend.async_engine",
    "CompletionOutput": "cadenza.outputs",
    "EngineConfig": "cadenza.config",
    "EngineCore": "cadenza.engine.core",
    "Finished": "cadenza.request",
    "LLM": "cadenza.frontend.llm",
    "Logprob": "cadenza.outputs",
    "ReferenceEngine": "cadenza.verification.reference",
    "Request": "cadenza.request",
    "RequestOutput": "cadenza.outputs",
    "SamplingParams": "cadenza.request",
    "Token": "cadenza.request",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'cadenza' has no attribute {name!r}")
    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
