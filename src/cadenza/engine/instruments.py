"""What measures an engine from the outside: the machine's limits, the time of each operation.

Owns the face that benchmarks see; the measuring itself is the backend's. Knows no benchmark.
Invariant: nothing is measured, and nothing heavy loaded, before it is asked for.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from cadenza.backends.xla.ops.native_measure import NativeMeasure


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTotals:
    """One operation's calls, their time, and the bytes that it had to read at least once."""

    name: str
    num_calls: int
    elapsed_s: float
    read_bytes: int


class NativeInstruments:
    """Over the native CPU kernels. Make one with `native_instruments`."""

    def __init__(self, measure: "NativeMeasure") -> None:
        self._measure = measure

    @property
    def cpu_isa(self) -> str:
        """The instruction set whose kernels run."""
        return self._measure.cpu_isa

    @property
    def num_threads(self) -> int:
        return self._measure.num_threads

    def read_bytes_per_s(self, buffer: "npt.NDArray[np.uint8]", *, repeats: int) -> float:
        """All threads read a buffer of `new_buffer`; the fastest of the passes."""
        return self._measure.read_bytes_per_s(buffer, repeats)

    def operations_per_s(self, dtype: str, *, repeats: int) -> float:
        """All threads multiply `dtype` in registers; the fastest of the runs."""
        return self._measure.operations_per_s(dtype, repeats)

    def start_profile(self) -> None:
        """Begins to count, from zero."""
        self._measure.start_profile()

    def stop_profile(self) -> tuple[OpTotals, ...]:
        """Stops counting; every operation there is, also those without a call."""
        self._measure.stop_profile()
        return tuple(
            OpTotals(
                name=name, num_calls=num_calls, elapsed_s=nanoseconds / 1e9, read_bytes=read_bytes
            )
            for name, num_calls, nanoseconds, read_bytes in self._measure.profile_totals()
        )


def private_memory_bytes(status: Path = Path("/proc/self/status")) -> int | None:
    """What this process holds that is no file's; None where the system does not tell."""
    try:
        lines = status.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    held = [line.split()[1] for line in lines if line.startswith("RssAnon:")]
    return int(held[0]) * 1024 if held else None


def new_buffer(num_bytes: int) -> "npt.NDArray[np.uint8]":
    """Memory for `NativeInstruments.read_bytes_per_s`."""
    from cadenza.backends.xla.ops.native_measure import new_buffer as make

    return make(num_bytes)


def native_instruments() -> NativeInstruments | None:
    """None where the package was built without its native kernels.

    Raises ConfigError when they cannot be loaded.
    """
    from cadenza.backends.xla.ops.native_library import has_native_library

    if not has_native_library():
        return None
    from cadenza.backends.xla.ops.native_measure import NativeMeasure

    return NativeInstruments(NativeMeasure())
