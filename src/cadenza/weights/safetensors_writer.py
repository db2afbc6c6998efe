"""Writes tensors into safetensors files: `write_shards`. The elements of one `Part` are in memory
at a time, and the bytes depend only on the parts."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

from cadenza.weights.dtypes import FORMAT_OF_NAME, StoredDType
from cadenza.weights.safetensors_file import LENGTH_BYTES
from cadenza.weights.stored_tensor import AnyArray
from cadenza.weights.weights import INDEX_FILE, SINGLE_FILE

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
