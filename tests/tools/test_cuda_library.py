"""Building the kernels for NVIDIA GPUs: who asks for them, nvcc, and what a library must have."""

import importlib.util
import struct
from pathlib import Path
from types import ModuleType

import pytest

from cadenza.backends.xla.ops.native_library import load_native_library
from tools.cuda_library import architectures_of, find_faults

pytestmark = pytest.mark.gates

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def nvcc() -> ModuleType:
    spec = importlib.util.spec_from_file_location("nvcc", ROOT / "csrc" / "nvcc.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_kernels_for_gpus_are_built_for_whom_asks(nvcc: ModuleType) -> None:
    answers = [nvcc.is_asked_for({"CADENZA_CUDA": each}) for each in ("", "0", "1")]
    assert answers == [False, False, True]
    assert not nvcc.is_asked_for({})
    with pytest.raises(SystemExit, match="CADENZA_CUDA=yes is neither 0 nor 1"):
        nvcc.is_asked_for({"CADENZA_CUDA": "yes"})


def test_the_compiler_is_the_named_one_or_that_of_a_toolkit(
    nvcc: ModuleType, tmp_path: Path
) -> None:
    for name in ("bin/nvcc", "own/bin/nvcc", "mine"):
        script = tmp_path / name
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text("#!/bin/sh\n")
        script.chmod(0o755)
    usual, own = [str(tmp_path)], {"CUDA_HOME": str(tmp_path / "own")}
    assert nvcc.find_nvcc({"PATH": ""}, usual) == str(tmp_path / "bin" / "nvcc")
    assert nvcc.find_nvcc({"PATH": "", **own}, usual) == str(tmp_path / "own" / "bin" / "nvcc")
    named = {"PATH": "", "NVCC": str(tmp_path / "mine"), **own}
    assert nvcc.find_nvcc(named, usual) == str(tmp_path / "mine")
    with pytest.raises(SystemExit, match=r"there is no nvcc on PATH.*leave CADENZA_CUDA out"):
        nvcc.find_nvcc({"PATH": ""}, [str(tmp_path / "absent")])


def group(*programs: tuple[int, int]) -> bytes:
    """Programs of (kind, architecture), as nvcc puts them into a library."""
    each = b"".join(
        struct.pack("<HHIQIIHHI", kind, 0, 64, 8, 0, 0, 0, 0, number) + bytes(64 - 32 + 8)
        for kind, number in programs
    )
    return struct.pack("<4sHHQ", b"\x50\xed\x55\xba", 1, 16, len(each)) + each


def test_the_architectures_of_a_library_are_those_of_each_group_of_programs() -> None:
    content = b"\x7fELF" + group((2, 80), (2, 90), (1, 90)) + b"text" + group((2, 80))
    assert architectures_of(content) == {
        frozenset({"sm_80", "sm_90", "ptx_90"}),
        frozenset({"sm_80"}),
    }
    assert architectures_of(b"none") == set()


@pytest.mark.native
def test_a_library_without_kernels_for_gpus_is_at_fault(tmp_path: Path) -> None:
    (fault,) = find_faults(Path(load_native_library().handle._name))
    assert "cadenza_cuda_workspace" in fault
    (absent,) = find_faults(tmp_path / "absent.so")
    assert "cannot be loaded" in absent
