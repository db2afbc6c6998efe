"""Image files for tests, good and hostile, made as they are needed."""

import base64
import io
import struct
import zlib
from collections.abc import Sequence
from typing import Any

from PIL import Image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF")
RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def quarters(width: int = 32, height: int = 16) -> Image.Image:
    """Red and green above, blue and white below: no turn or flip of it is equal to another."""
    image = Image.new("RGB", (width, height), WHITE)
    image.paste(RED, (0, 0, width // 2, height // 2))
    image.paste(GREEN, (width // 2, 0, width, height // 2))
    image.paste(BLUE, (0, height // 2, width // 2, height))
    return image


def saved(image: Image.Image, format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    if format == "WEBP":
        options = {"lossless": True, **options}
    if format == "JPEG":
        options = {"quality": 100, "subsampling": 0, **options}
    image.save(file, format, **options)
    return file.getvalue()


def animated(format: str) -> bytes:
    frames = [quarters(), Image.new("RGB", (32, 16), RED)]
    return saved(frames[0], format, save_all=True, append_images=frames[1:], duration=50)


def png(
    width: int,
    height: int,
    rows: bytes,
    *,
    depth: int = 8,
    colour: int = 2,
    before: Sequence[tuple[bytes, bytes]] = (),
) -> bytes:
    """A PNG by hand; `rows` are unfiltered, each behind a zero byte."""
    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    chunks = [(b"IHDR", head), *before, (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*each) for each in chunks)


def chunk(kind: bytes, data: bytes) -> bytes:
    check = struct.pack(">I", zlib.crc32(kind + data))
    return struct.pack(">I", len(data)) + kind + data + check


def header_bomb(side: int = 20_000) -> bytes:
    """Some hundred bytes that claim to be 400 megapixels."""
    return png(side, side, b"\0" * 100)


def data_bomb() -> bytes:
    """A small picture whose compressed data is 8 MiB of zeros."""
    return png(4, 4, b"\0" * (8 << 20))


def text_bomb() -> bytes:
    """A small picture beside a compressed text of 8 MiB."""
    text = b"Comment\0\0" + zlib.compress(b"x" * (8 << 20), 9)
    return png(1, 1, b"\0" + bytes(3), before=[(b"zTXt", text)])


def wide_grey(values: Sequence[int], key: int | None = None) -> bytes:
    """A row of grey pixels with 16 bits, one of which may mean transparent."""
    row = b"\0" + struct.pack(f">{len(values)}H", *values)
    before = [] if key is None else [(b"tRNS", struct.pack(">H", key))]
    return png(len(values), 1, row, depth=16, colour=0, before=before)


def wide_rgb(values: Sequence[tuple[int, int, int]], key: tuple[int, int, int]) -> bytes:
    row = b"\0" + b"".join(struct.pack(">3H", *each) for each in values)
    tr = (b"tRNS", struct.pack(">3H", *key))
    return png(len(values), 1, row, depth=16, colour=2, before=[tr])


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


OTHER_FORMATS = {
    "SVG or XML": b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>',
    "HTML": b"<!DOCTYPE html><html></html>",
    "TIFF": b"II*\0\x08\0\0\0" + bytes(64),
    "FITS": b"SIMPLE  =                    T" + b" " * 64,
    "BMP": saved(quarters(), "BMP"),
    "AVIF": b"\0\0\0\x1cftypavif" + bytes(64),
    "PDF": b"%PDF-1.7\n",
    "ICO": b"\0\0\1\0\1\0" + bytes(64),
    "of no known format": b"hello, world",
}
