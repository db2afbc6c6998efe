"""How much memory this process may still take: the machine's and the control group's word."""

import os
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP_LIMITS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def available_memory_bytes() -> int:
    """Bytes that can be allocated without swapping, as far as the system tells."""
    amounts = [_system_bytes()]
    for limit_path, usage_path in _CGROUP_LIMITS:
        limit, usage = _read_number(limit_path), _read_number(usage_path)
        if limit is not None and usage is not None:
            amounts.append(max(0, limit - usage))
    return min(amounts)


def _system_bytes() -> int:
    try:
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None
