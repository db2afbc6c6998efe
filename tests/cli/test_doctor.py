"""`cadenza doctor`: what it finds of a machine by the system's files, and its proof."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from cadenza.loading.machine import Finding, MachineReport, examine_machine
from tests.cli.harness import run_cadenza

SOUND = {
    "proc/cpuinfo": "model name: A CPU\nflags: fpu avx2 fma avx512f avx512bw avx512vl avx512dq\n",
    "proc/meminfo": "MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\nSwapTotal: 0 kB\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
}
KERNELS = {
    "isa": "avx512",
    "integer_isa": "avx2",
    "available_isas": ("avx512", "avx2", "scalar"),
    "available_integer_isas": ("avx2", "scalar"),
    "refusal_of_tiles": None,
}
DEVICE = {"platform": "cpu", "name": "cpu", "num_devices": 1}


@pytest.fixture
def examine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., MachineReport]:
    monkeypatch.setenv("CADENZA_CACHE_DIR", str(tmp_path / "cache"))

    def examined(
        files: Mapping[str, str] = MappingProxyType({}),
        processor: Mapping[str, Any] = KERNELS,
        device: Mapping[str, Any] = DEVICE,
    ) -> MachineReport:
        for name, text in {**SOUND, **files}.items():
            path = tmp_path / "root" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return examine_machine({"processor": processor, "device": device}, tmp_path / "root", {})

    return examined


def test_a_sound_machine_has_nothing_to_do(examine: Callable[..., MachineReport]):
    report = examine()
    assert report.findings == ()
    assert report.facts["processor"]["model"] == "A CPU"
    assert report.facts["memory"]["total_bytes"] == 8 << 30
    assert report.facts["memory"]["large_pages"] == "madvise"


VNNI = {"proc/cpuinfo": SOUND["proc/cpuinfo"].replace("avx512dq", "avx512dq avx512_vnni")}
TILES = {"proc/cpuinfo": SOUND["proc/cpuinfo"].replace("avx512dq", "avx512dq amx_tile amx_bf16")}


@pytest.mark.parametrize(
    ("changed", "level", "what", "advice"),
    [
        ({"processor": {}}, "warning", "no native kernels", "install a wheel"),
        ({"files": VNNI}, "warning", "runs avx512_vnni, this build has no", "install a wheel"),
        (
            {"processor": {**KERNELS, "isa": "avx2"}},
            "warning",
            "kernels of avx2 are used, those of avx512 are faster",
            "unset CADENZA_CPU_ISA",
        ),
        (
            {
                "files": TILES,
                "processor": {**KERNELS, "refusal_of_tiles": "the kernel forbids them"},
            },
            "warning",
            "tile instructions cannot be used: the kernel forbids them",
            "docs/exactness.md",
        ),
        (
            {"files": {"proc/meminfo": "MemTotal: 8388608 kB\nMemAvailable: 1024 kB\n"}},
            "problem",
            "less than 1 GiB",
            "raise the limit",
        ),
        (
            {"files": {"sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]"}},
            "warning",
            "huge pages are off",
            "madvise",
        ),
        (
            {"files": {"proc/driver/nvidia/version": "NVRM: NVIDIA UNIX Kernel Module  580.1  x"}},
            "warning",
            "NVIDIA driver, and JAX sees no GPU",
            "jax[cuda13]",
        ),
        ({"device": {"error": "no plug-in"}}, "problem", "no plug-in", "JAX_PLATFORMS=cpu"),
    ],
)
def test_what_is_amiss_is_found_with_what_to_do(
    examine: Callable[..., MachineReport],
    changed: dict[str, Any],
    level: str,
    what: str,
    advice: str,
):
    (finding,) = examine(**changed).findings
    assert finding.level == level
    assert what in finding.what
    assert advice in finding.advice


def test_a_cache_folder_that_cannot_be_written_is_found(
    examine: Callable[..., MachineReport], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("CADENZA_CACHE_DIR", str(tmp_path / "file"))
    (finding,) = examine().findings
    assert finding == Finding(
        level="warning",
        what=f"{tmp_path / 'file'} cannot be written",
        advice="set CADENZA_CACHE_DIR to a folder that can; without one each start compiles again",
    )


def test_the_command_proves_the_bundled_model_and_prints_json():
    ran = run_cadenza(["doctor", "--json"])
    report = json.loads(ran.out)
    assert report["facts"]["proof"]["is_bitwise_equal"]
    assert {"build", "processor", "memory", "folders", "device"} <= report["facts"].keys()
