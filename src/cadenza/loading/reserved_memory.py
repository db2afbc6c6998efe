"""Memory that engines of this machine have reserved and not taken yet: KV pages become resident as
they are used. Each engine keeps a locked file with its bytes in `engines` of the cache folder; what
it holds already is subtracted. Best effort: engines with another cache folder or process namespace
are not seen. A file whose engine has ended reserves nothing."""

import fcntl
import json
import logging
import os
import secrets
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from cadenza.loading.memory import private_memory_bytes

logger = logging.getLogger(__name__)

MAX_ENGINES = 256
MAX_FILE_BYTES = 4096
_PARTIAL = ".partial"
# what reading a file raises that was damaged
_DAMAGED = (ValueError, KeyError, TypeError, OverflowError, RecursionError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """Bytes that engines will still take: in all, and in this process's control groups."""

    in_all: int = 0
    in_group: int = 0


class MemoryReservation:
    """One engine's reservation, until `close`, or it is dropped, or the process ends."""

    def __init__(self, path: Path | None = None, descriptor: int | None = None) -> None:
        self._end = None
        if path is not None and descriptor is not None:
            self._end = weakref.finalize(self, _end_reservation, path, descriptor, os.getpid())

    def close(self) -> None:
        if self._end is not None:
            self._end()


def _end_reservation(path: Path, descriptor: int, pid: int) -> None:
    if os.getpid() == pid:  # a fork's copy ends nothing
        with suppress(OSError):
            path.unlink()
        os.close(descriptor)


def record_reservation(folder: Path, num_bytes: int, root: Path = Path("/")) -> MemoryReservation:
    """Records that this process will hold `num_bytes`; does nothing if that cannot be written."""
    path = folder / secrets.token_hex(8)
    partial = path.with_suffix(_PARTIAL)
    record = {
        "pid": os.getpid(),
        "bytes": num_bytes,
        "group": _group(root),
        "system": _system(root),
    }
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(descriptor, json.dumps(record).encode())
            partial.replace(path)  # no file of this name is ever without its lock
        except OSError:
            with suppress(OSError):
                partial.unlink()
            os.close(descriptor)
            raise
    except OSError as error:
        logger.debug(
            "other engines cannot see the memory that this one reserves: %s", error.strerror
        )
        return MemoryReservation()
    return MemoryReservation(path, descriptor)


def find_reserved(folder: Path, root: Path = Path("/")) -> Reserved:
    """What the running engines will still take, those of this process included."""
    planned: Counter[int] = Counter()
    groups: dict[int, str] = {}
    for record in _read_all(folder):
        if record["system"] == _system(root):
            planned[record["pid"]] += record["bytes"]
            groups[record["pid"]] = record["group"]
    left = {pid: _left(num_bytes, pid, root) for pid, num_bytes in planned.items()}
    own = _group(root)
    return Reserved(
        in_all=sum(left.values()),
        in_group=sum(num_bytes for pid, num_bytes in left.items() if groups[pid] == own),
    )


def _left(planned_bytes: int, pid: int, root: Path) -> int:
    held_bytes = private_memory_bytes(root / f"proc/{pid}/status")
    return 0 if held_bytes is None else max(0, planned_bytes - held_bytes)


def _read_all(folder: Path) -> Iterator[dict[str, Any]]:
    """The files of running engines; those of others are removed."""
    try:
        paths = sorted(folder.iterdir())[:MAX_ENGINES]
    except OSError:
        return
    for path in paths:
        with suppress(OSError, *_DAMAGED), path.open("rb") as file:
            if _is_locked(file):
                record = json.loads(file.read(MAX_FILE_BYTES))
                yield {
                    "pid": int(record["pid"]),
                    "bytes": int(record["bytes"]),
                    "group": str(record["group"]),
                    "system": str(record["system"]),
                }
            elif path.suffix != _PARTIAL:
                path.unlink()


def _is_locked(file: "IO[bytes]") -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _group(root: Path) -> str:
    with suppress(OSError):
        return (root / "proc/self/cgroup").read_text(errors="replace")[: MAX_FILE_BYTES // 2]
    return ""


def _system(root: Path) -> str:
    """The namespace in which a process id has its meaning."""
    with suppress(OSError):
        return os.readlink(root / "proc/self/ns/pid")
    return ""
