"""Fields that ask for a response format, each checked into a `StructuredOutput`; grammars check the
content. Invariant: such a field is followed or refused."""

from collections.abc import Callable
from typing import Any, TypeVar, cast, get_args

from cadenza.errors import InvalidRequestError
from cadenza.server.errors import invalid_value, not_built
from cadenza.server.fields.body import DeclaredObject, ObjectOf, label, optional, unsupported
from cadenza.server.fields.types import (
    Boolean,
    CheckedBy,
    FieldType,
    OneOf,
    Schema,
    String,
    array_schema,
    checked_dict,
    field_type,
    object_schema,
    refuse,
)
from cadenza.structured import MAX_STRUCTURED_BYTES, StructuredOutput, Whitespace

T = TypeVar("T")

_FORMATS = 'an object such as {"type": "json_schema", "json_schema": {"schema": …}}'
_NAMED = {"name": String(max_chars=64), "description": String(max_chars=16 << 10)}

_KINDS_WITH_VALUE = {"json_object": "json", "json": "json", "regex": "regex"}
"""TGI's, and the members of `StructuredOutput` that they ask for."""


def structured_of(name: str, **members: object) -> StructuredOutput:
    """Raises ApiError (400) naming the field."""
    try:
        return StructuredOutput(**cast(dict[str, Any], members))
    except InvalidRequestError as error:
        raise invalid_value(f"{name}: {error}", name) from None


_SCHEMA_OF_FORMAT = object_schema(
    {
        **{key: each.schema() for key, each in _NAMED.items()},
        "schema": {"type": ["object", "boolean"]},
        "strict": {"type": ["boolean", "null"]},
    },
    ("schema",),
)
_FORMAT = object_schema(
    {
        "type": OneOf(("text", "json_object", "json_schema", "json", "regex")).schema(),
        "json_schema": _SCHEMA_OF_FORMAT,
        "schema": {"type": ["object", "boolean", "null"]},
        "value": {"type": ["object", "boolean", "string", "null"]},
    },
    ("type",),
)


@field_type(_FORMAT)
def answer_format(name: str, value: object) -> StructuredOutput | None:
    """`response_format`: text (None), any JSON object, or JSON of a schema; TGI has a `value`. With
    `strict`, keywords that no grammar holds are refused."""
    given = checked_dict(name, value, _FORMATS)
    members = {key: item for key, item in given.items() if item is not None}
    kind = members.pop("type", None)
    if kind in ("text", "json_object") and not members:
        return None if kind == "text" else structured_of(name, json_object=True)
    if kind == "json_object" and members.keys() == {"schema"}:
        return structured_of(name, json=members["schema"])
    if kind in _KINDS_WITH_VALUE and members.keys() == {"value"}:
        member = _KINDS_WITH_VALUE[kind]
        return structured_of(name, **{member: MEMBERS[member].check(name, members["value"])})
    if kind == "structural_tag":
        raise not_built(name, "the type structural_tag")
    if kind == "json_schema" and "schema" in members:
        return schema_format(name, members)  # as Responses' text.format has it
    if kind != "json_schema" or members.keys() != {"json_schema"}:
        raise refuse(name, given, _FORMATS)
    return schema_format(name, members["json_schema"])


def schema_format(name: str, value: object) -> StructuredOutput:
    """A named schema, as `response_format` and Responses' `text.format` have it."""
    members = checked_dict(name, value, _FORMATS)
    for key, item in members.items():
        if item is None or key == "schema":
            continue
        if key == "strict":
            Boolean().check(f"{name}.strict", item)
        elif key in _NAMED:
            _NAMED[key].check(f"{name}.{key}", item)
        else:
            raise invalid_value(f"{name} has no member {key[:64]!r} in its json_schema", name)
    if members.get("schema") is None:
        raise invalid_value(f"{name} has a json_schema without schema; give the schema", name)
    return structured_of(name, json=members["schema"], strict=members.get("strict") or False)


@field_type({"type": ["object", "boolean", "string"]})
def json_schema(name: str, value: object) -> object:
    """A JSON Schema: an object, true or false, or its text."""
    if isinstance(value, dict | bool | str):
        return cast(object, value)
    raise refuse(name, value, "a JSON Schema")


@field_type(array_schema({"type": "string", "minLength": 1}, 1))
def choice_texts(name: str, value: object) -> object:
    if isinstance(value, list):
        return cast(object, value)
    raise refuse(name, value, "a list of texts")


_TEXT = String(min_chars=0, max_chars=MAX_STRUCTURED_BYTES)

MEMBERS: dict[str, FieldType[Any]] = {
    "json": json_schema,
    "regex": _TEXT,
    "choice": choice_texts,
    "grammar": _TEXT,
}


class StructuredOutputs(DeclaredObject):
    """The members of `structured_outputs`."""

    json = optional(json_schema)
    json_object = optional(Boolean(), default=False)
    regex = optional(_TEXT)
    choice = optional(choice_texts)
    grammar = optional(_TEXT)
    whitespace = optional(OneOf(get_args(Whitespace)), "Blanks in JSON.")
    strict = optional(Boolean(), "Refuse a schema that no grammar holds.", default=False)
    disable_any_whitespace = optional(Boolean(), "True: whitespace is compact.", default=False)
    disable_additional_properties = unsupported("closing every object of a schema", False)
    disable_fallback = label(Boolean())
    whitespace_pattern = unsupported("a pattern of the blanks in JSON")
    structural_tag = unsupported("structural tags")


@field_type(StructuredOutputs.object_schema)
def one_form(name: str, value: object) -> StructuredOutput:
    """`structured_outputs`: an object with exactly one of `StructuredOutput`'s members."""
    values = {**ObjectOf(StructuredOutputs).check(name, value).values}
    if values.pop("disable_any_whitespace", False) and values.get("whitespace") is None:
        values["whitespace"] = "compact"
    return structured_of(name, **values)


def guided(member: str) -> CheckedBy[StructuredOutput]:
    kind = MEMBERS[member]

    def check(name: str, value: object) -> StructuredOutput:
        return structured_of(name, **{member: kind.check(name, value)})

    return CheckedBy(check, kind.schema)


def or_nothing(kind: FieldType[T], nothing: object) -> CheckedBy[T | None]:
    """A field with one value, `nothing`, that asks for no form (None)."""
    schema: Schema = {"anyOf": [kind.schema(), {"enum": [nothing]}]}
    return CheckedBy(
        lambda name, value: None if value == nothing else kind.check(name, value), lambda: schema
    )


@field_type({"anyOf": [{"type": "string", "enum": ["", "json"]}, {"type": "object"}]})
def ollama_format(name: str, value: object) -> StructuredOutput | None:
    """`format`: "json", a JSON Schema, or nothing (None)."""
    if value == "":
        return None
    if value == "json":
        return structured_of(name, json_object=True)
    return structured_of(name, json=checked_dict(name, value, '"json" or a JSON Schema'))


FORM_FIELDS = (
    "response_format",
    "structured_outputs",
    *(f"guided_{member}" for member in MEMBERS),
    *("format", "json_schema", "grammar", "ebnf", "regex"),
)
"""The fields of which at most one asks for a form."""


def form_field(value_of: Callable[[str], object]) -> str | None:
    """The field that asks for a form; None without one. Raises ApiError (400) for two."""
    asked = [name for name in FORM_FIELDS if value_of(name) is not None]
    if len(asked) > 1:
        raise invalid_value(f"{asked[0]} and {asked[1]} both ask for a form; give one", asked[1])
    return asked[0] if asked else None
