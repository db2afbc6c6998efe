"""The fields of /v1/responses that are objects: the answer's text, reasoning, what to include.

Owns their members. Knows no engine. Invariant: what is not built is refused by its name.
"""

from dataclasses import dataclass
from typing import Any, cast

from cadenza.request import show
from cadenza.server.errors import not_built
from cadenza.server.schemas.body import DeclaredObject, label, optional, unsupported
from cadenza.server.schemas.field_types import Boolean, OneOf, Schema, refuse
from cadenza.server.schemas.reasoning import (
    BUDGET,
    EFFORT,
    EFFORT_HELP,
    VERBOSITY,
    VERBOSITY_HELP,
)
from cadenza.server.schemas.structured import schema_format, structured_of
from cadenza.structured import StructuredOutput

_FORMATS = 'an object such as {"type": "json_schema", "name": …, "schema": {…}}'

INCLUDABLE = (
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
"""Reasoning is returned in plain text, and the other members are of items that no response has, so
that these ask for nothing else."""


@dataclass(frozen=True, slots=True)
class AskedForm:
    """A checked format: what it asks for, and the object that did."""

    form: StructuredOutput | None
    given: dict[str, Any]


TEXT_FORM = AskedForm(None, {"type": "text"})


@dataclass(frozen=True, slots=True)
class TextFormat:
    """`text.format`: as `response_format`, but that a schema's members lie beside the type."""

    def check(self, name: str, value: object) -> AskedForm:
        if not isinstance(value, dict):
            raise refuse(name, value, _FORMATS)
        given = cast(dict[str, Any], value)
        members = {key: item for key, item in given.items() if item is not None}
        kind = members.pop("type", None)
        if kind == "text" and not members:
            return TEXT_FORM
        if kind == "json_object" and not members:
            return AskedForm(structured_of(name, json_object=True), given)
        if isinstance(kind, str) and kind not in ("text", "json_object", "json_schema"):
            raise not_built(name, f"the type {show(kind)}")
        if kind != "json_schema":
            raise refuse(name, given, _FORMATS)
        return AskedForm(schema_format(name, members), given)

    def schema(self) -> Schema:
        kinds: Schema = {"type": "string", "enum": ["text", "json_object", "json_schema"]}
        return {
            "type": "object",
            "properties": {
                "type": kinds,
                "name": {"type": ["string", "null"], "maxLength": 64},
                "schema": {"type": ["object", "boolean", "null"]},
                "strict": {"type": ["boolean", "null"]},
            },
            "required": ["type"],
        }


class TextOptions(DeclaredObject):
    """The members of `text`."""

    format = optional(TextFormat(), "The answer's form: text, or JSON.")
    verbosity = optional(VERBOSITY, VERBOSITY_HELP)


class ReasoningOptions(DeclaredObject):
    """The members of `reasoning`."""

    effort = optional(EFFORT, EFFORT_HELP)
    summary = unsupported("a summary of reasoning; the reasoning itself is returned", "auto")
    generate_summary = unsupported(
        "a summary of reasoning; the reasoning itself is returned", "auto"
    )
    context = label(OneOf(("auto",)))
    enabled = optional(Boolean(), "Whether the model reasons, as OpenRouter says it.")
    max_tokens = optional(BUDGET, "Most tokens of reasoning, as OpenRouter says it.")
    exclude = unsupported("leaving reasoning out", False)


class ResponseStreamOptions(DeclaredObject):
    """The members of `stream_options`."""

    include_obfuscation = unsupported("obfuscated events", False)


@dataclass(frozen=True, slots=True)
class Includes:
    """What the answer should have besides."""

    def check(self, name: str, value: object) -> tuple[str, ...]:
        if not isinstance(value, list):
            raise refuse(name, value, "a list of texts")
        for item in cast(list[object], value):
            if item not in INCLUDABLE:
                raise not_built(name, f"including {show(item)}")
        return tuple(cast(list[str], value))

    def schema(self) -> Schema:
        return {"type": "array", "items": {"type": "string", "enum": list(INCLUDABLE)}}
