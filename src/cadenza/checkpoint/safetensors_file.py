"""Opens safetensors files: `open_safetensors` maps a file and checks its header.

Owns the reading of the format (https://github.com/huggingface/safetensors#format). Knows no models.
It does not use the safetensors library, because views must be zero-copy in bfloat16 too and an
invalid header must raise a specific error. Invariant: every entry of an open file lies inside it,
overlaps no other entry, and has the number of bytes that its shape and data type imply.
"""

import math
import mmap
import os
from pathlib import Path
from typing import cast

from cadenza.checkpoint.dtypes import FORMAT_OF_CODE
from cadenza.checkpoint.json_object import JsonObject, parse_json_object, regular_file_size, shorten
from cadenza.checkpoint.tensor_file import TensorEntry, TensorFile
from cadenza.errors import CheckpointError

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 16 << 20
MAX_TENSORS = 100_000
MAX_RANK = 8
MAX_NAME_CHARS = 512
METADATA_KEY = "__metadata__"


def open_safetensors(path: Path) -> TensorFile:
    """Maps a file and checks its header completely.

    Raises:
        CheckpointError: the header is invalid, does not match the file, or has a wrong dtype.
    """
    num_bytes = regular_file_size(path)
    if num_bytes < LENGTH_BYTES:
        raise CheckpointError(
            f"{path.name} has {num_bytes} bytes, too few for a safetensors file; fetch it again"
        )
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            modified_ns = os.fstat(file.fileno()).st_mtime_ns
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path.name} cannot be mapped into memory") from error
    header, entries = read_entries(data, path.name)
    return TensorFile(
        name=path.name, header=header, entries=entries, data=data, modified_ns=modified_ns
    )


def read_entries(data: mmap.mmap | bytes, where: str) -> tuple[bytes, dict[str, TensorEntry]]:
    """The header and the checked entries of a file's bytes. Raises `CheckpointError`."""
    header = _read_header(data, where)
    return header, _parse_header(header, where, LENGTH_BYTES + len(header), len(data))


def _read_header(data: mmap.mmap | bytes, where: str) -> bytes:
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


def _parse_header(header: bytes, where: str, base: int, end: int) -> dict[str, TensorEntry]:
    table = parse_json_object(header, f"{where}: the header")
    entries: dict[str, TensorEntry] = {}
    for name, value in table.values.items():
        if name == METADATA_KEY:
            continue
        if not isinstance(value, dict) or len(name) > MAX_NAME_CHARS:
            raise CheckpointError(f"{where}: the header's entry {shorten(name)} is not a tensor")
        raw = JsonObject(cast(dict[str, object], value), f"{where}: tensor {shorten(name)}")
        entries[name] = _parse_entry(name, raw, base, end)
    _check_cover(list(entries.values()), where, base, end)
    return entries


def _parse_entry(name: str, raw: JsonObject, base: int, end: int) -> TensorEntry:
    code = raw.text("dtype")
    if code is None or code not in FORMAT_OF_CODE:
        raise CheckpointError(
            f"{raw.where} has dtype {shorten(code)}; supported are {', '.join(FORMAT_OF_CODE)}; "
            f"use a checkpoint in one of these"
        )
    num_bytes = end - base
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
    return TensorEntry(name=name, dtype=dtype.name, shape=shape, start=start, stop=stop)


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


def _check_cover(entries: list[TensorEntry], where: str, base: int, end: int) -> None:
    """Checks that every byte of the data belongs to exactly one tensor, as the format requires."""
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
