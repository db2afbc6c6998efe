"""The golden corpus on the tables that run here: every machine computes the recorded bits.

Few cases run in each test run, all of them as soak. Negative controls: an altered digest is seen,
and changed bits cannot be recorded under the same revision. The mutants `golden-*` change the
arithmetic itself.
"""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from cadenza.backends.xla.ops.native_library import NativeLibrary
from cadenza.fingerprint import ARITHMETIC_REVISION
from tools.golden_bits import Case, all_cases, compare, read_corpus, record

pytestmark = pytest.mark.native

ROOT = Path(__file__).resolve().parents[2]
QUICK = [Case(shape="tiny-gemma2", format="bfloat16"), Case(shape="tiny-qwen3-moe", format="int4")]
"""An ulp in a coefficient of the exponential is seen in them on every table."""
BF16_PRODUCTS = ("bfloat16", "int8")
"""Formats with products of bfloat16: int8 has them in attention, over KV in bfloat16."""
PORTABLE_ISAS = ("avx512", "avx2", "neon", "scalar")


def compared(isa: str, *arguments: str, num_threads: int = 2) -> subprocess.CompletedProcess[str]:
    threads = {"CADENZA_CPU_ISA": isa, "CADENZA_NUM_THREADS": str(num_threads)}
    return subprocess.run(
        [sys.executable, "-m", "tools.golden_bits", *arguments],
        cwd=ROOT,
        env={**os.environ, **threads},
        capture_output=True,
        text=True,
        check=False,
    )


def need(library: NativeLibrary, isa: str) -> None:
    if isa not in library.available_isas:
        pytest.skip(f"this CPU cannot run {isa}")


def test_the_corpus_is_of_this_revision_and_has_every_case():
    corpus = read_corpus()
    assert corpus.revision == ARITHMETIC_REVISION
    assert corpus.classes["portable"].keys() == {case.name for case in all_cases()}
    own, portable = corpus.classes["avx512_bf16"], corpus.classes["portable"]
    bf16_products = {case.name for case in all_cases() if case.format in BF16_PRODUCTS}
    assert own.keys() == bf16_products
    equal = {name for name, digest in own.items() if digest == portable[name]}
    assert not any(name.endswith(" bfloat16") for name in equal), "the classes have other bits"


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_this_machine_computes_the_recorded_bits(case: Case):
    assert compare(read_corpus(), [case]) == []


def test_plain_c_plus_plus_computes_the_recorded_bits():
    ran = compared("scalar", "--only", "llama bfloat16")
    assert "1 cases compared, 0 differ" in ran.stdout, ran.stdout + ran.stderr


def test_other_bits_are_seen_and_not_recorded_under_the_same_revision():
    corpus = read_corpus()
    name = QUICK[0].name
    classes = {"portable": {**corpus.classes["portable"], name: "0" * 20}}
    altered = msgspec.structs.replace(corpus, classes=classes)
    (difference,) = compare(altered, QUICK[:1])
    assert difference.startswith(f"portable: {name}: {corpus.classes['portable'][name]} here")
    with pytest.raises(SystemExit, match="raise ARITHMETIC_REVISION"):
        record(altered, QUICK[:1])


@pytest.mark.soak
@pytest.mark.parametrize("num_threads", [1, 2, 7])
@pytest.mark.parametrize("isa", PORTABLE_ISAS)
def test_every_case_has_the_recorded_bits(library: NativeLibrary, isa: str, num_threads: int):
    need(library, isa)
    ran = compared(isa, num_threads=num_threads)
    assert f"{len(all_cases())} cases compared, 0 differ" in ran.stdout, ran.stdout + ran.stderr


@pytest.mark.soak
@pytest.mark.parametrize("isa", ["avx512_bf16", "neon_bf16"])
def test_bf16_instructions_take_the_portable_kernels_when_asked(library: NativeLibrary, isa: str):
    """And in float32, or with codes in weights and KV, they have the portable bits anyway."""
    need(library, isa)
    assert compared(isa).returncode == 0
    for only in ("float32", "int4", "int8-kv"):
        assert compared(isa, "--only", only, "--arithmetic", "fast").returncode == 0


@pytest.mark.soak
@pytest.mark.parametrize("num_threads", [1, 2, 7])
def test_bf16_instructions_have_bits_of_their_own(library: NativeLibrary, num_threads: int):
    need(library, "avx512_bf16")
    for only in BF16_PRODUCTS:
        arguments = ("--only", f" {only}", "--arithmetic", "fast")
        ran = compared("avx512_bf16", *arguments, num_threads=num_threads)
        assert ", 0 differ" in ran.stdout, ran.stdout + ran.stderr


@pytest.mark.soak
@pytest.mark.parametrize(
    "environment",
    [
        {"XLA_FLAGS": "--xla_cpu_max_isa=SSE4_2"},
        {"XLA_FLAGS": "--xla_cpu_max_isa=AVX"},
        {"NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3"},
    ],
    ids=["xla-sse4.2", "xla-avx", "numpy-without-avx2"],
)
def test_bits_depend_on_neither_xlas_nor_numpys_instructions(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    ran = compared("", "--only", "bfloat16")
    assert ", 0 differ" in ran.stdout, ran.stdout + ran.stderr
