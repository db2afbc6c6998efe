"""`PackedFile`: packed weights on disk, so that they are packed once and not at every start.

The file is the content of the packed arrays in the order in which they were allocated, then a
trailer that describes them, with a CRC-32 of each piece. The file's name must identify everything
that the content depends on. Invariant: `read` returns what `write` was given, or None.
"""

import errno
import json
import logging
import os
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]

PIECE_BYTES = 16 << 20
MAX_THREADS = 4
PARTIAL = ".partial"  # how the names of files end that are not complete

_MAGIC = b"cadenza packed 1"
_END = struct.Struct("<QI16s")  # bytes of the description, its CRC-32, the magic
_MAX_DESCRIPTION_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """The shape and the type of one packed array."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, shape: Iterable[int], dtype: npt.DTypeLike) -> "ArraySpec":
        return cls(tuple(map(int, shape)), np.dtype(dtype).name)


# What a file held: each array's description and bytes, in the order of allocation.
PackedContent = list[tuple[ArraySpec, Bytes]]

_Piece = tuple[Bytes, int]  # a part of an array, and its place in the file


class _DamagedError(Exception): ...


class PackedFile:
    """The packed weights of one model in one format, with a checksum of each `piece_bytes`."""

    def __init__(self, path: Path, piece_bytes: int = PIECE_BYTES) -> None:
        self._path = path
        self._piece_bytes = piece_bytes

    def read(self, allocate: Callable[[Sequence[int]], Sequence[Bytes]]) -> PackedContent | None:
        """The content, in memory that `allocate` gives for the sizes of all arrays; None if there
        is none. A damaged file is removed, with a warning."""
        try:
            with self._path.open("rb") as file:
                content = _read(file.fileno(), allocate)
        except FileNotFoundError:
            return None
        except (OSError, _DamagedError) as error:
            logger.warning("weights are quantised again, since %s %s", self._path, _reason(error))
            with suppress(OSError):
                self._path.unlink()
            return None
        with suppress(OSError):
            os.utime(self._path)  # files that were not used for the longest time are removed first
        return content

    def write(self, arrays: Sequence[npt.NDArray[Any]]) -> None:
        """Replaces the file by one with these arrays. If that fails, logs a warning."""
        partial: str | None = None
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor, partial = tempfile.mkstemp(PARTIAL, dir=self._path.parent)
            with os.fdopen(descriptor, "wb", closefd=True) as file:
                _write(file.fileno(), arrays, self._piece_bytes)
            os.replace(partial, self._path)
        except OSError as error:
            logger.warning("the quantised weights cannot be kept: %s", error.strerror)
            if partial is not None:
                with suppress(OSError):
                    os.unlink(partial)


def _write(descriptor: int, arrays: Sequence[npt.NDArray[Any]], piece_bytes: int) -> None:
    contents = [each.reshape(-1).view(np.uint8) for each in arrays]

    def write_piece(piece: _Piece) -> int:
        content, offset = piece
        written, view = 0, content.data
        while written < len(view):
            written += os.pwrite(descriptor, view[written:], offset + written)
        return zlib.crc32(view)

    with ThreadPoolExecutor(MAX_THREADS) as threads:
        checksums = [*threads.map(write_piece, _pieces(contents, piece_bytes))]
    specs = [ArraySpec.of(each.shape, each.dtype) for each in arrays]
    description = {
        "arrays": [[each.shape, each.dtype] for each in specs],
        "piece_bytes": piece_bytes,
        "checksums": checksums,
    }
    encoded = json.dumps(description).encode()
    end = _END.pack(len(encoded), zlib.crc32(encoded), _MAGIC)
    os.pwrite(descriptor, encoded + end, sum(map(len, contents)))


def _read(descriptor: int, allocate: Callable[[Sequence[int]], Sequence[Bytes]]) -> PackedContent:
    description, num_bytes = _read_description(descriptor)
    specs = [ArraySpec.of(*each) for each in description["arrays"]]
    sizes = [int(np.prod(each.shape)) * np.dtype(each.dtype).itemsize for each in specs]
    if sum(sizes) != num_bytes:
        raise _DamagedError("has another size than it says")
    contents = allocate(sizes)
    pieces = [*_pieces(contents, description["piece_bytes"])]
    if len(pieces) != len(description["checksums"]):
        raise _DamagedError("lacks checksums")

    def is_whole(piece: _Piece, checksum: int) -> bool:
        content, offset = piece
        view = content.data
        count, done = -1, 0
        while done < len(view) and count:
            count = os.preadv(descriptor, [view[done:]], offset + done)
            done += count
        return zlib.crc32(view) == checksum

    with ThreadPoolExecutor(MAX_THREADS) as threads:
        if not all(threads.map(is_whole, pieces, description["checksums"])):
            raise _DamagedError("does not have its checksums")
    return [*zip(specs, contents, strict=True)]


def _read_description(descriptor: int) -> tuple[dict[str, Any], int]:
    size = os.fstat(descriptor).st_size
    start = size - _END.size
    if start < 0:
        raise _DamagedError("is too short")
    length, checksum, magic = _END.unpack(os.pread(descriptor, _END.size, start))
    if magic != _MAGIC or length > min(start, _MAX_DESCRIPTION_BYTES):
        raise _DamagedError("has no trailer")
    description = os.pread(descriptor, length, start - length)
    if zlib.crc32(description) != checksum:
        raise _DamagedError("has a damaged trailer")
    return json.loads(description), start - length


def _pieces(contents: Sequence[Bytes], piece_bytes: int) -> Iterator[_Piece]:
    offset = 0
    for content in contents:
        for start in range(0, len(content), piece_bytes):
            yield content[start : start + piece_bytes], offset + start
        offset += len(content)


def _reason(error: OSError | _DamagedError) -> str:
    if isinstance(error, _DamagedError):
        return str(error)
    return f"cannot be read: {error.strerror or errno.errorcode.get(error.errno or 0, 'error')}"
