"""`benchmarks/batching_result.py`: the result file of what `cadenza bench batching` printed."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.batching_result import main
from tools import result_tables

COMMAND = "cadenza bench batching --setting A --shape smollm2-135m"
SPREAD = {"count": 8, "mean_s": 0.25}


def mode(name: str, clients: int | None, rates: list[float]) -> dict[str, Any]:
    seen = {"mode": name, "clients": clients, "tok_s_runs": rates, "ttft": SPREAD}
    return seen | {"full_tok_s_runs": [] if clients else [77.04, 80.0]}


REPORT: dict[str, Any] = {
    "machine": {"cpu": "a CPU", "isa": "avx2", "cores": 2, "jax": "1", "python": "3"},
    "workload": {
        "setting": "A",
        "rows": 8,
        "system_len": 0,
        "repeats": 2,
        "modes": ["continuous", "static"],
        "loads": ["1 client", "4 clients"],
    },
    "results": [
        mode("continuous", 1, [10.04, 12.0]),
        mode("static", 1, [9.0, 9.0]),
        mode("continuous", 4, [40.0, 42.0]),
        mode("static", 4, [30.0, 31.0]),
    ],
    "bars": [
        {"what": "tok/s over static", "ratio": 1.234, "required": 0.95, "verdict": "pass"}
        | {"ideal": 1.5, "allowed": None, "claim": "6 to 9"}
    ],
}


def make(tmp_path: Path, report: dict[str, Any]) -> result_tables.Run:
    (tmp_path / "report.json").write_text(json.dumps(report))
    files = (str(tmp_path / "report.json"), str(tmp_path / "run.json"))
    about = ("--kind", "Zen 4", "--shape", "135M shape", "--conditions", "2 rounds")
    main([*files, *about, "--command", COMMAND])
    return result_tables.read_run(tmp_path / "run.json")


@pytest.fixture
def made(tmp_path: Path) -> result_tables.Run:
    return make(tmp_path, REPORT)


def test_a_report_becomes_a_result_file_with_a_figure_for_each_mode_and_bar(
    made: result_tables.Run,
):
    labels = [figure.label for figure in made.figures]
    assert labels == [
        "continuous, tok/s at 1 / 4 clients",
        "continuous, mean TTFT, ms at 1 / 4 clients",
        "static, tok/s at 1 / 4 clients",
        "static, mean TTFT, ms at 1 / 4 clients",
        "tok/s over static (bar 0.95, pass, ideal 1.50, claimed elsewhere 6 to 9), ×",
    ]
    values = [figure.values["Cadenza"] for figure in made.figures]
    assert values[0] == [[10.0, 12.0], [40.0, 42.0]]
    assert values[1] == [250.0, 250.0]
    assert values[-1] == [1.23]
    assert made.report == REPORT


def test_the_file_says_how_it_was_made(made: result_tables.Run):
    assert made.engines["Cadenza"].command == COMMAND
    assert made.workload == "batching A, 135M shape, 8 rows: 8 prompts of 128 tokens, 64 out"
    assert made.machine["cpu"] == "a CPU (avx2)"
    assert made.conditions == "2 rounds"


def test_requests_that_wait_from_the_start_have_the_rate_while_they_do(tmp_path: Path):
    workload = REPORT["workload"] | {"loads": ["all at once"], "modes": ["continuous"]}
    report = REPORT | {"workload": workload, "results": [mode("continuous", None, [5.0])]}
    labels = [figure.label for figure in make(tmp_path, report).figures]
    assert labels[:3] == [
        "continuous, tok/s",
        "continuous, mean TTFT, ms",
        "continuous, while requests wait, tok/s",
    ]


def test_the_length_of_the_system_prompt_is_the_one_that_was_played(tmp_path: Path):
    workload = REPORT["workload"] | {"setting": "D", "system_len": 1976}
    run = make(tmp_path, REPORT | {"workload": workload})
    assert run.workload.endswith("8 rows: questions of 64 tokens behind a system prompt of 1,976")
