"""`ChatTemplate`: chat messages to prompt text. Invariant: a checkpoint's template can neither
access nor change anything outside its rendering, and uses bounded time and memory
(`text.templates.sandbox`).
"""

import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, cast

from cadenza.errors import CheckpointError, InvalidRequestError, show
from cadenza.text.tokens.provenance import MarkedText, OwnText, written_by_template

if TYPE_CHECKING:
    from collections.abc import Callable

    from cadenza.text.templates.sandbox import BoundedTemplate

MAX_TEMPLATE_CHARS = 1 << 20
MAX_DEPTH = 64
MAX_OPTION_CHARS = 4096
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_ROLES = frozenset(
    "assistant context control developer documents environment function ipython model observation "
    "system tool tools user".split()
)
"""Roles that are marked as template text, because some templates build control tokens from them."""

_NO_OPTIONS = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class ChatTemplate:
    """A compiled chat template with its fixed `variables`, such as bos_token. `tools_source`: used
    instead of `source` when tools are given; `now`: the clock behind `strftime_now`. Raises
    CheckpointError: the source is too large or not valid Jinja."""

    __slots__ = ("_template", "_tools_template", "_variables", "source")

    def __init__(
        self,
        source: str,
        variables: Mapping[str, str],
        *,
        tools_source: str | None = None,
        now: "Callable[[], datetime]" = datetime.now,
    ) -> None:
        self.source = source if tools_source is None else f"{source}\n{tools_source}"
        self._variables = dict(variables)
        self._template = _compile(source, now)
        self._tools_template = (
            self._template if tools_source is None else _compile(tools_source, now)
        )

    @classmethod
    def of(
        cls, templates: Mapping[str, str], special_tokens: Mapping[str, str]
    ) -> "ChatTemplate | None":
        """A checkpoint's `default` template, with `tool_use` for tools; None if it has none."""
        source = templates.get("default")
        if source is None:
            return None
        return cls(source, special_tokens, tools_source=templates.get("tool_use"))

    @property
    def reads_tools(self) -> bool:
        return "tools" in self._tools_template.variables

    @property
    def reads_calls(self) -> bool:
        return self.reads_tools or "tool_calls" in self.source

    @property
    def renders_calls(self) -> bool:
        return "tool_calls" in self.source

    @property
    def options(self) -> frozenset[str]:
        """The further variables that the template reads, such as `enable_thinking`."""
        read = self._template.variables | self._tools_template.variables
        return read - _NO_OPTIONS - self._variables.keys()

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **options: object,
    ) -> MarkedText:
        """The prompt text. It contains its special tokens: encode it without adding more.
        `continue_final_message`: end within the last message, so that the model continues it;
        `options`: `documents`, a list of objects, and scalars for the names of the property
        `options`. Raises InvalidRequestError: an option is unknown, or the template rejects the
        messages or fails on them; raises CheckpointError: it uses something that the sandbox does
        not allow."""
        documents = options.pop("documents", None)
        self._check_options(options)
        if not isinstance(messages, list | tuple):
            raise InvalidRequestError(
                f"messages is {show(messages)}; it must be a list of messages", param="messages"
            )
        if not messages:
            raise InvalidRequestError("messages is empty; send at least one", param="messages")
        if tools is not None and not isinstance(tools, list | tuple):
            raise InvalidRequestError(
                f"tools is {show(tools)}; it must be a list of tool definitions", param="tools"
            )
        if tools and not self.reads_tools:
            raise InvalidRequestError(
                "this model's chat template has no place for tools; leave them out, or use a model "
                "whose template has one",
                param="tools",
            )
        template = self._template if tools is None else self._tools_template
        prepared = [_prepare(_plain_object(message)) for message in messages]
        ending = None
        if continue_final_message:
            if add_generation_prompt:
                raise InvalidRequestError(
                    "continue_final_message and add_generation_prompt exclude each other; "
                    "set one of them to false",
                    param="continue_final_message",
                )
            ending = _OpenEnding(prepared[-1])
        text = template.render(
            {
                **{name: written_by_template(text) for name, text in self._variables.items()},
                **_plain_object(options),
                "messages": prepared,
                "tools": plain_objects(tools, "tools"),
                "documents": plain_objects(documents, "documents"),
                "add_generation_prompt": add_generation_prompt,
            }
        )
        return text if ending is None else ending.cut(text)

    def _check_options(self, options: Mapping[str, object]) -> None:
        for name, value in options.items():
            if name not in self.options:
                known = ", ".join(sorted(self.options)) or "none"
                raise InvalidRequestError(
                    f"the chat template has no option {name[:80]!r}; its options are: {known}",
                    param="chat_template_kwargs",
                )
            is_scalar = value is None or isinstance(value, bool | int | float | str)
            if not is_scalar or len(str(value)) > MAX_OPTION_CHARS:
                raise InvalidRequestError(
                    f"the chat template's option {name!r} must be a string of at most "
                    f"{MAX_OPTION_CHARS} characters, a number, true, false or null",
                    param="chat_template_kwargs",
                )


class _OpenEnding:
    """Cuts a rendering at the end of the last message's text, where a marker was appended."""

    __slots__ = ("_last_text", "_mark")

    def __init__(self, message: dict[str, object]) -> None:
        self._mark = f"end of the last message {secrets.token_hex(16)} "
        content = message.get("content")
        parts = cast(list[object], content) if isinstance(content, list) else []
        texts = [
            cast(dict[str, object], part)
            for part in parts
            if isinstance(part, dict) and isinstance(cast(dict[str, object], part).get("text"), str)
        ]
        holder, key = (texts[-1], "text") if texts else (message, "content")
        last_text = holder.get(key)
        if not isinstance(last_text, str):
            raise InvalidRequestError(
                "continue_final_message needs a last message with text in its content",
                param="messages",
            )
        self._last_text = last_text
        holder[key] = last_text + self._mark

    def cut(self, text: MarkedText) -> MarkedText:
        index = text.rfind(self._mark.strip())
        if index < 0 or self._last_text.strip() not in text:
            raise InvalidRequestError(
                "the chat template changes the text of the last message, so it cannot be "
                "continued; leave out continue_final_message",
                param="continue_final_message",
            )
        # A template that strips the text has removed the marker's trailing space.
        is_stripped = not text.startswith(self._mark, index)
        return text.cut(0, index).rstrip() if is_stripped else text.cut(0, index)


def _compile(source: str, now: "Callable[[], datetime]") -> "BoundedTemplate":
    from cadenza.text.templates.sandbox import BoundedTemplate

    if len(source) > MAX_TEMPLATE_CHARS:
        raise CheckpointError(
            f"the chat template has {len(source)} characters; at most {MAX_TEMPLATE_CHARS} are "
            f"allowed; check that it is the right file"
        )
    return BoundedTemplate(source, now=now)


def _prepare(message: dict[str, object]) -> dict[str, object]:
    """As in transformers: drops nulls and copies reasoning to the names that templates read."""
    message = {key: value for key, value in message.items() if value is not None}
    role = message.get("role")
    if isinstance(role, str) and role in _ROLES:
        message["role"] = written_by_template(role)
    for key in _REASONING_KEYS:
        if key in message:
            reasoning = message[key]
            return {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _plain_object(value: Mapping[str, object]) -> dict[str, object]:
    plain = _plain(value)
    if not isinstance(plain, dict):
        raise InvalidRequestError(
            f"a message is {type(value).__name__}; it must be an object with a role",
            param="messages",
        )
    return cast(dict[str, object], plain)


def plain_objects(values: object, name: str) -> list[dict[str, object]] | None:
    """A list of objects rebuilt from JSON types; None stays None. Raises InvalidRequestError."""
    if values is None:
        return None
    if not isinstance(values, list | tuple):
        raise InvalidRequestError(f"{name} must be a list of objects", param=name)
    return [
        _plain_object(cast(Mapping[str, object], value)) for value in cast(list[object], values)
    ]


def _plain(value: object, depth: int = 0) -> object:
    # Of other types a template could call methods.
    if depth > MAX_DEPTH:
        raise InvalidRequestError(
            f"messages are nested over {MAX_DEPTH} deep; flatten them", param="messages"
        )
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, OwnText):
        return value.text
    for kind in (str, int, float):
        if isinstance(value, kind):
            return value if type(value) is kind else kind(value)
    if isinstance(value, Mapping):
        items = cast(Mapping[object, object], value).items()
        return {str(key): _plain(item, depth + 1) for key, item in items}
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in cast(Sequence[object], value)]
    raise InvalidRequestError(
        f"messages hold a {type(value).__name__}; use strings, numbers, lists and objects",
        param="messages",
    )
