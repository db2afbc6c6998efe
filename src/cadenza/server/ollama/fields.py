"""Ollama's fields, checked into what the other APIs' are. Invariant: an option that would change an
answer is followed, or refused by name; how a model is loaded is a label."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

from cadenza.media.image_input import ImageInput
from cadenza.server.errors import not_built
from cadenza.server.fields.body import DeclaredObject, Effect, Field, ObjectOf, label, labels
from cadenza.server.fields.images import IMAGE_BASE64, Content, content_of
from cadenza.server.fields.messages import ChatMessage, chat_messages
from cadenza.server.fields.other_engines import PENALTIES
from cadenza.server.fields.sampling import sampling_type
from cadenza.server.fields.types import (
    AnyJson,
    Boolean,
    FieldType,
    Integer,
    Number,
    OneOf,
    Schema,
    Unsupported,
    array_schema,
    field_type,
    members_of,
    object_schema,
    or_null,
    refuse,
)

_UNBOUNDED = 0  # at most this: as many tokens as there is room for


def _option(type: FieldType[Any]) -> Field[Any]:
    return Field(type, "", effect=Effect.SAMPLING)


def _own(names: str) -> dict[str, Field[Any]]:
    return {name: _option(sampling_type(name)) for name in names.split()}


class OptionFields(DeclaredObject):
    """The members of `options` that are known; Ollama's names, some of which differ."""

    more: ClassVar[Mapping[str, Field[Any]]] = {
        **_own("temperature top_k top_p min_p seed"),
        "num_predict": _option(Integer(-2, 1 << 31)),
        **_own("stop"),
        "repeat_penalty": _option(sampling_type("repetition_penalty")),
        **_own("presence_penalty frequency_penalty"),
        "repeat_last_n": _option(Integer(-1, 1 << 31)),
        "penalize_newline": _option(Boolean()),
        "mirostat": label(Unsupported("mirostat sampling", (0,))),
        **labels("mirostat_tau mirostat_eta", Number(-1e6, 1e6)),
        "tfs_z": label(Unsupported("tail-free sampling", (1,))),
        "typical_p": label(Unsupported("typical sampling", (1, 0))),
        "num_ctx": _option(Integer(-1, 1 << 31)),
        # How Ollama loads a model: the flags of this server's start decide that.
        **labels(
            "num_batch num_gpu num_keep num_thread main_gpu low_vram numa f16_kv "
            "logits_all vocab_only use_mmap use_mlock embedding_only draft_num_predict",
            AnyJson(max_chars=64),
        ),
    }


@field_type(OptionFields.object_schema)
def ollama_options(name: str, value: object) -> dict[str, Any]:
    options: dict[str, Any] = {**ObjectOf(OptionFields).check(name, value).values}
    num_tokens = options.pop("num_predict", _UNBOUNDED)
    if num_tokens > _UNBOUNDED:
        options["max_tokens"] = num_tokens
    if "repeat_penalty" in options:
        options["repetition_penalty"] = options.pop("repeat_penalty")
    window = options.pop("repeat_last_n", -1)
    counts_newlines = options.pop("penalize_newline", True)
    penalties = [key for key, neutral in PENALTIES.items() if options.get(key, neutral) != neutral]
    if not window:
        options |= {key: PENALTIES[key] for key in penalties}
    elif penalties and window > 0:
        raise not_built(f"{name}.repeat_last_n", "a penalty of the last tokens only", (-1, 0))
    elif penalties and not counts_newlines:
        raise not_built(f"{name}.penalize_newline", "a penalty without line breaks", (True,))
    return options


_EFFORTS = OneOf(("low", "medium", "high", "max"))


@field_type({"anyOf": [Boolean().schema(), _EFFORTS.schema()]})
def think_type(name: str, value: object) -> str:
    """`think`: true, false, or how much; checked into one of `EFFORTS`."""
    if isinstance(value, bool):
        return "medium" if value else "none"
    if isinstance(value, str) and value in _EFFORTS.values:
        return value
    raise refuse(name, value, f"true, false or one of {', '.join(_EFFORTS.values)}")


OLLAMA_IMAGES: Schema = {"type": "array", "items": {"type": "string", "minLength": 1}}


def ollama_images(name: str, where: str, value: object) -> list[ImageInput]:
    """`images` of a message or a prompt: base64 of files. Raises ApiError (400)."""
    if not isinstance(value, list):
        raise refuse(name, value, "a list of images, each a file's bytes as base64")
    found: list[ImageInput] = []
    for index, item in enumerate(cast(list[object], value)):
        text = IMAGE_BASE64.check(name, item)
        # Its bytes say what it is.
        url = text if text[:5].lower() == "data:" else f"data:image/png;base64,{text}"
        found.append(ImageInput(url=url, where=f"{where}[{index}]"))
    return found


def seen_content(images: Sequence[ImageInput], text: str) -> Content:
    """The images of a message in front of its text, as Ollama puts them."""
    return content_of([*images, text] if text or not images else images)


@field_type(OLLAMA_IMAGES)
def prompt_images(name: str, value: object) -> list[ImageInput]:
    return ollama_images(name, name, value)


_TEXT_OR_NULL: Schema = {"type": ["string", "null"]}
_FUNCTION = object_schema(
    {"name": {"type": "string", "minLength": 1}, "arguments": {"type": "object"}}
)
_MESSAGE = object_schema(
    {
        "role": ChatMessage.fields["role"].type.schema(),
        **dict.fromkeys(("content", "thinking", "tool_name"), _TEXT_OR_NULL),
        "images": or_null(OLLAMA_IMAGES),
        "tool_calls": {"type": ["array", "null"], "items": object_schema({"function": _FUNCTION})},
    },
    ("role",),
)


@field_type(array_schema(_MESSAGE))
def ollama_messages(name: str, value: object) -> tuple[dict[str, Any], ...]:
    """`messages`, checked into chat's; an empty list asks for no answer. Calls without ids, which
    some templates need, are numbered, and results after them."""
    if not isinstance(value, list):
        raise refuse(name, value, "a list of messages")
    items, numbers = cast(list[object], value), _CallNumbers()
    converted = [_converted(f"{name}[{index}]", item, numbers) for index, item in enumerate(items)]
    return chat_messages.check(name, converted) if converted else ()


class _CallNumbers:
    """Gives the calls of a conversation numbers, and finds those that a result may answer."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._open: list[tuple[object, str]] = []

    def add(self, call: Mapping[str, Any]) -> str:
        """Returns nine digits, which some templates need."""
        given = call.get("id")
        number = given if isinstance(given, str) and given else f"{self._num_calls:09d}"
        self._num_calls += 1
        self._open.append((members_of(call.get("function")).get("name"), number))
        return number

    def answered(self, tool: object) -> str | None:
        """The oldest open call of the tool, or of any if it has no name."""
        asked = enumerate(self._open)
        index = next((n for n, (name, _) in asked if tool in (None, "", name)), None)
        return None if index is None else self._open.pop(index)[1]


_RENAMED = {"thinking": "reasoning_content", "tool_name": "name"}


def _converted(name: str, item: object, numbers: _CallNumbers) -> object:
    """A message with chat's members. Raises ApiError (400) for `images` of another form."""
    if not isinstance(item, dict):
        return item  # which is refused as in chat
    given = cast(dict[str, Any], item)
    message = {_RENAMED.get(key, key): part for key, part in given.items() if part is not None}
    message.setdefault("content", "")
    images = ollama_images("messages", f"{name}.images", message.pop("images", []))
    if images and isinstance(message["content"], str):
        message["content"] = seen_content(images, message["content"])
    if not message.get("reasoning_content", "x"):
        del message["reasoning_content"]
    calls: object = message.get("tool_calls")
    if isinstance(calls, list):
        message["tool_calls"] = [
            {**members_of(call), "id": numbers.add(members_of(call)), "type": "function"}
            for call in cast(list[object], calls)
        ]
    if message.get("role") == "tool" and "tool_call_id" not in message:
        number = numbers.answered(message.get("name"))
        message |= {} if number is None else {"tool_call_id": number}
    return message
