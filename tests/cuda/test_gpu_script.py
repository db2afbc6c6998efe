"""tests/gpu/run.sh without a GPU: its files are those of docs/benchmarks.md, its report tells what
to look at, a step that fails or is cut costs no other, and what its probes compute with."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cadenza.backends.xla.ops.cuda_library import CudaLibrary
from cadenza.backends.xla.ops.cuda_measure import CudaInstruments
from cadenza.checkpoint import open_checkpoint
from cadenza.cli.verify import EXIT_CODES
from cadenza.errors import ConfigError
from tests.gpu.eight_billion import shape_of_8b, write
from tests.gpu.measure import ALL_S, ROWS, Step, run_all, run_step, steps
from tests.gpu.probes import time_attention
from tests.gpu.report import READINGS, VERDICTS, outcome
from tools.result_tables import read_run

DEVICE = "NVIDIA H100 80GB HBM3"


def fabricated(step: Step) -> dict[str, Any]:
    """What the step's command would print."""
    if step.name.startswith("throughput"):
        rows = [int(each) for each in ROWS[step.name.split()[1]].split(",")]
        rates = {"decode_tok_s": 10.0, "prefill_tok_s": 20.0}
        shares = {"decode_share_of_bound": 0.8, "prefill_share_of_bound": 0.6}
        return {"results": [{"concurrency": each, **rates, **shares} for each in rows]}
    return {
        "kernels": {"device": DEVICE, "targets": ["sm_90"], "library": "compiled"},
        "proof": {
            "kernel_proof": {"operations": ["a"] * 70, "step_sizes": [1, 8], "elapsed_s": 9.0}
        },
        "verify bfloat16": {"verdict": "PASS", "last_line": "REFERENCE-EXACT PASS"},
        "verify float32": {"verdict": "NOT SHOWN", "last_line": "REFERENCE-EXACT NOT SHOWN"},
        "verify int8": {"verdict": "MISMATCH", "last_line": "REFERENCE-EXACT MISMATCH"},
        "weights of 8B": {"written": "8b"},
        "attention": {"device": DEVICE, "at": ["64×4000"], "percent": [81.0]},
        "served 135M": {"clients": [1, 8], "tok_s": [900.0, 6000.0], "ready_s": 9.0},
        "host share": {"device": DEVICE, "rows": ["64"], "host_ms": [0.2], "step_ms": [0.5]},
        "kernel tests": {"passed": False, "last": ["1 failed, 90 passed"], "failed": ["test_a"]},
    }[step.name]


def run_fabricated(step: Step, limit_s: float) -> dict[str, Any]:
    assert step.limit_s - 5 < limit_s <= 2 * step.limit_s
    if step.name == "throughput 1B":
        return {"exit": 1, "seconds": 1.0, "found": None, "tail": "out of memory"}
    if step.name == "throughput 135M":
        return {"exit": None, "seconds": 40.1, "found": None, "tail": "compiling"}
    code = {"verify float32": 4, "verify int8": 1}.get(step.name, 0)
    return {"exit": code, "seconds": 1.0, "found": fabricated(step)}


def test_its_result_is_a_file_that_the_tables_are_made_of(tmp_path: Path) -> None:
    run_all(tmp_path, run_fabricated)
    path = tmp_path / "result.json"
    run = read_run(path)
    assert run.machine["kind"] == "NVIDIA H100"
    assert run.conditions.endswith("verify: bfloat16 PASS, float32 NOT SHOWN, int8 MISMATCH")
    assert run.figure("8B shape, decode").at == ("1", "8", "64", "256")
    assert run.figure("8B shape, decode, share of the bound").values == {"Cadenza": [80.0] * 4}
    assert run.figure("135M shape, served").of == "clients"
    assert not any(each.what.startswith(("1B", "135M shape, decode")) for each in run.figures)
    report = json.loads((tmp_path / "report.json").read_text())
    assert {*report} == {each.name for each in steps(tmp_path)}
    assert report["throughput 1B"]["tail"] == "out of memory"


def test_its_report_has_each_steps_outcome_figure_and_where_to_look(tmp_path: Path) -> None:
    run_all(tmp_path, run_fabricated)
    title, *lines = (tmp_path / "report.md").read_text().splitlines()
    assert title == "# 8 of 13 steps passed"
    rows = {cells[0]: cells for cells in (line.strip("| ").split(" | ") for line in lines[5:])}
    assert [*rows] == [each.name for each in steps(tmp_path)]
    assert {len(cells) for cells in rows.values()} == {5}
    assert {
        name: cells[1] for name, cells in rows.items() if cells[1] not in ("passed", "PASS")
    } == {
        "verify float32": "NOT SHOWN",
        "verify int8": "MISMATCH",
        "throughput 1B": "failed, exit 1",
        "throughput 135M": "cut after 40.1 s",
        "kernel tests": "failed",
    }
    assert rows["proof"][2] == "70 operations in 2 sizes of steps, 9.0 s"
    decode = "decode 10 / 10 / 10 / 10 tok/s (80 / 80 / 80 / 80 %)"
    assert rows["throughput 8B"][2].startswith(f"1 / 8 / 64 / 256 rows, {decode}, prefill 20")
    assert rows["host share"][2] == "0.2 of 0.5 ms at 64 rows"
    assert rows["kernel tests"][2:4] == ["1 failed, 90 passed", "all passed"]
    assert {*READINGS} == {*rows}


def test_what_was_measured_is_kept_when_the_script_is_ended(tmp_path: Path) -> None:
    def ended(step: Step, limit_s: float) -> dict[str, Any]:
        if step.name == "throughput 1B":
            raise KeyboardInterrupt
        return run_fabricated(step, limit_s)

    with pytest.raises(KeyboardInterrupt):
        run_all(tmp_path, ended)
    assert read_run(tmp_path / "result.json").figure("8B shape, prefill").at[-1] == "256"
    assert "| throughput 1B | not run yet |  |" in (tmp_path / "report.md").read_text()


def test_steps_run_in_the_order_of_their_worth_within_a_quarter_of_an_hour(tmp_path: Path) -> None:
    every = steps(tmp_path)
    order = "kernels proof verify weights throughput attention served host kernel"
    firsts = dict.fromkeys(each.name.split()[0] for each in every)
    assert " ".join(firsts) == order
    assert sum(each.limit_s for each in every) == ALL_S < 900
    assert {ROWS[shape] for shape in ("8B", "1B", "135M")} == {"1,8,64,256"}


def test_no_other_step_runs_without_kernels(tmp_path: Path) -> None:
    def cut(step: Step, limit_s: float) -> dict[str, Any]:
        assert step.name == "kernels"
        assert 299 < limit_s <= 300
        return {"exit": None, "seconds": 300.0, "found": None, "tail": ""}

    report = run_all(tmp_path, cut)
    assert {each.get("skipped") for each in report.values()} == {None, "the kernels are not there"}
    assert "| kernels | cut after 300.0 s | 0 of " in (tmp_path / "report.md").read_text()


def test_an_outcome_needs_the_status_and_what_the_step_is_for() -> None:
    assert {**EXIT_CODES} == VERDICTS
    ended = {"exit": 139, "seconds": 1.0, "found": {"verdict": "PASS", "last_line": ""}}
    assert outcome("verify int8", ended) == "failed, exit 139"
    unproven = {"exit": 0, "seconds": 1.0, "found": {"steps": {}}}
    assert outcome("proof", unproven) == "failed: no kernel_proof"
    assert outcome("attention", {"exit": 0, "found": None}) == "failed: it printed no result"


def test_a_step_has_a_limit_and_its_last_lines_are_kept() -> None:
    started = "sleep 60 & echo 1 row; echo compiling >&2; wait"
    cut = run_step(Step("slow", 1, ("sh", "-c", started)), 1)
    assert (cut["exit"], cut["tail"]) == (None, "1 row\ncompiling\n")
    assert cut["seconds"] < 50  # what it started holds its output open, and was ended
    broken = Step("broken", 9, (sys.executable, "-c", "raise SystemExit('no such device')"))
    found = run_step(broken, 60)
    assert found["exit"] == 1
    assert "no such device" in found["tail"]
    sound = run_step(Step("sound", 9, (sys.executable, "-c", "print('1\\n{\"a\": 2}')")), 60)
    assert (sound["exit"], sound["found"]) == (0, {"a": 2})


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
