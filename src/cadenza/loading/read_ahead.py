"""`read_ahead`: has the system read the files of weights before they are needed.

Knows no formats. Without it they are read while they are packed, by page faults. Invariant: nothing
waits for it, and it cannot fail.
"""

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from cadenza.checkpoint import Checkpoint

_PART_BYTES = 512 << 10
"""Linux reads no more for one request than the largest transfer of the disk."""


def read_ahead(checkpoint: Checkpoint, available_bytes: int) -> threading.Thread | None:
    """Starts a thread that asks for all files of weights, in their order; none where files of this
    size may not stay in memory, or the system has no such request.
    """
    if not checkpoint.is_known or not hasattr(os, "posix_fadvise"):
        return None
    files = checkpoint.weights.files
    if 2 * sum(len(file.data) for file in files) > available_bytes:
        return None
    paths = [checkpoint.folder / file.name for file in files]
    thread = threading.Thread(target=_ask_for, args=(paths,), name="read-ahead", daemon=True)
    thread.start()
    return thread


def _ask_for(paths: Sequence[Path]) -> None:
    for path in paths:
        try:
            with path.open("rb") as file:
                for at in range(0, os.fstat(file.fileno()).st_size, _PART_BYTES):
                    os.posix_fadvise(file.fileno(), at, _PART_BYTES, os.POSIX_FADV_WILLNEED)
        except OSError:
            return  # reading the weights will say why
