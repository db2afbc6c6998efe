"""Structured outputs as grammars: what is accepted, what is refused by name, what is bounded."""

import json
import random
from typing import Any

import jsonschema_rs
import llguidance
import pytest
from llguidance import LLMatcher

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.errors import InvalidRequestError
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.request import SamplingParams
from cadenza.structured import MAX_STRUCTURED_BYTES, StructuredOutput
from cadenza.text.schemas import json_schema
from cadenza.text.schemas.grammar import ADVICE, check_grammar, described, grammar_of, read_form
from cadenza.text.schemas.grammar_worker import GrammarWorker
from cadenza.text.schemas.json_schema import NO_TEXT
from cadenza.text.schemas.schema_check import is_valid
from tests.text.hostile_forms import (
    alternatives,
    any_of_objects,
    doubling,
    nested,
    optional,
    optional_rules,
    repeated,
)

NESTED = {"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t"}


def problem(**members: object) -> str | None:
    try:
        grammar = grammar_of(StructuredOutput(**members))  # type: ignore[arg-type]
    except InvalidRequestError as error:
        return str(error)
    return check_grammar(grammar)


@pytest.mark.parametrize(
    "members",
    [
        {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}},
        {"json": '{"type": "string", "description": "any"}'},
        {"json": True},
        {"json": NESTED},
        {"json_object": True},
        {"regex": r"^\d{3}-[a-z]+$"},
        {"choice": ["yes", 'n"o', "é\n"]},
        {"grammar": 'start: "a" x\nx: /[0-9]+/'},
        {"grammar": 'root ::= "a" [0-9]+ ws\nws ::= [ \\t]*'},
    ],
    ids=lambda members: next(iter(members)),
)
def test_every_notation_becomes_a_grammar(members: dict[str, object]):
    assert problem(**members) is None


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"not": {"type": "string"}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"if": {}, "then": {}}, "if, then"),
        ({"contains": {}}, "contains"),
        ({"propertyNames": {"minLength": 2}, "properties": {"ab": {}}}, "propertyNames"),
        ({"allOf": [{"unevaluatedProperties": False}, {"minLength": 1}]}, "unevaluatedProperties"),
        ({"properties": {"a": {"not": {}}}}, "not"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "string", "pattern": "(?=a)b"}, "pattern"),
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "uniqueItems"),
        ({"properties": {"a": {}, "b": {}}, "minProperties": 2}, "minProperties"),
        ({"$ref": "https://example.com/schema"}, "example.com"),
        ({"$ref": "#/nowhere"}, "/nowhere"),
        ({"type": "text"}, "text"),
    ],
    ids=str,
)
def test_a_keyword_that_cannot_be_enforced_is_named(schema: object, named: str):
    found = problem(json=schema, strict=True)
    assert found is not None
    assert named in found


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        ({"not": {"type": "string"}}, ("not",)),
        ({"if": {}, "then": {}}, ("if", "then")),
        ({"type": "array", "uniqueItems": True}, ("uniqueItems",)),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"not": {}}}}, ("not",)),
        ({"type": "array", "uniqueItems": False}, ()),
        ({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}, ()),
        ({"propertyNames": {"type": "string"}}, ()),
        ({"properties": {"a": {}}, "unevaluatedProperties": False}, ()),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, ()),
    ],
    ids=str,
)
def test_without_strict_a_keyword_that_cannot_be_enforced_is_left_to_the_end(
    schema: dict[str, object], names: tuple[str, ...]
):
    form = read_form(StructuredOutput(json=schema))
    assert form.unenforced == names
    assert check_grammar(form.text) is None


def test_a_format_that_is_not_known_is_an_annotation():
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "path"}}}
    form = read_form(StructuredOutput(json=schema, strict=True))
    assert form.annotations == ("path",)
    assert check_grammar(form.text) is None


@pytest.mark.parametrize(
    ("members", "named"),
    [
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": r"(a)\1"}, "backreferences"),
        ({"regex": r"\bx\b"}, "lookarounds"),
        ({"grammar": "start: (a"}, "Expected token"),
        ({"grammar": "start: b"}, "b"),
        ({"grammar": 'start: <|tool|> "a"'}, "special tokens"),
        ({"grammar": 'start: <[12]> "a"'}, "special tokens"),
    ],
    ids=str,
)
def test_an_expression_that_cannot_be_followed_is_explained(members: dict[str, object], named: str):
    found = problem(**members)
    assert found is not None
    assert named in found
    assert len(found) <= 300


@pytest.mark.parametrize(
    ("members", "named"),
    [
        ({"json": "{"}, "not valid JSON"),
        ({"json": "[1]"}, "neither an object"),
        ({"json": False}, "neither an object"),
        ({"json": "[" * 40_000}, "nested too deep"),
        ({"json": {"x-guidance": {"lenient": True}, "not": {}}}, "x-guidance"),
        ({"grammar": "root ::= ("}, "GBNF"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_no_schema_and_no_grammar_is_refused(members: dict[str, object], named: str):
    with pytest.raises(InvalidRequestError, match=named) as refused:
        grammar_of(StructuredOutput(**members))  # type: ignore[arg-type]
    assert refused.value.param == "structured"


def test_a_structured_output_asks_for_exactly_one_thing():
    for members in ({}, {"regex": "a", "json": {}}, {"json_object": False}):
        with pytest.raises(InvalidRequestError, match="give one of"):
            StructuredOutput(**members)
    odd = ({"json": 5}, {"json": {"a": {1}}}, {"regex": 5}, {"choice": "ab"}, {"choice": [""]})
    for members in (*odd, {"choice": []}, {"json_object": "yes"}, {"regex": "\ud800"}):
        with pytest.raises(InvalidRequestError) as refused:
            StructuredOutput(**members)  # type: ignore[arg-type]
        assert refused.value.param == "structured"


def test_the_size_of_a_structured_output_is_bounded():
    room = MAX_STRUCTURED_BYTES
    assert StructuredOutput(regex="a" * room).kind == "regex"
    for members in (
        {"regex": "a" * (room + 1)},
        {"choice": ["é" * room]},
        {"json": "x" * 2 * room},
    ):
        with pytest.raises(InvalidRequestError, match="bytes"):
            StructuredOutput(**members)
    with pytest.raises(InvalidRequestError, match="5000 choices"):
        StructuredOutput(choice=["a"] * 5000)


def test_a_form_of_many_prompts_is_checked_once_and_refused_each_time():
    text = TextFrontend(open_checkpoint(None))
    odd = {"$ref": "#/nowhere"}
    for name, found in (("good", None), ("odd", "nowhere")):
        schema = {"const": f"of many prompts, {name}", **(odd if found else {})}
        params = SamplingParams(structured=StructuredOutput(json=schema))
        before = check_grammar.cache_info().misses
        for _ in range(8):
            if found is None:
                text.prepare("x", params)
                continue
            with pytest.raises(InvalidRequestError, match=found):
                text.prepare("x", params)
        assert check_grammar.cache_info().misses == before + 1, name


CYCLE = {
    "$defs": {"a": {"$ref": "#/$defs/b~1c"}, "b/c": {"$ref": "#/$defs/a"}},
    "$ref": "#/$defs/a",
}
UNSATISFIABLE = {"type": "string", "minLength": 5, "maxLength": 3}


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


SCHEMAS: list[dict[str, Any]] = [
    {"type": "array", "uniqueItems": True},
    {"not": {"type": "object", "required": ["a"]}},
    {"if": {"type": "array"}, "then": {"minItems": 2}, "else": {"type": ["integer", "object"]}},
    {"contains": {"type": "integer"}, "minContains": 1, "maxContains": 2},
    {"oneOf": [{"type": "integer"}, {"minimum": 2}, {"type": "array"}]},
    {"dependentRequired": {"a": ["b"]}, "dependentSchemas": {"b": {"maxProperties": 1}}},
    {"properties": {"a": True}, "unevaluatedProperties": False},
    {"allOf": [{"properties": {"a": True}}], "unevaluatedProperties": {"type": "integer"}},
    {"prefixItems": [{"const": 1}], "unevaluatedItems": {"type": "string"}},
    {"propertyNames": {"maxLength": 1}, "patternProperties": {"^a": {"type": "integer"}}},
    {"additionalProperties": {"$ref": "#"}, "type": ["object", "integer"]},
    {"enum": [1, [1], {"a": 1}, True]},
    {"multipleOf": 0.5, "exclusiveMinimum": 0, "maximum": 2},
    {"$defs": {"s": {"minLength": 1, "pattern": "^a"}}, "items": {"$ref": "#/$defs/s"}},
]


def random_value(rng: random.Random, depth: int = 0) -> Any:
    scalars = [None, True, False, 0, 1, 1.0, 2, 2.5, -1, "", "a", "ab", "b"]
    kind = rng.random()
    if depth == 2 or kind < 0.4:
        return rng.choice(scalars)
    if kind < 0.7:
        return [random_value(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    return {rng.choice(["a", "b", "ab"]): random_value(rng, depth + 1) for _ in range(2)}


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: str(schema)[:40])
def test_a_text_is_valid_where_another_validator_says_so(schema: dict[str, Any]):
    validator, text = jsonschema_rs.validator_for(schema), json.dumps(schema)
    rng, verdicts = random.Random(1), set[bool]()
    for _ in range(300):
        value = random_value(rng)
        expected = validator.is_valid(value)
        assert is_valid(json.dumps(value), text) == expected, value
        verdicts.add(expected)
    assert verdicts == {True, False}


def test_what_cannot_be_decided_is_not_valid():
    for schema in ({"$ref": "https://example.com"}, {"$dynamicRef": "#a"}, {"pattern": "("}):
        assert not is_valid('"a"', json.dumps(schema))
    assert not is_valid("[", "true")
    assert not is_valid("[" * 100_000, "true")


MALFORMED: list[dict[str, Any]] = [
    {"multipleOf": 0},
    {"patternProperties": 3},
    {"dependentSchemas": 3},
    {"properties": [[]]},
    {"$ref": 3},
    {"type": "x"},
    {"type": [{}]},
    {"enum": 3},
    {"minimum": "x"},
]


@pytest.mark.parametrize("schema", MALFORMED, ids=str)
def test_a_text_is_not_valid_where_a_keyword_is_malformed(schema: dict[str, Any]):
    # The grammar's compiler reads nothing of `not`, so it does not refuse these.
    for text in ('{"a": 1}', "1"):
        assert not is_valid(text, json.dumps({"not": schema}))
