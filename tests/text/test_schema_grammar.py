"""Schemas as grammars: where blanks stand, what ends, and what a schema means that says nothing."""

import json
import random
import re
from decimal import Decimal
from typing import Any

import jsonschema_rs
import pytest

from cadenza.structured import JsonStyle, StructuredOutput
from cadenza.text.schemas.grammar import ARGUMENTS_STYLE, DEFAULT_STYLE, read_form
from cadenza.text.schemas.json_rules import EmptyRangeError, number_terminal
from cadenza.text.schemas.json_schema import without_looking
from tests.text.walks import Judge, walk

EOS, VOCAB_SIZE = 0, 2560
NODE = {
    "$defs": {
        "n": {
            "type": "object",
            "properties": {
                "v": {"type": "integer"},
                "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]},
            },
            "required": ["v", "next"],
        }
    },
    "$ref": "#/$defs/n",
}
LONG = JsonStyle(max_string=5, max_items=3)


def grammar(schema: Any, style: JsonStyle = DEFAULT_STYLE) -> str:
    return read_form(StructuredOutput(json=schema), style).text


@pytest.mark.parametrize(
    ("whitespace", "text", "is_allowed"),
    [
        ("usual", '{"v": 1, "next": null}', True),
        ("usual", '{"v":1,"next":null}', True),
        ("usual", '{\n  "v": 1,\n  "next": {\n    "v": -4,\n    "next": null\n  }\n}', True),
        ("usual", '{\n\t"v": 1,\n\t"next": null\n}', True),
        ("usual", '{ "v": 1, "next": null }', True),
        ("usual", '{\n    "v"\n\n:\n\n-1\n\n,\n\n"next": null}', False),
        ("usual", '{"v" : 1, "next": null}', False),
        ("usual", '{"v":\n1, "next": null}', False),
        ("usual", '{"v": 1 , "next": null}', False),
        ("usual", '{\n\n"v": 1, "next": null}', False),
        ("usual", '{  "v": 1, "next": null}', False),
        ("compact", '{"v":1,"next":null}', True),
        ("compact", '{"v": 1,"next":null}', False),
        ("any", '{\n\n"v"\n:\t1\n\n, "next"  : null}', True),
        ("any", '{"v":1,"next":null}', True),
    ],
)
def test_blanks_stand_where_json_is_usually_written_with_them(
    judge: Judge, whitespace: Any, text: str, is_allowed: bool
):
    style = JsonStyle(whitespace=whitespace)
    assert judge.allows(text, grammar(NODE, style)) == is_allowed


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        ({"type": "string"}, '"abcde"', '"abcdef"'),
        ({"type": "string", "maxLength": 6}, '"abcdef"', '"abcdefg"'),
        ({"type": "string", "minLength": 6}, '"abcdef"', '"abcdefg"'),
        ({"type": "string", "pattern": "^[a-z]+$"}, '"abcde"', '"abcdef"'),
        ({"type": "string", "pattern": "^a{6}$"}, '"aaaaaa"', '"aaaaa"'),
        ({"type": "array", "items": {"type": "integer"}}, "[1, 2, 3]", "[1, 2, 3, 4]"),
        ({"type": "array", "minItems": 4}, "[1, 2, 3, 4]", "[1, 2, 3, 4, 5]"),
        ({"type": "array", "maxItems": 4}, "[1, 2, 3, 4]", "[1, 2, 3, 4, 5]"),
        ({"type": "object"}, '{"a": ["abcde"]}', '{"a": ["abcdef"]}'),
        ({"type": "object"}, "{}", '{"a":1,"b":1,"c":1,"d":1}'),
    ],
)
def test_texts_and_lists_without_a_bound_have_a_soft_one_in_answers_and_not_in_arguments(
    judge: Judge, schema: dict[str, Any], allowed: str, refused: str
):
    assert judge.allows(allowed, grammar(schema, LONG))
    assert not judge.allows(refused, grammar(schema, LONG))
    has_bound = "maxLength" in schema or "maxItems" in schema or "{6}" in str(schema)
    assert judge.allows(refused, grammar(schema, ARGUMENTS_STYLE)) != has_bound


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        ({"type": "integer"}, "9" * 19, "9" * 20),
        ({"type": "integer", "maximum": 10**24}, "9" * 24, "9" * 25),
        ({"type": "number"}, "0." + "1" * 17, "0." + "1" * 18),
        ({"type": "number"}, "1.5e-300", "1.5e-3000"),
        ({"type": "number", "minimum": 0}, "5.25", "-5.25"),
        ({"type": "number", "minimum": 1e-20}, "0." + "0" * 19 + "2", "0." + "0" * 20 + "9"),
        ({"type": "number", "multipleOf": 0.5}, "7.5", "7.25"),
        (
            {"type": "string", "format": "date-time"},
            '"2024-02-29T10:00:00.123456789Z"',
            '"2024-02-29T10:00:00.1234567891Z"',
        ),
        ({"type": "string", "format": "time"}, '"10:00:00.5+01:00"', '"10:00:00.1234567891Z"'),
    ],
)
def test_numbers_end(judge: Judge, schema: dict[str, Any], allowed: str, refused: str):
    assert judge.allows(allowed, grammar(schema))
    assert not judge.allows(refused, grammar(schema))


def test_a_number_is_within_its_bounds_and_no_other_is_left_out():
    rng = random.Random(3)
    for _ in range(300):
        schema = {
            name: rng.choice([0, 1, -1, 10, 99, -100, 0.5, -0.25, 99.99, rng.randint(-300, 300)])
            for name in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
            if rng.random() < 0.4
        }
        is_integer = rng.random() < 0.4
        try:
            parts = number_terminal(schema, is_integer=is_integer).split(" & ")
        except EmptyRangeError:
            parts = []
        patterns = [re.compile(part[1:-1]) for part in parts]
        near = [rng.choice([*schema.values(), 7]) + rng.choice([0, 1, -1, 0.5, 0.01]) for _ in "ab"]
        for value in [*near, *(round(rng.uniform(-200, 200), rng.randint(0, 3)) for _ in "abcd")]:
            written = f"{Decimal(repr(value)).normalize():f}"
            number = Decimal(written)
            is_within = (
                number >= Decimal(repr(schema.get("minimum", -1e9)))
                and number > Decimal(repr(schema.get("exclusiveMinimum", -1e9)))
                and number <= Decimal(repr(schema.get("maximum", 1e9)))
                and number < Decimal(repr(schema.get("exclusiveMaximum", 1e9)))
                and not (is_integer and "." in written)
            )
            is_matched = bool(patterns) and all(each.fullmatch(written) for each in patterns)
            assert is_matched == is_within, (schema, is_integer, written)


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        ({"type": "object", "properties": {"a": {}}}, '{"a": 1}', '{"b": 1}'),
        ({"type": "object", "properties": {}}, "{}", '{"b": 1}'),
        ({"type": "object", "properties": {}, "additionalProperties": True}, '{"b": 1}', "[]"),
        (
            {"properties": {"a": {}}, "additionalProperties": {"type": "null"}, "type": "object"},
            '{"a": 1, "b": null}',
            '{"a": 1, "b": 1}',
        ),
        ({"type": "object"}, '{"b": 1}', "[]"),
        ({"type": "object", "required": ["b"], "properties": {"a": {}}}, '{"b": 1}', "{}"),
        (
            {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}], "type": "object"},
            '{"a": 1, "b": 1}',
            '{"c": 1}',
        ),
    ],
    ids=str,
)
def test_where_properties_are_named_others_must_be_asked_for(
    judge: Judge, schema: dict[str, Any], allowed: str, refused: str
):
    assert judge.allows(allowed, grammar(schema))
    assert not judge.allows(refused, grammar(schema))


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        (
            {"type": "array", "uniqueItems": True, "items": {"enum": ["a", "b"]}, "minItems": 1},
            ['["a"]', '["b", "a"]'],
            ["[]", '["a", "a"]', '["a", "b", "a"]'],
        ),
        (
            {"uniqueItems": True, "items": {"type": "integer", "minimum": 1, "maximum": 64}},
            ["[]", json.dumps([*range(64, 0, -1)])],
            ["[3, 3]", "[65]"],
        ),
        (
            {"type": "array", "uniqueItems": True, "items": {"type": "boolean"}, "maxItems": 1},
            ["[true]", "[]"],
            ["[true, false]"],
        ),
        (
            {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}},
            ['{"a": 1}'],
            ["[]"],
        ),
        (
            {
                "type": "object",
                "propertyNames": {"enum": ["a", "b"]},
                "additionalProperties": {"type": "null"},
                "required": ["b"],
            },
            ['{"a": null, "b": null}', '{"b": null}'],
            ['{"a": null}', '{"b": null, "c": null}', '{"b": 1}'],
        ),
        (
            {"type": "object", "propertyNames": {"pattern": "^x[0-9]$"}},
            ['{"x1": 5}', "{}"],
            ['{"x": 5}'],
        ),
        (
            {"type": "object", "patternProperties": {"^x[0-9]$": {"type": "null"}}},
            ['{"x1": null}'],
            ['{"x1": 5}', '{"y": null}'],
        ),
        ({"properties": {"a": {}}, "type": "object", "minProperties": 1}, ['{"a": 1}'], ["{}"]),
        (
            {"prefixItems": [{"type": "null"}, {"type": "boolean"}], "items": False, "minItems": 1},
            ["[null]", "[null, true]"],
            ["[]", "[true]", "[null, true, 1]"],
        ),
        (
            {
                "type": "object",
                "properties": {"k": {"enum": ["a", "b"]}},
                "required": ["k"],
                "anyOf": [{"properties": {"k": {"const": "b"}}}, {"minProperties": 9}],
            },
            ['{"k": "b"}'],
            ['{"k": "a"}'],
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_keyword_is_followed_exactly_where_a_grammar_can_hold_it(
    judge: Judge, schema: dict[str, Any], allowed: list[str], refused: list[str]
):
    assert read_form(StructuredOutput(json=schema, strict=True)).unenforced == ()
    assert [judge.allows(each, grammar(schema)) for each in allowed] == [True] * len(allowed)
    assert [judge.allows(each, grammar(schema)) for each in refused] == [False] * len(refused)


ZOD_EMAIL = (
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+"
    r"[A-Za-z]{2,}$"
)
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
PRICE = r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,8}|(?=[\d.]{1,11}0*$)\d{0,8}\.\d{0,2}0*$)"


@pytest.mark.parametrize(("pattern", "letters"), [(ZOD_EMAIL, "a-Z'.@"), (DECIMAL, "+-.019")])
def test_a_well_known_pattern_that_looks_ahead_is_replaced_by_one_for_the_same_texts(
    pattern: str, letters: str
):
    replaced = without_looking(pattern)
    assert replaced is not None
    assert "(?" not in replaced
    rng, num_matched = random.Random(5), 0
    for _ in range(5_000):
        text = "".join(rng.choices(letters, k=rng.randint(0, 5)))
        text += rng.choice(["", "@a.bc", "@a-1.b.Zed"]) if pattern is ZOD_EMAIL else ""
        is_matched = re.fullmatch(pattern, text) is not None
        assert (re.fullmatch(replaced, text) is not None) == is_matched, text
        num_matched += is_matched
    assert num_matched > 50


def test_a_decimal_of_so_many_digits_is_replaced_by_its_usual_texts():
    replaced = re.compile(without_looking(PRICE) or "")
    for text in ("0", "12345678", "-12.5", "+0.25", ".5", "7."):
        assert re.search(PRICE, text)
        assert replaced.search(text)
    for text in ("", "-", ".", "1.234", "123456789", "1e5"):
        assert not replaced.search(text)


def test_a_pattern_that_looks_ahead_and_is_not_known_is_not_replaced():
    assert without_looking("^(?=a)b$") is None


SCHEMAS: list[dict[str, Any]] = [
    NODE,
    {"type": "object", "properties": {"a": {"type": ["string", "null"]}, "b": {"type": "number"}}},
    {"oneOf": [{"type": "integer", "maximum": 5}, {"type": "string", "maxLength": 3}]},
    {"enum": [1, "a", None, {"x": [1, {"y": []}]}, [], {}]},
    {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
    {"additionalProperties": {"type": "integer"}, "properties": {"a": {}}, "type": "object"},
    {"allOf": [{"required": ["a"]}, {"properties": {"a": {"type": "boolean"}}}], "type": "object"},
    {"type": "object", "maxProperties": 2, "minProperties": 1},
    {"type": "array", "uniqueItems": True, "items": {"enum": [1, 2, 3]}, "minItems": 2},
    {"type": "number", "exclusiveMinimum": -1.5, "maximum": 12.25},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: str(schema)[:50])
def test_what_a_random_walk_writes_satisfies_the_schema(judge: Judge, schema: dict[str, Any]):
    validator = jsonschema_rs.validator_for(schema)
    num_complete = 0
    for seed in range(12):
        rng = random.Random(seed)
        constraint = judge.constraint(grammar(schema, JsonStyle(max_string=4, max_items=2)))
        walked = walk(constraint, vocab_size=VOCAB_SIZE, eos=EOS, rng=rng, max_tokens=80)
        if walked.is_complete:
            num_complete += 1
            text = judge.text(walked)
            assert validator.is_valid(json.loads(text)), text
    assert num_complete > 2
