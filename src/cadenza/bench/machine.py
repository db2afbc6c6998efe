"""What a figure was measured on: processor, threads, versions, load.

Knows no benchmark. Invariant: nothing here names the machine or its user.
"""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import cadenza
from cadenza.backends.base import Instruments
from cadenza.bench.roofline import num_usable_cores

_CPU_INFO = Path("/proc/cpuinfo")


def describe_machine(instruments: Instruments | None) -> dict[str, object]:
    """Facts for the JSON object; `isa` is None where there are no native kernels."""
    return {
        "cpu": cpu_name(),
        "architecture": platform.machine(),
        "system": platform.system(),
        "cores": num_usable_cores(),
        "threads": None if instruments is None else instruments.num_threads,
        "isa": None if instruments is None else instruments.cpu_isa,
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "jax": _version("jax"),
        "cadenza": cadenza.__version__,
    }


def cpu_name(cpu_info: Path = _CPU_INFO) -> str:
    """The processor's name, as far as the system tells."""
    try:
        lines = cpu_info.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), "") or platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
