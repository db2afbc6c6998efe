"""Chat messages from items and content blocks. Invariant: reasoning, text and calls of one turn are
one assistant's message; a call's result names its function, if the call is in the conversation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

from cadenza.request import show
from cadenza.server.errors import invalid_value, not_built
from cadenza.server.fields.body import DeclaredObject, ObjectOf
from cadenza.server.fields.images import Content
from cadenza.server.fields.types import Schema, String, array_schema, members_of, refuse

MAX_PARTS = 4096
PART_TEXT = String(max_chars=1 << 26)

Message = dict[str, Any]
Image = TypeVar("Image")


@dataclass(frozen=True, slots=True)
class TextParts:
    """A text, or a list of parts that hold texts; checked into the texts. `types`: of the parts
    that hold a text; any other is not built. `part`: a part's members, of which `type` and `text`
    are two; a `refusal` stands for a text."""

    types: tuple[str, ...]
    part: type[DeclaredObject]

    def check(self, name: str, value: object) -> tuple[str, ...]:
        if isinstance(value, str):
            return (PART_TEXT.check(name, value),)
        return tuple(self.text_of(name, part) for part in self.parts(name, value))

    @staticmethod
    def parts(name: str, value: object) -> list[object]:
        """Raises ApiError (400) for anything but a list."""
        if not isinstance(value, list):
            raise refuse(name, value, "a text, or a list of text parts")
        parts = cast(list[object], value)
        if len(parts) > MAX_PARTS:
            raise invalid_value(f"{name} has {len(parts)} parts; at most {MAX_PARTS}", name)
        return parts

    def schema(self) -> Schema:
        parts = array_schema(self.part.object_schema(), high=MAX_PARTS)
        return {"anyOf": [PART_TEXT.schema(), parts]}

    def text_of(self, name: str, part: object) -> str:
        kind = members_of(part).get("type")
        if isinstance(kind, str) and kind not in self.types:
            raise not_built(name, f"the content part {show(kind)} here")
        values = ObjectOf(self.part).check(name, part).values
        return values.get("text") or values.get("refusal") or ""


@dataclass(frozen=True, slots=True)
class SeenParts(Generic[Image]):
    """As `texts`, whose parts may also be images; checked into texts and images. `declared`: the
    members of a part that has an image; its type is `kind`. `read`: makes the image of a part of a
    field's name, at a place."""

    texts: TextParts
    kind: str
    declared: type[DeclaredObject]
    read: Callable[[str, str, dict[str, Any]], Image]

    def check(self, name: str, value: object) -> "tuple[str | Image, ...]":
        if isinstance(value, str):
            return self.texts.check(name, value)
        return tuple(
            self.read(name, f"{name}[{place}]", members_of(part))
            if members_of(part).get("type") == self.kind
            else self.texts.text_of(name, part)
            for place, part in enumerate(self.texts.parts(name, value))
        )

    def schema(self) -> Schema:
        parts = {"anyOf": [self.texts.part.object_schema(), self.declared.object_schema()]}
        return {"anyOf": [PART_TEXT.schema(), array_schema(parts, high=MAX_PARTS)]}


@dataclass(slots=True, eq=False)
class ConversationBuilder:
    """Makes chat messages of what a client sent, in its order."""

    messages: list[Message] = field(default_factory=list[Message])
    _called: dict[str, str] = field(default_factory=dict[str, str])
    """The functions by the ids of their calls so far."""

    def add(self, role: str, content: Content) -> None:
        self.messages.append({"role": role, "content": content})

    def new_turn(self) -> Message:
        self.add("assistant", "")
        return self.messages[-1]

    def last_turn(self) -> Message:
        """The assistant's message that is the last one, or a new one."""
        is_turn = bool(self.messages) and self.messages[-1]["role"] == "assistant"
        return self.messages[-1] if is_turn else self.new_turn()

    def add_call(self, turn: Message, call_id: str, name: str, arguments: object) -> None:
        self._called[call_id] = name
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)

    def add_result(self, call_id: str, content: Content) -> None:
        named = {"name": self._called[call_id]} if call_id in self._called else {}
        result = {"role": "tool", "tool_call_id": call_id, **named, "content": content}
        self.messages.append(result)


def with_system(system: str | None, messages: Sequence[Message]) -> list[Message]:
    """After a system text; leading system messages become one, as many templates need, except with
    images."""
    texts = [] if not system else [system]
    place = 0
    while place < len(messages) and messages[place]["role"] in ("system", "developer"):
        if not isinstance(messages[place]["content"], str):
            break
        texts.append(messages[place]["content"])
        place += 1
    leading = [{"role": "system", "content": "\n\n".join(texts)}] if texts else []
    return [*leading, *messages[place:]]
