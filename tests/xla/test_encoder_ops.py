"""Each operation of image towers in the reference table against float64 numpy.

Shapes are hostile: heads of 72, blocks that begin anywhere, images over two softmax spans, NaN in
every row of the workspace that is not the image's. Legend as in `ops.table`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import erf

from cadenza.backends.xla.ops.table import (
    EncoderActivation,
    EncoderBlock,
    EncoderFactors,
    EncoderHeads,
    EncoderShape,
    ImageRows,
)
from tests.xla.test_ops import assert_close, make_ops, normal, rounded

DTYPES = ("float32", "bfloat16")
COUNT = jnp.int32(5)
SHAPE = EncoderShape(num_heads=2, head_dim=72, scale=72**-0.5)
NUM_ROWS = 530  # of the image: more than a span


def block_at(start: int, num_defined: int, num_rows: int = NUM_ROWS) -> EncoderBlock:
    return EncoderBlock(*map(jnp.int32, (start, num_defined, num_rows)))


def float64_rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def float64_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray, scale: float
) -> np.ndarray:
    scores = np.einsum("bhd,nhd->bhn", q, k) * scale
    scores = np.where(seen[:, None, :], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("bhn,nhd->bhd", weights, v).reshape(len(q), -1)


def hostile_heads(seed: int, dtype: str, shape: EncoderShape = SHAPE) -> EncoderHeads:
    ops = make_ops(dtype)
    heads = ops.new_encoder_heads(600, shape)
    rows = [normal(seed + at, *heads.keys.shape) for at in range(3)]
    for each in rows:
        each[NUM_ROWS:] = np.nan
    return EncoderHeads(*(jnp.asarray(each, dtype) for each in rows))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [True, False])
def test_layer_norm_is_the_textbooks(dtype: str, has_bias: bool) -> None:
    x, weight, bias = 3 * normal(1, 5, 37) + 2, normal(2, 37), normal(3, 37)
    actual = make_ops(dtype).layer_norm(x, weight, bias if has_bias else None, COUNT, 1e-3)
    exact = x.astype(np.float64)
    expected = (exact - exact.mean(1, keepdims=True)) / np.sqrt(exact.var(1, keepdims=True) + 1e-3)
    assert actual.dtype == dtype
    assert_close(actual, expected * weight + (bias if has_bias else 0.0), dtype)


ACTIVATIONS: dict[EncoderActivation, Callable[[np.ndarray], np.ndarray]] = {
    "gelu": lambda x: 0.5 * x * (1 + erf(x / np.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "quick_gelu": lambda x: x / (1 + np.exp(-1.702 * x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_an_activation_is_its_formula(dtype: str, kind: EncoderActivation) -> None:
    x = jnp.asarray(3 * normal(4, 5, 37), dtype)
    actual = make_ops(dtype).activate(x, kind, COUNT)
    assert actual.dtype == dtype
    assert_close(actual, ACTIVATIONS[kind](np.asarray(x).astype(np.float64)), dtype)


def test_kept_heads_are_normed_then_rotated_and_only_those_of_the_block_are_written() -> None:
    ops, shape = make_ops(), EncoderShape(num_heads=3, head_dim=8, scale=1.0, norm_eps=1e-5)
    qkv, turns, norms = normal(5, 6, 72), normal(6, 6, 4), (normal(7, 8), normal(8, 8))
    before = EncoderHeads(*(jnp.full((20, 3, 8), 7.0 + at) for at in range(3)))
    factors = EncoderFactors(turns, norms, norms_values=True)
    after = ops.keep_heads(jnp.asarray(qkv), before, factors, block_at(9, 5), shape)
    query, key, value = qkv.astype(np.float64).reshape(6, 3, 3, 8).transpose(1, 0, 2, 3)
    expected = [
        turned(float64_rms(query, norms[0], 1e-5), turns),
        turned(float64_rms(key, norms[1], 1e-5), turns),
        float64_rms(value, np.ones(8), 1e-5),
    ]
    for at, (kept, rows) in enumerate(zip(after, expected, strict=True)):
        assert_close(kept[9:14], rows[:5], "float32")
        others = np.delete(np.asarray(kept), np.s_[9:14], axis=0)
        assert (others == 7.0 + at).all()


def turned(heads: np.ndarray, turns: np.ndarray) -> np.ndarray:
    half = turns.shape[1] // 2
    cos, sin = turns[:, None, :half], turns[:, None, half:]
    first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def test_heads_without_norms_or_turns_are_kept_as_they_are() -> None:
    ops, shape = make_ops(), EncoderShape(num_heads=1, head_dim=4, scale=1.0)
    qkv = normal(9, 3, 12)
    heads = ops.new_encoder_heads(3, shape)
    kept = ops.keep_heads(jnp.asarray(qkv), heads, EncoderFactors(), block_at(0, 3), shape)
    for at, side in enumerate(kept):
        np.testing.assert_array_equal(side[:3, 0], qkv[:, 4 * at : 4 * at + 4])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_query_attends_to_all_rows_of_the_image_and_to_no_other(dtype: str) -> None:
    heads = hostile_heads(10, dtype)
    actual = make_ops(dtype).encode_attend(heads, block_at(509, 21), SHAPE, 24)[:21]
    q, k, v = (rounded(side, dtype)[:NUM_ROWS] for side in heads)
    seen = np.ones((21, NUM_ROWS), bool)
    assert actual.dtype == dtype
    assert_close(actual, float64_attention(q[509:530], k, v, seen, SHAPE.scale), dtype)


def test_bounds_say_which_rows_a_query_sees() -> None:
    bounds = np.array([[0, 1], [511, 513], [20, 530], [0, 512], [513, 530]], np.int32)
    heads = hostile_heads(13, "float32")
    actual = make_ops().encode_attend(heads, block_at(3, 5), SHAPE, 5, jnp.asarray(bounds))
    q, k, v = (np.asarray(side, np.float64)[:NUM_ROWS] for side in heads)
    at = np.arange(NUM_ROWS)
    seen = (at >= bounds[:, :1]) & (at < bounds[:, 1:])
    assert_close(actual, float64_attention(q[3:8], k, v, seen, SHAPE.scale), "float32")


def test_rows_of_images_are_kept_by_slot_and_part() -> None:
    x, rows = normal(16, 4, 6), jnp.zeros((5, 18))
    images = ImageRows(rows, jnp.array([3, -1, 0, 2], jnp.int32))
    kept = np.asarray(make_ops().keep_rows(jnp.asarray(x), images, 1, jnp.int32(3)))
    expected = np.zeros((5, 18), np.float32)
    expected[3, 6:12], expected[0, 6:12] = x[0], x[2]
    np.testing.assert_array_equal(kept, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("adds", [False, True])
def test_tokens_with_a_slot_get_its_row_and_the_others_stay(dtype: str, adds: bool) -> None:
    x, rows = normal(17, 4, 6), jnp.asarray(normal(18, 5, 18), dtype)
    rows = rows.at[1].set(np.nan)  # nobody's
    images = ImageRows(rows, jnp.array([-1, 4, 0, -1], jnp.int32))
    actual: Any = make_ops(dtype).place_rows(jnp.asarray(x), images, 2, COUNT, adds)
    expected = x.copy()
    for token, slot in ((1, 4), (2, 0)):
        row = np.asarray(rows[slot, 12:]).astype(np.float32)
        expected[token] = x[token] + row if adds else row
    assert actual.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(jax.device_get(actual)), expected)
