"""The tests' own settings: warnings are errors, markers are strict, native means native."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gates

REPOSITORY = Path(__file__).parents[2]
# Those that the settings are for.
PLUGINS = ("-p", "pytest_timeout", "-p", "_hypothesis_pytestplugin")
OK, FAILED, INTERRUPTED, USAGE_ERROR = 0, 1, 2, 4


def run_pytest(
    root: Path, files: dict[str, str], *options: str, require_native: str = ""
) -> subprocess.CompletedProcess[str]:
    """Test files, by name, under this repository's settings and conftest.

    They find an empty package in `root`, whose native kernels are then the test's own matter.
    """
    (root / "cadenza").mkdir(exist_ok=True)
    (root / "cadenza" / "__init__.py").touch()
    (root / "tests").mkdir()
    for name, text in files.items():
        (root / "tests" / f"test_{name}.py").write_text(text, encoding="utf-8")
    shutil.copy(REPOSITORY / "tests" / "conftest.py", root / "tests")
    shutil.copytree(REPOSITORY / "tools", root / "tools", dirs_exist_ok=True)
    shutil.copy(REPOSITORY / "pyproject.toml", root)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *PLUGINS, *options],
        cwd=root,
        env={
            **os.environ,
            "PYTHONPATH": str(root),
            "CADENZA_REQUIRE_NATIVE": require_native,
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # some take seconds to import
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


PASSES = "def test_it():\n    pass\n"
WARNS = "import warnings\n\n\ndef test_it():\n    warnings.warn('careful', stacklevel=1)\n"
MARKED = "import pytest\n\n\n@pytest.mark.{}\ndef test_it():\n    assert {}\n"
FRESH = """
from hypothesis import settings


def test_it():
    assert settings.get_current_profile_name() == "{}"
"""


def test_files_of_tests_end_as_they_should(tmp_path: Path):
    files = {
        "plain": PASSES,
        "warning": WARNS,
        "slow": MARKED.format("slow", True),
        "native": MARKED.format("native", False),
        "profile": FRESH.format("ci"),
        "soak": MARKED.format("soak", False),
        "oracle": MARKED.format("oracle", False),
    }
    run = run_pytest(tmp_path, files, "-rA")
    assert run.returncode == FAILED
    for line in (
        "PASSED tests/test_plain.py::test_it",
        "FAILED tests/test_warning.py::test_it",
        "PASSED tests/test_slow.py::test_it",
        "SKIPPED [1] tests/conftest.py",
        "PASSED tests/test_profile.py::test_it",
    ):
        assert line in run.stdout
    assert "1 failed, 3 passed, 1 skipped, 2 deselected" in run.stdout


def test_an_unknown_marker_is_an_error(tmp_path: Path):
    run = run_pytest(tmp_path, {"it": MARKED.format("sowk", True)})
    assert run.returncode == INTERRUPTED
    assert "'sowk' not found in `markers`" in run.stdout


def test_the_soak_profile_is_used_when_asked_for(tmp_path: Path):
    run = run_pytest(tmp_path, {"it": FRESH.format("soak")}, "--hypothesis-profile=soak")
    assert run.returncode == OK


def test_a_missing_native_library_is_an_error_when_it_is_required(tmp_path: Path):
    assert run_pytest(tmp_path, {"it": PASSES}, require_native="1").returncode == USAGE_ERROR


def test_a_native_test_runs_when_there_is_a_library(tmp_path: Path):
    (tmp_path / "cadenza").mkdir()
    (tmp_path / "cadenza" / "kernels.so").touch()
    files = {"sound": MARKED.format("native", True), "wrong": MARKED.format("native", False)}
    run = run_pytest(tmp_path, files, require_native="1")
    assert run.returncode == FAILED
    assert "1 failed, 1 passed" in run.stdout
