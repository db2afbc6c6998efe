"""The tests' own settings: warnings are errors, markers are strict, native means native."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
OK, FAILED, USAGE_ERROR, NOTHING_RAN = 0, 1, 4, 5


def run_pytest(root: Path, text: str, *options: str, require_native: str = "") -> int:
    """Exit status of one test file under this repository's settings and conftest.

    It finds an empty package in `root`, whose native kernels are then the test's own matter.
    """
    (root / "cadenza").mkdir(exist_ok=True)
    (root / "cadenza" / "__init__.py").touch()
    (root / "tests").mkdir()
    (root / "tests" / "test_it.py").write_text(text, encoding="utf-8")
    shutil.copy(REPOSITORY / "tests" / "conftest.py", root / "tests")
    shutil.copytree(REPOSITORY / "tools", root / "tools", dirs_exist_ok=True)
    shutil.copy(REPOSITORY / "pyproject.toml", root)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root), "CADENZA_REQUIRE_NATIVE": require_native},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return run.returncode


PASSES = "def test_it():\n    pass\n"
WARNS = "import warnings\n\n\ndef test_it():\n    warnings.warn('careful', stacklevel=1)\n"
MARKED = "import pytest\n\n\n@pytest.mark.{}\ndef test_it():\n    assert {}\n"
FRESH = """
from hypothesis import settings

def test_it():
    assert settings.get_current_profile_name() == "{}"
"""


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (PASSES, OK),
        (WARNS, FAILED),
        (MARKED.format("slow", True), OK),
        (MARKED.format("sowk", True), 2),
        (MARKED.format("soak", True), NOTHING_RAN),
        (MARKED.format("oracle", True), NOTHING_RAN),
        (MARKED.format("native", False), OK),  # skipped
        (FRESH.format("ci"), OK),
    ],
)
def test_a_file_of_tests_ends_as_it_should(tmp_path: Path, text: str, status: int):
    assert run_pytest(tmp_path, text) == status


def test_the_soak_profile_is_used_when_asked_for(tmp_path: Path):
    assert run_pytest(tmp_path, FRESH.format("soak"), "--hypothesis-profile=soak") == OK


def test_a_missing_native_library_is_an_error_when_it_is_required(tmp_path: Path):
    assert run_pytest(tmp_path, PASSES, require_native="1") == USAGE_ERROR


@pytest.mark.parametrize(("holds", "status"), [(True, OK), (False, FAILED)])
def test_a_native_test_runs_when_there_is_a_library(tmp_path: Path, holds: bool, status: int):
    (tmp_path / "cadenza").mkdir()
    (tmp_path / "cadenza" / "kernels.so").touch()
    assert run_pytest(tmp_path, MARKED.format("native", holds), require_native="1") == status
