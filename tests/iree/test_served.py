"""Engines on compiled modules: the gate, a process without JAX, and its end."""

import subprocess
import sys
from pathlib import Path

import pytest

from cadenza.config import EngineConfig
from cadenza.verification.run import VerifyOptions, verify

TIMEOUT_S = 300

SCRIPT = """
import sys
from cadenza import LLM, SamplingParams
llm = LLM(backend="iree", max_num_seqs=4)
asked = ["The capital of France is", "9 * 7 ="] * 3
outputs = llm.generate(asked, SamplingParams(max_tokens=4, temperature=0))
print([each.outputs[0].text for each in outputs])
print(sorted(name for name in sys.modules if name.startswith(("jax", "mlx", "iree.compiler"))))
"""


@pytest.mark.parametrize(
    ("num_rows", "num_requests", "device"),
    [
        (4, 8, "auto"),
        pytest.param(4, 8, "cpu", marks=pytest.mark.soak),
        pytest.param(8, 16, "cpu", marks=pytest.mark.soak),
    ],
)
def test_every_stream_is_bitwise_that_of_its_request_alone_and_of_the_reference(
    num_rows: int, num_requests: int, device: str
):
    """Greedy and seeded, admitted while others decode, in slots that others have left; on one
    thread, and with `--device cpu` on all."""
    config = EngineConfig(backend="iree", max_num_seqs=num_rows, max_model_len=320, device=device)
    options = VerifyOptions(config=config, num_requests=num_requests, max_tokens=16)
    result, plan = verify(options, lambda _: None)
    assert result.passed, result.last_line
    assert result.last_line.startswith("REFERENCE-EXACT PASS bitwise"), result.last_line
    assert (plan.limits.max_num_seqs, plan.traits.name) == (num_rows, "iree:llvm-cpu")
    counts = [each.counts for each in result.modes]
    assert all(each.admitted_midstream >= num_requests - num_rows for each in counts)
    assert all(each.rows_reused for each in counts)
    assert sum(each.cache_hits for each in counts)


def test_a_process_that_computes_on_modules_loads_no_jax_and_ends_without_a_close():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    texts, loaded = done.stdout.splitlines()
    assert (texts.count("Paris"), texts.count("63")) == (3, 3)
    assert loaded == "[]"


def test_the_modules_are_part_of_the_package():
    import cadenza

    folder = Path(cadenza.__file__).parent / "models" / "bundled" / "iree"
    names = {path.name for path in folder.iterdir()}
    programs = {f"rows{rows}-{name}.vmfb" for rows in (4, 8) for name in ("decode", "prompt")}
    assert programs | {"manifest.json", "rows4-copy.vmfb", "rows8-copy.vmfb"} == names
