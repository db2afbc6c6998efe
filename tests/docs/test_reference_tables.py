"""docs/flags.md and docs/metrics.md say what the commands and the server have."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.docs import command_line
from tests.docs.documents import ROOT
from tests.server.serve_process import ServeProcess
from tools import reference_tables

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
