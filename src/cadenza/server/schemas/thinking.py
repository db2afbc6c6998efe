"""The fields by which clients of other servers turn thinking on and off, and bound it.

Owns their shapes and how they go together. Knows no template. Invariant: fields that ask for
different things are refused, so that none of them is passed over.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from cadenza.server.errors import invalid_value
from cadenza.server.schemas.body import (
    Alias,
    Body,
    DeclaredObject,
    Field,
    ObjectOf,
    label,
    optional,
    unsupported,
)
from cadenza.server.schemas.field_types import AnyJson, Boolean, OneOf, Schema, refuse
from cadenza.server.schemas.reasoning import BUDGET, EFFORT, EFFORT_HELP, EFFORTS, bound_of

_ON = ("enabled", "adaptive", "auto", "on")
_OFF = ("disabled", "off")
_EXCLUDED = "leaving reasoning out"


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedThinking:
    """What a field asks for; None: nothing.

    Args:
        is_on: whether the model thinks.
        effort: one of `EFFORTS`.
        max_tokens: the most tokens of thinking; -1: no bound.
    """

    is_on: bool | None = None
    effort: str | None = None
    max_tokens: int | None = None

    @property
    def bound(self) -> int | None:
        return bound_of(self.max_tokens)


class _ThinkingMembers(DeclaredObject):
    type = optional(OneOf((*_ON, *_OFF)), "Whether the model thinks.")
    budget_tokens = optional(BUDGET, "Most tokens of thinking.")
    display = label(AnyJson(max_chars=1024))
    clear_thinking = unsupported("leaving earlier reasoning out by this member", False)


class _ReasoningMembers(DeclaredObject):
    effort = optional(EFFORT)
    max_tokens = optional(BUDGET, "Most tokens of thinking.")
    enabled = optional(Boolean())
    exclude = unsupported(_EXCLUDED, False)
    summary = label(AnyJson(max_chars=1024))
    generate_summary = label(AnyJson(max_chars=1024))


@dataclass(frozen=True, slots=True)
class ThinkingField:
    """A switch, an effort, or an object with both and a bound."""

    members: type[DeclaredObject]

    def check(self, name: str, value: object) -> AskedThinking:
        if isinstance(value, bool):
            return AskedThinking(is_on=value)
        if isinstance(value, str) and value in (*_ON, *_OFF):
            return AskedThinking(is_on=value in _ON)
        if isinstance(value, str) and value in EFFORTS:
            return AskedThinking(effort=value)
        if not isinstance(value, dict):
            known = ", ".join(("on", "off", *EFFORTS))
            raise refuse(name, value, f"true, false, one of {known}, or an object")
        given = ObjectOf(self.members).check(name, cast(object, value)).values
        kind = given.get("type")
        return AskedThinking(
            is_on=given.get("enabled") if kind is None else kind in _ON,
            effort=given.get("effort"),
            max_tokens=given.get("budget_tokens", given.get("max_tokens")),
        )

    def schema(self) -> Schema:
        words = OneOf(("on", "off", "enabled", "disabled", "adaptive", "auto", *EFFORTS))
        return {"anyOf": [Boolean().schema(), words.schema(), self.members.object_schema()]}


THINKING = ThinkingField(_ThinkingMembers)
REASONING = ThinkingField(_ReasoningMembers)
_FIELDS = ("enable_thinking", "think", "thinking", "reasoning")


class ThinkingSwitches(Body):
    """Of a body that is rendered through a chat template."""

    enable_thinking: Field[Any] = optional(THINKING, "Whether the model thinks, where it can.")
    think: Field[Any] = optional(THINKING, "Ollama's name of it; or an effort.")
    thinking: Field[Any] = optional(THINKING, "The same, with a bound, as in Messages.")
    reasoning: Field[Any] = optional(REASONING, "How much the model reasons, as in Responses.")
    reasoning_effort: Field[Any] = optional(EFFORT, EFFORT_HELP)
    thinking_budget: Field[Any] = Alias("thinking_token_budget")
    reasoning_format: Field[Any] = unsupported("reasoning in the content", "auto", "deepseek")
    separate_reasoning: Field[Any] = unsupported("reasoning in the content", True)
    stream_reasoning: Field[Any] = unsupported("reasoning at once at its end", True)

    def asked_thinking(self, own: Mapping[str, AskedThinking]) -> AskedThinking:
        """What all fields ask for together.

        Args:
            own: what the body's own fields ask for, by their names.

        Raises:
            ApiError: (400) two of them ask for different things.
        """
        given = {name: self.values.get(name) for name in _FIELDS}
        others = {name: each for name, each in given.items() if isinstance(each, AskedThinking)}
        effort = AskedThinking(effort=self.values.get("reasoning_effort"))
        asked = {"reasoning_effort": effort, **own, **others}
        return AskedThinking(
            is_on=_only({name: each.is_on for name, each in asked.items()}),
            effort=_only({name: each.effort for name, each in asked.items()}),
            max_tokens=_only({name: each.max_tokens for name, each in asked.items()}),
        )

    def bound_field(self) -> str | None:
        """The field that bounds thinking, beside `thinking_token_budget`."""
        given = ((name, self.values.get(name)) for name in _FIELDS)
        return next(
            (
                name
                for name, each in given
                if isinstance(each, AskedThinking) and each.max_tokens is not None
            ),
            None,
        )


def _only(values: Mapping[str, Any]) -> Any:
    """The value that is given, if any. Raises ApiError (400) for two that differ."""
    given = {name: value for name, value in values.items() if value is not None}
    if len(set(given.values())) > 1:
        first, *_, last = given
        raise invalid_value(
            f"{first} asks for {given[first]!r} and {last} for {given[last]!r}; give one of them",
            last,
        )
    return next(iter(given.values()), None)
