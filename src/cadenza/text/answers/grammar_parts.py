"""Grammars of several parts, as the grammar library reads them: `joined_grammar`, and its inverse.

Knows no notation of what the grammars are of. Invariant: each part but the first has a name.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any


def parts_of(name: str, grammar: str) -> list[dict[str, Any]]:
    """The parts of a grammar, of which the first is renamed."""
    first, *others = _read(grammar)
    return [{**first, "name": name}, *others]


def joined_grammar(lark: str, others: Sequence[Mapping[str, Any]]) -> str:
    """A grammar, and those that it refers to by their names; of equal ones one is kept."""
    distinct: list[Mapping[str, Any]] = []
    for each in others:
        if each not in distinct:
            distinct.append(each)
    return json.dumps({"grammars": [{"lark_grammar": lark}, *distinct]}, ensure_ascii=False)


def _read(grammar: str) -> list[dict[str, Any]]:
    if not grammar.startswith("{"):
        return [{"lark_grammar": grammar}]
    found: list[dict[str, Any]] = json.loads(grammar)["grammars"]
    return [{name: value for name, value in each.items() if value is not None} for each in found]
