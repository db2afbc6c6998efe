"""next_token through XLA against the op table's definition in plain jnp."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from cadenza.backends.xla.ops.sampling import choose_tokens
from cadenza.backends.xla.ops.table import (
    COLUMN_FINITE,
    COLUMN_LOGPROB,
    COLUMN_RANK,
    COLUMN_TOKEN,
    COLUMN_TOP,
    NUM_COLUMNS,
    NUM_TOP,
    SamplingArrays,
)

pytestmark = pytest.mark.native

VOCAB, WIDTH, ROWS = 3001, 40, 24
NONE = np.zeros(0, np.float32)


def sampling(random: np.random.Generator) -> SamplingArrays:
    index = np.arange(ROWS)
    return SamplingArrays(
        temperature=np.where(index % 4 == 3, 0, 0.4 + 0.1 * (index % 9)).astype(np.float32),
        top_k=np.where(index % 3 == 0, 0, 1 + index * 31 % 500).astype(np.int32),
        top_p=np.choose(index % 4, [1, 0.9, 0.5, 0.99]).astype(np.float32),
        min_p=np.where(index % 5 == 2, 0.05, 0).astype(np.float32),
        keys=random.integers(0, 2**32, (ROWS, 2), dtype=np.uint32),
        num_logprobs=np.where(index % 2 == 0, 3, -1).astype(np.int32),
    )


def choose(
    call: Any,
    x: npt.NDArray[Any],
    head: Any,
    rows: SamplingArrays,
    bias: Any = NONE,
    bias_rows: Any = None,
) -> npt.NDArray[np.int32]:
    if bias_rows is None:
        bias_rows = np.full(len(x), -1, np.int32)
    shape = jax.ShapeDtypeStruct((len(x), NUM_COLUMNS), jnp.int32)
    count = np.int32(len(x))
    return np.asarray(
        call("next_token", shape, x, head, count, *rows, bias, bias_rows, vocab=np.int64(VOCAB))
    )


def row_of(rows: SamplingArrays, i: int) -> SamplingArrays:
    return SamplingArrays(*(np.asarray(field)[i : i + 1] for field in rows))


def as_floats(columns: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    return np.ascontiguousarray(columns).view(np.float32)


def test_next_token_agrees_with_the_definition_in_every_column(call, pack, random):
    weight = random.normal(size=(VOCAB, WIDTH)).astype(np.float32)
    x = random.normal(size=(ROWS, WIDTH)).astype(np.float32)
    rows = sampling(random)
    out = choose(call, x, pack(weight, dtype=np.float32), rows)
    logits = jnp.matmul(x, weight.T, precision="highest")
    expected = np.asarray(choose_tokens(logits, rows))
    np.testing.assert_array_equal(out[:, COLUMN_TOKEN], expected[:, COLUMN_TOKEN])
    np.testing.assert_array_equal(out[:, COLUMN_FINITE], 1)
    asked = rows.num_logprobs >= 0
    assert not out[~asked][:, COLUMN_LOGPROB:].any()
    ids = slice(COLUMN_TOP, COLUMN_TOP + NUM_TOP)
    np.testing.assert_array_equal(out[asked][:, COLUMN_RANK], expected[asked][:, COLUMN_RANK])
    np.testing.assert_array_equal(out[asked][:, ids], expected[asked][:, ids])
    for columns in (slice(COLUMN_LOGPROB, COLUMN_LOGPROB + 1), slice(ids.stop, None)):
        mine, theirs = as_floats(out[asked][:, columns]), as_floats(expected[asked][:, columns])
        np.testing.assert_allclose(mine, theirs, atol=1e-4)


def test_next_token_rows_are_bitwise_the_same_alone(call, pack, random):
    head = pack(random.normal(size=(VOCAB, WIDTH)).astype(np.float32), dtype=np.float32)
    x = random.normal(size=(ROWS, WIDTH)).astype(np.float32)
    rows = sampling(random)
    together = choose(call, x, head, rows)
    for i in range(ROWS):
        alone = choose(call, x[i : i + 1], head, row_of(rows, i))
        np.testing.assert_array_equal(alone[0], together[i])


def test_next_token_flags_only_the_row_that_is_not_finite(call, pack, random):
    head = pack(random.normal(size=(VOCAB, WIDTH)).astype(np.float32), dtype=np.float32)
    x = random.normal(size=(ROWS, WIDTH)).astype(np.float32)
    rows = sampling(random)
    clean = choose(call, x, head, rows)
    x[5, 7] = np.nan
    out = choose(call, x, head, rows)
    assert out[5, COLUMN_FINITE] == 0
    np.testing.assert_array_equal(np.delete(out, 5, axis=0), np.delete(clean, 5, axis=0))


def test_a_bias_row_forbids_tokens_to_its_own_row_only(call, pack, random):
    head = pack(random.normal(size=(VOCAB, WIDTH)).astype(np.float32), dtype=np.float32)
    x = random.normal(size=(ROWS, WIDTH)).astype(np.float32)
    rows = sampling(random)
    free = choose(call, x, head, rows)
    bias = np.zeros((1, VOCAB), np.float32)
    bias[0, free[:, COLUMN_TOKEN]] = -np.inf
    bias_rows = np.full(ROWS, -1, np.int32)
    bias_rows[4] = bias_rows[7] = 0
    bound = choose(call, x, head, rows, bias, bias_rows)
    others = np.delete(np.arange(ROWS), [4, 7])
    np.testing.assert_array_equal(bound[others], free[others])
    assert not np.isin(bound[[4, 7], COLUMN_TOKEN], free[:, COLUMN_TOKEN]).any()
