"""The linter's and the type checker's settings reject what they are there to reject."""

import json
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

pytestmark = pytest.mark.gates


REPOSITORY = Path(__file__).parents[2]
RUFF_CHECK = ("-m", "ruff", "check", "--no-cache", "--output-format=concise")
HEADER = '"""A module."""\n\n'


def ruff_codes(name: str, text: str) -> set[str]:
    """The rules that a file of this name and text would break in this repository."""
    run = subprocess.run(
        [sys.executable, *RUFF_CHECK, f"--stdin-filename={name}", "-"],
        cwd=REPOSITORY,
        input=text,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert run.returncode in (0, 1), run.stderr
    lines = [line for line in run.stdout.splitlines() if line.count(":") >= 3]
    return {line.split(": ", 1)[1].split()[0].rstrip(":") for line in lines}


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("import pickle\n", "TID251"),
        ("from .page_pool import PagePool\n", "TID252"),
        ("X = eval('1')\n", "S307"),
        ("exec('x = 1')\n", "S102"),
        ("import yaml\n\nX = yaml.load('')\n", "S506"),
        ("try:\n    X = 1\nexcept:\n    X = 2\n", "E722"),
        ("try:\n    X = 1\nexcept Exception:\n    X = 2\n", "BLE001"),
        ("def f(a: int, b: int, c: int, d: int, e: int, g: int) -> None: ...\n", "PLR0913"),
        ("def f(a) -> None: ...\n", "ANN001"),
        ("def f(a: int) -> int:\n    return 1\n", "ARG001"),
        ("print(1)\n", "T201"),
        ("# x = f(1)\n", "ERA001"),
        ("X = 1  # type: ignore\n", "PGH003"),
        ("X = '" + "x" * 100 + "'\n", "E501"),
        ("class C:\n    x = 1\n", "D101"),
    ],
)
def test_ruff_refuses_in_the_package(text: str, code: str):
    assert code in ruff_codes("src/cadenza/scheduler/example.py", HEADER + text)


def test_ruff_refuses_a_module_that_does_not_say_what_it_owns():
    assert ruff_codes("src/cadenza/scheduler/example.py", "X = 1\n") == {"D100"}


def test_ruff_refuses_a_package_without_its_init_file():
    assert "INP001" in ruff_codes("src/cadenza/nowhere/example.py", HEADER + "X = 1\n")


def test_ruff_lets_the_command_line_print_and_tests_assert():
    assert not ruff_codes("src/cadenza/cli/info.py", HEADER + "print(1)\n") - {"INP001"}
    assert not ruff_codes("tests/unit/test_x.py", HEADER + "def test_x():\n    assert 1 + 1 == 2\n")


@pytest.fixture(scope="module")
def pyright_rules(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """For each file of a tree with known faults, the rules it breaks under these settings."""
    root = tmp_path_factory.mktemp("types")
    shutil.copy(REPOSITORY / "pyproject.toml", root)
    (root / "tools").mkdir()
    for package in ("brand_new", "backends/xla"):
        folder = root / "src" / "cadenza" / package
        folder.mkdir(parents=True)
        (folder / "loose.py").write_text(HEADER + "def f(a):\n    return a\n", encoding="utf-8")
        (folder / "wrong.py").write_text(HEADER + "X: int = 'no'\n", encoding="utf-8")
    run = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", f"--pythonpath={sys.executable}"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert run.returncode == 1, run.stdout + run.stderr
    rules: dict[str, set[str]] = defaultdict(set)
    for fault in json.loads(run.stdout)["generalDiagnostics"]:
        name = Path(fault["file"]).relative_to(root / "src" / "cadenza").as_posix()
        rules[name].add(fault["rule"])
    return rules


def test_pyright_is_strict_with_a_package_that_nobody_listed(pyright_rules: dict[str, set[str]]):
    assert "reportMissingParameterType" in pyright_rules["brand_new/loose.py"]
    assert pyright_rules["brand_new/wrong.py"] == {"reportAssignmentType"}


def test_pyright_is_basic_with_the_array_backend_and_still_finds_wrong_types(
    pyright_rules: dict[str, set[str]],
):
    assert "backends/xla/loose.py" not in pyright_rules
    assert pyright_rules["backends/xla/wrong.py"] == {"reportAssignmentType"}
