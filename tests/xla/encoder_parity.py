"""The operations of image towers of a table beside the reference's, on the same inputs.

Legend as in `ops.table`.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.ops.table import (
    EncoderActivation,
    EncoderBlock,
    EncoderFactors,
    EncoderShape,
    ImageRows,
)

ACTIVATIONS: tuple[EncoderActivation, ...] = ("gelu", "gelu_tanh", "quick_gelu", "silu")
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def assert_like(actual: jax.Array, expected: jax.Array, tolerance: float) -> None:
    wide = np.asarray(expected, np.float64)
    error = np.abs(np.asarray(actual, np.float64) - wide).max()
    assert actual.dtype == expected.dtype
    assert error <= tolerance * np.abs(wide).max(), f"off by {error}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """An image of `num_rows` in one layer, its rows kept in blocks."""

    table: OpTable
    shape: EncoderShape
    num_rows: int
    dtype: str
    block: int = 64
    has_factors: bool = True

    def attend(self, bounds: np.ndarray | None = None) -> np.ndarray:
        heads = self._kept()

        def attend(heads: Any, block: EncoderBlock, own: Any) -> jax.Array:
            return self.table.compute(
                lambda ops: ops.encode_attend(heads, block, self.shape, self.block, own)
            )

        program = jax.jit(attend)
        parts = [
            program(heads, at, None if bounds is None else _padded(bounds, at, self.block))
            for at in self._blocks()
        ]
        return np.concatenate([np.asarray(part) for part in parts])[: self.num_rows]

    def _kept(self) -> Any:
        new = jax.jit(lambda: self.table.new_encoder_heads(self.num_rows, self.shape))
        keep = jax.jit(self._keep, donate_argnums=(1,))
        qkv = normal(1, self.num_rows, 3 * self.shape.width)
        turns = normal(2, self.num_rows, self.shape.head_dim // 2)
        heads = new()
        for at in self._blocks():
            own = jnp.asarray(_padded(qkv, at, self.block), self.dtype)
            heads = keep(own, heads, jnp.asarray(_padded(turns, at, self.block)), at)
        return heads

    def _keep(self, qkv: jax.Array, heads: Any, turns: jax.Array, block: EncoderBlock) -> Any:
        norms = normal(3, self.shape.head_dim), normal(4, self.shape.head_dim)
        factors = EncoderFactors(turns, norms, norms_values=True)
        if not self.has_factors:
            factors = EncoderFactors()
        return self.table.compute(
            lambda ops: ops.keep_heads(qkv, heads, factors, block, self.shape)
        )

    def _blocks(self) -> list[EncoderBlock]:
        return [
            EncoderBlock(*map(jnp.int32, (at, min(self.block, self.num_rows - at), self.num_rows)))
            for at in range(0, self.num_rows, self.block)
        ]


def _padded(rows: np.ndarray, block: EncoderBlock, size: int) -> np.ndarray:
    own = rows[int(block.start) : int(block.start) + size]
    return np.concatenate([own, np.zeros((size - len(own), *rows.shape[1:]), rows.dtype)])


def check_attention(
    table: OpTable,
    reference: OpTable,
    shape: EncoderShape,
    num_rows: int,
    bounds: np.ndarray | None = None,
) -> None:
    """The table's attention is the reference's, in blocks of any size, with the same bits."""
    dtype = np.dtype(reference._spec.dtype).name
    given = Tower(table=table, shape=shape, num_rows=num_rows, dtype=dtype)
    own = Tower(table=reference, shape=shape, num_rows=num_rows, dtype=dtype)
    actual = given.attend(bounds)
    assert_like(jnp.asarray(actual), jnp.asarray(own.attend(bounds)), TOLERANCE[dtype])
    odd = Tower(table=table, shape=shape, num_rows=num_rows, dtype=dtype, block=13)
    np.testing.assert_array_equal(actual.view(np.uint8), odd.attend(bounds).view(np.uint8))


def check_elements(table: OpTable, reference: OpTable) -> None:
    dtype = np.dtype(reference._spec.dtype)
    x, weight, bias, count = 3 * normal(5, 9, 70) + 1, normal(6, 70), normal(7, 70), jnp.int32(7)

    def compute(ops: OpTable) -> list[jax.Array]:
        activations = jnp.asarray(x, dtype)
        return [
            ops.layer_norm(jnp.asarray(x), weight, bias, count, 1e-5),
            ops.layer_norm(jnp.asarray(x), weight, None, count, 1e-5),
            *(ops.activate(activations, kind, count) for kind in ACTIVATIONS),
        ]

    found = jax.jit(lambda: table.compute(compute))()
    for actual, expected in zip(found, compute(reference), strict=True):
        assert_like(actual[:7], expected[:7], TOLERANCE[dtype.name] / 2)


def check_image_rows(table: OpTable, reference: OpTable) -> None:
    dtype = np.dtype(reference._spec.dtype)
    rows = jnp.asarray(normal(8, 6, 3 * 40), dtype)
    slots = jnp.asarray([4, -1, 0, 5, 2], jnp.int32)
    x, count = normal(9, 5, 40), jnp.int32(4)

    def compute(ops: OpTable, x: jax.Array, rows: jax.Array) -> list[jax.Array]:
        kept = ops.keep_rows(
            jnp.asarray(normal(10, 5, 40), dtype), ImageRows(rows, slots), 1, count
        )
        placed = ops.place_rows(x, ImageRows(kept, slots), 1, count)
        return [kept, ops.place_rows(placed, ImageRows(kept, slots), 2, count, adds=True)]

    program = jax.jit(
        lambda x, rows: table.compute(lambda ops: compute(ops, x, rows)), donate_argnums=(0, 1)
    )
    expected = compute(reference, jnp.asarray(x), rows)
    kept, placed = program(jnp.asarray(x), jnp.copy(rows))
    np.testing.assert_array_equal(np.asarray(kept), np.asarray(expected[0]))
    np.testing.assert_array_equal(np.asarray(placed)[:4], np.asarray(expected[1])[:4])
