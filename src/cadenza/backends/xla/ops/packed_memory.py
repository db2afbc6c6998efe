"""Packed weights: how they are made (`plan_packing`, layouts in `csrc/core/pack.h`), their memory,
and a file of them, so that they are packed once and not at every start. Arrays do not overlap and
are aligned to 64 bytes, which lets JAX use them without a copy."""

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
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from cadenza.backends.xla.ops.native_library import (
    CodedOperand,
    NativeLibrary,
    float8_shape,
    num_columns,
    packed_bytes,
    packed_shape,
)
from cadenza.backends.xla.ops.quantised import (
    are_codes,
    are_float8,
    as_floats,
    as_operand,
    formats_of,
    orders_of,
)
from cadenza.weights.quantised_weight import FloatsOrCodes, HostWeight
from cadenza.weights.weight_format import FLOAT8, WeightFormat, joined, panel_formats

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]

PIECE_BYTES = 16 << 20
MAX_THREADS = 4
PARTIAL = ".partial"  # how the names of files end that are not complete
_MAGIC = b"cadenza packed 1"
_END = struct.Struct("<QI16s")  # bytes of the description, its CRC-32, the magic
_MAX_DESCRIPTION_BYTES = 64 << 20
_Piece = tuple[Bytes, int]  # a part of an array, and its place in the file
CHUNK_BYTES = 256 << 20
_ALIGNMENT = 64
_LARGE_PAGE = 2 << 20


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


class _DamagedError(Exception): ...


class PackedFile:
    """The content of arrays in the order of their allocation, then a trailer that describes them,
    with a CRC-32 of each piece. `path` must identify everything that the content depends on."""

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


class PackedMemory:
    """Large chunks, since most weights are too small for huge pages of their own; one is freed when
    none of its arrays is referenced. Arrays of a `file` are taken in the order in which they were
    written; `keep` writes it if one was packed anew. `place` is called with each chunk before
    anything is written to it."""

    def __init__(
        self, file: PackedFile | None = None, place: Callable[[Bytes], None] | None = None
    ) -> None:
        self._place = place
        self._left: Bytes = np.empty(0, np.uint8)
        self._file = file
        self._stored: PackedContent = []
        self._arrays: list[npt.NDArray[Any]] = []
        self._has_packed = False
        stored = None if file is None else file.read(self._allocate_all)
        if stored is None:
            self._left = np.empty(0, np.uint8)
        else:
            self._stored = stored

    def hold(
        self, shape: tuple[int, ...], dtype: npt.DTypeLike, pack: Callable[[npt.NDArray[Any]], None]
    ) -> npt.NDArray[Any]:
        """With the content that `pack` writes into it."""
        array = self._take_stored(ArraySpec.of(shape, dtype))
        if array is None:
            array = self.empty(shape, dtype)
            pack(array)
            self._has_packed = True
        if self._file is not None:
            self._arrays.append(array)
        return array

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self._allocate(num_bytes).view(dtype).reshape(shape)

    def keep(self) -> None:
        """Ends the loading: writes the file if it lacked an array."""
        if self._file is not None and self._has_packed:
            self._file.write(self._arrays)
        self._file = None
        self._arrays, self._stored = [], []

    def _take_stored(self, wanted: ArraySpec) -> npt.NDArray[Any] | None:
        if not self._stored:
            return None
        spec, content = self._stored.pop(0)
        if spec != wanted:
            self._stored = []
            return None
        return content.view(np.dtype(spec.dtype)).reshape(spec.shape)

    def _allocate_all(self, sizes: Sequence[int]) -> list[Bytes]:
        self._left = self._new_chunk(sum(map(_aligned, sizes)))
        return [self._allocate(size) for size in sizes]

    def _allocate(self, num_bytes: int) -> Bytes:
        if num_bytes > len(self._left):
            self._left = self._new_chunk(max(num_bytes, CHUNK_BYTES))
        memory = self._left[:num_bytes]
        self._left = self._left[_aligned(num_bytes) :]
        return memory

    def _new_chunk(self, num_bytes: int) -> Bytes:
        # On Linux, numpy requests huge pages for arrays this large.
        memory = np.empty(num_bytes + _LARGE_PAGE, np.uint8)
        if self._place is not None:
            self._place(memory)
        start = -memory.ctypes.data % _LARGE_PAGE
        return memory[start : start + num_bytes]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class Packing(NamedTuple):
    """How the weights of experts are packed: the array of each, and what writes it.

    `format` is that of the first part.
    """

    shape: tuple[int, ...]
    dtype: Any
    format: WeightFormat
    writers: Sequence[Callable[[npt.NDArray[Any]], None]]


def plan_packing(
    library: NativeLibrary,
    experts: Sequence[Sequence[HostWeight]],
    format: WeightFormat,
    *,
    is_gated: bool,
) -> Packing:
    sizes = num_columns(experts[0], is_gated=is_gated), experts[0][0].shape[1]
    if all(are_float8(parts) for parts in experts):
        coded: Sequence[Any] = experts
        shape, dtype = float8_shape(*sizes, is_gated=is_gated), jnp.float8_e4m3fn
        writers = [partial(library.pack_float8, each, is_gated=is_gated) for each in coded]
        return Packing(shape, dtype, FLOAT8, writers)
    held = [as_operand(parts, format) for parts in experts]
    if all(are_codes(parts, format) for parts in held):
        return _plan_codes(library, held, format, is_gated=is_gated)
    floats = [[as_floats(part) for part in parts] for parts in held]
    dtype = jnp.dtype(format.name)
    writers = [partial(library.pack, each, is_gated=is_gated) for each in floats]
    return Packing(packed_shape(*sizes, dtype, is_gated=is_gated), dtype, format, writers)


def _plan_codes(
    library: NativeLibrary,
    experts: Sequence[Sequence[FloatsOrCodes]],
    format: WeightFormat,
    *,
    is_gated: bool,
) -> Packing:
    formats = [each for parts in experts for each in formats_of(parts, format)]
    rows, orders = [len(part) for part in experts[0]], orders_of(experts)
    if is_gated or len(experts) > 1:
        targets = [joined(formats)] * len(rows)
    else:
        targets = panel_formats(formats, rows)
    columns = [rows[0]] if is_gated else rows
    num_bytes = packed_bytes(
        [*zip(targets[: len(columns)], columns, strict=True)],
        experts[0][0].shape[1],
        is_gated=is_gated,
        is_ordered=orders[0] is not None,
    )
    operands = [
        CodedOperand(targets=targets, parts=parts, order=order)
        for parts, order in zip(experts, orders, strict=True)
    ]
    writers = [partial(library.pack_quantised, each, is_gated=is_gated) for each in operands]
    return Packing((num_bytes,), np.uint8, targets[0], writers)
