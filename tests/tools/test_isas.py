"""`csrc/isas.py`: which instruction sets a build compiles the kernels for."""

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.gates


ROOT = Path(__file__).resolve().parents[2]
PLAIN = {"scalar", "int8_scalar"}


@pytest.fixture(scope="module")
def isas() -> ModuleType:
    spec = importlib.util.spec_from_file_location("isas", ROOT / "csrc" / "isas.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def compiler() -> list[str]:
    if shutil.which("g++") is None:
        pytest.skip("g++ not found")
    return ["g++"]


def fake_compiler(folder: Path, triple: str, *, builds: bool) -> list[str]:
    """A compiler for another architecture: it knows every flag, and what it builds cannot run."""
    script = folder / "compiler"
    fails = "" if builds else 'case "$*" in *probe*) exit 1;; esac'
    script.write_text(f'#!/bin/sh\n{fails}\n[ "$1" = -dumpmachine ] && echo {triple}\nexit 0\n')
    script.chmod(0o755)
    return [str(script)]


def test_a_build_has_the_sets_of_this_machine_and_plain_cpp(
    isas: ModuleType, compiler: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("CADENZA_BUILD_ISAS", raising=False)
    chosen = isas.isas_to_build(compiler)
    monkeypatch.setenv("CADENZA_BUILD_ISAS", "all")
    every = isas.isas_to_build(compiler)
    floats = [isa for isa in chosen if not isa.startswith("int8_")]
    assert PLAIN < set(chosen) <= set(every)
    assert 2 <= len(floats) <= 3  # the fastest, the portable one where that has bf16, and plain C++
    assert any(isa not in isas._OWN_BF16 for isa in floats if isa != "scalar")


def test_a_cpu_with_tiles_has_the_table_of_tiles_and_the_portable_one(
    isas: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("CADENZA_BUILD_ISAS", raising=False)
    compiler = fake_compiler(tmp_path, "x86_64-linux-gnu", builds=True)
    script = Path(compiler[0])
    probe = "printf 'echo amx avx512 avx512_bf16 avx2 scalar\\necho amx avx512_vnni scalar\\n'"
    making = f'for last; do :; done\ncase "$*" in *probe*) (echo "#!/bin/sh"; {probe}) > "$last"; '
    script.write_text(script.read_text().replace("exit 0", making + 'chmod +x "$last";; esac'))
    chosen = isas.isas_to_build(compiler)
    assert set(chosen) == {"amx", "avx512", "int8_amx", *PLAIN}
    assert {"-mamx-tile", "-mamx-bf16", "-mavx512f"} < set(chosen["amx"])
    assert {"-mamx-tile", "-mamx-int8", "-mavx512vnni"} < set(chosen["int8_amx"])
    assert "FLAGS_int8_amx_emulated = -O2\n" in isas.makefile(compiler)


def test_the_table_of_tiles_brings_the_one_that_computes_the_rest(
    isas: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CADENZA_BUILD_ISAS", "amx")
    compiler = fake_compiler(tmp_path, "x86_64-linux-gnu", builds=True)
    assert set(isas.isas_to_build(compiler)) == {"amx", "avx512", *PLAIN}
    assert "TILE_BASE = avx512\nFLAGS_amx_emulated = -mavx2" in isas.makefile(compiler)


def test_another_architecture_has_all_of_its_sets(
    isas: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("CADENZA_BUILD_ISAS", raising=False)
    compiler = fake_compiler(tmp_path, "aarch64-linux-gnu", builds=False)
    assert set(isas.isas_to_build(compiler)) == set(isas.ISA_FLAGS["aarch64"])


def test_an_unknown_architecture_has_plain_cpp(
    isas: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CADENZA_BUILD_ISAS", "all")
    assert set(isas.isas_to_build(fake_compiler(tmp_path, "riscv64-linux", builds=True))) == PLAIN


def test_named_sets_are_built_beside_plain_cpp(
    isas: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CADENZA_BUILD_ISAS", "neon,int8_neon_dotprod")
    chosen = isas.isas_to_build(fake_compiler(tmp_path, "aarch64-linux-gnu", builds=True))
    assert set(chosen) == {"neon", "int8_neon_dotprod", *PLAIN}
    assert isas.table_macros(chosen) == {
        "CADENZA_TABLES(X)": "X(neon) X(scalar)",
        "CADENZA_INTEGER_TABLES(X)": "X(neon_dotprod) X(scalar)",
    }


def test_an_unknown_set_is_refused_with_those_that_there_are(
    isas: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CADENZA_BUILD_ISAS", "mmx")
    with pytest.raises(isas.BuildError, match="no instruction set mmx; there are machine, all"):
        isas.isas_to_build(fake_compiler(tmp_path, "x86_64-linux-gnu", builds=True))


def test_a_set_that_the_compiler_does_not_know_is_refused_if_it_was_named(
    isas: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    compiler = fake_compiler(tmp_path, "x86_64-linux-gnu", builds=True)
    script = Path(compiler[0])
    refusing = 'case "$*" in *avxvnni*) exit 1;; esac'
    script.write_text(script.read_text().replace("exit 0", refusing))
    monkeypatch.setenv("CADENZA_BUILD_ISAS", "int8_avx_vnni")
    with pytest.raises(isas.BuildError, match="does not know int8_avx_vnni"):
        isas.isas_to_build(compiler)
    monkeypatch.setenv("CADENZA_BUILD_ISAS", "all")
    assert "int8_avx_vnni" not in isas.isas_to_build(compiler)
