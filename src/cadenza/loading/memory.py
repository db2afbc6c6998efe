"""Available memory by /proc/meminfo, control groups and the limits of the process (Linux; elsewhere
all physical memory), less what other engines have reserved and not taken yet: each keeps a locked
file with its bytes in `engines` of the cache folder. Best effort: those with another cache folder
or process namespace are not seen."""

import fcntl
import json
import logging
import os
import resource
import secrets
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

logger = logging.getLogger(__name__)

GetLimit = Callable[[int], tuple[int, int]]  # as `resource.getrlimit`: soft limit, hard limit

_THREAD_STACK_BYTES = 8 << 20
_THREAD_ARENA_BYTES = 64 << 20
_THREADS_PER_CORE = 4
_UNTOUCHED_BYTES = 320 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _GroupFiles:
    mount: str
    limit: str
    usage: str
    reclaimable: str


_VERSION_1 = _GroupFiles(
    mount="sys/fs/cgroup/memory",
    limit="memory.limit_in_bytes",
    usage="memory.usage_in_bytes",
    reclaimable="total_inactive_file",
)
_VERSION_2 = _GroupFiles(
    mount="sys/fs/cgroup", limit="memory.max", usage="memory.current", reclaimable="inactive_file"
)


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The memory for this process: at least `least_bytes`. Files are read below `root`. A plan
    takes `most_bytes` at most (None: no bound). `front_end_bytes` is what the front end's process
    holds; None without such a process."""

    root: Path = Path("/")
    get_limit: GetLimit = resource.getrlimit
    least_bytes: int = 0
    front_end_bytes: int | None = None
    most_bytes: int | None = None

    @property
    def available_bytes(self) -> int:
        return max(self.least_bytes, available_memory_bytes(self.root, self.get_limit))

    def available_beside(self, *, reserved_bytes: int, in_group_bytes: int) -> int:
        """`available_bytes`, less what other engines have reserved of the machine's memory, part of
        it in this process's control groups."""
        available = available_memory_bytes(self.root, self.get_limit)
        system = _system_bytes(self.root) - reserved_bytes
        return max(self.least_bytes, min(available - in_group_bytes, system), 0)

    @property
    def held_bytes(self) -> int:
        """Private memory of this process; 0 if unknown."""
        return private_memory_bytes(self.root / "proc/self/status") or 0

    def taken_bytes(self, *, process_bytes: int, front_end_bytes: int) -> int:
        """The part of the planned bytes of the engine's and the front end's processes that they
        hold already, and that is thus no longer available."""
        if self.front_end_bytes is None:
            return min(self.held_bytes, process_bytes + front_end_bytes)
        taken_bytes = min(self.held_bytes, process_bytes)
        return taken_bytes + min(self.front_end_bytes, front_end_bytes)


HOST_MEMORY = HostMemory()


def available_memory_bytes(root: Path = Path("/"), get_limit: GetLimit = resource.getrlimit) -> int:
    """Bytes that can be allocated without swapping or exceeding a limit of a cgroup or the process.
    Reclaimable page cache counts as available. Files are read below `root`."""
    limits = [*_group_bytes(root), *_process_bytes(root, get_limit)]
    return min([_system_bytes(root), *limits])


def private_memory_bytes(status: Path = Path("/proc/self/status")) -> int | None:
    """Bytes of this process's anonymous resident memory; None if unknown."""
    return status_bytes(status, "RssAnon")


def usable_cores(environment: Mapping[str, str] = os.environ) -> int:
    """Cores that this process may run on, at most `CADENZA_NUM_THREADS` if that is set."""
    if hasattr(os, "sched_getaffinity"):
        num_cores = len(os.sched_getaffinity(0))
    else:
        num_cores = os.cpu_count() or 1
    asked = environment.get("CADENZA_NUM_THREADS", "")
    return min(num_cores, max(1, int(asked))) if asked.isdecimal() else num_cores


def status_bytes(status: Path, name: str) -> int | None:
    num_kib = _status_number(status, name)
    return None if num_kib is None else num_kib * 1024


def _status_number(status: Path, name: str) -> int | None:
    held = [line.split()[1] for line in _lines(status) if line.startswith(f"{name}:")]
    return int(held[0]) if held else None


def _process_bytes(root: Path, get_limit: GetLimit) -> Iterator[int]:
    """Bytes left below the process's limits of data and address space. Both count memory that is
    reserved and never touched: the rest of a chunk for packed weights, stacks, and in the address
    space the threads' heaps."""
    started = _status_number(root / "proc/self/status", "Threads") or 0
    num_threads = max(0, _THREADS_PER_CORE * usable_cores() - started)
    stack_bytes = _UNTOUCHED_BYTES + num_threads * _THREAD_STACK_BYTES
    arena_bytes = stack_bytes + num_threads * _THREAD_ARENA_BYTES
    for which, name, untouched_bytes in (
        (resource.RLIMIT_DATA, "VmData", stack_bytes),
        (resource.RLIMIT_AS, "VmSize", arena_bytes),
    ):
        limit, _ = get_limit(which)
        used = status_bytes(root / "proc/self/status", name)
        if limit != resource.RLIM_INFINITY and used is not None:
            yield max(0, limit - used - untouched_bytes)


def _system_bytes(root: Path) -> int:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _group_bytes(root: Path) -> Iterator[int]:
    """Bytes left below each memory limit of this process's cgroups and all their parents."""
    for files, own in _own_groups(root):
        mount = root / files.mount
        folder = mount / own.strip("/")
        for group in (folder, *folder.parents):
            limit, usage = _number(group / files.limit), _number(group / files.usage)
            if limit is not None and usage is not None:
                yield max(0, limit - usage + min(_reclaimable(group, files), usage))
            if group == mount:
                break


def _own_groups(root: Path) -> Iterator[tuple[_GroupFiles, str]]:
    yield _VERSION_1, "/"
    yield _VERSION_2, "/"
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if ".." in path.split("/"):
            continue
        if controllers == "":
            yield _VERSION_2, path
        elif "memory" in controllers.split(","):
            yield _VERSION_1, path


def _reclaimable(group: Path, files: _GroupFiles) -> int:
    for line in _lines(group / "memory.stat"):
        name, _, value = line.partition(" ")
        if name == files.reclaimable and value.isdecimal():
            return int(value)
    return 0


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdecimal() else None  # absent, or "max"


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
