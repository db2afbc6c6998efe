"""What `csrc/Makefile` builds besides the library: the kernels' own tests, and kernels with faults.

Both reuse the objects that an editable install left. They need make and a C++ compiler: without
them the tests are skipped, unless CADENZA_REQUIRE_NATIVE=1; and by day while the sources of the
kernels are unchanged since they passed.
"""

import fcntl
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cadenza.backends.xla.mutants import has_native_faults
from cadenza.backends.xla.ops.native_library import NativeLibrary, library_path
from cadenza.config import EngineConfig
from cadenza.verification.run import VerifyOptions
from cadenza.verification.self_test import SelfTestResult, self_test
from tests.conftest import LIBRARY_SUFFIXES, must_have_native

pytestmark = [pytest.mark.native, pytest.mark.slow, pytest.mark.kernels]

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
BINARY = CSRC / "build" / "native" / "tests"
PLAIN_CPP = "scalar"
OBJECTS = CSRC / "build" / "native" / "csrc"
ALL_FAULTS = (
    "blocks relative instead of absolute",
    "a page of another row",
    "pages of another row from token 640 on",
    "key taken from the row index",
    "padding multiplied instead of skipped",
)


def build(library: NativeLibrary, *arguments: str) -> None:
    """Makes targets of csrc with the library's instruction sets; skips where they cannot be made,
    unless they must.
    """
    tools = [tool for tool in ("make", "g++") if shutil.which(tool) is None]
    if tools and not must_have_native():
        pytest.skip(f"{' and '.join(tools)} not found: the kernels cannot be built here")
    (CSRC / "build").mkdir(exist_ok=True)
    with (CSRC / "build" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = ["make", "-j2", "-C", str(CSRC), *arguments, f"PYTHON={sys.executable}"]
        sets = [*library.available_isas, *(f"int8_{isa}" for isa in library.available_integer_isas)]
        environment = {**os.environ, "CADENZA_BUILD_ISAS": ",".join(sets)}
        made = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert made.returncode == 0, made.stderr


# Without vectors they take most of a minute. By day they run with them, and without them the tests
# of the same kernels in smaller sizes.
SLOW_IN_PLAIN_CPP = {
    "attention_of_long_rows_together_has_the_bits_of_each_alone",
    "a_decoding_row_does_not_depend_on_its_batch",
    "a_linear_row_that_is_copied_apart_from_others_does_not_depend_on_its_batch",
    "a_float8_row_that_is_copied_apart_from_others_does_not_depend_on_its_batch",
}


def run_kernel_tests(*arguments: str) -> list[str]:
    """The names of the tests that ran and passed."""
    ran = subprocess.run(
        [BINARY, "--quick", *arguments], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout[-2000:]
    assert " tests passed\n" in ran.stdout
    return [line.split(" ")[1] for line in ran.stdout.splitlines() if not line.endswith(" passed")]


def test_the_kernels_own_tests_pass_on_every_isa_of_this_machine(library: NativeLibrary):
    build(library, "build/native/tests")
    every = set[str]()
    for isa in library.available_isas:
        if isa != PLAIN_CPP:
            every = set(run_kernel_tests("--isa", isa))
            assert every > SLOW_IN_PLAIN_CPP
    for name in sorted(every - SLOW_IN_PLAIN_CPP):
        assert name in run_kernel_tests("--isa", PLAIN_CPP, "--only", name)
    assert every <= set(run_kernel_tests("--isa", "amx_emulated"))
    if not every:
        assert run_kernel_tests("--isa", PLAIN_CPP)


@pytest.mark.soak
def test_the_kernels_own_tests_pass_in_plain_cpp(library: NativeLibrary):
    build(library, "build/native/tests")
    assert set(run_kernel_tests("--isa", PLAIN_CPP)) > SLOW_IN_PLAIN_CPP


def test_the_kernels_own_benchmark_reports_each_operation(library: NativeLibrary):
    build(library, "build/native/bench")
    command = [CSRC / "build/native/bench", "--rows", "2", "--prefill", "0", "--repeats", "1"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert f"isa {library.cpu_isa}, 1 threads" in ran.stdout
    for operation in ("qkv", "o", "gate-up", "down", "norm", "attend", "head"):
        assert f" {operation} " in ran.stdout


OPTIONS = VerifyOptions(
    shape="tiny-qwen3", num_requests=8, max_tokens=16, config=EngineConfig(max_num_seqs=4)
)


def run_self_test(library: NativeLibrary, options: VerifyOptions) -> SelfTestResult:
    isas = (f"FAULTY_ISA={library.cpu_isa}", f"FAULTY_INTEGER_ISA={library.cpu_integer_isa}")
    build(library, "faults", *isas)
    assert has_native_faults()
    return self_test(options, lambda _: None)


def test_the_gate_catches_every_fault_of_the_native_kernels(library: NativeLibrary):
    result = run_self_test(library, OPTIONS)
    assert (result.verdict, result.note) == ("PASS", None)
    assert result.named("caught") == ALL_FAULTS
    assert all("the model has no" in each.why for each in result.faults[len(ALL_FAULTS) :])
    assert result.last_line.startswith("SELF-TEST PASS caught=5 skipped=")
    assert result.last_line.endswith(" ops=native")


@pytest.mark.soak
def test_the_gate_catches_every_fault_of_the_kernels_over_kv_in_int8(library: NativeLibrary):
    config = replace(OPTIONS.config, kv_cache_dtype="int8")
    result = run_self_test(library, replace(OPTIONS, config=config))
    assert result.verdict == "PASS"
    assert result.named("caught") == ALL_FAULTS


@pytest.mark.soak
def test_a_fault_that_needs_long_prompts_is_skipped_in_a_short_context(library: NativeLibrary):
    config = replace(OPTIONS.config, max_num_seqs=2, max_model_len=400)
    result = run_self_test(library, replace(OPTIONS, num_requests=5, config=config))
    assert result.verdict == "PASS"
    far = next(each for each in result.faults if each.name.startswith("pages of another row from"))
    assert far.outcome == "skipped"
    assert far.why == "the longest prompt has 384 tokens, and it needs 1200"


def test_the_library_reads_nothing_by_streams(library: NativeLibrary):
    """Where the C++ runtime is linked in, they crash beside jaxlib's copy; XLA's headers only write
    to streams, and only errors."""
    build(library, "build/native/tests")
    objects = [*OBJECTS.glob("core/*.o"), *OBJECTS.glob("isa/*.o"), *OBJECTS.glob("ffi/*.o")]
    command = ["nm", "-C", *map(str, objects)]
    named = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "cadenza::cgroup_cores" in named
    assert "fstream" not in named
    assert "istream::" not in named


def test_kernels_run_nothing_when_the_library_is_loaded(library: NativeLibrary):
    """Initialisers of an instruction set's objects would run on CPUs that do not have it."""
    build(library, "build/native/tests")
    objects = sorted(OBJECTS.glob("isa/*.o"))
    command = ["nm", *map(str, objects)]
    named = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "scalar_kernels" in named
    assert "_GLOBAL__sub_I" not in named


def test_the_library_that_is_installed_holds_no_faults(library: NativeLibrary):
    """A wheel takes the package's library, which is compiled without the flag, and no other."""
    assert not hasattr(library.handle, "cadenza_inject_fault")
    assert "CADENZA_FAULTS" not in (ROOT / "setup.py").read_text()
    package = library_path().parent
    found = [path for path in package.rglob("*") if path.suffix in LIBRARY_SUFFIXES]
    assert found == [library_path()]
    assert "prune csrc/build" in (ROOT / "MANIFEST.in").read_text().splitlines()
