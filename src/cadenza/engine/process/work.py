"""`Work`: what a process has done so far, as the kernel counts it; `work_of` asks.

Tells a load that is slow from one that hangs: whatever it waits for, a load that goes on computes,
reads or faults pages in. Knows nothing of what the process does. Invariant: a process that is
stopped, or waits for what never comes, does not get beyond where it was.
"""

import os
from dataclasses import dataclass
from pathlib import Path

IDLE_S = 0.25
"""Less computing than this may be a sleeping library's housekeeping."""

_MAJOR_FAULTS, _USER_TICKS, _SYSTEM_TICKS = 9, 11, 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Of all threads of a process: seconds computed, bytes read, pages fetched from a disk."""

    cpu_s: float
    read_bytes: int
    num_major_faults: int

    def is_beyond(self, earlier: "Work") -> bool:
        """Something was done since."""
        return (
            self.cpu_s >= earlier.cpu_s + IDLE_S
            or self.read_bytes > earlier.read_bytes
            or self.num_major_faults > earlier.num_major_faults
        )


def work_of(pid: int) -> Work | None:
    """None where the kernel does not tell: the process is gone, or this is not Linux."""
    folder = Path("/proc") / str(pid)
    try:
        counts = (folder / "stat").read_text().rpartition(")")[2].split()
        reads = (folder / "io").read_text().splitlines()
    except OSError:
        return None
    read_bytes = dict(line.split(": ") for line in reads)["rchar"]
    ticks = int(counts[_USER_TICKS]) + int(counts[_SYSTEM_TICKS])
    return Work(
        cpu_s=ticks / os.sysconf("SC_CLK_TCK"),
        read_bytes=int(read_bytes),
        num_major_faults=int(counts[_MAJOR_FAULTS]),
    )
