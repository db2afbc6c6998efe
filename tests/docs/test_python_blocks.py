"""The Python of README.md, docs/*.md and the cookbook runs; of docs/python.md another file sees to
that. That of docs/images.md runs with a small model of random weights, which sees, that of the
recipe about images with the bundled one.

Clients are sent to a server of the bundled model, which has the name that a page gives the model.
Where that is its own, an example prints what its comments say.
"""

import importlib
import importlib.util
import io
import re
import runpy
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest

from tests.docs.conftest import TRAINED, Shell, at
from tests.docs.documents import PAGES, Code, fences
from tests.docs.places import GGUF, PHOTO, PORT, SMOLVLM
from tests.server.serve_process import ServeProcess, serve_process

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
