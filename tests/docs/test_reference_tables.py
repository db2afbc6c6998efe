"""What scripts write is what they would write: flags, metrics, results; the site has all pages."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import cadenza
from tests.docs import command_line
from tests.docs.documents import PAGES, ROOT
from tests.server.serve_process import ServeProcess
from tools import reference_tables, result_tables

WRITTEN = reference_tables.pages()


@pytest.mark.parametrize("name", WRITTEN)
def test_a_page_is_what_the_script_writes(name: str) -> None:
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert page == WRITTEN[name], "run: .venv/bin/python -m tools.reference_tables"


def test_every_flag_of_every_command_has_a_row_in_its_section() -> None:
    sections = WRITTEN["flags.md"].split("\n## ")
    engine = next(each for each in sections if each.startswith("The engine"))
    for name, command in reference_tables.commands_of("cadenza", command_line.parser()):
        own = next((each for each in sections if each.startswith(f"{name}\n")), "")
        for flag in command.params:
            if flag.param_type_name == "option" and not getattr(flag, "hidden", False):
                row = f"| `{flag.opts[0]}`"
                assert row in own or row in engine, (name, flag)


def test_a_default_is_in_its_own_column_and_a_hidden_flag_in_none() -> None:
    page = WRITTEN["flags.md"]
    assert "| `--port` | `N` | 8000 | `CADENZA_PORT` | Port; 0 takes a free one. |\n" in page
    assert "| `--seed` | `N` | 0 |  | Seed of the load. |\n" in page
    assert "--enable-auto-tool-choice" not in page


def test_every_metric_of_a_server_has_a_row(served: ServeProcess) -> None:
    found = text_string_to_metric_families(served.get("/metrics").text)
    families = [each for each in found if each.name.startswith(("vllm:", "cadenza:"))]
    assert len(families) > 40
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        rows = (f"| `{name}` | {family.type} |", f"| `{name.partition(':')[2]}` | {family.type} |")
        assert any(row in WRITTEN["metrics.md"] for row in rows), name


RUNS = result_tables.read_runs(result_tables.RESULTS)
RUN: dict[str, Any] = {
    "workload": "a shape",
    "date": "2026-01-01",
    "machine": {"kind": "Zen 5", "cpu": "a CPU", "cores": 2},
    "engines": {"Cadenza": {"version": "1", "command": "cadenza bench"}},
    "figures": [
        {
            "what": "decode",
            "unit": "tok/s",
            "at": ["1", "8"],
            "of": "rows",
            "values": {"Cadenza": [1234.5, [9, 7, 8]]},
        }
    ],
}


def read(folder: Path, run: dict[str, Any]) -> result_tables.Run:
    (folder / "run.json").write_text(json.dumps(run))
    return result_tables.read_run(folder / "run.json")


def test_the_page_the_table_and_the_picture_are_what_the_script_writes() -> None:
    again = "run: .venv/bin/python -m tools.result_tables"
    assert result_tables.PAGE.read_text(encoding="utf-8") == result_tables.page(RUNS), again
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme == result_tables.with_table(readme, RUNS), again
    assert result_tables.digest(RUNS) in result_tables.PICTURE.read_text(encoding="utf-8"), again


def test_every_run_has_its_figures_and_its_command_on_the_page() -> None:
    page = result_tables.PAGE.read_text(encoding="utf-8")
    for name, run in RUNS.items():
        assert f"(results/{name}.json)" in page
        assert all(f"`{engine.command}`" in page for engine in run.engines.values())


def test_a_figure_has_a_row_and_each_value_its_form(tmp_path: Path) -> None:
    row = result_tables.figures_table([read(tmp_path, RUN)]).splitlines()[-1]
    assert row.endswith("| decode, tok/s at 1 / 8 rows | 1,234.5 / 8 |")
    shown = [result_tables.shown(value) for value in (0.294, 2.0, -3.2, [9, 7], [1, 5, 3])]
    assert shown == ["0.29", "2", "−3.2", "7–9", "3"]


def test_a_model_that_people_run_has_a_row_for_each_engine(tmp_path: Path) -> None:
    places: dict[str, Any] = {"unit": "tok/s", "at": ["1", "8"]}
    figures = [
        {"what": "decode", **places, "values": {"Cadenza": [5, 9], "llama.cpp": [4, 6]}},
        {"what": "decode, share of the bound", **places, "values": {"Cadenza": [90, 70]}},
        {"what": "prefill", "unit": "tok/s", "values": {"Cadenza": [80], "llama.cpp": [30]}},
        {"what": "memory", "unit": "GB", "values": {"Cadenza": [3], "llama.cpp": [2.5]}},
    ]
    engines = {name: {"version": "1", "command": "x"} for name in ("Cadenza", "llama.cpp")}
    model = {"name": "A", "file": "4 bits", "gb": 2.5}
    run = read(tmp_path, RUN | {"engines": engines, "figures": figures, "model": model})
    ours, other = result_tables.people_table([run]).splitlines()[2:]
    assert ours.startswith("| **A**, 4 bits, 2.5 GB ([run](results/run.json)) | Zen 5 | Cadenza |")
    assert ours.endswith("| Cadenza | 5 / 9 | 90 / 70 | 80 | 3 |")
    assert other == "|  |  | llama.cpp | 4 / 6 |  | 30 | 2.5 |"
    page = result_tables.page({"run": run})
    assert page.count("(results/run.json)") == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"engines": {"Other": {"version": "1", "command": "x"}}}, "Cadenza is not among"),
        ({"machine": {"kind": "Zen 99"}}, "'Zen 99' is not in"),
        ({"colour": "red"}, "colour"),
        ({"figures": [{**RUN["figures"][0], "at": ["1"]}]}, "Cadenza has 2 values"),
    ],
)
def test_a_file_that_is_no_run_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path, {**RUN, **change})


def test_the_index_page_names_every_other_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    listed = re.findall(r"^(?:.* <)?([\w/-]+)>?$", index, re.MULTILINE)
    pages = {each.relative_to(ROOT / "docs").with_suffix("").as_posix() for each in PAGES[1:]}
    assert pages - {"index"} <= set(listed), "add it to a list of docs/index.md"


def test_the_page_of_the_interface_has_every_public_name() -> None:
    page = (ROOT / "docs" / "site" / "interface.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\.\. autoclass:: (\w+)$", page, re.MULTILINE)
    assert sorted(shown) == sorted(set(cadenza.__all__) - {"__version__"})
