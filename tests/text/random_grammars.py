"""Random grammars, written in Lark's notation and in GBNF, and a recogniser of their texts.

The recogniser follows a grammar's derivations by itself: for each rule and place in a text, the
places where the rule may end, until nothing is added.
"""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass

CLASSES = ("a-c", "0-9", "x", " .")


@dataclass(frozen=True, slots=True)
class Literal:
    text: str


@dataclass(frozen=True, slots=True)
class OneOf:
    """A character of a class, as it is written between brackets."""

    members: str


@dataclass(frozen=True, slots=True)
class Rule:
    name: str


@dataclass(frozen=True, slots=True)
class Sequence:
    parts: tuple["Part", ...]


@dataclass(frozen=True, slots=True)
class Either:
    options: tuple["Part", ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    part: "Part"
    sign: str  # one of * + ?


Part = Literal | OneOf | Rule | Sequence | Either | Repeat
Grammar = Mapping[str, Part]
"""The first rule is where texts begin."""


def random_grammar(rng: random.Random) -> Grammar:
    """Two to four rules; each may use each, itself included, beside something that ends."""
    names = [f"r{i}" for i in range(rng.randint(2, 4))]
    found: dict[str, Part] = {}
    for name in names:
        ending = _part(rng, [], 2)
        found[name] = Either((_part(rng, names, 0), Sequence((Literal("!"), ending))))
    return found


def _part(rng: random.Random, names: list[str], depth: int) -> Part:
    kinds = ["literal", "class", *["rule"] * bool(names)]
    match rng.choice([*kinds, *["sequence", "either", "repeat"] * (depth < 3)]):
        case "literal":
            return Literal(rng.choice(["a", "bc", "(", ")", '"', "é", "[", "\\"]))
        case "class":
            return OneOf(rng.choice(CLASSES))
        case "rule":
            return Rule(rng.choice(names))
        case "sequence":
            return Sequence(tuple(_part(rng, names, depth + 1) for _ in range(rng.randint(2, 3))))
        case "either":
            return Either(tuple(_part(rng, names, depth + 1) for _ in range(2)))
        case _:
            inner = _part(rng, names, depth + 1)
            return inner if isinstance(inner, Repeat) else Repeat(inner, rng.choice("*+?"))


def as_lark(grammar: Grammar) -> str:
    first = next(iter(grammar))
    rules = [f"{name}: {_written(part, '/[{}]/')}" for name, part in grammar.items()]
    return "\n".join([f"start: {first}", *rules])


def as_gbnf(grammar: Grammar) -> str:
    first = next(iter(grammar))
    rules = [f"{name} ::= {_written(part, '[{}]')}" for name, part in grammar.items()]
    return "\n".join([f"root ::= {first}", *rules])


def _written(part: Part, one_of: str) -> str:
    match part:
        case Literal(text):
            return json.dumps(text, ensure_ascii=False)
        case OneOf(members):
            return one_of.format(members)
        case Rule(name):
            return name
        case Sequence(parts):
            return " ".join(_written(each, one_of) for each in parts)
        case Either(options):
            return f"({' | '.join(_written(each, one_of) for each in options)})"
        case Repeat(inner, sign):
            return f"({_written(inner, one_of)}){sign}"


def is_derived(grammar: Grammar, text: str) -> bool:
    """Whether a text is one of the grammar's."""
    ends: dict[tuple[str, int], frozenset[int]] = {}
    first = next(iter(grammar))
    while True:
        wanted = {(first, 0), *ends}
        before = dict(ends)
        for name, start in wanted:
            ends[name, start] = _ends(grammar[name], text, start, ends)
        if ends == before:
            return len(text) in ends[first, 0]


def _ends(
    part: Part, text: str, start: int, known: dict[tuple[str, int], frozenset[int]]
) -> frozenset[int]:
    """Where a part that begins at `start` may end, as far as the rules' ends are known."""
    match part:
        case Literal(wanted):
            return frozenset({start + len(wanted)} if text.startswith(wanted, start) else ())
        case OneOf(members):
            is_one = start < len(text) and _is_in(members, text[start])
            return frozenset({start + 1} if is_one else ())
        case Rule(name):
            return known.setdefault((name, start), frozenset())
        case Sequence(parts):
            reached = frozenset({start})
            for each in parts:
                reached = frozenset().union(*(_ends(each, text, at, known) for at in reached))
            return reached
        case Either(options):
            return frozenset().union(*(_ends(each, text, start, known) for each in options))
        case Repeat(inner, sign):
            reached = {start} if sign in "*?" else set(_ends(inner, text, start, known))
            waiting = list(reached) if sign != "?" else [start]
            while waiting:
                new = _ends(inner, text, waiting.pop(), known) - reached
                reached |= new
                waiting += [] if sign == "?" else new
            return frozenset(reached)


def _is_in(members: str, character: str) -> bool:
    if len(members) == 3 and members[1] == "-":
        return members[0] <= character <= members[2]
    return character in members
