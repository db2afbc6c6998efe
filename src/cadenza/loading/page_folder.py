"""`open_page_folder`: the folder of `--prefix-cache-disk`, for pages of the engine's identity."""

from pathlib import Path

from cadenza.config import EngineConfig
from cadenza.engine.page_folder import PageFolder
from cadenza.loading.planned_engine import PlannedEngine

DEFAULT_BYTES = 8 << 30  # without `--prefix-cache-disk-bytes`


def open_page_folder(engine: PlannedEngine) -> PageFolder | None:
    """The folder for an engine's runner; None if the options ask for none. Reads all weights once
    for their digest, unless it is cached. Raises ConfigError if the folder cannot be used."""
    config = engine.config
    if config.prefix_cache_disk is None:
        return None
    folder = Path(config.prefix_cache_disk)
    return PageFolder(folder, engine.identity().digest("pages"), max_folder_bytes(config))


def max_folder_bytes(config: EngineConfig) -> int:
    return config.prefix_cache_disk_bytes or DEFAULT_BYTES
