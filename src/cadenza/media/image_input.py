"""`ImageInput`: an image of a request; `OpenedImage`: the same once it was opened. A conversation
has its images in parts {"type": "image", "image": ImageInput} of a message's `content`, whatever
the API. An image is opened at most once; preparing a prompt reads `opened` only."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from cadenza.errors import InvalidRequestError

Detail = Literal["auto", "low", "high"]
DETAILS: tuple[Detail, ...] = ("auto", "low", "high")

MAX_IMAGES = 8  # of one request
MAX_ENCODED_BYTES = 20 << 20  # of one image's file
MAX_PIXELS = 25_000_000  # of one image, by its header


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedImage:
    """An image whose size is known."""

    width: int  # pixels, upright
    height: int  # pixels, upright
    # the RGB bytes of each part that the model's processor makes of it; None where only the file's
    # header was read, as for counting tokens
    parts: tuple[bytes, ...] | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class ImageInput:
    """An image of a request. One of `data`, `url` and `picture` is not None."""

    data: bytes | None = None  # the file's bytes: JPEG, PNG, WebP or GIF
    url: str | None = None  # where to fetch it, by https
    picture: Any = None  # a PIL image, from a caller in this process
    detail: Detail = "auto"  # how fine the model is to see it
    where: str = ""  # its path in the request, such as "messages[1].content[0]", for errors
    opened: OpenedImage | None = None  # set once, when it was opened

    @property
    def is_remote(self) -> bool:
        has_file = self.data is not None or self.picture is not None or self.opened is not None
        return not has_file and self.url is not None and self.url[:5].lower() != "data:"


class ImageFault(Exception):
    """What is wrong with an image and what is allowed, without naming the image."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem

    def named(self, image: ImageInput, index: int) -> InvalidRequestError:
        """The error of a request's image at `index`, from 0; the message counts from 1."""
        where = f" ({image.where})" if image.where else ""
        return InvalidRequestError(
            f"image {index + 1}{where}: {self.problem}", param=image.where or "messages"
        )


class ImagesToFetch(Exception):
    """Images of the conversation are at remote URLs: fetch them, and prepare it again."""

    def __init__(self, images: Sequence[ImageInput]) -> None:
        super().__init__(f"{len(images)} images are to be fetched")
        self.images = images


def need_files(messages: Iterable[Mapping[str, Any]]) -> None:
    """Raises ImagesToFetch, with all images of a conversation, if one is at a remote URL."""
    images = images_of(messages)
    if any(image.is_remote for image in images):
        raise ImagesToFetch(images)


def image_part(image: ImageInput) -> dict[str, Any]:
    return {"type": "image", "image": image}


def images_of(messages: Iterable[Mapping[str, Any]]) -> list[ImageInput]:
    found: list[ImageInput] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            for part in cast(list[object], content):
                if isinstance(part, Mapping):
                    image = cast(Mapping[str, object], part).get("image")
                    found += [image] if isinstance(image, ImageInput) else []
    return found
