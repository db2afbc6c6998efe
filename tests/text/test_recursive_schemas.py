"""Schemas that refer to themselves: answers in a form have so many levels, and then they end."""

import json
import random
from dataclasses import replace
from typing import Any

import jsonschema_rs
import pytest

from cadenza.structured import JsonStyle, StructuredOutput
from cadenza.text.schemas.grammar import ARGUMENTS_STYLE, DEFAULT_STYLE, check_grammar, read_form
from cadenza.text.schemas.json_schema import MAX_LEVELS_CHARS
from tests.text.walks import Judge, walk

EOS, VOCAB_SIZE = 0, 2560
FEW = replace(DEFAULT_STYLE, max_depth=3)
NODE, OTHER = {"$ref": "#/$defs/n"}, {"$ref": "#/$defs/other"}
NULL = {"type": "null"}


def node(**others: Any) -> dict[str, Any]:
    """A schema that is its definition n, beside others."""
    return {"$defs": others, **NODE}


def required(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties]}


def optional(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


LIST = node(n=required(v={"type": "integer"}, next={"anyOf": [NODE, NULL]}))

PAIR = node(n=optional(a=OTHER, again=NODE), other=optional(b=NODE, more=OTHER))


def allows(judge: Judge, value: Any, schema: Any, style: JsonStyle = FEW) -> bool:
    return judge.allows(json.dumps(value), read_form(StructuredOutput(json=schema), style).text)


def linked(count: int) -> Any:
    """A list of so many nodes."""
    found = None
    for _ in range(count):
        found = {"v": 1, "next": found}
    return found


def test_a_linked_list_has_16_nodes_at_most(judge: Judge):
    assert allows(judge, linked(16), LIST, DEFAULT_STYLE)
    assert not allows(judge, linked(17), LIST, DEFAULT_STYLE)


def test_tools_arguments_have_as_many_levels_as_the_model_likes(judge: Judge):
    assert allows(judge, linked(40), LIST, ARGUMENTS_STYLE)


@pytest.mark.parametrize(
    ("schema", "inner", "around"),
    [
        (LIST, None, '{"v": 1, "next": %s}'),
        (node(n=optional(next=NODE)), {}, '{"next": %s}'),
        (node(n={"type": "array", "items": NODE}), [], "[%s]"),
        (node(n={"type": "array", "prefixItems": [NODE], "items": False}), [], "[%s]"),
        (node(n={"type": "object", "additionalProperties": NODE}), {}, '{"k": %s}'),
        (node(n=optional(kids={"type": "array", "items": NODE})), {"kids": []}, '{"kids": [%s]}'),
        ({"type": "array", "items": {"$ref": "#"}}, [], "[%s]"),
        ({"anyOf": [NULL, required(next={"$ref": "#"})]}, None, '{"next": %s}'),
        (
            node(n={"oneOf": [NULL, {"type": "array", "items": NODE, "minItems": 1}]}),
            None,
            "[%s]",
        ),
        (node(n=optional(a=OTHER), other=optional(b=NODE)), {}, '{"a": {"b": %s}}'),
        (node(n=optional(next={**NODE, "type": "object"})), {}, '{"next": %s}'),
        (
            node(n={"type": ["object", "null"], "properties": {"x": {**NODE, "required": []}}}),
            None,
            '{"x": %s}',
        ),
        (
            node(base=required(v=NULL), n={"allOf": [{"$ref": "#/$defs/base"}, optional(x=NODE)]}),
            {"v": None},
            '{"v": null, "x": %s}',
        ),
        (
            node(n={"anyOf": [{"type": "integer"}, OTHER]}, other=required(x=NODE, y=NULL)),
            1,
            '{"x": %s, "y": null}',
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_reference_is_so_many_levels_within_itself(
    judge: Judge, schema: Any, inner: Any, around: str
):
    def nested(count: int) -> Any:
        text = json.dumps(inner)
        for _ in range(count):
            text = around % text
        return json.loads(text)

    deepest = max(count for count in range(6) if allows(judge, nested(count), schema))
    assert deepest in (2, 3), "of the innermost value alone, it depends on whether it is a level"
    assert not allows(judge, nested(deepest + 1), schema)
    assert not allows(judge, nested(deepest + 4), schema)
    assert allows(judge, nested(deepest + 4), schema, ARGUMENTS_STYLE)


def test_a_reference_is_narrowed_by_what_stands_beside_it(judge: Judge):
    small = {"$ref": "#/$defs/small", "maximum": 5}
    schema = node(n=required(v=small), small={"type": "integer", "minimum": 2})
    assert allows(judge, {"v": 5}, schema)
    assert not allows(judge, {"v": 6}, schema)
    assert not allows(judge, {"v": 1}, schema)


def test_two_references_that_have_each_other_may_both_be_used(judge: Judge):
    assert allows(judge, {"a": {"b": {}, "more": {"b": {}}}, "again": {"a": {}}}, PAIR)


def test_what_stands_side_by_side_has_its_own_levels(judge: Judge):
    schema = node(n={"type": "array", "items": NODE})
    assert allows(judge, [[[], []], [[], []]], schema)


def test_a_reference_that_no_text_satisfies_is_compiled_as_it_is():
    endless = node(n=required(next=NODE))
    without = replace(FEW, max_depth=None)
    one, other = (read_form(StructuredOutput(json=endless), each) for each in (FEW, without))
    assert one.text == other.text


def test_a_schema_without_recursion_has_the_same_grammar_with_and_without_the_limit():
    schema = node(n=required(a=OTHER, b=OTHER), other={"type": "string"})
    without = replace(FEW, max_depth=None)
    one, other = (read_form(StructuredOutput(json=schema), each) for each in (FEW, without))
    assert one.text == other.text


def wide(count: int) -> dict[str, Any]:
    """A list whose nodes have so many members with long rules."""
    members = {
        f"a{i}": {"type": "array", "uniqueItems": True, "items": {"enum": [*range(i, i + 40)]}}
        for i in range(count)
    }
    return node(n=optional(next=NODE, **members))


@pytest.mark.parametrize(("count", "num_levels"), [(1, 16), (4, 8), (20, None)])
def test_the_more_rules_a_level_has_the_fewer_levels_there_are(count: int, num_levels: int | None):
    schema, without = wide(count), replace(DEFAULT_STYLE, max_depth=None)
    levels, plain = (
        read_form(StructuredOutput(json=schema), each).text for each in (DEFAULT_STYLE, without)
    )
    given = None if num_levels is None else replace(DEFAULT_STYLE, max_depth=num_levels)
    assert levels == (
        plain if given is None else read_form(StructuredOutput(json=schema), given).text
    )
    assert (levels == plain) == (num_levels is None)
    assert num_levels is None or len(levels) < 1.2 * MAX_LEVELS_CHARS
    assert num_levels is None or check_grammar(levels) is None


def test_references_that_are_nested_hundreds_deep_are_no_fault_of_the_server():
    for beside in ({}, {"type": ["object", "null"]}):
        chain = {f"d{i}": optional(x={"$ref": f"#/$defs/d{i + 1}", **beside}) for i in range(400)}
        schema = {"$defs": {**chain, "d400": NULL}, "$ref": "#/$defs/d0"}
        assert read_form(StructuredOutput(json=schema)).text


@pytest.mark.parametrize("schema", [LIST, PAIR], ids=["list", "pair"])
def test_a_random_walk_ends_and_satisfies_the_schema(judge: Judge, schema: dict[str, Any]):
    validator, style = (
        jsonschema_rs.validator_for(schema),
        JsonStyle(max_string=3, max_depth=3, max_items=2),
    )
    num_complete = 0
    for seed in range(8):
        walked = walk(
            judge.constraint(
                read_form(StructuredOutput(json=schema), replace(style, max_items=2)).text
            ),
            vocab_size=VOCAB_SIZE,
            eos=EOS,
            rng=random.Random(seed),
            max_tokens=400,
        )
        num_complete += walked.is_complete
        text = judge.text(walked)
        assert not walked.is_complete or validator.is_valid(json.loads(text)), text
    assert num_complete > 4
