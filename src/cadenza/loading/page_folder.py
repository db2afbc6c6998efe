"""`open_page_folder`: the folder of `--prefix-cache-disk`, with what its pages depend on.

Reads all weights once for their digest, unless it is in the cache folder. Invariant: engines with
equal fingerprints compute equal bits for a page of equal tokens.
"""

import hashlib
from pathlib import Path

from cadenza import __version__
from cadenza.backends.base import Backend, RunnerSetup
from cadenza.checkpoint import Checkpoint
from cadenza.config import EngineConfig
from cadenza.engine.page_folder import PageFolder
from cadenza.loading.content_digest import content_digest
from cadenza.loading.plan import EnginePlan


def open_page_folder(
    checkpoint: Checkpoint,
    plan: EnginePlan,
    config: EngineConfig,
    backend: Backend,
    setup: RunnerSetup,
) -> PageFolder | None:
    """The folder for the runner of `setup`; None if the options ask for none.

    Raises ConfigError if it cannot be used.
    """
    if config.prefix_cache_disk is None:
        return None
    assert setup.cache_folder is not None
    # Where the class of the arithmetic has no name, the step's shape decides about bits too.
    is_named = backend.name_arithmetic(checkpoint, setup) is not None
    shape = "" if is_named else repr(plan.limits)
    parts = (
        __version__,  # the layout of a page, which is that of the kernels
        content_digest(checkpoint, setup.cache_folder),
        *backend.describe_arithmetic(config.device, config.ops, checkpoint),
        shape,
        plan.traits.name,
        plan.traits.ops,
        config.arithmetic,
        plan.dtype,
        plan.weights_name,
        plan.kv_name,
        str(plan.limits.page_size),
        str(plan.limits.max_model_len),  # LongRoPE's factors follow it
    )
    framed = "".join(f"{len(part)}:{part}" for part in parts)
    fingerprint = hashlib.sha256(framed.encode()).hexdigest()
    return PageFolder(Path(config.prefix_cache_disk), fingerprint, config.prefix_cache_disk_bytes)
