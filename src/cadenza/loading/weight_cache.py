"""`packed_weights_file`: where the weights that `--quantization` makes are cached, below `weights`
of the cache folder, and the bound on their bytes. A backend reads and writes the files. A name
stands for everything that the content of a file depends on."""

import logging
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from cadenza.backends.base import RunnerSetup
from cadenza.config import EngineConfig
from cadenza.errors import show_size
from cadenza.loading.identity import Identity

logger = logging.getLogger(__name__)

DEFAULT_BYTES = 16 << 30
MIN_WEIGHT_BYTES = 64 << 20  # smaller models are quantised in a fraction of a second

FREE_SHARE = 0.1  # of the disk stays free

ABANDONED_S = 3600.0  # an incomplete file of this age has no writer any more

_SUFFIX = ".packed"


def packed_weights_file(
    setup: RunnerSetup,
    config: EngineConfig,
    weight_bytes: int,
    identify: Callable[[], Identity],
) -> Path | None:
    """The file for the packed weights of `setup`; None if they are not cached."""
    max_bytes = max_cache_bytes(config)
    if setup.quantization == "none" or setup.cache_folder is None:
        return None
    if not MIN_WEIGHT_BYTES <= weight_bytes <= max_bytes:
        return None
    folder = setup.cache_folder / "weights"
    path = folder / f"{identify().digest('weights')}{_SUFFIX}"
    if path.exists() or _make_room(folder, max_bytes, weight_bytes):
        return path
    return None


def max_cache_bytes(config: EngineConfig) -> int:
    chosen = config.weight_cache_bytes
    return DEFAULT_BYTES if chosen is None else chosen


def _make_room(folder: Path, max_bytes: int, num_bytes: int) -> bool:
    """Removes the least recently used files; whether `num_bytes` more may be written."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_abandoned(folder)
        files = sorted(folder.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime_ns)
        sizes = {path: path.stat().st_size for path in files}
        disk = shutil.disk_usage(folder)
    except OSError as error:
        logger.debug("quantised weights are not kept: %s", error.strerror)
        return False
    kept, free = sum(sizes.values()), disk.free
    for path in files:
        if kept + num_bytes <= max_bytes:
            break
        with suppress(OSError):
            path.unlink()
        kept, free = kept - sizes[path], free + sizes[path]
    if free - num_bytes >= FREE_SHARE * disk.total:
        return True
    logger.debug("quantised weights are not kept: the disk has %s left", show_size(free))
    return False


def _remove_abandoned(folder: Path) -> None:
    oldest = time.time() - ABANDONED_S
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.endswith(_SUFFIX) and entry.stat().st_mtime < oldest:
                with suppress(OSError):
                    os.unlink(entry)
