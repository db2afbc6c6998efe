"""The kernels of the table `amx` over emulated tile instructions, as the engine runs them.

A copy of the package has the library of `make -C csrc emulated` in place of its own, and computes
the golden corpus of the class `amx`. On a CPU with AMX the same cases run in the package itself, so
both have the recorded bits. The kernels' own tests of this table are in `test_kernel_builds.py`.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cadenza.backends.xla.ops.native_library import LIBRARY_NAME, NativeLibrary
from tests.by_day import by_day
from tests.native.test_kernel_builds import CSRC, ROOT, build
from tools.golden_bits import read_corpus

pytestmark = [pytest.mark.native, pytest.mark.slow, pytest.mark.kernels]

EMULATED = "amx_emulated"
LIBRARY = CSRC / "build" / "native" / "emulated" / "_native.so"
FORMATS = ("bfloat16", "int8", "gguf", "mxfp4", "float8")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a copy of the package whose kernels include the emulated table."""
    from cadenza.backends.xla.ops.native_library import load_native_library

    build(load_native_library(), "emulated")
    folder = tmp_path_factory.mktemp("emulated")
    ignored = shutil.ignore_patterns("*.so", "*.dylib", "__pycache__")
    shutil.copytree(ROOT / "src" / "cadenza", folder / "cadenza", ignore=ignored)
    shutil.copyfile(LIBRARY, folder / "cadenza" / LIBRARY_NAME)
    return folder


def run(
    module: str, *arguments: str, isa: str, package: Path | None = None, **settings: str
) -> str:
    own = {"CADENZA_CPU_ISA": isa, "CADENZA_NUM_THREADS": "2"}
    environment = {**os.environ, **own, **settings}
    if package is not None:
        environment["PYTHONPATH"] = f"{package}{os.pathsep}{ROOT}"
    ran = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def play(only: str, *, isa: str, package: Path | None = None) -> str:
    arguments = ("--only", only, "--arithmetic", "fast")
    return run("tools.golden_bits", *arguments, isa=isa, package=package)


def test_the_class_of_tiles_has_bits_of_its_own_where_weights_or_kv_are_bfloat16():
    classes = read_corpus().classes
    tiles, portable = classes["amx"], classes["portable"]
    assert tiles.keys() == classes["avx512_bf16"].keys()
    equal = {name for name, digest in tiles.items() if digest == portable[name]}
    assert not any(name.endswith(" bfloat16") for name in equal)
    assert "llama int8" not in equal, "its KV is bfloat16"


def test_the_engine_computes_the_recorded_bits_over_emulated_tiles(package: Path):
    assert "1 cases compared, 0 differ" in play(
        "glm4-moe-lite bfloat16", isa=EMULATED, package=package
    )


def test_quantised_products_over_emulated_tiles_have_the_bits_of_the_definition(package: Path):
    """Every format of codes and every type of GGUF, by tiles at every number of rows."""
    module = "tests.native.quantised_definition"
    _, *expected = run(module, "few", isa="scalar", CADENZA_CPU_INTEGER_ISA="scalar").split()
    settings = {"CADENZA_CPU_INTEGER_ISA": EMULATED}
    used, *found = run(module, "few", isa="scalar", package=package, **settings).split()
    assert used == EMULATED
    assert found == expected


def test_rows_for_tiles_that_are_no_number_are_refused(package: Path):
    """Where the integer kernels have tiles; `never` leaves all products to vectors."""
    code = (
        "from cadenza.backends.xla.ops.native_library import load_native_library as load\n"
        "print(load().tile_rows)"
    )
    own = {"CADENZA_CPU_INTEGER_ISA": EMULATED, "PYTHONPATH": f"{package}{os.pathsep}{ROOT}"}
    for stated, told in (("", "1\n"), ("24", "24\n"), ("never", "never\n"), ("some", None)):
        environment = {**os.environ, **own, "CADENZA_TILE_ROWS": stated}
        ran = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if told is None:
            assert "CADENZA_TILE_ROWS is 'some'; it is a number of rows" in ran.stderr
        else:
            assert ran.stdout == told, ran.stderr


@pytest.mark.soak
@pytest.mark.parametrize("format", FORMATS)
def test_every_case_has_the_recorded_bits_over_emulated_tiles(package: Path, format: str):
    assert ", 0 differ" in play(f" {format}", isa=EMULATED, package=package)


@pytest.mark.soak
def test_verify_passes_over_emulated_tiles(package: Path):
    arguments = ("verify", "--shape", "tiny-qwen3-moe", "--dtype", "bfloat16")
    said = run("cadenza", *arguments, isa=EMULATED, package=package)
    assert "PASS" in said.splitlines()[-1]


@pytest.mark.parametrize("format", by_day([*FORMATS, "llama bfloat16 hit"], {"llama bfloat16 hit"}))
def test_a_cpu_with_tiles_computes_the_recorded_bits(library: NativeLibrary, format: str):
    if "amx" not in library.available_isas:
        pytest.skip("this CPU has no AMX, or may not use it: its bits were recorded by emulation")
    assert ", 0 differ" in play(format, isa="amx")
