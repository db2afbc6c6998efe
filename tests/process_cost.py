"""A process's cost from /proc: CPU seconds of its threads and private memory.

Also measures how much a shared machine is slowed down by other load. Invariant: a value that cannot
be read is an error, never a zero that would pass as cheap.
"""

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="this system has no /proc")

IDLE_SHARE = 0.01
"""Of a core: an idle process takes less over a minute."""
SHORT_IDLE_SHARE = 0.02
"""The same over a second or two, where one housekeeping of a cold cache counts for more."""

_NUM_LOOKS = 3
_PROBE_S = 0.03
_PRIVATE = frozenset({"Private_Clean", "Private_Dirty", "Private_Hugetlb", "Swap"})


def cpu_s(pid: int) -> float:
    """What the threads that a process has now have computed so far."""
    threads = list(Path(f"/proc/{pid}/task").glob("*/schedstat"))
    assert threads, f"process {pid} has no threads"
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def wait(seconds: float) -> float:
    """How long it was."""
    start_s = time.monotonic()
    threading.Event().wait(seconds)
    return time.monotonic() - start_s


def idle_share(pid: int, seconds: float, wait: Callable[[float], float] = wait) -> float:
    """Of a core, what a process takes while nobody asks it for anything.

    The least of three looks: what is left of earlier work ends some time, a thread that never
    sleeps is in all of them.
    """

    def look() -> float:
        before_s = cpu_s(pid)
        waited_s = wait(seconds / _NUM_LOOKS)
        return (cpu_s(pid) - before_s) / waited_s

    return min(look() for _ in range(_NUM_LOOKS))


def slowness() -> float:
    """By how much to stretch a bound in seconds, 1 on an idle machine: others may use it too."""
    start_s, end_s = time.monotonic(), time.thread_time() + _PROBE_S
    while time.thread_time() < end_s:
        pass
    return max(1.0, 2 * (time.monotonic() - start_s) / _PROBE_S - 1.5)


def private_bytes(pid: int) -> int:
    """Memory of a process that no other shares, swapped out or not."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    sizes = {line.split(":")[0]: int(line.split(":")[1].split()[0]) for line in lines}
    assert sizes["Rss"] > 0
    return 1024 * sum(sizes.get(name, 0) for name in _PRIVATE)
