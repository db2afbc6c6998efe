"""`tools.request_path` counts what was called, no more and no less."""

import importlib.util
import json
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tools.request_path import Recorder, Window, figures_of, measure_source, rows_of

ROOT = Path(__file__).parents[2]

FIRST = """
    import counted_second

    class Caller:
        def call_twice(self):
            return counted_second.leaf() + self._inner()

        def _inner(self):
            return counted_second.leaf()
"""
SECOND = """
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Made:
        size: int

    def leaf():
        return Made(1).size

    def numbers():
        yield from (1, 2, 3)

    def doubled():
        return [2 * number for number in numbers()]
"""


@pytest.fixture
def package(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "counted"
    folder.mkdir()
    (folder / "counted_first.py").write_text(textwrap.dedent(FIRST))
    (folder / "counted_second.py").write_text(textwrap.dedent(SECOND))
    yield folder
    for name in [name for name in sys.modules if name.startswith("counted")]:
        del sys.modules[name]


def load(package: Path, name: str) -> ModuleType:
    """The module, under a name within a package of its folder's name, as its classes tell it."""
    spec = importlib.util.spec_from_file_location(f"counted.{name}", package / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def count(recorder: Recorder, function: object) -> Window:
    assert callable(function)
    sys.setprofile(recorder)
    try:
        window = recorder.open()
        function()
        recorder.close()
    finally:
        sys.setprofile(None)
    return window


def test_calls_are_counted_with_those_into_another_file(package: Path):
    load(package, "counted_second")
    first = load(package, "counted_first")
    window = count(Recorder(package), first.Caller().call_twice)
    assert window.num_calls == 4
    assert window.num_calls_across_files == 2
    assert window.files == {"counted_first.py", "counted_second.py"}
    assert window.calls[0] == "counted_first.py:Caller.call_twice"


def test_classes_are_those_whose_methods_ran_or_whose_objects_were_made(package: Path):
    load(package, "counted_second")
    first = load(package, "counted_first")
    window = count(Recorder(package), first.Caller().call_twice)
    assert window.classes == {"counted.counted_first.Caller", "counted.counted_second.Made"}


def test_a_generator_counts_once_and_a_comprehension_not_at_all(package: Path):
    second = load(package, "counted_second")
    window = count(Recorder(package), second.doubled)
    assert window.calls == ["counted_second.py:doubled", "counted_second.py:numbers"]


def test_nothing_is_counted_while_no_window_is_open_or_in_files_left_out(package: Path):
    second = load(package, "counted_second")
    recorder = Recorder(package, {str(package / "counted_second.py")})
    assert count(recorder, second.leaf).num_calls == 0
    recorder = Recorder(package)
    window = count(recorder, second.leaf)
    sys.setprofile(recorder)
    second.leaf()
    sys.setprofile(None)
    assert window.num_calls == 1


def test_a_thread_is_no_more_counted_after_the_call_that_ends_it(package: Path):
    second = load(package, "counted_second")
    recorder = Recorder(package, ends_thread=second.leaf)

    def call() -> None:
        second.doubled()
        second.leaf()
        second.doubled()

    def call_elsewhere() -> None:
        call()
        thread = threading.Thread(target=second.doubled)
        threading.setprofile(recorder)
        thread.start()
        threading.setprofile(None)  # pyright: ignore[reportArgumentType]
        thread.join()

    window = count(recorder, call_elsewhere)
    assert window.calls == ["counted_second.py:doubled", "counted_second.py:numbers"] * 2


def test_a_figure_is_the_median_of_its_windows():
    windows = [Window(num_calls=calls, calls=["x"] * calls) for calls in (9, 1, 4)]
    figures = figures_of(windows)
    assert figures["calls"] == 4
    assert figures["call_names"] == ["x"] * 4


def test_the_source_is_measured_by_folder(package: Path):
    found = measure_source(package)
    assert found["folders"] == {
        "counted": {
            "num_files": 2,
            "num_lines": len(textwrap.dedent(FIRST + SECOND).splitlines()),
        }
    }
    assert found["function_lines_median"] == 2


def test_one_command_prints_every_figure():
    run = subprocess.run(
        [sys.executable, "-m", "tools.request_path", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    figures = json.loads(run.stdout)
    assert 100 < figures["request"]["calls"] < 1000
    assert figures["request"]["calls_across_files"] < figures["request"]["calls"]
    assert "cadenza.events.Token" in figures["token"]["class_names"]
    assert figures["source"]["folders"]["cadenza/core"]["num_files"] > 5
    names = figures["request"]["call_names"]
    statuses = names.count("engine/process/engine_process.py:EngineProcess.status")
    assert statuses == 2, "before the body is read, and behind it"
    assert not {
        "engine/open_requests.py:OpenRequests.stats",
        "engine/stats.py:Tally.snapshot",
        "text/detokenizer.py:plan_decoder",
    }.intersection(names), "a request takes no statistics and parses no decoder"
    rows = rows_of(figures)
    assert rows["token to SSE frame: classes"] == str(figures["token"]["classes"])
