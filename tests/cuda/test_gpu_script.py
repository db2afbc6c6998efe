"""tests/gpu/run.sh without a GPU: its files are those of docs/benchmarks.md, its report tells what
to look at, a step that fails or is cut costs no other, and what its probes compute with."""

import json
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cadenza.backends.xla.ops.cuda_library import CudaInstruments, CudaLibrary
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.cli.verify import EXIT_CODES
from cadenza.errors import ConfigError
from tests.gpu.checks import FAMILIES, check_families, check_self_test, pytest_command
from tests.gpu.eight_billion import shape_of_8b, write
from tests.gpu.measure import (
    ALL_S,
    BESIDE_OTHERS,
    ROWS,
    Step,
    _run_stage,
    run_all,
    run_step,
    stages,
    steps,
)
from tests.gpu.probes import time_attention
from tests.gpu.profile import kernel_times, top_kernels
from tests.gpu.report import READINGS, VERDICTS, outcome
from tools import result_tables
from tools.result_tables import read_run

DEVICE = "NVIDIA H200"


def fabricated(step: Step) -> dict[str, Any]:
    if step.name.startswith("throughput"):
        rows = [int(each) for each in ROWS[step.name.split()[1]].split(",")]
        rates = {"decode_tok_s": 10.0, "prefill_tok_s": 20.0}
        shares = {"decode_share_of_bound": 0.8, "prefill_share_of_bound": 0.6}
        return {"results": [{"concurrency": each, **rates, **shares} for each in rows]}
    return {
        "kernels": {
            "device": DEVICE,
            "targets": ["sm_90"],
            "library": "compiled",
            "faults": "was there",
        },
        "proof": {
            "kernel_proof": {"operations": ["a"] * 70, "step_sizes": [1, 8], "elapsed_s": 9.0}
        },
        "verify bfloat16": {"verdict": "PASS", "last_line": "REFERENCE-EXACT PASS"},
        "verify float32": {"verdict": "NOT SHOWN", "last_line": "REFERENCE-EXACT NOT SHOWN"},
        "verify int8": {"verdict": "MISMATCH", "last_line": "REFERENCE-EXACT MISMATCH"},
        "self-test": {"verdict": "PASS", "last_line": "SELF-TEST PASS caught=8"},
        "verify families": {
            "passed": False,
            "last_lines": {"tiny-a": "SOLO-EXACT PASS bitwise", "tiny-b": "exit 1: no memory"},
        },
        "weights of 8B": {"written": "8b"},
        "weights of 8B, 8 layers": {"written": "8b-layers"},
        "weights of 1B and 135M": {"written": ["1b", "135m"]},
        "kernel profile": {"case": "decode 64", "top": [["attend", 22.25], ["product", 9.5]]},
        "attention": {"device": DEVICE, "at": ["64×4000"], "percent": [81.0], "us": [312.4]},
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
    assert run.machine["kind"] == "NVIDIA H200"
    assert run.conditions.endswith(
        "verify: bfloat16 PASS, float32 NOT SHOWN, int8 MISMATCH, self-test PASS, families failed"
    )
    assert run.engines["Cadenza"].version.startswith("jax 0.")
    assert ", Python 3." in run.engines["Cadenza"].version
    page = result_tables.page({run.name: run})
    assert "## NVIDIA H200" in page
    assert f"| result | {run.date} | NVIDIA H200; `tests/gpu/run.sh`; verify: bfloat16 PASS" in page
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
    assert title == "# 12 of 18 steps passed"
    rows = {cells[0]: cells for cells in (line.strip("| ").split(" | ") for line in lines[5:])}
    assert [*rows] == [each.name for each in steps(tmp_path)]
    assert {len(cells) for cells in rows.values()} == {5}
    assert {
        name: cells[1] for name, cells in rows.items() if cells[1] not in ("passed", "PASS")
    } == {
        "verify float32": "NOT SHOWN",
        "verify int8": "MISMATCH",
        "verify families": "failed",
        "throughput 1B": "failed, exit 1",
        "throughput 135M": "cut after 40.1 s",
        "kernel tests": "failed",
    }
    assert rows["proof"][2] == "70 operations in 2 sizes of steps, 9.0 s"
    decode = "decode 10 / 10 / 10 / 10 tok/s (80 / 80 / 80 / 80 %)"
    assert rows["throughput 8B"][2].startswith(f"1 / 8 / 64 / 256 rows, {decode}, prefill 20")
    assert rows["host share"][2] == "0.2 of 0.5 ms at 64 rows"
    assert rows["attention"][2] == "81 %, 312.4 µs at 64×4000"
    assert rows["verify families"][2] == "1 of 2 PASS; tiny-b: exit 1: no memory"
    assert rows["kernel profile"][2] == "decode 64: attend 22.2 %, product 9.5 %"
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


def test_steps_run_in_the_order_of_their_worth_within_ten_minutes(tmp_path: Path) -> None:
    every = stages(tmp_path)
    kernels, untimed, *timed = [[each.name for each in stage] for stage in every]
    assert kernels == ["kernels"]
    assert untimed[:4] == ["proof", *(f"verify {n}" for n in ("bfloat16", "float32", "int8"))]
    order = "throughput 8B, throughput 1B, throughput 135M, attention, served 135M, host share"
    assert ", ".join(name for (name,) in timed) == f"{order}, kernel profile"
    assert sum(max(each.limit_s for each in stage) for stage in every) == ALL_S < 600
    alone = {each.name for stage in every for each in stage if not each.is_beside_others}
    assert alone == {*kernels, *(name for (name,) in timed)}
    assert {ROWS[shape] for shape in ("8B", "1B", "135M")} == {"1,8,64,256"}


def test_no_other_step_runs_without_kernels(tmp_path: Path) -> None:
    def cut(step: Step, limit_s: float) -> dict[str, Any]:
        assert step.name == "kernels"
        assert 189 < limit_s <= 190
        return {"exit": None, "seconds": 190.0, "found": None, "tail": ""}

    report = run_all(tmp_path, cut)
    assert {each.get("skipped") for each in report.values()} == {None, "the kernels are not there"}
    assert "| kernels | cut after 190.0 s | 0 of " in (tmp_path / "report.md").read_text()


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


def test_steps_that_are_not_timed_run_side_by_side_with_a_part_of_the_cards_memory(
    tmp_path: Path,
) -> None:
    untimed = stages(tmp_path)[1]
    all_run = threading.Barrier(len(untimed), timeout=30)

    def run(step: Step, limit_s: float) -> dict[str, Any]:
        if step in untimed:
            all_run.wait()
        return run_fabricated(step, limit_s)

    assert len(run_all(tmp_path, run)) == len(steps(tmp_path))
    names = [each.name for each in steps(tmp_path)]
    assert [*json.loads((tmp_path / "report.json").read_text())] == names
    code = "import json, os; print(json.dumps({**os.environ}))"
    beside, alone = (
        run_step(Step("printed", 9, (sys.executable, "-c", code), is_beside), 60)["found"]
        for is_beside in (True, False)
    )
    assert {name: beside[name] for name in BESIDE_OTHERS} == BESIDE_OTHERS
    assert not any(name in alone for name in BESIDE_OTHERS)


def test_what_runs_side_by_side_ends_with_the_script() -> None:
    slow, quick = ("sh", "-c", "sleep 60"), ("sh", "-c", "echo '{}'")
    given = [Step(name, 60, slow, True) for name in ("first", "second")]
    results = _run_stage([*given, Step("third", 60, quick, True)], 60, run_step, {})
    started = time.monotonic()
    assert next(results)[0].name == "third"
    results.close()
    assert time.monotonic() < started + 30


def test_what_needs_a_library_with_faults_says_so(tmp_path: Path) -> None:
    found = check_self_test(tmp_path / "_cuda.so")
    told = outcome("self-test", {"exit": 0, "seconds": 1.0, "found": found})
    assert told == f"skipped: there is no library with faults: {tmp_path / '_cuda.so'}"


def test_families_are_told_apart_by_their_last_lines() -> None:
    script = """import json, sys
if "tiny-gpt-oss" in sys.argv: sys.exit("no memory")
print(json.dumps({"last_line": f"PASS {sys.argv[-1]}"}))"""
    found = check_families((sys.executable, "-c", script))
    assert not found["passed"]
    assert [*found["last_lines"]] == [shape for shape, *_ in FAMILIES]
    assert found["last_lines"]["tiny-gpt-oss"] == "exit 1: no memory"
    assert found["last_lines"]["tiny-gemma4"] == "PASS tiny-gemma4"
    assert found["last_lines"]["tiny-qwen3-vl"] == "PASS --images"


def test_the_kernels_tests_run_by_half_of_the_cpus() -> None:
    for cpus, workers in ((1, "1"), (6, "3"), (64, "8")):
        words = pytest_command(cpus)
        assert words[words.index("-n") + 1] == workers
        assert "--ignore=tests/cuda/test_proof.py" in words
        assert words[words.index("no:benchmark") - 1] == "-p"


def test_times_of_a_trace_are_those_of_kernels_on_the_gpu() -> None:
    def ran(pid: int, name: str, ts: float, dur: float) -> dict[str, Any]:
        return {"ph": "X", "pid": pid, "name": name, "ts": ts, "dur": dur}

    names = {1: "/device:GPU:0", 2: "/host:CPU"}
    own = "void cadenza::cuda::(anonymous namespace)::norm_kernel<cadenza::bf16>(cadenza::Norm)"
    events = [
        *({"name": "process_name", "pid": n, "args": {"name": name}} for n, name in names.items()),
        ran(1, "nvjet_sm90", 10.0, 4.0),
        ran(1, own, 16.0, 1.5),
        ran(2, "generate", 0.0, 100.0),
        ran(1, own, 18.0, 0.5),
    ]
    found = kernel_times(events)
    assert found == {"span_us": 8.5, "kernels": [["nvjet_sm90", 1, 4.0], [own, 2, 2.0]]}
    assert top_kernels(found) == [("nvjet_sm90", 66.7), ("norm_kernel<cadenza::bf16>", 33.3)]
    assert kernel_times(events[:2]) == {"span_us": 0.0, "kernels": []}


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
