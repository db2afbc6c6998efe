"""The machine: its roofline with and without kernels, its description, fresh processes on it."""

from pathlib import Path

import pytest

from cadenza.bench.machine import (
    MIN_BUFFER_BYTES,
    RooflineProbe,
    buffer_bytes,
    cpu_name,
    describe_machine,
    largest_cache_bytes,
)
from cadenza.errors import RunnerError
from cadenza_bench.fresh_process import run_in_fresh_process


def test_without_native_kernels_numpy_measures_and_says_so():
    found = RooflineProbe(None, "bfloat16").measure(repeats=1)
    assert (found.method, found.dtype) == ("numpy", "float32")
    assert found.read_gb_s > 0
    assert found.gflop_s > 0


def test_the_largest_cache_is_read_from_the_system(tmp_path: Path):
    for index, size in enumerate(("48K", "2048K", "36M", "unknown")):
        folder = tmp_path / "devices/system/cpu/cpu0/cache" / f"index{index}"
        folder.mkdir(parents=True)
        (folder / "size").write_text(f"{size}\n")
    assert largest_cache_bytes(tmp_path) == 36 << 20
    assert largest_cache_bytes(tmp_path / "nowhere") == 0


def test_the_buffer_is_well_beyond_every_cache():
    assert buffer_bytes() >= MIN_BUFFER_BYTES
    assert buffer_bytes() >= 4 * largest_cache_bytes()
    assert buffer_bytes() % (1 << 20) == 0


@pytest.mark.parametrize(
    ("text", "name"), [("processor: 0\nmodel name\t: A Chip @ 3 GHz\n", "A Chip @ 3 GHz")]
)
def test_the_processor_is_named_as_the_system_does(tmp_path: Path, text: str, name: str):
    path = tmp_path / "cpuinfo"
    path.write_text(text)
    assert cpu_name(path) == name
    assert cpu_name(tmp_path / "absent")


def test_the_machine_is_described_without_native_kernels():
    facts = describe_machine(None)
    assert (facts["isa"], facts["threads"]) == (None, None)
    assert isinstance(facts["cores"], int)


def test_a_measurement_that_fails_is_reported_with_its_last_line():
    with pytest.raises(RunnerError, match=r"a look failed with exit code \d: .*no such file"):
        run_in_fresh_process("json.tool", "no such file", what="a look", timeout_s=60.0)


def test_a_measurement_that_does_not_end_is_killed():
    with pytest.raises(RunnerError, match=r"a look took more than 0 s"):
        run_in_fresh_process("tests.bench.endless", "{}", what="a look", timeout_s=0.01)
