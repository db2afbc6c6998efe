"""Processors of images for tests, by which a child process does what a test needs."""

import hashlib
import os
import time
from dataclasses import dataclass
from typing import Any

from cadenza.errors import InvalidRequestError
from cadenza.vision.processor import Detail, ImagePart, ImagePlan, Run


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeImages:
    """Takes images as they are, in one part.

    Args:
        most_aspect: of the longer side to the shorter one.
    """

    most_aspect: float = 200.0

    def plan(self, width: int, height: int, detail: str = "auto") -> object:
        aspect = max(width, height) / min(width, height)
        if aspect > self.most_aspect:
            raise InvalidRequestError(
                f"its sides are {aspect:g} to 1; at most {self.most_aspect:g} to 1 is allowed"
            )
        return (width, height, detail)

    def prepare(self, image: Any, detail: str = "auto") -> tuple[bytes, ...]:
        return (image.tobytes(), detail.encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class GridImages:
    """Takes images as they are, with a token for each square of `side` pixels; with the detail low
    one token.

    Args:
        hang_width: of images that never end.
    """

    placeholder: str = "<image>"
    token: str = "<image>"
    settings: bytes = b"grid"
    side: int = 8
    hang_width: int = 0

    def plan(self, width: int, height: int, detail: Detail = "auto") -> ImagePlan:
        is_low = detail == "low"
        rows, columns = (1, 1) if is_low else (height // self.side, width // self.side)
        part = ImagePart(width=width, height=height, rows=rows, columns=columns)
        return ImagePlan(parts=(part,), pieces=(Run(0, part.num_tokens),))

    def prepare(self, image: Any, detail: Detail = "auto") -> tuple[bytes, ...]:
        while image.width == self.hang_width:
            time.sleep(3600)
        return (image.tobytes(),)

    def check(self, part: ImagePart) -> None:
        assert part.num_tokens

    def patches(self, pixels: bytes, part: ImagePart) -> Any:
        raise AssertionError("only an engine makes patches")


@dataclass(frozen=True, slots=True, kw_only=True)
class Greedy(WholeImages):
    """Uses more memory than there is."""

    num_bytes: int

    def prepare(self, image: Any, detail: str = "auto") -> tuple[bytes, ...]:
        return (bytes(self.num_bytes),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy(WholeImages):
    """Never ends, and uses the processor meanwhile."""

    def prepare(self, image: Any, detail: str = "auto") -> tuple[bytes, ...]:
        digest = b""
        while True:
            digest = hashlib.sha256(digest).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stuck(WholeImages):
    """Never ends, and uses no processor."""

    def prepare(self, image: Any, detail: str = "auto") -> tuple[bytes, ...]:
        while True:
            time.sleep(3600)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dying(WholeImages):
    """Ends its process."""

    def prepare(self, image: Any, detail: str = "auto") -> tuple[bytes, ...]:
        os.abort()


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing(WholeImages):
    """Writes a file."""

    path: str

    def prepare(self, image: Any, detail: str = "auto") -> tuple[bytes, ...]:
        with open(self.path, "wb") as file:
            file.write(b"x" * 100)
        return ()
