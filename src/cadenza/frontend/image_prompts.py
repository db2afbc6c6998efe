"""`ImagePrompts`: images as placeholders and `Attachment`s of a model that sees. A prompt's length
follows from the sizes of its images, known from their headers; `PooledPixels` decodes them last.
Invariant: a placeholder is one that a template wrote, or the caller of a raw prompt with images;
what a user typed is text."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from cadenza.errors import InvalidRequestError, TextTooLongError, must_be, show, show_size
from cadenza.media.image_input import (
    DETAILS,
    MAX_ENCODED_BYTES,
    ImageFault,
    ImageInput,
    image_part,
    images_of,
)
from cadenza.media.opening import PooledPixels
from cadenza.request import Attachment, Request
from cadenza.text import Tokenizer
from cadenza.text.tokens.provenance import MarkedText, OwnText, join_marked, written_by_template
from cadenza.vision.processor import (
    ImagePart,
    ImagePlan,
    Run,
    image_digest,
)
from cadenza.vision.tower_config import VisionConfig

_NAMED = re.compile(r"""(['"])image\1""")
_OLDER_PART: Mapping[str, object] = {"type": "image_url", "image_url": {"url": ""}}
_BETWEEN = "\n"


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt's text, in which a placeholder stands for each of its images."""

    text: str
    images: SequenceOf[ImageInput] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedImage:
    """An image, and what it becomes."""

    image: ImageInput
    plan: ImagePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class LaidOut:
    """A prompt's text, with one image token for each run of placeholders."""

    text: str
    images: tuple[PlannedImage, ...] = ()

    @property
    def runs(self) -> Iterator[tuple[int, Run]]:
        for index, each in enumerate(self.images):
            for piece in each.plan.pieces:
                if isinstance(piece, Run):
                    yield index, piece

    @property
    def num_tokens(self) -> int:
        return sum(each.plan.num_tokens for each in self.images)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spanned:
    """A prompt's token ids with placeholders, and its images."""

    ids: tuple[int, ...]
    images: tuple[PlannedImage, ...] = ()
    # The first and last placeholder of each part of each image.
    spans: Mapping[tuple[int, int], tuple[int, int]] = field(
        default_factory=dict[tuple[int, int], tuple[int, int]]
    )

    @property
    def has_pixels(self) -> bool:
        opened = [each.image.opened for each in self.images]
        return all(each is not None and each.parts is not None for each in opened)


class ImagePrompts:
    """Of one model that sees, whose chat template, if it has one, is `template`."""

    def __init__(
        self,
        vision: VisionConfig,
        tokenizer: Tokenizer,
        template: str | None,
        pixels: PooledPixels,
    ) -> None:
        self.processor = vision.processor
        self._token_id = vision.image_token_id
        self.pixels = pixels
        self._part = _part_for(template or "")
        self._written = _written_forms(self.processor.placeholder, template or "", tokenizer)

    def with_parts(self, messages: SequenceOf[Any]) -> list[Any]:
        """The messages, in which parts that the template knows stand in place of images."""
        return [self._with_parts(each) if images_of([each]) else each for each in messages]

    def _with_parts(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        parts = cast(list[Mapping[str, Any]], message["content"])
        if self._part is not None:
            changed = [self._part if _is_image(part) else part for part in parts]
            return {**message, "content": changed}
        mark = written_by_template(self.processor.placeholder)
        texts = [mark if _is_image(part) else str(part.get("text", "")) for part in parts]
        return {**message, "content": OwnText(cast(MarkedText, MarkedText(_BETWEEN).join(texts)))}

    def marked(self, prompt: str) -> MarkedText:
        pieces = re.split(f"({self._written})", prompt)
        return join_marked(
            written_by_template(piece) if index % 2 else MarkedText(piece)
            for index, piece in enumerate(pieces)
        )

    def spanned(
        self, rendered: Rendered, encode: Callable[[str], SequenceOf[int]], most: int | None
    ) -> Spanned:
        """The ids of a prompt, at most `most`. Raises TextTooLongError; raises InvalidRequestError:
        there are more placeholders than images or fewer, or an image cannot be taken."""
        laid_out = self._laid_out(rendered)
        ids = encode(laid_out.text)
        runs = [*laid_out.runs]
        if ids.count(self._token_id) != len(runs):
            raise InvalidRequestError(
                f"this model's tokenizer does not encode {self.processor.token!r} as the token "
                f"{self._token_id} of images; fetch its tokenizer.json again",
                param="messages",
            )
        num_tokens = len(ids) - len(runs) + laid_out.num_tokens
        if runs and most is not None and num_tokens > most:
            raise TextTooLongError(
                f"the prompt has {num_tokens} tokens, {laid_out.num_tokens} of them of its images; "
                f"at most {most} are allowed: shorten it, or send fewer or smaller images",
                num_tokens=num_tokens,
                length=f"{num_tokens} tokens",
            )
        return _with_runs(ids, self._token_id, laid_out) if runs else Spanned(ids=tuple(ids))

    def _laid_out(self, rendered: Rendered) -> LaidOut:
        text, images = rendered.text, rendered.images
        marked = text if isinstance(text, MarkedText) else MarkedText(text)
        places = [*self._places(marked)]
        if len(places) != len(images):
            raise _miscounted(len(images), len(places))
        if not images:
            return LaidOut(text=text)
        planned = self.planned(images)
        pieces: list[str] = []
        position = 0
        for start, each in zip(places, planned, strict=True):
            pieces.append(marked.cut(position, start))
            pieces += [written_by_template(self._text_of(piece)) for piece in each.plan.pieces]
            position = start + len(self.processor.placeholder)
        pieces.append(marked.cut(position, len(marked)))
        return LaidOut(text=join_marked(pieces), images=planned)

    def _text_of(self, piece: str | Run) -> str:
        return piece if isinstance(piece, str) else self.processor.token

    def _places(self, text: MarkedText) -> Iterator[int]:
        placeholder = self.processor.placeholder
        start = text.find(placeholder)
        while start >= 0:
            is_own = text.is_own(start, start + len(placeholder))
            if is_own:
                yield start
            start = text.find(placeholder, start + (len(placeholder) if is_own else 1))

    def planned(self, images: SequenceOf[ImageInput]) -> tuple[PlannedImage, ...]:
        """What each image becomes, by its header. Raises InvalidRequestError."""
        self.pixels.measure(images, self.processor)
        return tuple(self._planned(image, index) for index, image in enumerate(images))

    def _planned(self, image: ImageInput, index: int) -> PlannedImage:
        size = image.opened
        assert size is not None, "it was measured"
        try:
            plan = self.processor.plan(size.width, size.height, image.detail)
        except InvalidRequestError as error:
            raise ImageFault(str(error)).named(image, index) from None
        return PlannedImage(image=image, plan=plan)

    def attachments(self, spanned: Spanned) -> tuple[Attachment, ...]:
        """The images of the placeholders, with their pixels. Slow."""
        if not spanned.has_pixels:
            self.pixels.open([each.image for each in spanned.images], self.processor)
        found: list[Attachment] = []
        for index, each in enumerate(spanned.images):
            parts = () if each.image.opened is None else each.image.opened.parts or ()
            if [*map(len, parts)] != [part.num_bytes for part in each.plan.parts]:
                raise ImageFault(
                    "its pixels are others than its file's header says; save it again"
                ).named(each.image, index)
            for number, (part, payload) in enumerate(zip(each.plan.parts, parts, strict=True)):
                found.append(self._attachment(part, payload, spanned.spans[index, number]))
        return tuple(found)

    def _attachment(self, part: ImagePart, payload: bytes, span: tuple[int, int]) -> Attachment:
        first, last = span
        return Attachment(
            start=first,
            length=last + 1 - first,
            digest=image_digest(self.processor.settings, part, payload),
            payload=payload,
            width=part.width,
            height=part.height,
            rows=part.rows,
            columns=part.columns,
        )


def num_image_tokens(request: Request) -> int:
    return sum(each.rows * each.columns for each in request.attachments)


def keep_last(request: Request, count: int) -> Request:
    """With the last tokens of its prompt. Raises InvalidRequestError where that cuts an image."""
    first = len(request.prompt_token_ids) - count
    kept = tuple(each for each in request.attachments if each.end > first)
    if kept and kept[0].start < first:
        raise InvalidRequestError(
            f"truncate_prompt_tokens is {count} and cuts the prompt within an image, whose tokens "
            f"are {kept[0].start} to {kept[0].end - 1}; keep at least "
            f"{len(request.prompt_token_ids) - kept[0].start}, or leave the image out",
            param="truncate_prompt_tokens",
        )
    moved = tuple(replace(each, start=each.start - first) for each in kept)
    return replace(request, prompt_token_ids=request.prompt_token_ids[first:], attachments=moved)


def _part_for(template: str) -> Mapping[str, object] | None:
    """For which a template writes an image's placeholder; None where it takes text only."""
    if _NAMED.search(template):
        return {"type": "image"}
    return _OLDER_PART if "image_url" in template else None


def _written_forms(placeholder: str, template: str, tokenizer: Tokenizer) -> str:
    """A pattern of the placeholder with the control tokens that the template writes around it."""
    tokens = "|".join(map(re.escape, sorted(tokenizer.added_tokens, key=len, reverse=True)))
    around = f"(?:{tokens})*" if tokens else ""
    found = re.finditer(f"{around}{re.escape(placeholder)}{around}", template)
    forms = {placeholder, *(match.group() for match in found)}
    return "|".join(map(re.escape, sorted(forms, key=len, reverse=True)))


def _is_image(part: object) -> bool:
    return isinstance(part, Mapping) and isinstance(
        cast(Mapping[str, object], part).get("image"), ImageInput
    )


def _miscounted(num_images: int, num_places: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"there are {num_images} images and {num_places} placeholders for them: each image needs "
        f"one, which a raw prompt has in its text, and for which a model's chat template may have "
        f"no place in some messages; put images into messages of the user",
        param="messages",
    )


def _with_runs(ids: SequenceOf[int], token_id: int, laid_out: LaidOut) -> Spanned:
    found: list[int] = []
    spans: dict[tuple[int, int], tuple[int, int]] = {}
    position = 0
    for index, run in laid_out.runs:
        start = ids.index(token_id, position)
        found += ids[position:start]
        first, _ = spans.get((index, run.part), (len(found), 0))
        found += [token_id] * run.count
        spans[index, run.part] = first, len(found) - 1
        position = start + 1
    found += ids[position:]
    return Spanned(ids=tuple(found), images=laid_out.images, spans=spans)


_KINDS = ("image", "image_url", "input_image", "image_pil")
_PLACES = ("image", "image_url", "image_pil", "url", "path", "base64")
_SCHEMES = ("data:", "http://", "https://")
_ALLOWED = "a PIL image, the bytes of a file, a path, a data: URL or an https: URL"


def with_images(messages: object) -> Any:
    """A conversation whose images, in the forms of OpenAI, transformers and vLLM, are
    `ImageInput`s; anything else stays as it is. Raises InvalidRequestError."""
    if not isinstance(messages, list | tuple):
        return messages
    return [
        _with_images(found, f"messages[{index}]") if (found := _members(each)) else each
        for index, each in enumerate(cast(SequenceOf[object], messages))
    ]


def _with_images(message: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return message
    parts = [
        _with_image(part, f"{where}.content[{index}]")
        for index, part in enumerate(cast(SequenceOf[object], content))
    ]
    return {**message, "content": parts}


def _with_image(part: object, where: str) -> object:
    members = _members(part)
    if members.get("type") not in _KINDS or isinstance(members.get("image"), ImageInput):
        return part
    given = next((value for name in _PLACES if (value := members.get(name)) is not None), None)
    detail = members.get("detail")
    if isinstance(given, Mapping):
        inner = _members(cast(object, given))
        given, detail = inner.get("url"), inner.get("detail", detail)
    if members.get("base64") is given and isinstance(given, str):
        given = f"data:image/png;base64,{given}"  # its bytes say what it is
    return image_part(image_input(given, where, detail))


def _members(given: object) -> Mapping[str, object]:
    return cast(Mapping[str, object], given) if isinstance(given, Mapping) else dict[str, object]()


def image_input(given: object, where: str, detail: object = None) -> ImageInput:
    """In one of the forms that programs have. Raises InvalidRequestError."""
    if isinstance(given, ImageInput):
        return given
    if detail not in (None, *DETAILS):
        raise InvalidRequestError(
            f"{where} has the detail {show(detail)}; there are {', '.join(DETAILS)}", param=where
        )
    chosen = "auto" if detail is None else detail
    if isinstance(given, bytes | bytearray):
        return ImageInput(data=bytes(given), detail=chosen, where=where)
    if isinstance(given, str) and given[:8].lower().startswith(_SCHEMES):
        return ImageInput(url=given, detail=chosen, where=where)
    if isinstance(given, str | os.PathLike):
        path = Path(cast("str | os.PathLike[str]", given)).expanduser()
        return ImageInput(data=read_image(path, where), detail=chosen, where=where)
    if hasattr(given, "convert") and hasattr(given, "size"):
        return ImageInput(picture=given, detail=chosen, where=where)
    raise must_be(where, given, _ALLOWED)


def read_image(path: Path, where: str) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_ENCODED_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no path"
        raise InvalidRequestError(
            f"the image {show(str(path))} cannot be read: {reason}", param=where
        ) from None
    if len(data) > MAX_ENCODED_BYTES:
        raise InvalidRequestError(
            f"the image {show(str(path))} has over {show_size(MAX_ENCODED_BYTES)}; make it smaller",
            param=where,
        )
    return data


def images_of_prompt(data: object) -> tuple[ImageInput, ...]:
    """vLLM's `multi_modal_data`: {"image": one or a list}. Raises InvalidRequestError."""
    members = _members(data)
    if not isinstance(data, Mapping) or [name for name in members if name != "image"]:
        allowed = 'a mapping {"image": …}; there is no other kind'
        raise must_be("multi_modal_data", cast(object, data), allowed)
    given = members.get("image")
    listed = cast(SequenceOf[object], given) if isinstance(given, list | tuple) else [given]
    return tuple(
        image_input(each, f"multi_modal_data.image[{index}]")
        for index, each in enumerate(listed)
        if given is not None
    )
