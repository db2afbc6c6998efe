"""The bytes in a `data:` URL, strictly (`data_of_url`), and those of base64 alone
(`data_of_base64`). A media type is checked for its form and then ignored, since the bytes say what
they are. Nothing but base64's alphabet and padding is skipped or repaired."""

import binascii
import re
from collections.abc import Iterator

from cadenza.errors import show, show_size
from cadenza.media.headers import FORMATS_HELP, too_many_bytes
from cadenza.media.image_input import MAX_ENCODED_BYTES, ImageFault

_SLICE = 1 << 18  # characters decoded at once, whole groups; other threads run between slices
MAX_BASE64_CHARS = -(-MAX_ENCODED_BYTES // 3) * 4
_HEAD = re.compile(r"data:([A-Za-z0-9.+-]+/[A-Za-z0-9.+-]+);base64,", re.ASCII | re.IGNORECASE)
_MAX_HEAD_CHARS = 256
_FORM = "data:image/png;base64,…"


def is_data_url(url: str) -> bool:
    return url[:5].lower() == "data:"


def data_of_url(url: str) -> bytes:
    """Raises ImageFault: not one media type and base64, or another type of media."""
    found = _HEAD.match(url[:_MAX_HEAD_CHARS])
    if found is None:
        raise ImageFault(f"its URL is {show(url)}; a data URL has the form {_FORM}")
    media_type = found[1].lower()
    if not media_type.startswith("image/"):
        raise ImageFault(f"its data URL says {show(media_type)}; {FORMATS_HELP}: {_FORM}")
    return data_of_base64(url[found.end() :])


def data_of_base64(text: str) -> bytes:
    """Raises ImageFault."""
    if len(text) > MAX_BASE64_CHARS:
        raise too_many_bytes(f"about {show_size(len(text) // 4 * 3)}")
    try:
        return b"".join(_decoded(text))
    except ValueError:
        raise ImageFault(
            f"its base64 is damaged ({len(text)} characters); send the standard alphabet with "
            f"padding, without line breaks"
        ) from None


def _decoded(text: str) -> Iterator[bytes]:
    """Raises ValueError. Checks what Python does not: padding ends the whole text, and is at most
    two characters."""
    if text.endswith("==="):
        raise ValueError
    for start in range(0, len(text), _SLICE):
        part = text[start : start + _SLICE]
        if "=" in part and start + _SLICE < len(text):
            raise ValueError
        yield binascii.a2b_base64(part, strict_mode=True)
