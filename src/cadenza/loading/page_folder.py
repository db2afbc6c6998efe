"""`open_page_folder`: the folder of `--prefix-cache-disk`, with what its pages depend on.

Reads all weights once for their digest, unless it is in the cache folder. Invariant: engines with
equal fingerprints compute equal bits for a page of equal tokens.
"""

import os
import platform
from pathlib import Path

from cadenza import __version__
from cadenza.config import EngineConfig, EngineLimits
from cadenza.engine.page_folder import PageFolder
from cadenza.fingerprint import ARITHMETIC_REVISION
from cadenza.loading.content_digest import content_digest, digest_of
from cadenza.loading.planned_engine import PlannedEngine

DEFAULT_BYTES = 8 << 30
"""Of a folder without `--prefix-cache-disk-bytes`."""


def open_page_folder(engine: PlannedEngine) -> PageFolder | None:
    """The folder for the runner of an engine; None if the options ask for none.

    Raises ConfigError if it cannot be used.
    """
    config = engine.config
    if config.prefix_cache_disk is None:
        return None
    folder = Path(config.prefix_cache_disk)
    return PageFolder(folder, page_fingerprint(engine), max_folder_bytes(config))


def page_fingerprint(engine: PlannedEngine) -> str:
    """A digest of all that decides the bits of a page besides what it is of."""
    checkpoint, plan, config = engine.checkpoint, engine.plan, engine.config
    backend, setup = engine.backend, engine.setup()
    assert setup.cache_folder is not None
    is_named = backend.name_arithmetic(checkpoint, setup) is not None
    parts = (
        __version__,  # the layout of a page, which is that of the kernels
        str(ARITHMETIC_REVISION),
        content_digest(checkpoint, setup.cache_folder),
        *backend.describe_arithmetic(config.device, config.ops, checkpoint),
        *(() if is_named else _describe_machine(plan.limits)),
        plan.traits.name,
        plan.traits.ops,
        config.arithmetic,
        plan.dtype,
        plan.weights_name,
        plan.kv_name,
        str(plan.limits.page_size),
        str(plan.limits.max_model_len),  # LongRoPE's factors follow it
        *(("hidden states",) if plan.keeps_hidden else ()),  # pages have them, too
    )
    return digest_of(parts)


def max_folder_bytes(config: EngineConfig) -> int:
    """The most that the folder's pages may take."""
    return config.prefix_cache_disk_bytes or DEFAULT_BYTES


def _describe_machine(limits: EngineLimits) -> tuple[str, ...]:
    """What may decide bits where the class of the arithmetic has no name: the processor and the
    shapes of a step."""
    return (platform.machine(), str(os.cpu_count()), _cpu_flags(), repr(limits.of_steps))


def _cpu_flags() -> str:
    """As the kernel lists them; empty where it does not."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
