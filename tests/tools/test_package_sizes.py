"""The gates on lines and features of packages, the report of small functions, repeated tests."""

from pathlib import Path
from typing import Any

import pytest

from tools import crossings, package_sizes, passed_gates, small_functions

pytestmark = pytest.mark.gates


def test_a_package_above_its_bound_without_one_or_absent_is_a_fault(tmp_path: Path):
    for name, count in (("core/a.py", 3), ("core/x/b.py", 2), ("top.py", 1)):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n" * count)
    counted = package_sizes.lines_of(tmp_path)
    assert counted == {"core": 5, package_sizes.ROOT: 1}
    assert package_sizes.find_faults(counted, {"core": 5, package_sizes.ROOT: 1}) == []
    faults = package_sizes.find_faults(counted, {"core": 4, "gone": 9})
    assert [fault.split(";")[0] for fault in faults] == [
        f"{package_sizes.ROOT} has no bound",
        "gone is bounded, but absent",
        "core has 5 lines, more than 4",
    ]


def test_docstrings_are_counted_also_behind_fields(tmp_path: Path):
    documented = (
        '"""A module."""\n\nLIMIT = 1\n"""Of it."""\n\ndef f():\n    """Two\n    lines."""\n'
    )
    (tmp_path / "a.py").write_text(documented)
    (tmp_path / "b.py").write_text('text = """\nno docstring"""\n')
    assert package_sizes.percent_docstrings(tmp_path) == pytest.approx(100 * 4 / 10)


def test_a_module_of_the_middle_that_knows_too_many_features_is_a_fault(tmp_path: Path):
    features = crossings.features_of(
        "from cadenza.scheduler.image_queue import ImageQueue\n"
        "from cadenza.kv import drafts, recurrent_states\n"
        "def f():\n    from cadenza.scheduler.fair_share import Tenants\n"
    )
    assert features == ("images", "drafts", "states", "tenants")
    assert crossings.find_faults({"a": features, "b": (*features, "spans")}) == [
        "b knows 5 features, more than 4: images, drafts, states, tenants, spans"
    ]
    core = tmp_path / crossings.MIDDLE[0]
    core.mkdir(parents=True)
    (core / "a.py").write_text("from x import Image, Draft, Span, Tenant, Receipt\n")
    assert crossings.main([str(tmp_path)]) == 1
    (core / "a.py").write_text("from x import Image\n")
    assert crossings.find_faults({"a": crossings.features_of((core / "a.py").read_text())}) == []


SOURCE = """
class Thing:
    def used_once(self): return 1
    def used_twice(self): return 2
    def __eq__(self, other): return True
    @property
    def decorated(self): return 3


def long():
    x = 1
    y = 2
    z = 3
    a = 4
    return x


thing = Thing()
thing.used_once(), thing.used_twice(), thing.used_twice(), thing.decorated, long()
"""


def test_short_functions_that_are_used_once_are_reported(tmp_path: Path):
    (tmp_path / "a.py").write_text(SOURCE)
    assert [name for _, name, _ in small_functions.once_used(tmp_path)] == ["used_once"]


class Kept:
    """A configuration with a cache, as of a process that runs all tests."""

    def __init__(self) -> None:
        self.cache, self.option, self.args, self.keyword = self, self, ["tests"], ""
        self.markexpr = "not soak and not oracle"
        self.values: dict[str, Any] = {}

    def get(self, key: str, default: Any) -> Any:
        return self.values.get(key, default)

    def set(self, key: str, value: Any) -> None:
        self.values[key] = value


class Seen:
    """An item, and the report on it."""

    def __init__(self, outcome: str, file: str = "tests/a.py") -> None:
        self.nodeid, self.keywords, self.marks = f"{file}::test", {"gates": 1}, list[Any]()
        self.skipped, self.failed = outcome == "skipped", outcome == "failed"

    def get_closest_marker(self, name: str) -> bool:
        return name in self.keywords

    def add_marker(self, mark: Any) -> None:
        self.marks.append(mark.mark.name)


@pytest.mark.parametrize(
    ("outcomes", "is_skipped"),
    [(["passed", "passed"], True), (["passed", "failed"], False), (["passed", "skipped"], False)],
)
def test_a_file_of_gates_is_skipped_once_all_of_it_has_passed_until_a_tool_changes(
    tmp_path: Path, outcomes: list[str], is_skipped: bool
):
    (tmp_path / "pyproject.toml").write_text("a = 1")
    config: Any = Kept()
    reports: list[Any] = [Seen(outcome) for outcome in outcomes]
    plugin = passed_gates.PassedGates(config, tmp_path)
    for report in reports:
        plugin.pytest_runtest_logreport(report)
    plugin.pytest_sessionfinish()

    def is_skipped_now() -> bool:
        item: Any = Seen("passed")
        passed_gates.PassedGates(config, tmp_path).pytest_collection_modifyitems([item])
        return item.marks == ["skip"]

    assert is_skipped_now() is is_skipped
    config.markexpr = "soak"
    assert not is_skipped_now()
    config.markexpr = "not soak"
    assert is_skipped_now() is is_skipped
    (tmp_path / "pyproject.toml").write_text("a = 2")
    assert not is_skipped_now()


@pytest.mark.parametrize("part", [{"keyword": "x"}, {"args": ["tests/a.py::test"]}])
def test_a_part_of_a_file_counts_for_nothing(tmp_path: Path, part: dict[str, Any]):
    config: Any = Kept()
    vars(config).update(part)
    plugin = passed_gates.PassedGates(config, tmp_path)
    report: Any = Seen("passed")
    plugin.pytest_runtest_logreport(report)
    plugin.pytest_sessionfinish()
    assert config.values == {}
