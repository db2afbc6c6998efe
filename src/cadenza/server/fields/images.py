"""Images in messages of chats and responses, checked into `ImageInput`s; URLs and base64 stay until
the whole request is known. Invariant: an image's place in the body is known, for errors."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from cadenza.media.image_input import Detail, ImageInput, image_part
from cadenza.server.errors import not_built
from cadenza.server.fields.body import DeclaredObject, ObjectOf, label, labels, optional, required
from cadenza.server.fields.types import (
    OneOf,
    Schema,
    String,
    Unsupported,
    field_type,
    members_of,
    refuse,
)

Part = str | ImageInput  # what a content is made of, in its order

Content = str | list[dict[str, Any]]
"""What a message of a chat has: a text, or parts where there is an image among them."""

IMAGE_URL = String(min_chars=1, max_chars=1 << 26)
IMAGE_BASE64 = String(min_chars=1, max_chars=1 << 26)
_DETAILS: Mapping[str, Detail] = {"auto": "auto", "low": "low", "high": "high", "original": "high"}
DETAIL_HELP = "How closely the model looks: auto, low or high; original is high."


@field_type(OneOf(tuple(_DETAILS)).schema())
def detail_type(name: str, value: object) -> Detail:
    if isinstance(value, str) and value in _DETAILS:
        return _DETAILS[value]
    raise refuse(name, value, f"one of {', '.join(_DETAILS)}")


class _ImageUrl(DeclaredObject):
    is_open = True
    url = required(IMAGE_URL)
    detail = optional(detail_type, DETAIL_HELP)


def _url_schema() -> Schema:
    return {"anyOf": [_ImageUrl.object_schema(), IMAGE_URL.schema()]}


@field_type(_url_schema)
def _image_url(name: str, value: object) -> _ImageUrl:
    if isinstance(value, str):
        return _ImageUrl({"url": IMAGE_URL.check(name, value)})
    return ObjectOf(_ImageUrl).check(name, value)


class ChatImage(DeclaredObject):
    """The part of a chat's message that has an image."""

    is_open = True
    type = required(OneOf(("image_url",)))
    image_url = required(_image_url, "A data: URL, or an https: URL of an allowed host.")
    detail = optional(detail_type, DETAIL_HELP)
    more = labels("id uuid cache_control prompt_cache_breakpoint")


class InputImage(DeclaredObject):
    """The part of Responses that has an image; some clients send it to chats, too."""

    is_open = True
    type = required(OneOf(("input_image",)))
    image_url = required(IMAGE_URL, "A data: URL, or an https: URL of an allowed host.")
    detail = optional(detail_type, DETAIL_HELP)
    file_id = label(Unsupported("an uploaded file; send image_url"))
    more = labels("id prompt_cache_breakpoint")


IMAGE_PARTS: Mapping[str, type[DeclaredObject]] = {
    "image_url": ChatImage,
    "input_image": InputImage,
}


def image_of_part(name: str, where: str, part: Mapping[str, Any]) -> ImageInput:
    """The image of a part whose type is one of `IMAGE_PARTS`. Raises ApiError (400)."""
    kind = part["type"]
    if part.get("image_url") is None and part.get("file_id") is not None:
        raise not_built(name, "an image by file_id", advice="send image_url")
    values = ObjectOf(IMAGE_PARTS[kind]).check(name, part).values
    url, detail = values["image_url"], values.get("detail")
    if isinstance(url, _ImageUrl):
        url, detail = url.url, url.detail or detail
    return ImageInput(url=url, detail=detail or "auto", where=where)


def content_of(parts: Sequence[Part]) -> Content:
    """One text where there is no image (parts as lines); otherwise parts, with adjacent texts
    joined."""
    if not has_images(parts):
        return "\n".join(cast(Sequence[str], parts))
    made: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, ImageInput):
            made.append(image_part(part))
        elif made and made[-1]["type"] == "text":
            made[-1]["text"] += f"\n{part}"
        else:
            made.append({"type": "text", "text": part})
    return made


def content_parts(content: Content) -> list[Part]:
    if isinstance(content, str):
        return [content]
    return [part["image"] if part["type"] == "image" else part["text"] for part in content]


def has_images(parts: Iterable[Part]) -> bool:
    return any(isinstance(part, ImageInput) for part in parts)


def is_image_part(part: object) -> bool:
    """Whether a part is one that this server made: JSON cannot hold its image."""
    return isinstance(members_of(part).get("image"), ImageInput)
