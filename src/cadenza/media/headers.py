"""An image file's format, size and orientation from its header: `read_image_header`. Reads bytes
without an image library, so that it is safe in the server's own process. A file that passes has one
picture of at most `MAX_PIXELS`; each loop is bounded by the file's length."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from struct import error as StructError
from struct import unpack_from
from typing import Literal

from cadenza.errors import show_size
from cadenza.media.image_input import MAX_ENCODED_BYTES, MAX_PIXELS, ImageFault

Format = Literal["JPEG", "PNG", "WebP", "GIF"]
FORMATS_HELP = "JPEG, PNG, WebP and GIF are allowed"
_ORIENTATION = 0x0112
_SHORT = 3
_MAX_STEPS = 1 << 18  # in a walk through a file; each 255 bytes of a GIF's data are one
_TURNED = 5  # the first orientation that exchanges the sides

_OTHERS = (
    (re.compile(rb"BM.{4}\0\0\0\0", re.DOTALL), "BMP"),
    (re.compile(rb"II\*\0|MM\0\*|II\+\0|MM\0\+"), "TIFF"),
    (re.compile(rb"SIMPLE  ="), "FITS"),
    (re.compile(rb".{4}ftyp(?:avif|avis)", re.DOTALL), "AVIF"),
    (re.compile(rb".{4}ftyp(?:heic|heix|mif1|msf1|hevc)", re.DOTALL), "HEIC"),
    (re.compile(rb"%PDF"), "PDF"),
    (re.compile(rb"\x00\x00\x01\x00"), "ICO"),
    (re.compile(rb"8BPS"), "PSD"),
    (re.compile(rb"\xff\x0a|\x00\x00\x00\x0cJXL "), "JPEG XL"),
    (re.compile(rb"\x00\x00\x00\x0cjP  "), "JPEG 2000"),
    (re.compile(rb"(?:\xef\xbb\xbf)?\s*<(?:\?xml|svg|!DOCTYPE svg)", re.IGNORECASE), "SVG or XML"),
    (re.compile(rb"(?:\xef\xbb\xbf)?\s*<(?:!DOCTYPE html|html)", re.IGNORECASE), "HTML"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageHeader:
    """What a file says of its picture."""

    format: Format
    # stored_width, stored_height: pixels as they lie in the file
    stored_width: int
    stored_height: int
    orientation: int = 1  # 1 to 8, as EXIF numbers them

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the picture upright."""
        width, height = self.stored_width, self.stored_height
        return (height, width) if self.orientation >= _TURNED else (width, height)


def read_image_header(data: bytes) -> ImageHeader:
    """Raises ImageFault: not one of the formats, truncated, animated, empty or too large."""
    if not data:
        raise ImageFault(f"it has no bytes; {FORMATS_HELP}")
    if len(data) > MAX_ENCODED_BYTES:
        raise too_many_bytes(show_size(len(data)))
    try:
        header = _reader_of(data)(data)
    except (StructError, IndexError):
        raise cut_off() from None
    width, height = header.stored_width, header.stored_height
    if not width or not height:
        raise ImageFault(f"its {header.format} header says {width} x {height} pixels: it is empty")
    if width * height > MAX_PIXELS:
        raise ImageFault(
            f"it has {width} x {height} pixels, over the {MAX_PIXELS:,} that are allowed; make it "
            f"smaller"
        )
    return header


def image_size(data: bytes) -> tuple[int, int]:
    return read_image_header(data).size


def cut_off() -> ImageFault:
    return ImageFault("the file is cut off or damaged; send the whole of it")


def too_many_bytes(given: str) -> ImageFault:
    return ImageFault(
        f"the file has {given}, over the {show_size(MAX_ENCODED_BYTES)} that are allowed; make it "
        f"smaller"
    )


def _reader_of(data: bytes) -> Callable[[bytes], ImageHeader]:
    if data.startswith(b"\xff\xd8\xff"):
        return _read_jpeg
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return _read_png
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return _read_webp
    if data[:6] in (b"GIF87a", b"GIF89a"):
        return _read_gif
    named = next((name for magic, name in _OTHERS if magic.match(data)), "of no known format")
    raise ImageFault(f"its bytes are {named}; {FORMATS_HELP}, whatever the media type says")


def _header(format: Format, width: int, height: int, exif: bytes = b"") -> ImageHeader:
    return ImageHeader(
        format=format, stored_width=width, stored_height=height, orientation=_orientation(exif)
    )


# --- JPEG ----------------------------------------------------------------------------------------

_ALONE = frozenset({0x01, *range(0xD0, 0xD9)})  # markers without a length
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


def _read_jpeg(data: bytes) -> ImageHeader:
    """The first frame's size; a second picture after the first, as cameras add, is not read."""
    exif = b""
    for marker, start, length in _segments(data):
        if marker == 0xE1 and data[start : start + 6] == b"Exif\0\0":
            exif = exif or data[start + 6 : start + length]
        elif marker in _FRAMES:
            height, width = unpack_from(">HH", data, start + 1)
            return _header("JPEG", width, height, exif)
    raise cut_off()


def _segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Marker, start and length of what follows it, up to the first scan."""
    offset = 2
    for _ in range(_MAX_STEPS):
        if data[offset] != 0xFF:
            raise cut_off()
        marker = data[offset + 1]
        if marker == 0xFF:
            offset += 1
            continue
        offset += 2
        if marker in (0xD9, 0xDA):
            return
        if marker in _ALONE:
            continue
        (length,) = unpack_from(">H", data, offset)
        if length < 2 or offset + length > len(data):
            raise cut_off()
        yield marker, offset + 2, length - 2
        offset += length
    raise _in_pieces()


# --- PNG -----------------------------------------------------------------------------------------


def _read_png(data: bytes) -> ImageHeader:
    if data[12:16] != b"IHDR":
        raise cut_off()
    width, height = unpack_from(">II", data, 16)
    if width * height > MAX_PIXELS:  # is said of a bomb without its data, too
        return _header("PNG", width, height)
    exif, has_data = b"", False
    for kind, start, length in _chunks(data):
        if kind == b"acTL" and unpack_from(">I", data, start)[0] != 1:
            raise _animated("PNG")
        elif kind == b"eXIf":
            exif = exif or data[start : start + length]
        elif kind == b"IDAT":
            has_data = True
        elif kind == b"IEND" and has_data:
            return _header("PNG", width, height, exif)
    raise cut_off()


def _chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    offset = 8
    for _ in range(_MAX_STEPS):
        length, kind = unpack_from(">I4s", data, offset)
        if offset + 12 + length > len(data):
            raise cut_off()
        yield kind, offset + 8, length
        offset += 12 + length
    raise _in_pieces()


# --- WebP ----------------------------------------------------------------------------------------


def _read_webp(data: bytes) -> ImageHeader:
    (size,) = unpack_from("<I", data, 4)
    if size + 8 > len(data):
        raise cut_off()
    kind = data[12:16]
    if kind == b"VP8X":
        return _read_extended_webp(data)
    if kind == b"VP8L":
        (bits,) = unpack_from("<I", data, 21)
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    elif kind == b"VP8 ":
        width, height = (side & 0x3FFF for side in unpack_from("<HH", data, 26))
    else:
        raise cut_off()
    return _header("WebP", width, height)


def _read_extended_webp(data: bytes) -> ImageHeader:
    (flags,) = unpack_from("<I", data, 20)
    if flags & 0x02:
        raise _animated("WebP")
    width, height = (int.from_bytes(data[offset : offset + 3], "little") + 1 for offset in (24, 27))
    return _header("WebP", width, height, _exif_of_webp(data) if flags & 0x08 else b"")


def _exif_of_webp(data: bytes) -> bytes:
    offset = 12
    for _ in range(_MAX_STEPS):
        if offset + 8 > len(data):
            return b""
        kind, length = unpack_from("<4sI", data, offset)
        if kind == b"EXIF":
            return data[offset + 8 : offset + 8 + length].removeprefix(b"Exif\0\0")
        offset += 8 + length + length % 2
    raise _in_pieces()


# --- GIF -----------------------------------------------------------------------------------------


def _read_gif(data: bytes) -> ImageHeader:
    """The screen, and the first picture where it exceeds it; a second one is an animation."""
    width, height, flags = unpack_from("<HHB", data, 6)
    offset, num_pictures = 13 + _colours(flags), 0
    for _ in range(_MAX_STEPS):
        if offset >= len(data) or data[offset] == 0x3B:
            break
        if data[offset] == 0x21:
            offset = _behind_blocks(data, offset + 2)
        elif data[offset] == 0x2C:
            num_pictures += 1
            if num_pictures > 1:
                raise _animated("GIF")
            left, top, across, down, flags = unpack_from("<HHHHB", data, offset + 1)
            width, height = max(width, left + across), max(height, top + down)
            if not across or not down:
                width = height = 0
            offset = _behind_blocks(data, offset + 11 + _colours(flags))
        else:
            raise cut_off()
    if not num_pictures:
        raise cut_off()
    return _header("GIF", width, height)


def _colours(flags: int) -> int:
    """Bytes of the colour table."""
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _behind_blocks(data: bytes, offset: int) -> int:
    for _ in range(_MAX_STEPS):
        if not data[offset]:
            return offset + 1
        offset += data[offset] + 1
    raise _in_pieces()


def _in_pieces() -> ImageFault:
    return ImageFault(f"the file has over {_MAX_STEPS:,} blocks; save it again by another program")


def _animated(format: Format) -> ImageFault:
    return ImageFault(f"it is an animated {format}; send one frame as a still image")


# --- EXIF ----------------------------------------------------------------------------------------


def _orientation(exif: bytes) -> int:
    """From the first directory; 1 where it has none or is damaged, as in viewers."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None:
        return 1
    try:
        (offset,) = unpack_from(f"{order}I", exif, 4)
        (count,) = unpack_from(f"{order}H", exif, offset)
        for start in range(offset + 2, offset + 2 + 12 * count, 12):
            tag, kind, number, value = unpack_from(f"{order}HHIH", exif, start)
            if tag == _ORIENTATION:
                is_known = kind == _SHORT and number == 1 and 1 <= value <= 8
                return value if is_known else 1
    except StructError:
        return 1
    return 1
