"""A GGUF file mapped into memory, versions 2 and 3: `open_gguf` checks its header completely,
unlike gguf-py, which trusts counts and offsets. Every number is compared with the remaining bytes
before anything is read or allocated by it; every tensor lies inside the file, overlaps no other,
and has the bytes that its shape and type imply."""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np

from cadenza.errors import CheckpointError
from cadenza.json_object import JsonObject, regular_file_size, shorten
from cadenza.weights.stored_tensor import FileBytes, MappedFile, map_file

STRING = 8
ARRAY = 9
BOOL = 7
FLOAT32 = 6

# by the code of a metadata value's type
SCALARS: dict[int, struct.Struct] = {
    code: struct.Struct(f"<{letter}")
    for code, letter in {
        0: "B",
        1: "b",
        2: "H",
        3: "h",
        4: "I",
        5: "i",
        FLOAT32: "f",
        BOOL: "B",
        10: "Q",
        11: "q",
        12: "d",
    }.items()
}

NUM_VALUE_TYPES = 13


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorType:
    """`block_len` consecutive elements of a row are stored in `block_bytes` bytes."""

    name: str
    block_len: int
    block_bytes: int


# by ggml's code of the type; Q8_1 and Q8_K, types of activations, are in no file
TENSOR_TYPES: dict[int, TensorType] = {
    code: TensorType(name=name, block_len=block_len, block_bytes=block_bytes)
    for code, name, block_len, block_bytes in (
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (16, "IQ2_XXS", 256, 66),
        (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18),
        (21, "IQ3_S", 256, 110),
        (22, "IQ2_S", 256, 82),
        (23, "IQ4_XS", 256, 136),
        (24, "I8", 1, 1),
        (25, "I16", 1, 2),
        (26, "I32", 1, 4),
        (27, "I64", 1, 8),
        (28, "F64", 1, 8),
        (29, "IQ1_M", 256, 56),
        (30, "BF16", 1, 2),
        (34, "TQ1_0", 256, 54),
        (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17),
        (40, "NVFP4", 64, 36),
    )
}


MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_TENSORS = 100_000
MAX_ENTRIES = 1 << 16
MAX_STRINGS = 1 << 23  # strings of all arrays together: each becomes an object

MAX_KEY_BYTES = (1 << 16) - 1
MAX_NAME_BYTES = 512
MAX_RANK = 4
MAX_ALIGNMENT = 1 << 16
DEFAULT_ALIGNMENT = 32
LENGTH_BYTES = 8

_AGAIN = "fetch the file again"


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFTensor:
    """A tensor's type, shape (slowest axis first) and bytes [start, stop) of its file."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFHeader:
    """What a file has before its tensors' data, in `num_bytes`. `metadata` has numbers, flags,
    strings, and arrays: of strings as lists, of others as read-only numpy arrays over the file's
    bytes. A float32 is its shortest decimal."""

    metadata: JsonObject
    tensors: Mapping[str, GGUFTensor]
    num_bytes: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GGUFFile:
    """An open file and its header."""

    mapped: MappedFile
    header: GGUFHeader


def open_gguf(path: Path) -> GGUFFile:
    """Maps a file and checks its header. Raises CheckpointError if the header is invalid, does not
    match the file, or exceeds a limit."""
    if regular_file_size(path) == 0:
        raise CheckpointError(f"{path.name} is empty; {_AGAIN}")
    file = map_file(path)
    header = read_header(file.data, path.name)
    content = memoryview(file.data)[: header.num_bytes]
    return GGUFFile(mapped=replace(file, header=content), header=header)


def read_header(data: FileBytes, where: str) -> GGUFHeader:
    """The checked header of a file's bytes. Raises `CheckpointError`."""
    cursor = _Cursor(data=data, where=where)
    _check_version(cursor)
    num_tensors = cursor.count("tensors", MAX_TENSORS)
    num_entries = cursor.count("metadata entries", MAX_ENTRIES)
    metadata = _read_metadata(cursor, num_entries)
    alignment = _read_alignment(metadata)
    infos = [_read_info(cursor) for _ in range(num_tensors)]
    num_bytes = cursor.position
    first = -(-num_bytes // alignment) * alignment
    tensors = _place(infos, first, alignment, cursor)
    return GGUFHeader(metadata=metadata, tensors=tensors, num_bytes=num_bytes)


@dataclass(slots=True, eq=False, kw_only=True)
class _Cursor:
    """A position in the header; every read is checked against the end of the file."""

    data: FileBytes
    where: str
    position: int = 0
    num_strings: int = 0

    def take(self, num_bytes: int, what: str) -> int:
        """Advances by `num_bytes`, which hold `what`, and returns where they start."""
        start = self.position
        if num_bytes > len(self.data) - start:
            raise CheckpointError(
                f"{self.where}: {what} at byte {start} takes {num_bytes} bytes, but the file has "
                f"{len(self.data) - start} left; {_AGAIN}"
            )
        self.position = start + num_bytes
        return start

    def number(self, code: int, what: str) -> int | float:
        scalar = SCALARS[code]
        return scalar.unpack_from(self.data, self.take(scalar.size, what))[0]

    def whole(self, code: int, what: str) -> int:
        return cast(int, self.number(code, what))

    def count(self, what: str, limit: int) -> int:
        """A number of `what`, of 64 bits, each of which takes at least a length."""
        count = self.whole(10, f"the number of {what}")
        left = (len(self.data) - self.position) // LENGTH_BYTES
        if count > min(limit, left):
            raise CheckpointError(
                f"{self.where}: the header claims {count} {what}; at most {limit} are allowed, and "
                f"the file has bytes for {left}; {_AGAIN}"
            )
        return count

    def text(self, what: str, limit: int | None = None) -> str:
        num_bytes = self.whole(10, f"the length of {what}")
        if limit is not None and num_bytes > limit:
            raise CheckpointError(
                f"{self.where}: {what} has {num_bytes} bytes; at most {limit} are allowed; {_AGAIN}"
            )
        start = self.take(num_bytes, what)
        try:
            return str(self.data[start : self.position], "utf-8")
        except UnicodeDecodeError as error:
            raise self._not_text(what) from error

    def texts(self, count: int, what: str) -> list[str]:
        """An array's strings. Without a call for each: vocabularies have hundreds of thousands."""
        self.num_strings += count
        if self.num_strings > MAX_STRINGS:
            raise CheckpointError(
                f"{self.where}: {what} has {count} strings, {self.num_strings} with those of "
                f"earlier arrays; at most {MAX_STRINGS} are allowed"
            )
        data, end, position, found = self.data, len(self.data), self.position, list[str]()
        unpack = SCALARS[10].unpack_from
        for _ in range(count):
            start = position + LENGTH_BYTES
            position = start + unpack(data, position)[0] if start <= end else end + 1
            if position > end:
                raise CheckpointError(
                    f"{self.where}: string {len(found)} of {what} ends after the file's {end} "
                    f"bytes; {_AGAIN}"
                )
            try:
                found.append(str(data[start:position], "utf-8"))
            except UnicodeDecodeError as error:
                raise self._not_text(f"string {len(found)} of {what}") from error
        self.position = position
        return found

    def _not_text(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {what} is not UTF-8; {_AGAIN}")


def _check_version(cursor: _Cursor) -> None:
    start = cursor.take(len(MAGIC), "the format's name")
    found = cursor.data[start : start + len(MAGIC)]
    if found != MAGIC:
        raise CheckpointError(
            f"{cursor.where} starts with {found!r}; a GGUF file starts with {MAGIC!r}; check that "
            f"it is the right file"
        )
    version = cursor.whole(4, "the version")
    if version in VERSIONS:
        return
    if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
        raise CheckpointError(
            f"{cursor.where} is big-endian, which is not supported; use a little-endian file"
        )
    raise CheckpointError(
        f"{cursor.where} has version {version} of the format; supported are "
        f"{' and '.join(map(str, VERSIONS))}; convert the model again"
    )


def _read_metadata(cursor: _Cursor, num_entries: int) -> JsonObject:
    values: dict[str, object] = {}
    for _ in range(num_entries):
        key = cursor.text("a metadata key", MAX_KEY_BYTES)
        if key in values:
            raise CheckpointError(
                f"{cursor.where}: the metadata key {shorten(key)} occurs twice; {_AGAIN}"
            )
        values[key] = _read_value(cursor, shorten(key))
    return JsonObject(values, cursor.where)


def _read_value(cursor: _Cursor, key: str) -> object:
    code = cursor.whole(4, f"the type of {key}")
    if code == STRING:
        return cursor.text(key)
    if code == ARRAY:
        return _read_array(cursor, key)
    if code not in SCALARS:
        raise CheckpointError(
            f"{cursor.where}: {key} has the value type {code}; types are below {NUM_VALUE_TYPES}; "
            f"{_AGAIN}"
        )
    value = cursor.number(code, key)
    if code == FLOAT32:
        return float(str(np.float32(value)))
    if code == BOOL:
        if value not in (0, 1):
            raise CheckpointError(f"{cursor.where}: the flag {key} is {value}, not 0 or 1")
        return bool(value)
    return value


def _read_array(cursor: _Cursor, key: str) -> object:
    code = cursor.whole(4, f"the item type of {key}")
    if code == ARRAY:
        raise CheckpointError(
            f"{cursor.where}: {key} is an array of arrays; supported are arrays of numbers, flags "
            f"and strings"
        )
    if code != STRING and code not in SCALARS:
        raise CheckpointError(
            f"{cursor.where}: {key} has items of the value type {code}; types are below "
            f"{NUM_VALUE_TYPES}; {_AGAIN}"
        )
    count = cursor.whole(10, f"the length of {key}")
    item_bytes = LENGTH_BYTES if code == STRING else SCALARS[code].size
    left = len(cursor.data) - cursor.position
    if count > left // item_bytes:
        raise CheckpointError(
            f"{cursor.where}: {key} claims {count} items of at least {item_bytes} bytes, but the "
            f"file has {left} bytes left; {_AGAIN}"
        )
    if code == STRING:
        return cursor.texts(count, key)
    start = cursor.take(count * item_bytes, key)
    dtype = np.dtype(SCALARS[code].format)
    return np.frombuffer(cursor.data, dtype, count, start)


def _read_alignment(metadata: JsonObject) -> int:
    key = "general.alignment"
    alignment = metadata.integer(key, 1, MAX_ALIGNMENT, DEFAULT_ALIGNMENT)
    if alignment & (alignment - 1):
        raise metadata.wrong(key, f"a power of two from 1 to {MAX_ALIGNMENT}")
    return alignment


def _read_info(cursor: _Cursor) -> GGUFTensor:
    """An entry of the list of tensors; its offset counts from the first tensor's start."""
    name = cursor.text("a tensor's name", MAX_NAME_BYTES)
    what = f"tensor {shorten(name)}"
    rank = cursor.whole(4, f"the rank of {what}")
    if not 1 <= rank <= MAX_RANK:
        raise CheckpointError(
            f"{cursor.where}: {what} has {rank} axes; allowed are 1 to {MAX_RANK}; {_AGAIN}"
        )
    sizes = [cursor.whole(10, f"the shape of {what}") for _ in range(rank)]
    code = cursor.whole(4, f"the type of {what}")
    if code not in TENSOR_TYPES:
        raise CheckpointError(
            f"{cursor.where}: {what} has the type {code}, which is not known; use a file with "
            f"other types, such as Q8_0 or BF16"
        )
    kind = TENSOR_TYPES[code]
    _check_sizes(sizes, kind, what, cursor)
    start = cursor.whole(10, f"the offset of {what}")
    stop = start + math.prod(sizes) // kind.block_len * kind.block_bytes
    return GGUFTensor(name=name, type=kind, shape=tuple(sizes[::-1]), start=start, stop=stop)


def _check_sizes(sizes: list[int], kind: TensorType, what: str, cursor: _Cursor) -> None:
    """`sizes` start with the fastest axis, along which the blocks run."""
    num_bytes = len(cursor.data)
    if min(sizes) < 1 or math.prod(sizes) // kind.block_len * kind.block_bytes > num_bytes:
        raise CheckpointError(
            f"{cursor.where}: {what} has the shape {sizes[::-1]} in {kind.name}; sizes must be "
            f"positive and fit the file's {num_bytes} bytes; {_AGAIN}"
        )
    if sizes[0] % kind.block_len:
        raise CheckpointError(
            f"{cursor.where}: {what} has rows of {sizes[0]} elements; {kind.name} needs a multiple "
            f"of {kind.block_len}; {_AGAIN}"
        )


def _place(
    infos: list[GGUFTensor], first: int, alignment: int, cursor: _Cursor
) -> dict[str, GGUFTensor]:
    """Checks that the tensors follow each other with no more than padding between."""
    tensors: dict[str, GGUFTensor] = {}
    where, num_bytes, position = cursor.where, len(cursor.data), first
    for info in sorted(infos, key=lambda info: info.start):
        what = f"{where}: tensor {shorten(info.name)}"
        start, stop = first + info.start, first + info.stop
        if info.name in tensors:
            raise CheckpointError(f"{what} is listed twice; {_AGAIN}")
        if start != position:
            raise CheckpointError(
                f"{what} is at byte {info.start} of the data; it must be at {position - first}, "
                f"after the one before it, aligned to {alignment}; {_AGAIN}"
            )
        if stop > num_bytes:
            raise CheckpointError(
                f"{what} ends at byte {stop}, but the file has {num_bytes}: it was cut; {_AGAIN}"
            )
        tensors[info.name] = replace(info, start=start, stop=stop)
        position = -(-stop // alignment) * alignment
    return tensors
