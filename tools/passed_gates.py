"""A pytest plugin: tests marked `gates` or `kernels` are skipped while what they test is unchanged.

They start linters, type checkers, compilers and other processes to test what seldom changes. A file
of them that has passed as a whole by day leaves the digest of what its mark watches in pytest's
cache, and is skipped by day while the digest is the same. A new clone has no cache;
`make test-tools` runs without it.
"""

import hashlib
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
_SETTINGS = (
    *("pyproject.toml", "requirements.lock", "Makefile", "setup.py"),
    *("csrc/isas.py", "csrc/nvcc.py"),
)
# By mark, files and folders.
WATCHED = {
    "gates": ("tools", "tests/tools", "tests/conftest.py", "tests/pyrightconfig.json", *_SETTINGS),
    "kernels": ("csrc", "MANIFEST.in", "setup.py", "tests/native/test_kernel_builds.py"),
}
UNWATCHED = {"__pycache__", "build"}
REASON = "unchanged since it passed (`make test-tools` runs it)"


class PassedGates:
    """The plugin; `root` is the repository's folder."""

    def __init__(self, config: pytest.Config, root: Path = ROOT) -> None:
        self._config = config
        self._cache: Any = getattr(config, "cache", None)
        self._digests = {mark: digest_of(root, watched) for mark, watched in WATCHED.items()}
        self._passed: dict[tuple[str, str], bool] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            for mark in WATCHED:
                if item.get_closest_marker(mark) and self._is_passed(mark, item.nodeid):
                    item.add_marker(pytest.mark.skip(reason=REASON))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for mark in WATCHED:
            if mark in report.keywords:
                key = mark, file_of(report.nodeid)
                has_run = not report.skipped
                self._passed[key] = self._passed.get(key, True) and has_run and not report.failed

    def pytest_sessionfinish(self) -> None:
        """Keeps the digest for each file of which all tests were run, and passed."""
        is_worker = hasattr(self._config, "workerinput")
        is_part = self._config.option.keyword or any("::" in each for each in self._config.args)
        if self._cache is not None and self._is_by_day and not is_worker and not is_part:
            for mark, file in (key for key, is_passed in self._passed.items() if is_passed):
                self._cache.set(f"passed-{mark}/{file}", self._digests[mark])

    @property
    def _is_by_day(self) -> bool:
        return "not soak" in self._config.option.markexpr

    def _is_passed(self, mark: str, nodeid: str) -> bool:
        key = f"passed-{mark}/{file_of(nodeid)}"
        return (
            self._cache is not None
            and self._is_by_day
            and self._cache.get(key, None) == self._digests[mark]
        )


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def digest_of(root: Path, watched: Iterable[str]) -> str:
    """Of the watched files' names and bytes, and of Python's version."""
    state = hashlib.sha256(sys.version.encode())
    for name in watched:
        top = root / name
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            if path.is_file() and not UNWATCHED & {*path.relative_to(root).parts}:
                state.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return state.hexdigest()
