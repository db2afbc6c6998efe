"""A pytest plugin: tests marked `gates` are skipped while nothing that they test has changed.

They start linters, type checkers and other processes to test what seldom changes. A file of them
that has passed as a whole leaves the digest of `WATCHED` in pytest's cache, and is skipped while
the digest is the same. A new clone has no cache; `make test-tools` runs without it.
"""

import hashlib
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
WATCHED = ("tools", "tests/tools", "tests/conftest.py", "tests/pyrightconfig.json")
WATCHED_TOO = ("pyproject.toml", "requirements.lock", "Makefile", "setup.py", "csrc/isas.py")
REASON = "unchanged since it passed (`make test-tools` runs it)"


class PassedGates:
    """The plugin; `root` is the repository's folder."""

    def __init__(self, config: pytest.Config, root: Path = ROOT) -> None:
        self._config = config
        self._cache: Any = getattr(config, "cache", None)
        self._digest = digest_of(root)
        self._passed: dict[str, bool] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if item.get_closest_marker("gates") and self._is_passed(item.nodeid):
                item.add_marker(pytest.mark.skip(reason=REASON))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "gates" in report.keywords:
            file = file_of(report.nodeid)
            has_run = not report.skipped
            self._passed[file] = self._passed.get(file, True) and has_run and not report.failed

    def pytest_sessionfinish(self) -> None:
        """Keeps the digest for each file of which all tests were run, and passed."""
        is_worker = hasattr(self._config, "workerinput")
        is_part = self._config.option.keyword or any("::" in each for each in self._config.args)
        if self._cache is not None and not is_worker and not is_part:
            for file in (file for file, is_passed in self._passed.items() if is_passed):
                self._cache.set(f"passed-gates/{file}", self._digest)

    def _is_passed(self, nodeid: str) -> bool:
        key = f"passed-gates/{file_of(nodeid)}"
        return self._cache is not None and self._cache.get(key, None) == self._digest


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def digest_of(root: Path) -> str:
    """Of the watched files' names and bytes, and of Python's version."""
    state = hashlib.sha256(sys.version.encode())
    for name in (*WATCHED, *WATCHED_TOO):
        top = root / name
        for path in [top] if top.is_file() else sorted(top.rglob("*.*")):
            if path.is_file() and "__pycache__" not in path.parts:
                state.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return state.hexdigest()
