"""`split_cpus`: the CPUs of each replica of one machine. The kernels of an engine use as many
threads as its process may run on, so each replica gets CPUs of its own, of one memory node where
there are several.
"""

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

NODES = Path("/sys/devices/system/node")


def split_cpus(cpus: Sequence[int], num_parts: int) -> list[tuple[int, ...]]:
    """Consecutive parts of nearly equal size; all CPUs for each where there are too few."""
    if len(cpus) < num_parts:
        return [tuple(cpus)] * num_parts
    ends = [len(cpus) * part // num_parts for part in range(num_parts + 1)]
    return [tuple(cpus[start:end]) for start, end in pairwise(ends)]


def own_cpus(nodes: Path = NODES) -> list[int]:
    """Those that this process may use, by memory node; empty where the system does not tell."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    allowed = os.sched_getaffinity(0)
    found: list[int] = []
    for node in sorted(nodes.glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        found += [cpu for cpu in _listed(node / "cpulist") if cpu in allowed]
    return found if set(found) == allowed else sorted(allowed)


def place_on(pid: int, cpus: Sequence[int]) -> None:
    """Binds a new process, and what it starts, to these CPUs; with none of them nothing changes."""
    if cpus:
        os.sched_setaffinity(pid, cpus)


def _listed(path: Path) -> list[int]:
    """Of a file such as `0-3,8`."""
    found: list[int] = []
    for part in path.read_text().strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found += range(int(first), int(last or first) + 1)
    return found
