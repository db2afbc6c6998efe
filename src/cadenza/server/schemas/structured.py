"""The fields of a body that ask for a form of the answer: OpenAI's and vLLM's.

Each is checked into a `StructuredOutput`. Knows no grammar: what a schema or an expression may hold
is decided where it is compiled. Invariant: a field that asks for a form is followed or refused.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast, get_args

from cadenza.errors import InvalidRequestError
from cadenza.server.errors import invalid_value, not_built
from cadenza.server.schemas.body import DeclaredObject, ObjectOf, label, optional, unsupported
from cadenza.server.schemas.field_types import (
    Boolean,
    FieldType,
    OneOf,
    Schema,
    String,
    refuse,
)
from cadenza.structured import MAX_STRUCTURED_BYTES, StructuredOutput, Whitespace

_FORMATS = 'an object such as {"type": "json_schema", "json_schema": {"schema": …}}'
_NAMED = {"name": String(max_chars=64), "description": String(max_chars=16 << 10)}


def structured_of(name: str, **members: object) -> StructuredOutput:
    """Raises ApiError (400) naming the field."""
    try:
        return StructuredOutput(**cast(dict[str, Any], members))
    except InvalidRequestError as error:
        raise invalid_value(f"{name}: {error}", name) from None


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """`response_format`: text (None), any JSON object, or JSON of a schema.

    With `strict`, a schema with keywords that no grammar holds is refused.
    """

    def check(self, name: str, value: object) -> StructuredOutput | None:
        if not isinstance(value, dict):
            raise refuse(name, value, _FORMATS)
        given = cast(dict[str, object], value)
        members = {key: item for key, item in given.items() if item is not None}
        kind = members.pop("type", None)
        if kind in ("text", "json_object") and not members:
            return None if kind == "text" else structured_of(name, json_object=True)
        if kind == "json_object" and members.keys() == {"schema"}:
            return structured_of(name, json=members["schema"])
        if kind == "structural_tag":
            raise not_built(name, "the type structural_tag")
        if kind == "json_schema" and "schema" in members:
            return schema_format(name, members)  # as Responses' text.format has it
        if kind != "json_schema" or members.keys() != {"json_schema"}:
            raise refuse(name, given, _FORMATS)
        return schema_format(name, members["json_schema"])

    def schema(self) -> Schema:
        described = {
            "type": "object",
            "properties": {
                **{key: each.schema() for key, each in _NAMED.items()},
                "schema": {"type": ["object", "boolean"]},
                "strict": {"type": ["boolean", "null"]},
            },
            "required": ["schema"],
        }
        kinds: Schema = {"type": "string", "enum": ["text", "json_object", "json_schema"]}
        return {
            "type": "object",
            "properties": {
                "type": kinds,
                "json_schema": described,
                "schema": {"type": ["object", "boolean", "null"]},
            },
            "required": ["type"],
        }


def schema_format(name: str, value: object) -> StructuredOutput:
    """A named schema, as `response_format` and Responses' `text.format` have it."""
    if not isinstance(value, dict):
        raise refuse(name, value, _FORMATS)
    members = cast(dict[str, object], value)
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


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """A JSON Schema: an object, true or false, or its text."""

    def check(self, name: str, value: object) -> object:
        if isinstance(value, dict | bool | str):
            return cast(object, value)
        raise refuse(name, value, "a JSON Schema")

    def schema(self) -> Schema:
        return {"type": ["object", "boolean", "string"]}


@dataclass(frozen=True, slots=True)
class ChoiceTexts:
    """A list of texts."""

    def check(self, name: str, value: object) -> object:
        if isinstance(value, list):
            return cast(object, value)
        raise refuse(name, value, "a list of texts")

    def schema(self) -> Schema:
        return {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1}


_TEXT = String(min_chars=0, max_chars=MAX_STRUCTURED_BYTES)

MEMBERS: dict[str, FieldType[Any]] = {
    "json": JsonSchema(),
    "regex": _TEXT,
    "choice": ChoiceTexts(),
    "grammar": _TEXT,
}


class StructuredOutputs(DeclaredObject):
    """The members of `structured_outputs`."""

    json = optional(JsonSchema())
    json_object = optional(Boolean(), default=False)
    regex = optional(_TEXT)
    choice = optional(ChoiceTexts())
    grammar = optional(_TEXT)
    whitespace = optional(OneOf(get_args(Whitespace)), "Blanks in JSON.")
    strict = optional(Boolean(), "Refuse a schema that no grammar holds.", default=False)
    disable_any_whitespace = optional(Boolean(), "True: whitespace is compact.", default=False)
    disable_additional_properties = unsupported("closing every object of a schema", False)
    disable_fallback = label(Boolean())
    whitespace_pattern = unsupported("a pattern of the blanks in JSON")
    structural_tag = unsupported("structural tags")


@dataclass(frozen=True, slots=True)
class OneForm:
    """`structured_outputs`: an object with exactly one of `StructuredOutput`'s members."""

    def check(self, name: str, value: object) -> StructuredOutput:
        values = {**ObjectOf(StructuredOutputs).check(name, value).values}
        if values.pop("disable_any_whitespace", False) and values.get("whitespace") is None:
            values["whitespace"] = "compact"
        return structured_of(name, **values)

    def schema(self) -> Schema:
        return StructuredOutputs.object_schema()


@dataclass(frozen=True, slots=True)
class Guided:
    """One of vLLM's older fields, such as `guided_regex`."""

    member: str

    def check(self, name: str, value: object) -> StructuredOutput:
        return structured_of(name, **{self.member: MEMBERS[self.member].check(name, value)})

    def schema(self) -> Schema:
        return MEMBERS[self.member].schema()


@dataclass(frozen=True, slots=True)
class OrNothing:
    """A field that one value of asks for nothing (None)."""

    type: FieldType[Any]
    nothing: object

    def check(self, name: str, value: object) -> StructuredOutput | None:
        return None if value == self.nothing else self.type.check(name, value)

    def schema(self) -> Schema:
        return {"anyOf": [self.type.schema(), {"enum": [self.nothing]}]}


@dataclass(frozen=True, slots=True)
class OllamaFormat:
    """`format`: "json", a JSON Schema, or nothing (None)."""

    def check(self, name: str, value: object) -> StructuredOutput | None:
        if value == "":
            return None
        if value == "json":
            return structured_of(name, json_object=True)
        if isinstance(value, dict):
            return structured_of(name, json=cast(object, value))
        raise refuse(name, value, '"json" or a JSON Schema')

    def schema(self) -> Schema:
        return {"anyOf": [{"type": "string", "enum": ["", "json"]}, {"type": "object"}]}


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
