"""A package's docstring lists each of its modules once; ARCHITECTURE.md names what exists."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "cadenza"
MOST_LINES = 220  # of ARCHITECTURE.md: a map that is read in one sitting
# A family's module is named by its model type, and listed in the table of families.
NOT_LISTED = {PACKAGE / "models" / "families"}
LABORATORY = ROOT / "benchmarks" / "cadenza_bench"
FOLDERS = sorted({path.parent for path in PACKAGE.rglob("__init__.py")} - NOT_LISTED)
FOLDERS += sorted(path.parent for path in LABORATORY.rglob("__init__.py"))


def listed_modules(source: str) -> Counter[str]:
    """The names before the colon of each item below "Modules:" in a module's docstring."""
    docstring = ast.get_docstring(ast.parse(source)) or ""
    _, _, items = docstring.partition("\nModules:\n")
    found: Counter[str] = Counter()
    for line in items.splitlines():
        if line.startswith("- "):
            found.update(re.findall(r"`(\w+)`", line.split(":")[0]))
    return found


def own_modules(folder: Path) -> set[str]:
    return {path.stem for path in folder.glob("*.py") if not path.stem.startswith("__")}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_is_listed_once(folder: Path):
    listed = listed_modules((folder / "__init__.py").read_text())
    assert listed == dict.fromkeys(own_modules(folder), 1)


def test_a_module_that_is_listed_twice_or_unknown_is_found():
    source = '"""A.\n\nModules:\n\n- `batch`: x\n- `batch`, `ghost`: y `no`\n"""\n'
    assert listed_modules(source) == {"batch": 2, "ghost": 1}


def missing_paths(text: str) -> list[str]:
    """The paths in backquotes that are neither in the repository nor in the package."""
    named = re.findall(r"`([\w.-]+/[\w./-]+)`", text)
    places = [[ROOT / each, PACKAGE / each, PACKAGE / f"{each}.py"] for each in named]
    return [
        each
        for each, found in zip(named, places, strict=True)
        if "NAME" not in each and not any(place.exists() for place in found)
    ]


def test_the_map_is_short_and_names_what_exists():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert missing_paths(text) == []
    assert len(text.splitlines()) <= MOST_LINES


def test_a_path_that_does_not_exist_is_found():
    assert missing_paths("`scheduler/scheduler`, `kv/ghost`, `formats/NAME`") == ["kv/ghost"]
