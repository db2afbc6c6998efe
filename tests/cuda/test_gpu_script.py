"""tests/gpu/run.sh without a GPU: its files are those of docs/benchmarks.md, a step that fails
costs no other, and what its probes compute with."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cadenza.backends.xla.ops.cuda_library import CudaLibrary
from cadenza.backends.xla.ops.cuda_measure import CudaInstruments
from cadenza.checkpoint import open_checkpoint
from cadenza.errors import ConfigError
from tests.gpu.eight_billion import shape_of_8b, write
from tests.gpu.measure import ALL_S, ROWS, Step, run_all, run_step, steps
from tests.gpu.probes import time_attention
from tools.result_tables import read_run

DEVICE = "NVIDIA H100 80GB HBM3"


def fabricated(step: Step) -> dict[str, Any]:
    """What the step's command would print."""
    if step.name.startswith("throughput"):
        rows = [int(each) for each in ROWS[step.name.split()[1]].split(",")]
        rates = {"decode_tok_s": 10.0, "prefill_tok_s": 20.0}
        shares = {"decode_share_of_bound": 0.8, "prefill_share_of_bound": 0.6}
        return {"results": [{"concurrency": each, **rates, **shares} for each in rows]}
    if step.name == "attention":
        return {"device": DEVICE, "at": ["64×4000"], "percent": [81.0]}
    if step.name == "host share":
        return {"device": DEVICE, "rows": ["64"], "host_ms": [0.2]}
    return {"clients": [1, 8, 64], "tok_s": [900.0, 6000.0, 9000.0]}


def run_fabricated(step: Step, limit_s: float) -> dict[str, Any]:
    assert 0 < limit_s <= step.limit_s
    failed = step.name in ("throughput 1B", "verify int8")
    if failed:
        return {"exit": 1, "seconds": 1.0, "found": None, "tail": "out of memory"}
    return {"exit": 0, "seconds": 1.0, "found": fabricated(step)}


def test_its_result_is_a_file_that_the_tables_are_made_of(tmp_path: Path) -> None:
    run_all(tmp_path, run_fabricated)
    path = tmp_path / "result.json"
    run = read_run(path)
    assert run.machine["kind"] == "NVIDIA H100"
    assert run.conditions.endswith("passed: verify bfloat16, verify float32")
    assert run.figure("8B shape, decode").at == ("1", "8", "64", "256")
    assert run.figure("8B shape, decode, share of the bound").values == {"Cadenza": [80.0] * 4}
    assert run.figure("135M shape, served").of == "clients"
    assert not any(each.what.startswith("1B") for each in run.figures)
    report = json.loads((tmp_path / "report.json").read_text())
    assert {*report} == {each.name for each in steps(tmp_path)}
    assert report["throughput 1B"]["tail"] == "out of memory"


def test_a_step_has_a_limit_and_its_last_lines_are_kept() -> None:
    slow = Step("slow", 1, (sys.executable, "-c", "import time; time.sleep(60)"))
    assert run_step(slow, 0.5)["exit"] is None
    broken = Step("broken", 9, (sys.executable, "-c", "raise SystemExit('no such device')"))
    found = run_step(broken, 60)
    assert found["exit"] == 1
    assert "no such device" in found["tail"]
    sound = run_step(Step("sound", 9, (sys.executable, "-c", "print('1\\n{\"a\": 2}')")), 60)
    assert (sound["exit"], sound["found"]) == (0, {"a": 2})
    assert ALL_S < 480


def test_the_model_of_8b_is_loaded_as_one(tmp_path: Path) -> None:
    model = shape_of_8b()
    assert (model.hidden_size, model.num_layers, model.vocab_size) == (4096, 32, 128256)
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "vocab_size": 300,
        "eos_token_ids": (2,),
        "bos_token_id": 1,
    }
    small = replace(model, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16, **sizes)
    small = replace(small, rope=replace(small.rope, rotary_dim=16))
    write(tmp_path / "model", small)
    checkpoint = open_checkpoint(tmp_path / "model")
    assert checkpoint.config.num_layers == 3
    assert {checkpoint.weights.stored_type(name) for name in checkpoint.weights} == {"bfloat16"}


@pytest.mark.native
def test_attention_is_timed_over_pages_of_each_row(library: CudaLibrary) -> None:
    assert time_attention(library, 1, 5, trials=1) > 0


@pytest.mark.native
def test_a_cards_rates_are_those_of_its_library(library: CudaLibrary) -> None:
    instruments = CudaInstruments(library)
    assert instruments.read_bytes_per_s(instruments.new_buffer(8), repeats=1) > 0
    assert instruments.operations_per_s("bfloat16", repeats=1) > 0
    assert instruments.operations_per_s("int8", repeats=1) > 0
    with pytest.raises(ConfigError, match="float32 is not measured"):
        instruments.operations_per_s("float32", repeats=1)
