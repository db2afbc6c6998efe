"""Fields that switch and bound thinking, and verbosity. Invariant: contradicting fields are
refused; an effort never asks for more than the model gives."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cadenza.server.errors import invalid_value
from cadenza.server.fields.body import (
    Alias,
    Body,
    DeclaredObject,
    Field,
    ObjectOf,
    label,
    labels,
    optional,
    unsupported,
)
from cadenza.server.fields.types import AnyJson, Boolean, Integer, OneOf, Schema, checked_dict

EFFORTS: Mapping[str, int | None] = {
    "none": None,
    "minimal": 256,
    "low": 1024,
    "medium": None,
    "high": None,
    "xhigh": None,
    "max": None,
}
"""Each with its bound on thinking tokens where the chat template has no efforts; None: no bound.
`none`: the template's switch off."""


def nearest_effort(effort: str, known: Sequence[str]) -> str:
    """The nearest effort that a model knows (in ascending order); itself where it takes any."""
    if not known or effort in known:
        return effort
    order = [*EFFORTS]
    return known[0] if order.index(effort) < order.index(known[0]) else known[-1]


EFFORT = OneOf(tuple(EFFORTS))
EFFORT_HELP = (
    "For the chat template, where it has efforts or a switch; otherwise minimal and low bound the "
    "tokens of thinking."
)
VERBOSITY = OneOf(("low", "medium", "high"))
VERBOSITY_HELP = "For the chat template, where it reads `verbosity`; otherwise without effect."

_UNBOUNDED = -1
BUDGET = Integer(_UNBOUNDED, 1 << 31)
BUDGET_HELP = "Most tokens of thinking, which is then ended; -1 is no bound."

_ON = ("enabled", "adaptive", "auto", "on")
_OFF = ("disabled", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedThinking:
    """What a field asks for; None: nothing. `is_on`: whether the model thinks. `effort`: one of
    `EFFORTS`. `max_tokens`: the most tokens of thinking; -1: no bound."""

    is_on: bool | None = None
    effort: str | None = None
    max_tokens: int | None = None

    @property
    def bound(self) -> int | None:
        """The most tokens of thinking; None: no bound."""
        return None if self.max_tokens == _UNBOUNDED else self.max_tokens


NOTHING_ASKED = AskedThinking()


class _ThinkingMembers(DeclaredObject):
    type = optional(OneOf((*_ON, *_OFF)), "Whether the model thinks.")
    budget_tokens = optional(BUDGET, "Most tokens of thinking.")
    display = label(AnyJson(max_chars=1024))
    clear_thinking = unsupported("leaving earlier reasoning out by this member", False)


class _ReasoningMembers(DeclaredObject):
    effort = optional(EFFORT)
    max_tokens = optional(BUDGET, "Most tokens of thinking.")
    enabled = optional(Boolean())
    exclude = unsupported("leaving reasoning out", False)
    more = labels("summary generate_summary", AnyJson(max_chars=1024))


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
        known = ", ".join(("on", "off", *EFFORTS))
        members = checked_dict(name, value, f"true, false, one of {known}, or an object")
        given = ObjectOf(self.members).check(name, members).values
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
    """The switches of thinking of a body that is rendered through a chat template."""

    enable_thinking: Field[Any] = optional(THINKING, "Whether the model thinks, where it can.")
    think: Field[Any] = optional(THINKING, "Ollama's name of it; or an effort.")
    thinking: Field[Any] = optional(THINKING, "The same, with a bound, as in Messages.")
    reasoning: Field[Any] = optional(REASONING, "How much the model reasons, as in Responses.")
    reasoning_effort: Field[Any] = optional(EFFORT, EFFORT_HELP)
    thinking_budget: Field[Any] = Alias("thinking_token_budget")
    reasoning_format: Field[Any] = unsupported("reasoning in the content", "auto", "deepseek")
    separate_reasoning: Field[Any] = unsupported("reasoning in the content", True)
    stream_reasoning: Field[Any] = unsupported("reasoning at once at its end", True)

    def own_thinking(self) -> dict[str, AskedThinking]:
        """What the body's own fields ask for, by their names."""
        budget = self.values.get("thinking_token_budget")
        return {"thinking_token_budget": AskedThinking(max_tokens=budget)}

    @cached_property
    def asked(self) -> AskedThinking:
        """Raises ApiError: (400) two fields ask for different things."""
        return self.asked_thinking(self.own_thinking())

    def asked_thinking(self, own: Mapping[str, AskedThinking]) -> AskedThinking:
        """What all fields ask for together. Raises as `asked`."""
        effort = AskedThinking(effort=self.values.get("reasoning_effort"))
        asked = {"reasoning_effort": effort, **own, **self._switches()}
        return AskedThinking(
            is_on=_only({name: each.is_on for name, each in asked.items()}),
            effort=_only({name: each.effort for name, each in asked.items()}),
            max_tokens=_only({name: each.max_tokens for name, each in asked.items()}),
        )

    def bound_field(self) -> str | None:
        """The field that bounds thinking, besides `thinking_token_budget`."""
        bounds = (name for name, each in self._switches().items() if each.max_tokens is not None)
        return next(bounds, None)

    def _switches(self) -> dict[str, AskedThinking]:
        given = {name: self.values.get(name) for name in _FIELDS}
        return {name: each for name, each in given.items() if isinstance(each, AskedThinking)}


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
