"""Instruction sets without bf16 arithmetic compute the same bits, in float32 and in bfloat16.

By day the golden corpus and the kernels' own tests show it.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cadenza.backends.xla.ops.native_library import NativeLibrary

pytestmark = [pytest.mark.native, pytest.mark.soak]

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
def test_two_portable_tables_give_equal_streams_and_logprobs(
    library: NativeLibrary, tmp_path: Path, shape: str
):
    """The two fastest that were built, of which the last one may be plain C++."""
    portable = [isa for isa in library.available_isas if isa != "amx" and "_bf16" not in isa]
    first, second, *_ = [*portable, None]
    if second is None:
        pytest.skip("this CPU and build have one table without bf16 instructions")
    recording = str(tmp_path / "bits.json")
    recorded = record_bits(first, recording, "--only", f"{shape} native")
    assert recorded.returncode == 0, recorded.stderr
    compared = record_bits(second, recording, "--only", f"{shape} native", "--compare")
    assert compared.returncode == 0, compared.stdout
    assert "of 2 cases compared, 0 differ" in compared.stdout
