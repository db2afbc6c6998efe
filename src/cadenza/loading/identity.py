"""`identify`: digests of what a model's streams depend on besides the request.

An engine goes on with the streams of another one only if both digests are equal. Reads no tensor.
Invariant: whatever may change a token or a log probability changes a digest; so may things that do
not, such as a copy of the same files.
"""

import hashlib
from collections.abc import Iterable

from cadenza import __version__
from cadenza.backends.base import Backend
from cadenza.checkpoint import Checkpoint
from cadenza.config import EngineConfig
from cadenza.engine.process.messages import EngineIdentity
from cadenza.loading.plan import EnginePlan


def identify(
    checkpoint: Checkpoint, plan: EnginePlan, config: EngineConfig, backend: Backend
) -> EngineIdentity:
    """The identity of the engine that `build_core` makes of the same arguments."""
    arithmetic = (
        __version__,
        plan.dtype,
        config.quantization,
        config.kv_cache_dtype,
        config.arithmetic,
        repr(plan.limits),
        repr(sorted(checkpoint.eos_token_ids)),
        str(config.seed),
        *backend.describe_arithmetic(config.device, config.ops, checkpoint),
    )
    return EngineIdentity(
        checkpoint=_digest((checkpoint.digest, *checkpoint.file_stamps)),
        arithmetic=_digest(arithmetic),
    )


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
