"""The golden corpus on the tables that run here: every machine computes the recorded bits.

Few cases run in each test run, all of them as soak. Negative controls: an altered digest is seen,
and changed bits cannot be recorded under the same revision. The mutants `golden-*` change the
arithmetic itself.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from cadenza.backends.xla.ops.native_library import NativeLibrary
from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.fingerprint import ARITHMETIC_REVISION
from cadenza.models.layer_kind import ConvShape, DeltaShape, ScanShape
from cadenza.models.towers.registry import READERS
from tools.golden_bits import cases_of_class, compare, missing, missing_text, read_corpus, record
from tools.golden_cases import Case, all_cases

pytestmark = pytest.mark.native

ROOT = Path(__file__).resolve().parents[2]
# An ulp in a coefficient of the exponential is seen in the first two on every table; the others
# have sinks, blocks of GGUF, a tower, shared KV, latents and recurrent states.
QUICK = [
    Case(shape="tiny-gemma2", format="bfloat16"),
    Case(shape="tiny-qwen3-moe", format="int4"),
    Case(shape="tiny-gpt-oss", format="mxfp4"),
    Case(shape="tiny-llama", format="gguf"),
    Case(shape="tiny-qwen3-vl", format="bfloat16"),
    Case(shape="tiny-gemma4", format="bfloat16", route="drafts"),
    Case(shape="tiny-deepseek-v3", format="bfloat16", route="hit"),
    Case(shape="tiny-qwen3.5", format="bfloat16", route="snapshot"),
]
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
    portable = corpus.classes["portable"]
    for name in ("avx512_bf16", "amx"):
        own = corpus.classes[name]
        assert own.keys() == {case.name for case in cases_of_class(name)}
        equal = {each for each, digest in own.items() if digest == portable[each]}
        assert not any(" bfloat16" in each for each in equal), "the classes have other bits"


def test_a_route_has_the_bits_of_its_case_without_one():
    for digests in read_corpus().classes.values():
        for case in all_cases():
            if case.route is not None and case.name in digests:
                assert digests[case.name] == digests[replace(case, route=None).name], case


def test_every_kind_of_tower_and_of_recurrent_state_is_in_the_corpus():
    shapes = {case.shape: named_shape(case.shape) for case in all_cases()}
    seeing = [shape.vision.family for shape in shapes.values() if shape.vision is not None]
    readers = {READERS[family].model_types for family in seeing}
    assert readers == {reader.model_types for reader in READERS.values()}
    routed = [case for case in all_cases() if case.route is not None]
    for route in ("snapshot", "drafts"):
        own = {type(shapes[case.shape].recurrence) for case in routed if case.route == route}
        assert own >= {ConvShape, DeltaShape, ScanShape}


def test_what_a_class_lacks_is_listed_and_counts_as_a_difference():
    corpus = read_corpus()
    name = QUICK[0].name
    kept = {each: digest for each, digest in corpus.classes["portable"].items() if each != name}
    lacking = msgspec.structs.replace(corpus, classes={"portable": kept})
    assert missing(lacking)["portable"] == [name]
    assert missing(lacking)["neon_bf16"] == [case.name for case in cases_of_class("neon_bf16")]
    assert f"portable lacks 1 of {len(all_cases())} cases: {name}" in missing_text(lacking)
    (difference,) = compare(lacking, QUICK[:1])
    assert difference.endswith("not recorded yet (--record)")


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_this_machine_computes_the_recorded_bits(case: Case):
    assert compare(read_corpus(), [case]) == []


def test_plain_c_plus_plus_computes_the_recorded_bits():
    ran = compared("scalar", "--only", "olmo2 bfloat16")
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
    """In float32, or with codes in weights and KV, they have the portable bits anyway."""
    need(library, isa)
    assert compared(isa).returncode == 0


@pytest.mark.soak
@pytest.mark.parametrize("num_threads", [1, 2, 7])
def test_bf16_instructions_have_bits_of_their_own_in_some_formats(
    library: NativeLibrary, num_threads: int
):
    need(library, "avx512_bf16")
    ran = compared("avx512_bf16", "--arithmetic", "fast", num_threads=num_threads)
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
