"""IREE's compiler, by target: `compile_module`."""

import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from cadenza.errors import ConfigError

Target = Literal["llvm-cpu", "vulkan-spirv", "cuda"]
CpuChoice = Literal["generic", "host"]

PACKAGE = "iree-base-compiler"
REQUIREMENT = f"{PACKAGE}==3.13.0"  # The runtime's version, which decides the bits, too

COMPILE_S = 3600.0  # a compilation is given up after so many seconds

_COMMON = (
    "--iree-input-type=stablehlo",
    "--iree-vm-bytecode-module-strip-source-map=true",
)
_OF_TARGET: dict[Target, tuple[str, ...]] = {
    "llvm-cpu": (
        "--iree-hal-target-device=local",
        "--iree-hal-local-target-device-backends=llvm-cpu",
        "--iree-llvmcpu-debug-symbols=false",
    ),
    "vulkan-spirv": ("--iree-hal-target-device=vulkan",),
    "cuda": ("--iree-hal-target-device=cuda", "--iree-cuda-target=sm_80"),
}
_MAX_MESSAGE_CHARS = 800


def compiler_flags(target: Target, cpu: CpuChoice) -> tuple[str, ...]:
    """The compiler's flags. `cpu` counts for llvm-cpu only."""
    flags = (*_COMMON, *_OF_TARGET[target])
    if target != "llvm-cpu":
        return flags
    triple = f"--iree-llvmcpu-target-triple={platform.machine()}-unknown-linux-gnu"
    return (*flags, triple, f"--iree-llvmcpu-target-cpu={cpu}")


def compiler_version(find: Callable[[str], object | None] = find_spec) -> str:
    try:
        is_missing = find("iree.compiler") is None
    except ModuleNotFoundError:  # of the package `iree`
        is_missing = True
    if is_missing:
        raise ConfigError(
            f"`cadenza export` needs {PACKAGE}, which this installation lacks; "
            f"pip install {REQUIREMENT}"
        )
    return version(PACKAGE)


def compile_module(text: str, flags: tuple[str, ...]) -> bytes:
    """The module of a program's text. Raises ConfigError with what the compiler says."""
    with tempfile.TemporaryDirectory() as name:
        source, made = Path(name) / "program.mlir", Path(name) / "program.vmfb"
        source.write_text(text, encoding="utf-8")
        command = [str(_compiler()), str(source), *flags, "-o", str(made)]
        done = subprocess.run(  # noqa: S603 (our own arguments)
            command, capture_output=True, text=True, timeout=COMPILE_S, check=False
        )
        if done.returncode:
            said = done.stderr.replace(str(source), "program")[:_MAX_MESSAGE_CHARS]
            raise ConfigError(f"IREE's compiler failed ({done.returncode}): {said}")
        return made.read_bytes()


def _compiler() -> Path:
    """In the scripts folder beside this interpreter, where pip installs it."""
    return Path(sys.executable).parent / "iree-compile"
