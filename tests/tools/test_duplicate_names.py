"""The gate on names: a public class or function has one home in the package."""

from pathlib import Path

import pytest

from tools import duplicate_names

pytestmark = pytest.mark.gates


REPOSITORY = Path(__file__).parents[2]
OVERLOADED = """
@overload
def find(key: int) -> int: ...
@overload
def find(key: str) -> str: ...
def find(key): return key
"""


def write_package(root: Path, **modules: str) -> Path:
    package = root / duplicate_names.PACKAGES[0]
    for name, text in modules.items():
        path = package / name / "__init__.py"
        path.parent.mkdir(parents=True)
        path.write_text(text, encoding="utf-8")
    return package


def test_a_name_of_two_modules_fails_the_gate_and_is_named_with_both(tmp_path: Path):
    package = write_package(tmp_path, server="class Answer: ...", bench="def Answer(): ...")
    assert duplicate_names.main([str(tmp_path)]) == 1
    (fault,) = duplicate_names.find_faults([package], {})
    assert "Answer is defined in bench/__init__.py, server/__init__.py" in fault


def test_the_laboratory_has_no_name_of_the_product(tmp_path: Path):
    write_package(tmp_path, server="class Answer: ...")
    (tmp_path / duplicate_names.PACKAGES[1]).mkdir(parents=True)
    (tmp_path / duplicate_names.PACKAGES[1] / "report.py").write_text("class Answer: ...")
    assert duplicate_names.main([str(tmp_path)]) == 1


def test_asynchronous_functions_count_too(tmp_path: Path):
    write_package(tmp_path, server="async def serve(): ...", cli="def serve(): ...")
    assert duplicate_names.main([str(tmp_path)]) == 1


def test_private_names_methods_imports_and_overloads_pass(tmp_path: Path):
    write_package(
        tmp_path,
        core="def _plan(): ...\nclass Pool:\n    def free(self): ...\n" + OVERLOADED,
        engine="def _plan(): ...\nfrom core import find\nclass Loop:\n    def free(self): ...\n",
    )
    assert duplicate_names.main([str(tmp_path)]) == 0


def test_an_exception_excuses_its_name_and_one_that_excuses_nothing_fails(tmp_path: Path):
    package = write_package(tmp_path, core="class Slot: ...", engine="class Slot: ...")
    assert duplicate_names.find_faults([package], {"Slot": "a reason"}) == []
    (fault,) = duplicate_names.find_faults([package], {"Slot": "a reason", "Page": "none"})
    assert "Page excuses nothing" in fault


def test_a_file_that_does_not_parse_fails_the_gate(tmp_path: Path):
    write_package(tmp_path, core="def f(:")
    assert duplicate_names.main([str(tmp_path)]) == 1
