"""Available memory by /proc/meminfo and control groups, and this process's private memory.

Linux only; elsewhere `available_memory_bytes` is all physical memory.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class _GroupFiles:
    """The memory files of one cgroup version."""

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


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Bytes that can be allocated without swapping or exceeding a cgroup's limit.

    Reclaimable page cache counts as available. Files are read below `root`.
    """
    return min([_system_bytes(root), *_group_bytes(root)])


def private_memory_bytes(status: Path = Path("/proc/self/status")) -> int | None:
    """Bytes of this process's anonymous resident memory; None if unknown."""
    try:
        lines = status.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    held = [line.split()[1] for line in lines if line.startswith("RssAnon:")]
    return int(held[0]) * 1024 if held else None


def _system_bytes(root: Path) -> int:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _group_bytes(root: Path) -> Iterator[int]:
    """Bytes left below each memory limit: of this process's cgroups and all their parents."""
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
    """This process's cgroups in /proc, and the mounts' roots, which containers may use."""
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
