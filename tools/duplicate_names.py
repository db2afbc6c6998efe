"""Fails when two modules of the product, or of the laboratory, define a public class or function of
the same name.

Owns the exceptions. Looks at definitions at module level, by the syntax tree; several definitions
in one module, such as overloads, count once. Invariant: a file that does not parse is a fault, and
so is an exception that excuses nothing.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

PACKAGES = (Path("src/cadenza"), Path("benchmarks/cadenza_bench"))

EXCEPTIONS: Mapping[str, str] = {}  # names that may have several homes, each with the reason


def main(arguments: list[str]) -> int:
    """Looks through the tree at `arguments[0]`, or here; 0 when every name has one home."""
    root = Path(arguments[0]) if arguments else Path()
    faults = find_faults([root / each for each in PACKAGES], EXCEPTIONS)
    for fault in faults:
        print(f"duplicate names: {fault}", file=sys.stderr)
    print(f"duplicate names: {len(faults)} found")
    return 1 if faults else 0


def find_faults(packages: Sequence[Path], exceptions: Mapping[str, str]) -> list[str]:
    """A line for each fault, in the order of the names."""
    homes: dict[str, list[str]] = defaultdict(list)
    faults: list[str] = []
    files = [(package, path) for package in packages for path in sorted(package.rglob("*.py"))]
    for package, path in files:
        module = path.relative_to(package).as_posix()
        try:
            names = public_names(path.read_bytes())
        except (SyntaxError, ValueError) as error:
            faults.append(f"{module} does not parse: {error}")
            continue
        for name in names:
            homes[name].append(module)
    for name, modules in sorted(homes.items()):
        if len(modules) > 1 and name not in exceptions:
            faults.append(f"{name} is defined in {', '.join(modules)}; rename all but one")
    faults += [
        f"the exception for {name} excuses nothing; remove it"
        for name in sorted(exceptions)
        if len(homes.get(name, ())) < 2
    ]
    return faults


def public_names(source: bytes) -> set[str]:
    """The public classes and functions that a module defines at its level."""
    names = {
        node.name
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    }
    return {name for name in names if not name.startswith("_")}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
