"""Random blocks of the quantised types of GGUF. Knows neither gguf-py nor the reader under test."""

import numpy as np

from cadenza.checkpoint.gguf.reader import TENSOR_TYPES

TYPES = {kind.name: kind for kind in TENSOR_TYPES.values()}
HALVES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2)}
"""Where a block has float16 numbers; at 0 for others."""


FACTORS = {"Q4_K": (2e-4, 1.5e-3), "Q5_K": (1e-4, 1.5e-3), "Q6_K": (4e-5,)}
"""Of the numbers at `HALVES`, for elements about 0 with a deviation near 0.05."""


def random_tensor(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """A tensor in a K-quant [..., bytes of a row] that a model can compute with."""
    *rows, columns = shape
    kind = TYPES[name]
    stored = any_blocks(name, int(np.prod(shape)) // kind.block_len, seed)
    for place, factor in zip(HALVES[name], FACTORS[name], strict=True):
        stored[:, place : place + 2] = np.array([factor], "<f2").view(np.uint8)
    return stored.reshape(*rows, columns // kind.block_len * kind.block_bytes)


def any_blocks(name: str, count: int, seed: int) -> np.ndarray:
    """Random bytes, whose float16 numbers are finite: every bit of a block has its meaning."""
    draw = np.random.default_rng(seed)
    stored = draw.integers(0, 256, (count, TYPES[name].block_bytes), np.uint8)
    if name == "MXFP4":
        stored[:, 0] = draw.integers(0, 240, count)  # twelve times 2^112 is finite
        return stored
    for place in HALVES.get(name, (0,)):
        numbers = draw.normal(0, 0.1, count).astype("<f2")
        stored[:, place : place + 2] = numbers.view(np.uint8).reshape(-1, 2)
    return stored
