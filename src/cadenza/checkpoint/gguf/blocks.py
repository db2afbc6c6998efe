"""The quantised types of GGUF as integer codes with scales: `BLOCKS`. Codes, scales and offsets are
those of the file, exactly, and their float32 values are those of ggml's conversion (ggml-quants.c).
Shapes: B blocks, C elements of a block, G groups of a block with one scale each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cadenza.checkpoint.formats.grouped import E2M1_DOUBLED
from cadenza.checkpoint.gguf.reader import TENSOR_TYPES, TensorType
from cadenza.weights.quantised_weight import Encoding, QuantisedWeight, Scales
from cadenza.weights.weight_format import MXFP4, WeightFormat, code_format

Bytes = npt.NDArray[Any]  # of uint8

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedBlocks:
    """An element is codes * scales + offsets of its group; without offsets they are 0."""

    codes: npt.NDArray[np.int8]  # [B, G, C / G]
    scales: Float32Array  # [B, G]
    offsets: Float32Array | None = None  # [B, G]

    def as_weight(self, format: WeightFormat) -> QuantisedWeight:
        """A weight [B, C] with the scales as `format` has them, nested ones in float32."""

        def stored(values: Float32Array) -> Scales:
            return values.astype(np.float16) if format.scale == "float16" else values

        return QuantisedWeight(
            codes=self.codes.reshape(len(self.codes), -1),
            scales=stored(self.scales),
            offsets=None if self.offsets is None else stored(self.offsets),
            bits=4 if format.bits == 4 else 8,
            group=self.codes.shape[2],
            is_mxfp4=format == MXFP4,
        )


def _half(stored: Bytes) -> Float32Array:
    """[B, 2 n] bytes of float16 as [B, n]."""
    return np.ascontiguousarray(stored).view("<f2").astype(np.float32)


def _nibbles(stored: Bytes) -> Bytes:
    """[..., n] bytes as [..., 2 n]: all low halves, then all high ones."""
    return np.concatenate([stored & 15, stored >> 4], axis=-1)


def _fifth_bits(stored: Bytes) -> Bytes:
    """[B, 4] bytes as [B, 32]: 16 for each bit that is set."""
    return np.unpackbits(stored, axis=-1, bitorder="little") << 4


def _signed(codes: Bytes, zero: int = 0) -> npt.NDArray[np.int8]:
    """Codes of at most 7 bits less `zero`."""
    return codes.view(np.int8) - np.int8(zero)


def _read_q8_0(stored: Bytes) -> CodedBlocks:
    codes = np.ascontiguousarray(stored[:, 2:]).view(np.int8)
    return CodedBlocks(codes=codes[:, None], scales=_half(stored[:, :2]))


def _read_q4_0(stored: Bytes) -> CodedBlocks:
    codes = _signed(_nibbles(stored[:, 2:]), 8)
    return CodedBlocks(codes=codes[:, None], scales=_half(stored[:, :2]))


def _read_q4_1(stored: Bytes) -> CodedBlocks:
    return CodedBlocks(
        codes=_signed(_nibbles(stored[:, 4:]))[:, None],
        scales=_half(stored[:, :2]),
        offsets=_half(stored[:, 2:4]),
    )


def _read_q5_0(stored: Bytes) -> CodedBlocks:
    codes = _signed(_nibbles(stored[:, 6:]) | _fifth_bits(stored[:, 2:6]), 16)
    return CodedBlocks(codes=codes[:, None], scales=_half(stored[:, :2]))


def _read_q5_1(stored: Bytes) -> CodedBlocks:
    codes = _signed(_nibbles(stored[:, 8:]) | _fifth_bits(stored[:, 4:8]))
    return CodedBlocks(
        codes=codes[:, None], scales=_half(stored[:, :2]), offsets=_half(stored[:, 2:4])
    )


def _read_k_scales(stored: Bytes) -> tuple[Float32Array, Float32Array]:
    """Scales and offsets [B, 8] of the 16 bytes in front of Q4_K and Q5_K: d, dmin and twelve bytes
    with 6-bit scales and minimums: four of each in the low bits of the first eight, the other four
    in the last four bytes and the high bits of the first eight."""
    first, second, third = (stored[:, start : start + 4] for start in (4, 8, 12))
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 2) & 48)], axis=-1)
    minimums = np.concatenate([second & 63, (third >> 4) | ((second >> 2) & 48)], axis=-1)
    with np.errstate(invalid="ignore", over="ignore"):
        return _half(stored[:, :2]) * scales, -(_half(stored[:, 2:4]) * minimums)


def _read_q4_k(stored: Bytes) -> CodedBlocks:
    """Each 32 bytes have the low and the high halves of two groups."""
    scales, offsets = _read_k_scales(stored)
    codes = _nibbles(stored[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return CodedBlocks(codes=_signed(codes), scales=scales, offsets=offsets)


def _read_q5_k(stored: Bytes) -> CodedBlocks:
    """As Q4_K; bit j of 32 further bytes is the fifth bit of group j."""
    scales, offsets = _read_k_scales(stored)
    low = _nibbles(stored[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    shifts = np.arange(8, dtype=np.uint8)[:, None]
    high = (stored[:, None, 16:48] >> shifts) & 1  # [B, 8, 32]
    return CodedBlocks(codes=_signed(low | (high << 4)), scales=scales, offsets=offsets)


def _read_q6_k(stored: Bytes) -> CodedBlocks:
    """Halves of 128 elements, each of 64 bytes with 4 bits and 32 bytes with the 2 above them."""
    low = _nibbles(stored[:, :128].reshape(-1, 2, 64))  # [B, 2, 128]
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = (stored[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3  # [B, 2, 4, 32]
    codes = _signed(low | (high.reshape(-1, 2, 128) << 4), 32).reshape(-1, 16, 16)
    scales = np.ascontiguousarray(stored[:, 192:208]).view(np.int8)
    with np.errstate(invalid="ignore", over="ignore"):
        return CodedBlocks(codes=codes, scales=_half(stored[:, 208:]) * scales)


def _read_mxfp4(stored: Bytes) -> CodedBlocks:
    """Codes are twice the values of E2M1, scales half the power of two."""
    scales = np.ldexp(np.float32(0.5), stored[:, :1].astype(np.int32) - 127)
    codes = E2M1_DOUBLED[_nibbles(stored[:, 1:])]
    return CodedBlocks(codes=codes[:, None], scales=scales.astype(np.float32))


Read = Callable[[Bytes], CodedBlocks]  # of blocks [B, bytes of one]

# how a block is read, and the format of its codes
BLOCKS: dict[str, tuple[Read, WeightFormat]] = {
    "Q8_0": (_read_q8_0, code_format(8)),
    "Q4_0": (_read_q4_0, code_format(4)),
    "Q4_1": (_read_q4_1, code_format(4, "float16", "offset")),
    "Q5_0": (_read_q5_0, code_format(5)),
    "Q5_1": (_read_q5_1, code_format(5, "float16", "offset")),
    "Q4_K": (_read_q4_k, code_format(4, "nested", "offset")),
    "Q5_K": (_read_q5_k, code_format(5, "nested", "offset")),
    "Q6_K": (_read_q6_k, code_format(6, "nested", None, 16)),
    "MXFP4": (_read_mxfp4, MXFP4),
}


def _encoding_of(number: int, kind: TensorType) -> Encoding:
    read, format = BLOCKS[kind.name]

    def read_codes(stored: Bytes) -> QuantisedWeight:
        return read(stored).as_weight(format)

    return Encoding(
        name=kind.name,
        number=number,
        block_len=kind.block_len,
        block_bytes=kind.block_bytes,
        format=format,
        read=read_codes,
    )


# of the types that can be read
ENCODINGS: dict[str, Encoding] = {
    kind.name: _encoding_of(number, kind)
    for number, kind in TENSOR_TYPES.items()
    if kind.name in BLOCKS
}
