"""Structured outputs as grammars: what is accepted, what is refused by name, what is bounded."""

import pytest

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.errors import InvalidRequestError
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.request import SamplingParams
from cadenza.structured import MAX_STRUCTURED_BYTES, StructuredOutput
from cadenza.text.schemas.grammar import check_grammar, grammar_of, read_form

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
