"""Reports functions that are shorter than six lines and used once: candidates to inline.

    python tools/small_functions.py [FOLDER…]

Counts names in the package's syntax trees, so that a method is used wherever an attribute of its
name is read. Reports and never fails: a function that names a rule stays.
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path("src/cadenza")
SHORT = 6  # lines from `def` on below which a function is reported


def main(arguments: list[str]) -> int:
    """Reports on the folders, or on the whole package; 0."""
    folders = [Path(each) for each in arguments] or [PACKAGE]
    found = [(path, name, line) for path, name, line in once_used(PACKAGE) if _is_in(path, folders)]
    if arguments:
        for path, name, line in found:
            print(f"{path}:{line} {name}")
    print(f"small functions: {len(found)} shorter than {SHORT} lines and used once")
    return 0


def once_used(package: Path) -> Iterator[tuple[Path, str, int]]:
    """Path, name and line of each; dunder methods and decorated functions are left out."""
    trees = {path: ast.parse(path.read_bytes()) for path in sorted(package.rglob("*.py"))}
    uses = Counter(name_of(node) for tree in trees.values() for node in ast.walk(tree))
    functions = [(path, node) for path, tree in trees.items() for node in functions_of(tree)]
    homes = Counter(node.name for _, node in functions)
    for path, node in functions:
        is_short = (node.end_lineno or 0) - node.lineno + 1 < SHORT
        is_once = homes[node.name] == 1 and uses[node.name] == 1
        if is_short and is_once and not (node.decorator_list or node.name.startswith("__")):
            yield path, node.name, node.lineno


def functions_of(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def name_of(node: ast.AST) -> str:
    """The name that a node uses; "" for others. An import is no use."""
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


def _is_in(path: Path, folders: list[Path]) -> bool:
    return any(folder == path or folder in path.parents for folder in folders)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
