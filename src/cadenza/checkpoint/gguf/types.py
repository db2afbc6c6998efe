"""The types of GGUF, with codes and sizes: of metadata values (`SCALARS`, `STRING`, `ARRAY`) and of
tensors, whose rows are whole blocks."""

import struct
from dataclasses import dataclass

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
