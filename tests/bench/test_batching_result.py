"""`benchmarks/batching_result.py`: the result file of what `cadenza bench batching` printed."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.batching_result import main
from tools import result_tables

SPREAD = {"count": 8, "mean_s": 0.25}


def mode(name: str, clients: int, rates: list[float]) -> dict[str, Any]:
    return {"mode": name, "clients": clients, "tok_s_runs": rates, "ttft": SPREAD}


REPORT: dict[str, Any] = {
    "machine": {"cpu": "a CPU", "isa": "avx2", "cores": 2, "jax": "1", "python": "3"},
    "workload": {
        "setting": "A",
        "rows": 8,
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
        {"what": "tok/s over static", "ratios": [1.234, 1.3], "required": 0.95, "verdict": "pass"}
        | {"ideal": 1.5, "allowed": None, "claim": "6 to 9"}
    ],
}


@pytest.fixture
def made(tmp_path: Path) -> result_tables.Run:
    (tmp_path / "report.json").write_text(json.dumps(REPORT))
    files = (str(tmp_path / "report.json"), str(tmp_path / "run.json"))
    main([*files, "--kind", "Zen 4", "--shape", "smollm2-135m", "--conditions", "2 rounds"])
    return result_tables.read_run(tmp_path / "run.json")


def test_a_report_becomes_a_result_file_with_a_figure_for_each_mode_and_bar(
    made: result_tables.Run,
):
    labels = [figure.label for figure in made.figures]
    assert labels == [
        "continuous, tok/s at 1 / 4 clients",
        "continuous, mean TTFT, ms at 1 / 4 clients",
        "static, tok/s at 1 / 4 clients",
        "static, mean TTFT, ms at 1 / 4 clients",
        "tok/s over static (bar 0.95, pass, ideal 1.50, the seed: 6 to 9), ×",
    ]
    values = [figure.values["Cadenza"] for figure in made.figures]
    assert values[0] == [[10.0, 12.0], [40.0, 42.0]]
    assert values[1] == [250.0, 250.0]
    assert values[-1] == [[1.23, 1.3]]
    assert made.report == REPORT


def test_the_file_says_how_it_was_made(made: result_tables.Run):
    assert made.engines["Cadenza"].command == (
        "cadenza bench batching --shape smollm2-135m --setting A --modes continuous,static "
        "--repeats 2"
    )
    assert made.machine["cpu"] == "a CPU (avx2)"
    assert made.conditions == "2 rounds"
