"""Cadenza's public API; each name is imported lazily from its module on first use.

Owns the list of public names and the version. Invariant: importing this module imports no other
module of Cadenza and no third-party package, so that `--version` and `--help` start fast.

Modules:

- `config`: the user's options (`EngineConfig`) and the resolved bounds (`EngineLimits`)
- `option`: how an option is declared, with its bounds, help and names
- `figures`: what is counted and measured, declared once for engine, `/metrics` and docs
- `speculative_config`: the value of `--speculative-config`
- `sparse_prefill`: prompts of which only a part is computed: the value of `--spec-prefill`, a
  request's choice, the tokens that are kept
- `tenant`: on whose behalf a request is served
- `bounds`: bounded values of requests, and what may be given in place of them
- `request`: `Request`, `SamplingParams` and their `BOUNDS`, attachments
- `events`: what comes of a request: `Token`, `Finished`, …
- `outputs`: results, under the names that vLLM uses
- `structured`: the form that an answer must have, as it is asked for and as it is resolved, and the
  protocol of what decides which tokens may follow
- `errors`: one tree of exceptions
- `json_object`: typed access to untrusted JSON
- `fingerprint`: what an answer depends on besides its request; what another machine needs to
  compute it again
- `build_record`: the commit, platform and compiler of a wheel
- `kernel_proof`: what was compared of kernels' bits when a model was loaded
- `server_link`: how a command reaches a server: its certificate, a proxy, what went wrong
- `serve_app`: engines on many machines, as an application of Ray Serve
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cadenza.config import EngineConfig, EngineOptions
    from cadenza.engine.core import EngineCore
    from cadenza.events import Finished, Token
    from cadenza.frontend.async_engine import AsyncEngine
    from cadenza.frontend.llm import LLM
    from cadenza.outputs import (
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        Logprob,
        RequestOutput,
    )
    from cadenza.request import PoolingParams, Request, SamplingParams
    from cadenza.structured import StructuredOutput
    from cadenza.verification.reference import ReferenceEngine

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineConfig",
    "EngineCore",
    "EngineOptions",
    "Finished",
    "Logprob",
    "PoolingParams",
    "ReferenceEngine",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutput",
    "Token",
    "__version__",
]

_HOMES = {
    "AsyncEngine": "cadenza.frontend.async_engine",
    "CompletionOutput": "cadenza.outputs",
    "EmbeddingOutput": "cadenza.outputs",
    "EmbeddingRequestOutput": "cadenza.outputs",
    "EngineConfig": "cadenza.config",
    "EngineCore": "cadenza.engine.core",
    "EngineOptions": "cadenza.config",
    "Finished": "cadenza.events",
    "LLM": "cadenza.frontend.llm",
    "Logprob": "cadenza.outputs",
    "PoolingParams": "cadenza.request",
    "ReferenceEngine": "cadenza.verification.reference",
    "Request": "cadenza.request",
    "RequestOutput": "cadenza.outputs",
    "SamplingParams": "cadenza.request",
    "StructuredOutput": "cadenza.structured",
    "Token": "cadenza.events",
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
