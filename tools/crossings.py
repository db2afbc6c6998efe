"""Fails if a module of the engine's middle knows more than four features by name.

    python tools/crossings.py

A module knows a feature if it imports one of its modules or types. A new feature should cost each
module of the scheduler, the cache and the engine nothing: it is a class behind a protocol there.
"""

import ast
import re
import sys
from collections.abc import Mapping
from pathlib import Path

MIDDLE = tuple(f"src/cadenza/{each}" for each in ("batch", "drafting", "engine", "kv", "scheduler"))
MOST = 4

# What the names of its modules and types have in common.
FEATURES: Mapping[str, re.Pattern[str]] = {
    name: re.compile(words, re.IGNORECASE)
    for name, words in {
        "images": "image|vision|attachment|pixel",
        "spans": r"span",
        "sparse prefill": "sparse|spec_?prefill|scor(ing|e_?memo)|kept_?positions|prompt_?scor",
        "drafts": "draft|speculat|acceptance",
        "constraints": "constrain|grammar|structured|token_?mask",
        "states": "recurrent|sequence_?state|state_?(slot|store|array|snapshot)",
        "pooling": r"pooling|pooled|embedding",
        "tenants": "tenant|fair_?share|quota",
        "replicas": "replica|cluster",
        "receipts": "receipt",
        "disk pages": "disk|page_?store|stored_?page",
        "prompt logprobs": "prompt_?(logprob|row)",
    }.items()
}


def main(arguments: list[str]) -> int:
    """Reads the tree at `arguments[0]`, or here; 0 if no module knows more than it may."""
    root = Path(*arguments[:1])
    known = {
        path.relative_to(root).as_posix(): features_of(path.read_text(encoding="utf-8"))
        for package in MIDDLE
        for path in sorted((root / package).rglob("*.py"))
    }
    faults = find_faults(known)
    for fault in faults:
        print(f"crossings: {fault}", file=sys.stderr)
    print(f"crossings: {len(known)} modules, {len(faults)} at fault")
    return 1 if faults else 0


def features_of(source: str) -> tuple[str, ...]:
    """The features whose modules or types a module imports."""
    names = set[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            module = (node.module or "").rpartition(".")[2]
            names |= {module, *(each.name for each in node.names)}
    return tuple(
        feature for feature, words in FEATURES.items() if any(words.search(name) for name in names)
    )


def find_faults(known: Mapping[str, tuple[str, ...]]) -> list[str]:
    """A line for each module that knows more features than it may."""
    return [
        f"{path} knows {len(features)} features, more than {MOST}: {', '.join(features)}"
        for path, features in known.items()
        if len(features) > MOST
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
