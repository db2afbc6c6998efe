"""Instruction sets without bf16 arithmetic compute the same bits, in float32 and in bfloat16."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cadenza.backends.xla.ops.native_library import NativeLibrary

pytestmark = [pytest.mark.native, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]


def record_bits(isa: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tools.record_bits", *arguments],
        cwd=ROOT,
        env={**os.environ, "CADENZA_CPU_ISA": isa},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("shape", ["tiny-gemma2", "tiny-qwen3-moe"])
def test_avx512_and_avx2_give_equal_streams_and_logprobs(
    library: NativeLibrary, tmp_path: Path, shape: str
):
    missing = {"avx512", "avx2"} - set(library.available_isas)
    if missing:
        pytest.skip(f"this CPU cannot run {' and '.join(sorted(missing))}")
    recording = str(tmp_path / "bits.json")
    recorded = record_bits("avx512", recording, "--only", f"{shape} native")
    assert recorded.returncode == 0, recorded.stderr
    compared = record_bits("avx2", recording, "--only", f"{shape} native", "--compare")
    assert compared.returncode == 0, compared.stdout
    assert "of 2 cases compared, 0 differ" in compared.stdout
