"""What this machine and this installation are, and what keeps them from more: the facts and
findings of `cadenza doctor`. Linux tells most; a fact that nothing tells is None."""

import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import cadenza
from cadenza.build_record import read_build
from cadenza.loading.memory import available_memory_bytes, status_bytes, usable_cores
from cadenza.loading.planned_engine import cache_folder

Facts = Mapping[str, Mapping[str, Any]]

LIBRARIES = (
    "jax",
    "jaxlib",
    "numpy",
    "ml_dtypes",
    "tokenizers",
    "llguidance",
    "msgspec",
    "uvicorn",
)

LEAST_FREE_BYTES = 2 << 30
"""Of the cache folder's disk: compiled programs and the quantised weights of a small model."""

LEAST_AVAILABLE_BYTES = 1 << 30

NEEDS: Mapping[str, tuple[str, ...]] = {
    "amx": ("amx_tile", "amx_bf16"),
    "avx512_bf16": ("avx512_bf16",),
    "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512dq"),
    "avx2": ("avx2", "fma"),
    "int8_amx": ("amx_tile", "amx_int8"),
    "int8_avx512_vnni": ("avx512_vnni", "avx512bw"),
    "int8_avx_vnni": ("avx_vnni",),
    "neon_bf16": ("bf16",),
    "int8_neon_dotprod": ("asimddp",),
}
"""What /proc/cpuinfo lists of a CPU that runs an instruction set, best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What was found of one fact, and what to do about it. A `problem` keeps Cadenza from
    answering, a `warning` makes it slower than the machine."""

    level: Literal["warning", "problem"]
    what: str
    advice: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineReport:
    """`facts`: sections of them, whose keys end in their units."""

    facts: Facts
    findings: tuple[Finding, ...]


def examine_machine(
    own: Facts, root: Path = Path("/"), environment: Mapping[str, str] = os.environ
) -> MachineReport:
    """Reads the files of the system below `root`. `own`: what the backend finds of the processor
    and the device (`Backend.describe_machine`). Loads no model and leaves nothing behind."""
    facts = {
        "build": build_facts(),
        "processor": {**processor_facts(root, environment), **own.get("processor", {})},
        "memory": memory_facts(root),
        "folders": folder_facts(),
        "device": {**driver_facts(root), **own.get("device", {})},
    }
    return MachineReport(facts=facts, findings=tuple(_findings(facts, cpu_flags(root))))


def build_facts() -> dict[str, Any]:
    """`commit` and `built_for` are None in a source tree."""
    return {
        "version": cadenza.__version__,
        **{name: read_build().get(name) for name in ("commit", "platform", "compiler")},
        "python": platform.python_version(),
        **{name: _version_of(name) for name in LIBRARIES},
    }


def processor_facts(root: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    return {
        "model": cpu_model(root),
        "architecture": platform.machine(),
        "num_cpus": os.cpu_count(),
        "num_usable_cpus": usable_cores(environment),
        "num_memory_nodes": len([*root.glob("sys/devices/system/node/node[0-9]*")]) or None,
    }


def memory_facts(root: Path) -> dict[str, Any]:
    chosen = _text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    swap = status_bytes(root / "proc/meminfo", "SwapTotal")
    return {
        "total_bytes": status_bytes(root / "proc/meminfo", "MemTotal"),
        "available_bytes": available_memory_bytes(root),
        "swap_bytes": swap,
        "large_pages": None if chosen is None else chosen.partition("[")[2].partition("]")[0],
    }


def folder_facts() -> dict[str, Any]:
    from huggingface_hub.constants import HF_HUB_CACHE as hub

    found: dict[str, Any] = {}
    for name, folder in (
        ("cache", cache_folder()),
        ("hub", Path(hub)),
        ("temporary", _temporary()),
    ):
        found |= {
            f"{name}_folder": str(folder),
            f"{name}_is_writable": can_write(folder),
            f"{name}_free_bytes": _free_bytes(folder),
        }
    return found


def driver_facts(root: Path) -> dict[str, Any]:
    """The kernel module of NVIDIA's driver, which is there without JAX's build for GPUs."""
    told = _text(root / "proc/driver/nvidia/version") or ""
    words = told.partition("Kernel Module")[2].split()
    return {"nvidia_driver": next((word for word in words if word[0].isdigit()), None)}


def can_write(folder: Path) -> bool:
    """Whether a file can be made there, or the folder where it is absent."""
    existing = _existing(folder)
    try:
        with tempfile.TemporaryFile(dir=existing):
            return True
    except OSError:
        return False


def cpu_model(root: Path) -> str | None:
    named = _cpuinfo(root, "model name")
    return named or _cpuinfo(root, "CPU part")


def cpu_flags(root: Path) -> frozenset[str]:
    return frozenset((_cpuinfo(root, "flags") or _cpuinfo(root, "Features") or "").split())


_ADVICE_ON_FOLDERS = {
    "cache": "set CADENZA_CACHE_DIR to a folder that can; without one each start compiles again",
    "temporary": "set TMPDIR to a folder that can; the processes of an engine meet there",
}


def _findings(facts: Facts, flags: frozenset[str]) -> Iterator[Finding]:
    processor, memory, folders = facts["processor"], facts["memory"], facts["folders"]
    if "isa" not in processor:
        yield Finding(
            level="warning",
            what="there are no native kernels in this installation: XLA alone computes",
            advice="install a wheel of this platform, or a C++17 compiler and then Cadenza again",
        )
    else:
        yield from _missed_sets(processor, flags)
    if processor["num_usable_cpus"] < (processor["num_cpus"] or 0):
        yield Finding(
            level="warning",
            what=f"of {processor['num_cpus']} CPUs {processor['num_usable_cpus']} may be used",
            advice="the affinity or the control group of this process says so; raise it there "
            "(docker run --cpus, CPUQuota=, taskset)",
        )
    if memory["available_bytes"] < LEAST_AVAILABLE_BYTES:
        yield Finding(
            level="problem",
            what="less than 1 GiB of memory is available",
            advice="end other programs, or raise the limit of the control group",
        )
    if memory["large_pages"] == "never":
        yield Finding(
            level="warning",
            what="transparent huge pages are off: reading weights takes longer",
            advice="echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )
    for name in ("cache", "temporary"):
        if not folders[f"{name}_is_writable"]:
            yield Finding(
                level="problem" if name == "temporary" else "warning",
                what=f"{folders[f'{name}_folder']} cannot be written",
                advice=_ADVICE_ON_FOLDERS[name],
            )
    free = folders["cache_free_bytes"]
    if free is not None and free < LEAST_FREE_BYTES:
        yield Finding(
            level="warning",
            what=f"the disk of {folders['cache_folder']} has less than 2 GiB free",
            advice="make room, or set CADENZA_CACHE_DIR to a folder on another disk",
        )
    yield from _device_findings(facts["device"])


def _missed_sets(processor: Mapping[str, Any], flags: frozenset[str]) -> Iterator[Finding]:
    """Instruction sets that the CPU has and the kernels in use do not."""
    for prefix, kind in (("", "isa"), ("int8_", "integer_isa")):
        order = [name for name in NEEDS if name.startswith("int8_") == bool(prefix)]
        best = next((name for name in order if flags.issuperset(NEEDS[name])), None)
        if best is None or best == f"{prefix}{processor[kind]}":
            continue
        if best.removeprefix(prefix) in processor[f"available_{kind}s"]:
            yield Finding(
                level="warning",
                what=f"the kernels of {processor[kind]} are used, those of "
                f"{best.removeprefix(prefix)} are faster here",
                advice="unset CADENZA_CPU_ISA and CADENZA_CPU_INTEGER_ISA",
            )
        elif best.endswith("amx") and processor.get("refusal_of_tiles"):
            yield Finding(
                level="warning",
                what=f"tile instructions cannot be used: {processor['refusal_of_tiles']}",
                advice="see docs/exactness.md, under instruction sets",
            )
        else:
            yield Finding(
                level="warning",
                what=f"the CPU runs {best.removeprefix(prefix)}, this build has no kernels for it",
                advice="install a wheel, which has those of every instruction set, or build here "
                "with a newer compiler",
            )


def _device_findings(device: Mapping[str, Any]) -> Iterator[Finding]:
    if device.get("nvidia_driver") and device.get("platform") == "cpu":
        yield Finding(
            level="warning",
            what="there is an NVIDIA driver, and JAX sees no GPU",
            advice="install JAX's build for GPUs: pip install 'jax[cuda13]'; see docs/gpu.md",
        )
    if device.get("error"):
        yield Finding(
            level="problem",
            what=f"the device cannot be used: {device['error']}",
            advice="JAX_PLATFORMS=cpu computes without it",
        )


def _cpuinfo(root: Path, name: str) -> str | None:
    for line in (_text(root / "proc/cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _version_of(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def _temporary() -> Path:
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:  # none of the usual ones can be written
        return Path(os.environ.get("TMPDIR") or Path.cwd())


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(each for each in (folder, *folder.parents) if each.exists())


def _free_bytes(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(_existing(folder)).free
    except OSError:
        return None
