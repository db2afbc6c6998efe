"""Which instruction sets the kernels are compiled for, and with which flags.

`setup.py` and `csrc/Makefile` both ask here. CADENZA_BUILD_ISAS chooses: `machine` (the default) is
what this machine's CPU runs fastest, the table of its portable arithmetic, and plain C++, which
every CPU runs; `all` is every set of the architecture, as in a wheel; else names, with commas.
Standard library only: a build runs this before anything is installed.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

CSRC = Path(__file__).resolve().parent
VARIABLE = "CADENZA_BUILD_ISAS"

_AVX2 = ["-mavx2", "-mfma"]
_AVX512 = [*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
_PLAIN = {"scalar": [], "int8_scalar": ["-O2"]}
"""Compiled for every CPU. The integer kernels are as fast with -O2 as with -O3, which takes g++ 12
five times as long; the others have three quarters of their speed with it."""

ISA_FLAGS: dict[str, dict[str, list[str]]] = {
    "x86_64": {
        "amx": [*_AVX512, "-mamx-tile", "-mamx-bf16", "-mamx-int8"],
        "avx512_bf16": [*_AVX512, "-mavx512bf16"],
        "avx512": _AVX512,
        "avx2": _AVX2,
        "int8_amx": [*_AVX512, "-mavx512vnni", "-mamx-tile", "-mamx-int8"],
        "int8_avx512_vnni": [*_AVX512, "-mavx512vnni"],
        "int8_avx_vnni": [*_AVX2, "-mf16c", "-mavxvnni"],
        "int8_avx2": [*_AVX2, "-mf16c"],
        **_PLAIN,
    },
    "aarch64": {
        "neon_bf16": ["-march=armv8.2-a+bf16"],
        "neon": [],
        "int8_neon_dotprod": ["-march=armv8.2-a+dotprod"],
        "int8_neon": [],
        **_PLAIN,
    },
}
"""By architecture, each set's flags; `int8_` are those of the integer kernels."""

_NEEDS = {"amx": "avx512"}
"""Tables that take what they do not compute themselves from another one."""

_OWN_BF16 = ("amx", "avx512_bf16", "neon_bf16")
"""Sets whose products of bfloat16 round in their own way: not of the portable arithmetic."""

_TILE_BASES = ("avx2", "neon", "avx512", "scalar")
"""What the tests' table of emulated tiles is based on: the first that is compiled."""

_ALIASES = {"amd64": "x86_64", "arm64": "aarch64"}


class BuildError(Exception):
    """The kernels cannot be built as asked for."""


def isas_to_build(compiler: list[str]) -> dict[str, list[str]]:
    """The flags of each set to compile, with the command of the C++ compiler. Raises BuildError."""
    every = _isas_of(compiler)
    asked = os.environ.get(VARIABLE, "machine") or "machine"
    if asked == "all":
        return {isa: flags for isa, flags in every.items() if _accepts(compiler, flags)}
    names = _isas_of_machine(compiler) if asked == "machine" else asked.split(",")
    unknown = sorted(set(names) - set(every))
    if unknown:
        raise BuildError(
            f"{VARIABLE}={asked}: there is no instruction set {', '.join(unknown)}; there are "
            f"machine, all, or of {', '.join(every)} some, with commas"
        )
    needed = [_NEEDS[isa] for isa in names if isa in _NEEDS]
    chosen = {isa: flags for isa, flags in every.items() if isa in {*names, *needed, *_PLAIN}}
    refused = [isa for isa, flags in chosen.items() if not _accepts(compiler, flags)]
    if refused and asked != "machine":
        raise BuildError(f"{VARIABLE}={asked}: the compiler does not know {', '.join(refused)}")
    return {isa: flags for isa, flags in chosen.items() if isa not in refused}


def table_macros(isas: dict[str, list[str]]) -> dict[str, str]:
    """What core/isa.cpp needs to know of the tables that are linked."""
    floats = [isa for isa in isas if not isa.startswith("int8_")]
    integers = [isa.removeprefix("int8_") for isa in isas if isa.startswith("int8_")]
    return {
        "CADENZA_TABLES(X)": " ".join(f"X({isa})" for isa in floats),
        "CADENZA_INTEGER_TABLES(X)": " ".join(f"X({isa})" for isa in integers),
    }


def _isas_of(compiler: list[str]) -> dict[str, list[str]]:
    """All sets of the architecture that the compiler compiles for."""
    triple = subprocess.run(
        [*compiler, "-dumpmachine"], capture_output=True, text=True, check=True
    ).stdout
    architecture = triple.split("-")[0].strip()
    return ISA_FLAGS.get(_ALIASES.get(architecture, architecture), _PLAIN)


def _isas_of_machine(compiler: list[str]) -> list[str]:
    """What this CPU's kernels are chosen from; all sets where a program of the compiler's does not
    run here. A set that the compiler does not know is passed over.
    """
    every = _isas_of(compiler)
    runs = _isas_that_run(compiler)
    if runs is None:
        return list(every)
    known = [[isa for isa in isas if _accepts(compiler, every[isa])] for isas in runs]
    floats, integers = known
    portable = [isa for isa in floats if isa not in _OWN_BF16]
    return [floats[0], portable[0], integers[0]]


def _isas_that_run(compiler: list[str]) -> list[list[str]] | None:
    """The sets of floats and those of integers that this CPU runs, fastest first."""
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder) / "probe"
        sources = [CSRC / "probe.cpp", CSRC / "core" / "cpu.cpp"]
        command = [*compiler, "-std=c++17", f"-I{CSRC}", *map(str, sources), "-o", str(probe)]
        try:
            subprocess.run(command, capture_output=True, check=True)
            ran = subprocess.run([probe], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
    floats, integers = ran.stdout.splitlines()
    return [floats.split(), [f"int8_{isa}" for isa in integers.split()]]


def _accepts(compiler: list[str], flags: list[str]) -> bool:
    """Whether the compiler knows the flags: g++ knows those of AVX-VNNI from version 11 on."""
    command = [*compiler, *flags, "-x", "c++", "-E", os.devnull, "-o", os.devnull]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def makefile(compiler: list[str]) -> str:
    """Variables for csrc/Makefile."""
    isas = isas_to_build(compiler)
    lines = [f"ISAS = {' '.join(isas)}"]
    lines += [f"FLAGS_{isa} = {' '.join(flags)}" for isa, flags in isas.items()]
    base = next(isa for isa in _TILE_BASES if isa in isas)
    lines += [f"TILE_BASE = {base}", f"FLAGS_amx_emulated = {' '.join(isas[base])}"]
    integers = next(isa for isa in isas if isa.startswith("int8_") and isa != "int8_amx")
    lines += [f"FLAGS_int8_amx_emulated = {' '.join(isas[integers])}"]
    tables = [shlex.quote(f"-D{name}={value}") for name, value in table_macros(isas).items()]
    return "\n".join([*lines, f"TABLES = {' '.join(tables)}"])


if __name__ == "__main__":
    try:
        sys.stdout.write(makefile(sys.argv[1:]) + "\n")
    except BuildError as error:
        sys.exit(str(error))
