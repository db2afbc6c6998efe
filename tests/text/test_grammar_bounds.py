"""Bounds of structured outputs: what exceeds one is refused by its name, before it starts."""

import json
from typing import Any

import llguidance
import pytest
from llguidance import LLMatcher

from cadenza.errors import InvalidRequestError
from cadenza.structured import MAX_STRUCTURED_BYTES, StructuredOutput
from cadenza.text.schemas import json_schema
from cadenza.text.schemas.grammar import ADVICE, check_grammar, described, grammar_of
from cadenza.text.schemas.grammar_worker import GrammarWorker
from cadenza.text.schemas.json_schema import NO_TEXT
from tests.text.hostile_forms import (
    alternatives,
    any_of_objects,
    doubling,
    nested,
    optional,
    optional_rules,
    repeated,
)

CYCLE = {
    "$defs": {"a": {"$ref": "#/$defs/b~1c"}, "b/c": {"$ref": "#/$defs/a"}},
    "$ref": "#/$defs/a",
}
UNSATISFIABLE = {"type": "string", "minLength": 5, "maxLength": 3}


def problem(**members: object) -> str | None:
    try:
        grammar = grammar_of(StructuredOutput(**members))  # type: ignore[arg-type]
    except InvalidRequestError as error:
        return str(error)
    return check_grammar(grammar)


@pytest.mark.parametrize(
    ("members", "named"),
    [
        ({"json": optional(600)}, "over 500 parts of rules"),
        ({"grammar": alternatives(600)}, "over 500 parts of rules"),
        ({"grammar": optional_rules(600)}, "over 500 parts of rules"),
        ({"grammar": f'{doubling(900)}\nr900: "b"\nstart: r0'}, "too many ways"),
        ({"json": {"type": "string", "pattern": "^(a?){500}a{500}$"}}, "too many states"),
        ({"json": {"allOf": repeated(7, 11, 13, 17, 19)}}, "too many states"),
        ({"json": {"type": "integer", "minimum": 5, "multipleOf": 99_991}}, "too many states"),
        ({"json": UNSATISFIABLE}, "no text can satisfy it: minLength (5) is greater than max"),
        ({"json": {"format": "date", "enum": ["x"]}}, NO_TEXT),
        ({"json": nested(70)}, "more than 64 levels"),
        ({"json": {"$ref": "#"}}, "back to itself: # -> #"),
        ({"json": CYCLE}, "#/$defs/a -> #/$defs/b~1c -> #/$defs/a"),
        ({"json": {"properties": {"x": CYCLE["$ref"]}, **CYCLE}}, "#/$defs/a -> #/$defs/b~1c"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_form_beyond_a_bound_is_refused_by_its_name_before_it_starts(
    members: dict[str, object], named: str
):
    found = problem(**members)
    assert found is not None
    assert named in found
    assert len(found) <= 400


@pytest.mark.parametrize(
    "members",
    [
        {"json": optional(300)},
        {"json": any_of_objects(60)},
        {"json": {"enum": [f"{i} {'x' * 50}" for i in range(1000)]}},
        {"json": {"$defs": {"$ref": {"type": "null"}}, "$ref": "#/$defs/$ref"}},
        {"json": {"properties": {"$ref": {"type": "string"}, "format": {"type": "integer"}}}},
        {"json": {"const": {"$ref": "#/const"}}},
        {"json": nested(60)},
        {"choice": [str(i) for i in range(4096)]},
        {"choice": ["a" * i for i in range(1, 300)]},
        {"grammar": alternatives(400)},
        {"regex": "(a|b)*a(a|b){20}"},
    ],
    ids=lambda members: str(members)[:40],
)
def test_a_large_form_within_the_bounds_is_not_refused(members: dict[str, object]):
    assert problem(**members) is None


def test_no_message_shows_the_librarys_own_notation():
    date = problem(json={"type": "string", "format": "date", "pattern": "^q+$"})
    assert date == NO_TEXT
    size = "panic: assertion failed: grammar.symbols.len() < u16::MAX as usize - 10\n<backtrace>"
    assert described(size) == f"its rules have too many parts; {ADVICE}"


def test_every_reference_of_a_schema_is_resolved_once(monkeypatch: pytest.MonkeyPatch):
    """A chain of them was followed to its end from each of its links; that grew with its square."""
    links = 200
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(links)}
    shared = {"anyOf": [{"$ref": "#/$defs/d0"}] * links}
    schema = {"$defs": {**chain, f"d{links}": {"type": "null"}}, **shared}
    names: list[str] = []
    resolved = json_schema.resolve_reference

    def counted(root: dict[str, object], name: str) -> object:
        names.append(name)
        return resolved(root, name)

    monkeypatch.setattr(json_schema, "resolve_reference", counted)
    grammar_of(StructuredOutput(json=schema))
    once = sorted(f"#/$defs/d{i}" for i in range(links + 1))
    assert sorted(names) == sorted([*once, *once]), "once for cycles, and once for the grammar"

    schema["$defs"][f"d{links}"] = {"$ref": "#/$defs/d7"}
    with pytest.raises(InvalidRequestError, match="leads back to itself: #/"):
        grammar_of(StructuredOutput(json=schema))


def test_hostile_grammars_end_soon_in_the_worker():
    enum = [f"{place:03} {'x' * 50}" for place in range(1100)]
    assert MAX_STRUCTURED_BYTES * 0.9 < len(json.dumps(enum)) < MAX_STRUCTURED_BYTES
    hostile = [
        {"json": {"enum": enum}},
        {"regex": "((((a{1,50}){1,50}){1,50}b){1,50}c){1,50}"},
        {"regex": "(a|aa|aaa)*" * 2000},
        {"regex": "(" * 20_000 + "a" + ")" * 20_000},
        {"json": {"type": "string", "pattern": "^(a?){500}a{500}$"}},
        {"json": {"allOf": [{"pattern": f"(a|b)*{c}(a|b){{12}}"} for c in "abab"]}},
        {"grammar": "start: " + "(" * 10_000 + '"a"' + ")" * 10_000},
        {"grammar": f'{doubling(900)}\nr900: "b"\nstart: r0'},
    ]
    worker = GrammarWorker(cpu_s=1)
    try:
        for members in hostile:
            try:
                grammar = grammar_of(StructuredOutput(**members))  # type: ignore[arg-type]
            except InvalidRequestError:
                continue
            worker.check(grammar)
        assert worker.check(grammar_of(StructuredOutput(regex="a"))) is None
    finally:
        worker.close()


def test_a_form_that_takes_long_to_compile_is_refused_by_the_worker_and_not_by_the_engine():
    grammar = grammar_of(StructuredOutput(json={"type": "integer", "multipleOf": 999_983}))
    worker = GrammarWorker(cpu_s=0.5)
    try:
        found = worker.check(grammar)
    finally:
        worker.close()
    assert found == ("it takes longer than 0.5 seconds of processor time to compile; simplify it")


def test_a_trial_finds_a_text_that_must_follow_once(monkeypatch: pytest.MonkeyPatch):
    """For 60 KB that takes 20 ms each time."""
    made: list[str] = []

    class Counted:
        def __init__(self, *args: object, **options: object) -> None:
            self._inner: Any = LLMatcher(*args, **options)  # type: ignore[arg-type]

        def __getattr__(self, name: str) -> Any:
            if name in ("compute_bitmask", "compute_ff_tokens"):
                made.append(name)
            return getattr(self._inner, name)

        validate_grammar_with_warnings = staticmethod(LLMatcher.validate_grammar_with_warnings)

    grammar = grammar_of(StructuredOutput(json={"const": "to be followed " * 20}))
    monkeypatch.setattr(llguidance, "LLMatcher", Counted)
    assert check_grammar.__wrapped__(grammar) is None
    assert 0 < len(made) < 8
