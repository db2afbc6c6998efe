"""The notebooks run from their first cell to their last, and have stored outputs."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.docs.documents import ROOT
from tools import run_notebook

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def texts(notebook: dict[str, Any]) -> list[str]:
    return [
        "".join(output.get("text", output["output_type"]))
        for cell in code_cells(notebook)
        for output in cell["outputs"]
    ]


def notebook_of(*sources: str) -> dict[str, Any]:
    return {
        "cells": [{"cell_type": "code", "source": [each], "outputs": []} for each in sources],
    }


def test_there_is_a_notebook() -> None:
    assert NOTEBOOKS


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs_and_prints_what_it_has_stored(path: Path, small: dict[str, str]) -> None:
    stored, again = (json.loads(path.read_text(encoding="utf-8")) for _ in range(2))
    run_notebook.run(again, small)
    assert texts(again) == texts(stored)
    assert any(text == "display_data" for text in texts(stored))
    counts = [cell["execution_count"] for cell in code_cells(stored)]
    assert counts == [*range(1, len(counts) + 1)]


def test_a_later_cell_has_what_an_earlier_one_made() -> None:
    notebook = notebook_of("a = 20", "print(a + 1)", "print()")
    run_notebook.run(notebook)
    assert texts(notebook) == ["21\n", "\n"]


def test_a_cell_that_fails_fails_the_run() -> None:
    with pytest.raises(subprocess.CalledProcessError):
        run_notebook.run(notebook_of("print(1)", "assert 1 == 2"))
