"""`freeze_heap`: leaves what a process has loaded out of later garbage collections, each of which
would take a tenth of a second, and returns the memory that only loading needed."""

import ctypes
import gc
import logging
from collections.abc import Generator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

# Objects, and collections of the younger ones, between two collections: with a thousand open
# requests one of everything takes 50 ms, and by Python's own thresholds came every two seconds.
THRESHOLDS = (1000, 10, 25)


@contextmanager
def loading() -> Generator[None]:
    """No garbage is collected until `freeze_heap`, since what loading makes is kept; collections
    would take a sixth of a start."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def freeze_heap() -> None:
    """Called once, when the process is ready."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    gc.enable()
    _return_free_memory()
    logger.debug("%d objects are left out of garbage collections", gc.get_freeze_count())


def _return_free_memory() -> None:
    """glibc keeps what was freed in the middle of its heap."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
