"""ARCHITECTURE.md lists every module of the package, each in one place."""

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "cadenza"
FOLDER_OF_HEADING = {"Layer 1": "", "models/bundled": None}


def listed_modules(text: str) -> Counter[str]:
    """Paths below the package, of the names before the colon of each item under "## Modules"."""
    section = text.split("\n## Modules\n")[1].split("\n## ", maxsplit=1)[0]
    found: Counter[str] = Counter()
    folder: str | None = None
    for line in section.splitlines():
        if heading := re.match(r"\*\*([\w./ ]+?)\.?\*\*", line):
            name = heading[1]
            folder = FOLDER_OF_HEADING.get(name, name.replace(".", "/") + "/")
        elif line.startswith("- ") and folder is not None:
            names = re.findall(r"`([\w/]+)`", line.split(":")[0])
            found.update(f"{folder}{name}" for name in names if name != "__init__")
    return found


def own_modules() -> set[str]:
    paths = {
        path.relative_to(PACKAGE).with_suffix("")
        for path in PACKAGE.rglob("*.py")
        if not path.stem.startswith("__")
    }
    families = Path("checkpoint/families")
    return {f"{families}/" if families in each.parents else str(each) for each in paths}


def test_every_module_is_listed_once():
    listed = listed_modules((ROOT / "ARCHITECTURE.md").read_text())
    assert set(listed) == own_modules()
    assert set(listed.values()) == {1}


def test_a_module_that_is_listed_twice_or_unknown_is_found():
    text = "# A\n\n## Modules\n\n**core.**\n- `batch`: x\n- `batch`, `ghost`: y `no`\n\n## Next\n"
    assert listed_modules(text) == {"core/batch": 2, "core/ghost": 1}
