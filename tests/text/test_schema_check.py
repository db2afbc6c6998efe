"""Whether a text is JSON of a schema: against another validator, over all keywords."""

import json
import random
from typing import Any

import jsonschema_rs
import pytest

from cadenza.text.schemas.schema_check import is_valid

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
