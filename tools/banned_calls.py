"""Fails if any file has a call or import that can execute code hidden in data.

Owns the list of banned names. Works on the syntax tree and ignores suppression comments, unlike the
linter's rules for the same names. Invariant: a file that does not parse is a fault.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOTS = ("src", "training", "tests", "tools", "benchmarks", "setup.py")

BANNED_MODULES = frozenset({"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"})
BANNED_BUILTINS = frozenset({"eval", "exec"})
BANNED_ATTRIBUTES = frozenset({("torch", "load"), ("yaml", "load"), ("yaml", "unsafe_load")})
BANNED_FLAGS = frozenset({"allow_pickle", "trust_remote_code"})


def main(arguments: list[str]) -> int:
    """Checks the tree at `arguments[0]`, or the current folder; returns 0 if nothing is found."""
    root = Path(arguments[0]) if arguments else Path()
    faults = [f"{path}:{line}: {what}" for path in _files(root) for line, what in banned_in(path)]
    for fault in faults:
        print(f"banned calls: {fault}", file=sys.stderr)
    print(f"banned calls: {len(faults)} found")
    return 1 if faults else 0


def banned_in(path: Path) -> Iterator[tuple[int, str]]:
    """Line and description of each fault in a file."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as error:
        yield 1, f"does not parse: {error}"
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (
                (node.lineno, f"imports {name}")
                for name in _imported_names(node)
                if _is_banned_import(name)
            )
        elif isinstance(node, ast.Call):
            yield from ((node.lineno, what) for what in _banned_in_call(node))


def _imported_names(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [f"{node.module or ''}.{alias.name}" for alias in node.names]


def _is_banned_import(name: str) -> bool:
    module, _, member = name.rpartition(".")
    return name.partition(".")[0] in BANNED_MODULES or (module, member) in BANNED_ATTRIBUTES


def _banned_in_call(call: ast.Call) -> Iterator[str]:
    match call.func:
        case ast.Name(id=name) if name in BANNED_BUILTINS:
            yield f"calls {name}"
        case ast.Attribute(value=ast.Name(id=module), attr=name) if (
            module,
            name,
        ) in BANNED_ATTRIBUTES or (module == "builtins" and name in BANNED_BUILTINS):
            yield f"calls {module}.{name}"
        case _:
            pass
    for keyword in call.keywords:
        is_off = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
        if keyword.arg in BANNED_FLAGS and not is_off:
            yield f"passes {keyword.arg}"


def _files(root: Path) -> Iterator[Path]:
    for name in ROOTS:
        top = root / name
        yield from [top] if top.is_file() else sorted(top.rglob("*.py"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
