"""next_token through XLA against the op table's definition in plain jnp."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from cadenza.backends.token_choice import (
    COLUMN_LOGPROB,
    COLUMN_RANK,
    COLUMN_STATE,
    COLUMN_TOKEN,
    COLUMN_TOP,
    NUM_COLUMNS,
    NUM_TOP,
)
from cadenza.backends.xla.ops.reference import CHOICE
from cadenza.batch.step_schema import LogitInputs, specs_of
from tests.contract.steps import logit_rows

pytestmark = pytest.mark.native

VOCAB, WIDTH, ROWS = 3001, 40, 24
NONE = np.zeros(0, np.int32)


def sampling(random: np.random.Generator) -> LogitInputs[Any]:
    index = np.arange(ROWS)
    return logit_rows(
        ROWS,
        temperature=np.where(index % 4 == 3, 0, 0.4 + 0.1 * (index % 9)).astype(np.float32),
        top_k=np.where(index % 3 == 0, 0, 1 + index * 31 % 500).astype(np.int32),
        top_p=np.choose(index % 4, [1, 0.9, 0.5, 0.99]).astype(np.float32),
        min_p=np.where(index % 5 == 2, 0.05, 0).astype(np.float32),
        top_n_sigma=np.where(index % 6 == 1, 1.5, 0).astype(np.float32),
        keys=random.integers(0, 2**32, (ROWS, 2), dtype=np.uint32),
        num_logprobs=np.where(index % 2 == 0, 3, -1).astype(np.int32),
    )


def choose(
    call: Any,
    x: npt.NDArray[Any],
    head: Any,
    rows: LogitInputs[Any],
    *,
    divisor: float = 1.0,
    soft_cap: float = 0.0,
) -> npt.NDArray[np.int32]:
    shape = jax.ShapeDtypeStruct((len(x), NUM_COLUMNS), jnp.int32)
    count = np.int32(len(x))
    attrs = {
        "vocab": np.int64(VOCAB),
        "divisor": np.float32(divisor),
        "soft_cap": np.float32(soft_cap),
        "page_size": np.int64(16),
        "banned": np.int64(-1),
    }
    columns = np.concatenate(
        [
            getattr(rows, spec.name).view(np.int32).reshape(-1, spec.columns).T
            for spec in specs_of(LogitInputs)
        ]
    )
    return np.asarray(call("next_token", shape, x, head, count, columns, *[NONE] * 3, **attrs))


def row_of(rows: LogitInputs[Any], i: int) -> LogitInputs:
    columns = {spec.name: getattr(rows, spec.name)[i : i + 1] for spec in specs_of(LogitInputs)}
    return LogitInputs(**columns)


def as_floats(columns: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    return np.ascontiguousarray(columns).view(np.float32)


def test_next_token_agrees_with_the_definition_in_every_column(call, pack, random):
    weight = random.normal(size=(VOCAB, WIDTH)).astype(np.float32)
    x = random.normal(size=(ROWS, WIDTH)).astype(np.float32)
    rows = sampling(random)
    out = choose(call, x, pack(weight, dtype=np.float32), rows)
    logits = jnp.matmul(x, weight.T, precision="highest")
    expected = np.asarray(CHOICE.choose_tokens(logits, rows))
    np.testing.assert_array_equal(out[:, COLUMN_TOKEN], expected[:, COLUMN_TOKEN])
    np.testing.assert_array_equal(out[:, COLUMN_STATE], 1)
    asked = rows.num_logprobs >= 0
    assert not out[~asked][:, COLUMN_LOGPROB:].any()
    ids = slice(COLUMN_TOP, COLUMN_TOP + NUM_TOP)
    np.testing.assert_array_equal(out[asked][:, COLUMN_RANK], expected[asked][:, COLUMN_RANK])
    np.testing.assert_array_equal(out[asked][:, ids], expected[asked][:, ids])
    for columns in (slice(COLUMN_LOGPROB, COLUMN_LOGPROB + 1), slice(ids.stop, None)):
        mine, theirs = as_floats(out[asked][:, columns]), as_floats(expected[asked][:, columns])
        np.testing.assert_allclose(mine, theirs, atol=1e-4)


def test_next_token_divides_and_caps_its_logits(call, pack, random):
    weight = random.normal(size=(VOCAB, WIDTH)).astype(np.float32)
    x = random.normal(size=(ROWS, WIDTH)).astype(np.float32)
    rows = replace(sampling(random), num_logprobs=np.full(ROWS, NUM_TOP, np.int32))
    out = choose(call, x, pack(weight, dtype=np.float32), rows, divisor=1.5, soft_cap=6.0)
    logits = 6.0 * np.tanh(x.astype(np.float64) @ weight.T / 1.5 / 6.0)
    exact = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    top_ids = out[:, COLUMN_TOP : COLUMN_TOP + NUM_TOP]
    top = as_floats(out[:, COLUMN_TOP + NUM_TOP :])
    np.testing.assert_allclose(top, np.take_along_axis(exact, top_ids, axis=1), atol=1e-5)
    np.testing.assert_allclose(top, -np.sort(-exact, axis=1)[:, :NUM_TOP], atol=1e-5)


def test_a_soft_cap_does_not_hide_an_infinite_logit(call, pack, random):
    weight = random.normal(size=(VOCAB, WIDTH)).astype(np.float32)
    x = random.normal(size=(ROWS, WIDTH)).astype(np.float32)
    x[5, 7] = np.inf
    out = choose(call, x, pack(weight, dtype=np.float32), sampling(random), soft_cap=30.0)
    np.testing.assert_array_equal(out[:, COLUMN_STATE], np.arange(ROWS) != 5)


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
    assert out[5, COLUMN_STATE] == 0
    np.testing.assert_array_equal(np.delete(out, 5, axis=0), np.delete(clean, 5, axis=0))
