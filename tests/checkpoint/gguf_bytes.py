"""GGUF files built byte by byte, so that tests can make each byte a lie.

Owns the encoding, by the format's description. Knows neither gguf-py nor the reader under test.
"""

import struct
from dataclasses import dataclass, field
from typing import Any

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
FORMATS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B"}
FORMATS |= {U64: "Q", I64: "q", F64: "d"}

F32_TENSOR, F16_TENSOR, Q4_0_TENSOR, BF16_TENSOR = 0, 1, 2, 30


@dataclass(frozen=True)
class Raw:
    """A value whose bytes are given."""

    code: int
    data: bytes


@dataclass(frozen=True)
class Items:
    """An array with its items' type; `count` may claim another number of them."""

    code: int
    values: list[Any]
    count: int | None = None


@dataclass
class Tensor:
    """An entry of the tensor list; `sizes` start with the fastest axis."""

    name: str | bytes
    sizes: list[int]
    code: int = F32_TENSOR
    offset: int = 0
    rank: int | None = None


@dataclass
class File:
    """A file; the counts may be lies."""

    metadata: list[tuple[str | bytes, Any]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    data: bytes = b""
    magic: bytes = b"GGUF"
    version: bytes = struct.pack("<I", 3)
    num_tensors: int | None = None
    num_entries: int | None = None
    alignment: int = 32

    def encode(self) -> bytes:
        num_tensors = len(self.tensors) if self.num_tensors is None else self.num_tensors
        num_entries = len(self.metadata) if self.num_entries is None else self.num_entries
        out = self.magic + self.version + struct.pack("<QQ", num_tensors, num_entries)
        for key, value in self.metadata:
            out += text(key) + encode_value(value)
        for each in self.tensors:
            rank = len(each.sizes) if each.rank is None else each.rank
            out += text(each.name) + struct.pack("<I", rank)
            out += struct.pack(f"<{len(each.sizes)}Q", *each.sizes)
            out += struct.pack("<IQ", each.code, each.offset)
        return out + bytes(-len(out) % self.alignment) + self.data


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def encode_value(value: Any) -> bytes:
    match value:
        case Raw():
            return struct.pack("<I", value.code) + value.data
        case Items():
            count = len(value.values) if value.count is None else value.count
            items = b"".join(encode_item(value.code, item) for item in value.values)
            return struct.pack("<IIQ", ARRAY, value.code, count) + items
        case bool():
            return struct.pack("<IB", BOOL, value)
        case int():
            return struct.pack("<II", U32, value)
        case float():
            return struct.pack("<If", F32, value)
    return struct.pack("<I", STRING) + text(value)


def encode_item(code: int, item: Any) -> bytes:
    if code == STRING:
        return text(item)
    if code == ARRAY:
        return encode_value(item)[4:]
    return struct.pack(f"<{FORMATS[code]}", item)


def small_file(**changes: Any) -> File:
    """Two tensors, 2 × 3 in F32 and one row of a Q4_0 block, and a value of every kind."""
    return File(
        **{
            "metadata": [
                ("general.architecture", "llama"),
                ("a.flag", True),
                ("a.number", 7),
                ("a.epsilon", 1e-5),
                ("a.long", Raw(U64, struct.pack("<Q", 1 << 40))),
                ("a.texts", Items(STRING, ["x", "é"])),
                ("a.numbers", Items(I32, [1, -2])),
            ],
            "tensors": [
                Tensor("first", [3, 2]),
                Tensor("second", [32, 1], code=Q4_0_TENSOR, offset=32),
            ],
            "data": struct.pack("<6f", *range(6)) + bytes(8) + bytes(range(18)),
            **changes,
        }
    )
