"""The docstring of each package lists every module of it, each once."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "cadenza"
# A family's module is named by its model type, and listed in the table of families.
NOT_LISTED = {PACKAGE / "checkpoint" / "families"}
FOLDERS = sorted({path.parent for path in PACKAGE.rglob("__init__.py")} - NOT_LISTED)


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


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_module_is_listed_once(folder: Path):
    listed = listed_modules((folder / "__init__.py").read_text())
    assert listed == dict.fromkeys(own_modules(folder), 1)


def test_a_module_that_is_listed_twice_or_unknown_is_found():
    source = '"""A.\n\nModules:\n\n- `batch`: x\n- `batch`, `ghost`: y `no`\n"""\n'
    assert listed_modules(source) == {"batch": 2, "ghost": 1}
