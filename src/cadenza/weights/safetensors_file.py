"""Safetensors files (https://github.com/huggingface/safetensors#format), without that library:
views must be zero-copy in bfloat16 too. `open_safetensors` maps a file: its tensors lie inside it,
overlap no other, and have the bytes of their shape and type. `write_shards` has one `Part` in
memory at a time."""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import BinaryIO, cast

from cadenza.errors import CheckpointError
from cadenza.json_object import JsonObject, parse_json_object, regular_file_size, shorten
from cadenza.weights.stored_tensor import AnyArray, FileBytes, MappedFile, StoredTensor, map_file
from cadenza.weights.weight_format import FORMAT_OF_CODE, FORMAT_OF_NAME, StoredDType

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# MTP layers beside `model.safetensors`: engines that refuse tensors they do not compute load that
# one alone
MTP_FILE = "mtp.safetensors"

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 16 << 20
MAX_TENSORS = 100_000
MAX_RANK = 8
MAX_NAME_CHARS = 512
METADATA_KEY = "__metadata__"


def open_safetensors(path: Path) -> tuple[MappedFile, dict[str, StoredTensor]]:
    """Maps a file and checks its header completely; its tensors by name. Raises CheckpointError if
    the header is invalid, does not match the file, or has a wrong dtype."""
    num_bytes = regular_file_size(path)
    if num_bytes < LENGTH_BYTES:
        raise CheckpointError(
            f"{path.name} has {num_bytes} bytes, too few for a safetensors file; fetch it again"
        )
    file = map_file(path)
    header, tensors = read_entries(file.data, path.name)
    return replace(file, header=header), tensors


def read_entries(data: FileBytes, where: str) -> tuple[bytes, dict[str, StoredTensor]]:
    """The header and the checked tensors of a file's bytes. Raises `CheckpointError`."""
    header = _read_header(data, where)
    table = parse_json_object(header, f"{where}: the header")
    base, tensors = LENGTH_BYTES + len(header), dict[str, StoredTensor]()
    for name, value in table.values.items():
        if name == METADATA_KEY:
            continue
        if not isinstance(value, dict) or len(name) > MAX_NAME_CHARS:
            raise CheckpointError(f"{where}: the header's entry {shorten(name)} is not a tensor")
        raw = JsonObject(cast(dict[str, object], value), f"{where}: tensor {shorten(name)}")
        tensors[name] = _parse_entry(name, raw, data, base)
    _check_cover(list(tensors.values()), where, base, len(data))
    return header, tensors


def _read_header(data: FileBytes, where: str) -> bytes:
    num_header_bytes = int.from_bytes(data[:LENGTH_BYTES], "little")
    num_bytes = len(data) - LENGTH_BYTES
    if num_header_bytes > min(num_bytes, MAX_HEADER_BYTES):
        raise CheckpointError(
            f"{where}: the header claims {num_header_bytes} bytes; the file has {num_bytes} after "
            f"its first {LENGTH_BYTES}, and at most {MAX_HEADER_BYTES} are allowed; fetch the file "
            f"again"
        )
    header = data[LENGTH_BYTES : LENGTH_BYTES + num_header_bytes]
    if header.count(b"{") + header.count(b"[") > 3 * MAX_TENSORS:
        raise CheckpointError(
            f"{where}: the header lists over {MAX_TENSORS} tensors; split the file"
        )
    return header


def _parse_entry(name: str, raw: JsonObject, data: FileBytes, base: int) -> StoredTensor:
    code = raw.text("dtype")
    if code is None or code not in FORMAT_OF_CODE:
        raise CheckpointError(
            f"{raw.where} has dtype {shorten(code)}; supported are {', '.join(FORMAT_OF_CODE)}; "
            f"use a checkpoint in one of these"
        )
    num_bytes = len(data) - base
    shape = _read_sizes(raw, "shape", high=max(num_bytes, 1))
    offsets = _read_sizes(raw, "data_offsets", high=num_bytes)
    if len(shape) > MAX_RANK or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(
            f"{raw.where}: shape {list(shape[:9])} with data_offsets {list(offsets[:3])} is "
            f"invalid; allowed are at most {MAX_RANK} axes and [start, stop] within {num_bytes} "
            f"bytes"
        )
    dtype = FORMAT_OF_CODE[code]
    expected = math.prod(shape) * dtype.numpy.itemsize
    if expected != offsets[1] - offsets[0]:
        raise CheckpointError(
            f"{raw.where}: {code} of shape {list(shape)} takes {shorten(expected)} bytes, but "
            f"data_offsets give it {offsets[1] - offsets[0]}; fetch the file again"
        )
    start, stop = base + offsets[0], base + offsets[1]
    return StoredTensor(name=name, dtype=dtype.name, shape=shape, data=data, start=start, stop=stop)


def _read_sizes(raw: JsonObject, key: str, *, high: int) -> tuple[int, ...]:
    if raw.get(key) is None:
        raise CheckpointError(f"{raw.where}: {key} is missing; fetch the file again")
    sizes: list[int] = []
    for size in raw.items_of(key):
        if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= high:
            raise CheckpointError(
                f"{raw.where}: {key} holds {shorten(size)}; allowed are whole numbers from 0 to "
                f"{high}, the size of the file's data; fetch the file again"
            )
        sizes.append(size)
    return tuple(sizes)


def _check_cover(entries: list[StoredTensor], where: str, base: int, end: int) -> None:
    """Every byte of the data must belong to exactly one tensor, as the format requires."""
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    position = base
    for entry in entries:
        if entry.start != position:
            kind = "overlaps another" if entry.start < position else "leaves a hole before it"
            raise CheckpointError(
                f"{where}: tensor {shorten(entry.name)} {kind}: it starts at byte "
                f"{entry.start - base} of the data, not at {position - base}; fetch the file again"
            )
        position = entry.stop
    if position != end:
        raise CheckpointError(
            f"{where}: the tensors end at byte {position - base} of the data, but the file has "
            f"{end - base} bytes of it; fetch the file again"
        )


DEFAULT_SHARD_BYTES = 2 << 30
HEADER_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTensor:
    """The name, type and shape of a tensor to write."""

    name: str
    dtype: StoredDType
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * FORMAT_OF_NAME[self.dtype].numpy.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Tensors that are made together; `make` gives their elements, one tensor after the other."""

    tensors: tuple[NewTensor, ...]
    make: Callable[[], Iterable[AnyArray]]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)


OnWritten = Callable[[int], object]  # called with the number of bytes written since the last call


def write_shards(
    folder: Path,
    parts: Sequence[Part],
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    on_written: OnWritten = lambda _: None,
) -> None:
    """Writes one file, or several with their index, into a folder. Raises OSError."""
    shards = _split(parts, max_shard_bytes)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = SINGLE_FILE
        if len(shards) > 1:
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        with (folder / name).open("wb") as file:
            _write_header(file, shard)
            for part in shard:
                for array in part.make():
                    file.write(array.tobytes())
                on_written(part.num_bytes)
        weight_map |= dict.fromkeys((each.name for part in shard for each in part.tensors), name)
    if len(shards) > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _split(parts: Sequence[Part], max_shard_bytes: int) -> list[list[Part]]:
    shards: list[list[Part]] = [[]]
    bytes_left = max_shard_bytes
    for part in parts:
        if shards[-1] and part.num_bytes > bytes_left:
            shards.append([])
            bytes_left = max_shard_bytes
        shards[-1].append(part)
        bytes_left -= part.num_bytes
    return shards


def _write_header(file: BinaryIO, parts: Sequence[Part]) -> None:
    table: dict[str, object] = {}
    position = 0
    for tensor in (each for part in parts for each in part.tensors):
        stop = position + tensor.num_bytes
        code = FORMAT_OF_NAME[tensor.dtype].code
        offsets = [position, stop]
        table[tensor.name] = {"dtype": code, "shape": tensor.shape, "data_offsets": offsets}
        position = stop
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-(LENGTH_BYTES + len(header)) % HEADER_ALIGNMENT)
    file.write(len(header).to_bytes(LENGTH_BYTES, "little") + header)
