"""Messages to the text that a model was trained on: `ChatTemplate`.

Owns what a template sees: plain data, the special tokens, and nothing else. Knows nothing of
token ids. Invariant: a checkpoint's template can neither change nor reach anything outside its own
rendering, and takes bounded time and memory (see `text.sandbox`).
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Protocol, cast

from cadenza.errors import CheckpointError, InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable

    from cadenza.text.sandbox import BoundedTemplate

MAX_TEMPLATE_CHARS = 1 << 20
MAX_DEPTH = 64

_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


class TokenizerStatements(Protocol):
    """What a checkpoint says of its tokenizer (`checkpoint.tokenizer_files.TokenizerFiles`)."""

    @property
    def chat_templates(self) -> Mapping[str, str]: ...

    @property
    def special_tokens(self) -> Mapping[str, str]: ...


class HasTokenizerStatements(Protocol):
    """A checkpoint, as far as chat templates go."""

    @property
    def tokenizer(self) -> TokenizerStatements: ...


class ChatTemplate:
    """A compiled chat template with the variables that each rendering sees.

    Args:
        source: Jinja source.
        variables: say bos_token and eos_token.
        tools_source: used instead of `source` when tools are given.
        now: the clock behind `strftime_now`.

    Raises:
        CheckpointError: the source is too large or not valid.
    """

    __slots__ = ("_template", "_tools_template", "_variables")

    def __init__(
        self,
        source: str,
        variables: Mapping[str, str],
        *,
        tools_source: str | None = None,
        now: "Callable[[], datetime]" = datetime.now,
    ) -> None:
        self._variables = dict(variables)
        self._template = _compile(source, now)
        self._tools_template = (
            self._template if tools_source is None else _compile(tools_source, now)
        )

    @classmethod
    def from_checkpoint(cls, checkpoint: HasTokenizerStatements) -> "ChatTemplate | None":
        """The checkpoint's default template (with tools its `tool_use` one); `None` without."""
        templates = checkpoint.tokenizer.chat_templates
        source = templates.get("default")
        if source is None:
            return None
        special_tokens = checkpoint.tokenizer.special_tokens
        return cls(source, special_tokens, tools_source=templates.get("tool_use"))

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: object,
    ) -> str:
        """The prompt's text. It holds its own special tokens: encode it without adding more.

        Raises:
            InvalidRequestError: the template refuses the messages or fails on them.
            CheckpointError: the template reaches for what the sandbox does not allow.
        """
        if not messages:
            raise InvalidRequestError("messages is empty; send at least one", param="messages")
        template = self._template if tools is None else self._tools_template
        return template.render(
            {
                **self._variables,
                **_plain_object(kwargs),
                "messages": [_prepare(_plain_object(message)) for message in messages],
                "tools": None if tools is None else [_plain_object(tool) for tool in tools],
                "documents": _plain(kwargs.get("documents")),
                "add_generation_prompt": add_generation_prompt,
            }
        )


def _compile(source: str, now: "Callable[[], datetime]") -> "BoundedTemplate":
    from cadenza.text.sandbox import BoundedTemplate

    if len(source) > MAX_TEMPLATE_CHARS:
        raise CheckpointError(
            f"the chat template has {len(source)} characters; at most {MAX_TEMPLATE_CHARS} are "
            f"read; check that it is the right file"
        )
    return BoundedTemplate(source, now=now)


def _prepare(message: dict[str, object]) -> dict[str, object]:
    """As transformers does: no nulls, and reasoning under each name that templates read it by."""
    message = {key: value for key, value in message.items() if value is not None}
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


def _plain(value: object, depth: int = 0) -> object:
    """`value` rebuilt from JSON's types, so that no method of another type is in reach."""
    if depth > MAX_DEPTH:
        raise InvalidRequestError(
            f"messages are nested over {MAX_DEPTH} deep; flatten them", param="messages"
        )
    if value is None or isinstance(value, bool):
        return value
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
