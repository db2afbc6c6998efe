"""`open_page_folder`: the folder of `--prefix-cache-disk`, for pages of the engine's identity."""

from pathlib import Path

from cadenza.config import EngineConfig
from cadenza.engine.page_folder import PageFolder
from cadenza.loading.planned_engine import PlannedEngine

DEFAULT_BYTES = 8 << 30
"""Of a folder without `--prefix-cache-disk-bytes`."""


def open_page_folder(engine: PlannedEngine) -> PageFolder | None:
    """The folder for the runner of an engine; None if the options ask for none.

    Reads all weights once for their digest, unless it is in the cache folder. Raises ConfigError if
    the folder cannot be used.
    """
    config = engine.config
    if config.prefix_cache_disk is None:
        return None
    folder = Path(config.prefix_cache_disk)
    return PageFolder(folder, engine.identity().digest("pages"), max_folder_bytes(config))


def max_folder_bytes(config: EngineConfig) -> int:
    """The most that the folder's pages may take."""
    return config.prefix_cache_disk_bytes or DEFAULT_BYTES
