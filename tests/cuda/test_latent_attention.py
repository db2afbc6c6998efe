"""latent_attend of the kernels for GPUs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cadenza.backends.xla.ops.cuda_library import CudaLibrary
from tests.cuda.attention_rows import BF16, EPS, LAYER, LAYERS, Array, Caller

pytestmark = [pytest.mark.native, pytest.mark.kernels]

F32: Any = np.float32
LENGTH, PAGE_SIZE, NUM_PAGES = 36, 16, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    heads: int = 3
    rank: int = 48
    rotary: int = 16
    query_size: int = 32
    pairs_neighbours: bool = True
    dtype: Any = BF16

    @property
    def key_size(self) -> int:
        return self.rank + self.rotary

    @property
    def rope(self) -> Array:
        angles = np.arange(64)[:, None] / 1e4 ** (np.arange(0, self.rotary, 2) / self.rotary)
        return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)

    @property
    def norm(self) -> Array:
        return np.random.default_rng(4).normal(size=self.rank).astype(np.float32)

    def inputs(self, seed: int) -> tuple[Array, Array, Array]:
        random = np.random.default_rng(seed)
        absorbed = random.normal(size=(LENGTH, self.heads * self.rank))
        queries = random.normal(size=(LENGTH, self.heads * self.query_size))
        keys = random.normal(size=(LENGTH, self.key_size))
        return absorbed.astype(self.dtype), queries.astype(self.dtype), keys.astype(np.float32)


SHAPES = [
    Shape(),
    Shape(heads=20, pairs_neighbours=False),
    Shape(dtype=F32),
    Shape(heads=2, rank=512, rotary=64, query_size=96),
    Shape(heads=1, rank=512, rotary=64, query_size=64, dtype=F32),
    Shape(heads=1, rank=640, rotary=32),
    Shape(heads=1, rank=640, rotary=32, dtype=F32),
]


@pytest.fixture(scope="module")
def call(library: CudaLibrary) -> Caller:
    return Caller(library)


def play(call: Caller, shape: Shape, inputs: Sequence[Array], chunks: Sequence[int]) -> Array:
    pages = np.random.default_rng(len(chunks)).permutation(NUM_PAGES)
    held = np.full((NUM_PAGES, LAYERS, 1, PAGE_SIZE, shape.key_size), np.nan, shape.dtype)
    pool = jnp.asarray(held.view(np.uint16) if shape.dtype == BF16 else held)
    found, at = [], 0
    for count in chunks:
        positions = np.arange(at, at + count, dtype=np.int32)
        slots = pages[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        padded = [np.full((count + 2, each.shape[1]), np.nan, each.dtype) for each in inputs]
        for each, given in zip(padded, inputs, strict=True):
            each[:count] = given[positions]
        out, pool = call(
            "latent_attend",
            (
                jax.ShapeDtypeStruct((count + 2, shape.heads * shape.rank), shape.dtype),
                jax.ShapeDtypeStruct(pool.shape, pool.dtype),
            ),
            *padded,
            np.concatenate([positions, np.zeros(2, np.int32)]),
            np.concatenate([slots, [-1, -1]]).astype(np.int32),
            np.array([0, count, count], np.int32),
            np.array([at + count, 0], np.int32),
            np.stack([pages, np.full_like(pages, -1)]).astype(np.int32),
            *(shape.rope, shape.norm, pool),
            np.concatenate([positions, np.zeros(2, np.int32)]),
            aliases={10: 1},
            layer=LAYER,
            heads=shape.heads,
            scale=np.float32(shape.key_size**-0.5),
            norm_eps=np.float32(EPS),
            pairs_neighbours=shape.pairs_neighbours,
        )
        found.append(np.asarray(out)[:count])
        at += count
    return np.concatenate(found)


def turned(shape: Shape, part: Array) -> Array:
    cos, sin = np.split(shape.rope[:LENGTH, None, :].astype(np.float64), 2, axis=-1)
    halves = np.split(part, 2, axis=-1)
    a, b = (part[..., 0::2], part[..., 1::2]) if shape.pairs_neighbours else halves
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def in_float64(shape: Shape, inputs: Sequence[Array]) -> Array:
    absorbed, queries, keys = (each.astype(np.float64) for each in inputs)
    own = queries.reshape(LENGTH, shape.heads, -1)[..., -shape.rotary :]
    plain = absorbed.reshape(LENGTH, shape.heads, -1)
    query = np.concatenate([plain, turned(shape, own)], axis=-1)
    latent = keys[:, : shape.rank]
    latent = latent / np.sqrt(np.mean(latent**2, axis=-1, keepdims=True) + EPS) * shape.norm
    key = np.concatenate([latent, turned(shape, keys[:, None, shape.rank :])[:, 0]], axis=-1)
    scores = np.einsum("qhd,kd->hqk", query, key) * shape.key_size**-0.5
    scores = np.where(np.tri(LENGTH, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hqk,kd->qhd", weights, latent).reshape(LENGTH, -1)


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_over_latents_agrees_with_float64_however_the_row_is_cut_and_paged(
    call: Caller, shape: Shape
) -> None:
    inputs = shape.inputs(1)
    found = play(call, shape, inputs, [LENGTH])
    atol = 4e-2 if shape.dtype == BF16 else 1e-5
    np.testing.assert_allclose(found.astype(float), in_float64(shape, inputs), atol=atol)
    chunks = [1, 17, 3, 1, 1, 1, 9, 3]
    assert play(call, shape, inputs, chunks).tobytes() == found.tobytes()
