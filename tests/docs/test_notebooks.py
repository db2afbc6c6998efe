"""Notebooks run from their first cell to their last, and have stored outputs; the Python of pages
runs, with the model that each page says."""

import importlib
import importlib.util
import io
import json
import re
import runpy
import subprocess
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.docs.conftest import TRAINED, Shell, at
from tests.docs.documents import PAGES, ROOT, Code, fences
from tests.docs.places import GGUF, PHOTO, PORT, SMOLVLM
from tests.server.serve_process import ServeProcess, serve_process
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
    return {"cells": [{"cell_type": "code", "source": [each], "outputs": []} for each in sources]}


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


CLIENTS = ("openai", "anthropic", "ollama")
PRINTED = re.compile(r"^print\(.*\)  # (.*)$", re.MULTILINE)
TRAINED_ONES = f'model="{GGUF}"'


def blocks() -> list[Code]:
    other = ("python.md", "images.md", "image-questions.md")
    pages = [page for page in PAGES if page.name not in other]
    return [code for page in pages for code in fences(page) if code.language == "python"]


def client_of(code: Code) -> str:
    """The package that it imports; "" of one that needs no server."""
    imported = re.findall(r"^(?:from|import) (\w+)", code.text, re.MULTILINE)
    assert len(imported) == 1, code.place
    return imported[0] if imported[0] in CLIENTS else ""


def ran(code: Code, url: str, folder: Path) -> str:
    """What it prints."""
    name = client_of(code)
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"the client {name} is not installed")
    importlib.import_module(name)
    printed = io.StringIO()
    file = folder / "example.py"
    file.write_text(code.text.replace(f"http://{PORT}", url))
    with redirect_stdout(printed):
        client = runpy.run_path(str(file))["client"]
    (client if hasattr(client, "close") else client._client).close()
    return printed.getvalue()


OF_CLIENTS = [code for code in blocks() if client_of(code)]
OF_THE_ENGINE = [code for code in blocks() if not client_of(code)]


def test_every_client_of_the_pages_has_an_example() -> None:
    assert {client_of(code) for code in OF_CLIENTS} == set(CLIENTS)


@pytest.mark.parametrize("code", OF_CLIENTS, ids=lambda code: code.place)
def test_a_client_gets_an_answer(served: ServeProcess, code: Code, tmp_path: Path) -> None:
    text = code.text.replace(TRAINED_ONES, 'model="bundled"')
    printed = ran(replace(code, text=text), served.url, tmp_path)
    assert printed.strip()
    if 'model="bundled"' in code.text and PRINTED.search(code.text):
        assert printed.splitlines() == PRINTED.findall(code.text)


@pytest.mark.soak
@pytest.mark.parametrize(
    "code", [code for code in OF_CLIENTS if TRAINED_ONES in code.text], ids=lambda code: code.place
)
def test_a_client_of_a_trained_model_gets_the_answer_of_the_page(code: Code, shell: Shell) -> None:
    shell.with_stand_ins(GGUF, {})  # it puts the file there, or skips
    assert TRAINED.is_file()
    with serve_process(shell.folder / GGUF, CADENZA_MAX_NUM_SEQS="2") as server:
        server.wait_ready()
        assert ran(code, server.url, shell.folder).splitlines() == PRINTED.findall(code.text)


@pytest.mark.parametrize("code", OF_THE_ENGINE, ids=lambda code: code.place)
def test_an_example_of_the_engine_runs(code: Code, shell: Shell) -> None:
    (shell.folder / "example.py").write_text(code.text)
    said = shell.run("python -W error example.py")
    assert (said.code, said.err) == (0, "")
    assert "Paris" in said.out
    assert "42" in said.out


def python_of(name: str) -> list[Code]:
    return [
        code
        for page in PAGES
        if page.name == name
        for code in fences(page)
        if code.language == "python"
    ]


OF_IMAGES = python_of("images.md")


@pytest.mark.slow
def test_the_recipe_about_images_prints_what_it_says(shell: Shell) -> None:
    """Its blocks, one after the other in one folder."""
    with serve_process(Path("bundled-vision"), CADENZA_MAX_NUM_SEQS="4") as server:
        server.wait_ready()
        for code in python_of("image-questions.md"):
            (shell.folder / "example.py").write_text(at(code.text, server))
            said = shell.run("python -W error example.py")
            assert (said.code, said.err) == (0, ""), code.place
            assert said.out.splitlines() == PRINTED.findall(code.text), code.place


@pytest.mark.soak
@pytest.mark.parametrize("code", OF_IMAGES, ids=lambda code: code.place)
def test_an_example_with_an_image_runs(code: Code, shell: Shell) -> None:
    (model,) = SMOLVLM
    written = shell.with_stand_ins(code.text, SMOLVLM)
    assert model in code.text
    (shell.folder / "example.py").write_text(written)
    said = shell.run(f"{PHOTO} && python -W error example.py")
    assert (said.code, said.err) == (0, "")
    assert said.out.strip()
