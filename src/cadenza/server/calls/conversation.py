"""`AskedConversation`: what every endpoint that answers a conversation makes of its body, and the
chat messages that items and content blocks become. Invariants: equal conversations have equal
answers, whatever API they came by; reasoning, text and calls of one turn are one assistant's
message; a call's result names its function, if the call is in the conversation."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

from cadenza.frontend.answers import AskedAnswer, ToolUse
from cadenza.frontend.prepared_request import ChatPrompt
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.media.image_input import need_files
from cadenza.request import show
from cadenza.server.errors import invalid_value, not_built
from cadenza.server.fields.body import DeclaredObject, ObjectOf
from cadenza.server.fields.images import Content
from cadenza.server.fields.thinking import EFFORTS, NOTHING_ASKED, AskedThinking, nearest_effort
from cadenza.server.fields.types import Schema, String, array_schema, members_of, refuse

MAX_PARTS = 4096
PART_TEXT = String(max_chars=1 << 26)
Message = dict[str, Any]
Image = TypeVar("Image")


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedConversation:
    """A conversation that waits for an answer."""

    messages: Sequence[Message]
    use: ToolUse | None
    # its switch and bound take precedence over what its effort implies
    thinking: AskedThinking = NOTHING_ASKED
    verbosity: str | None = None  # None: as the template does
    # of the chat template; those that it does not read are ignored
    variables: Mapping[str, object] = field(default_factory=dict[str, object])
    # further arguments of the chat template
    template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    # The request does not mention thinking, which its API takes for off: only a switch of the chat
    # template turns it off.
    is_off_unasked: bool = False

    def prompt(self, text: TextFrontend) -> ChatPrompt:
        """The prompt, for a model. Slow. Raises InvalidRequestError and ImagesToFetch."""
        if text.prompts.takes_images:
            need_files(self.messages)
        return ChatPrompt(
            messages=self.messages,
            template_kwargs=self._kwargs(text),
            asked=AskedAnswer(
                use=self.use, max_thinking=self._max_thinking(text), thinks=self._thinks(text)
            ),
        )

    def count(self, text: TextFrontend) -> int:
        """Whatever the context. Slow. Raises as `prompt`."""
        return len(text.render_chat(self.prompt(text))[1])

    def _kwargs(self, text: TextFrontend) -> dict[str, Any]:
        """The arguments of the template; the request's own variables take precedence."""
        switches: dict[str, Any] = {}
        effort, is_on = self.thinking.effort, self.thinking.is_on
        if effort is not None:
            known = nearest_effort(effort, text.prompts.efforts)
            switches |= {"enable_thinking": effort != "none", "reasoning_effort": known}
        if is_on is not None:
            switches |= {"enable_thinking": is_on, "thinking": is_on}
        if self.verbosity is not None:
            switches["verbosity"] = self.verbosity
        read = {k: v for k, v in switches.items() if k in text.prompts.options}
        return {**read, **text.prompts.known(self.variables), **self.template_kwargs}

    def _thinks(self, text: TextFrontend) -> bool:
        """False where thinking is off and the chat template has no switch for it."""
        asked, read = self.thinking, text.prompts.options
        is_off = asked.is_on is False or (asked.is_on is None and asked.effort == "none")
        has_switch = not read.isdisjoint(("enable_thinking", "thinking"))
        if asked.effort == "none":  # which a template may know as an effort
            has_switch = has_switch or ("reasoning_effort" in read and not text.prompts.efforts)
        return has_switch or not is_off or self.is_off_unasked

    def _max_thinking(self, text: TextFrontend) -> int | None:
        asked = self.thinking
        if asked.bound is not None or asked.effort is None:
            return asked.bound
        if "reasoning_effort" not in text.prompts.options:
            return EFFORTS[asked.effort]
        # A model that knows no such effort does not think either.
        return 0 if asked.effort == "none" and text.prompts.efforts else None


def continuing(is_continued: bool) -> dict[str, bool]:
    """How the chat template ends the prompt: within the last message, or where an answer begins."""
    return {"add_generation_prompt": not is_continued, "continue_final_message": is_continued}


def new_call_id() -> str:
    """The id of a call: nine letters and digits, which some chat templates ask for."""
    return secrets.token_hex(5)[:9]


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
            self.read(name, f"{name}[{index}]", members_of(part))
            if members_of(part).get("type") == self.kind
            else self.texts.text_of(name, part)
            for index, part in enumerate(self.texts.parts(name, value))
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
    index = 0
    while index < len(messages) and messages[index]["role"] in ("system", "developer"):
        if not isinstance(messages[index]["content"], str):
            break
        texts.append(messages[index]["content"])
        index += 1
    leading = [{"role": "system", "content": "\n\n".join(texts)}] if texts else []
    return [*leading, *messages[index:]]
