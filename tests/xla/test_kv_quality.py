"""KV in int8 on the bundled model: how far its distributions are from those over float32 KV.

All else is float32 on the native kernels, so the difference is that of the KV alone.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from cadenza.backends.xla.ops.table import HeadInputs, KVPool
from cadenza.config import KVCacheDType
from tests.xla.divergence import BUNDLED, LogitOps, Logprobs, held_out_texts, logprobs_of, mean_kl

pytestmark = pytest.mark.native

MOST_KL = 3e-4


class CoarseValues(LogitOps):
    """Rounds the values of each head to 15 multiples of a scale, before they are stored."""

    def rope_append_attend(self, given: HeadInputs, *others: Any) -> tuple[jax.Array, KVPool]:
        model, qkv = self._model, given.qkv
        heads = qkv.reshape(len(qkv), -1, model.head_dim)
        kept, values = jnp.split(heads, [model.num_heads + model.num_kv_heads], axis=1)
        scale = jnp.max(jnp.abs(values), axis=-1, keepdims=True) / 7
        coarse = jnp.concatenate([kept, jnp.round(values / scale) * scale], axis=1)
        return super().rope_append_attend(HeadInputs(coarse.reshape(qkv.shape)), *others)


def with_kv(kv_cache_dtype: KVCacheDType, table: type[LogitOps] = LogitOps) -> Logprobs:
    return logprobs_of(
        held_out_texts(), BUNDLED, table, dtype=jnp.float32, kv_cache_dtype=kv_cache_dtype
    )


@functools.cache
def exact_logprobs() -> Logprobs:
    return [*with_kv("auto")]


def test_kv_in_int8_is_within_the_bound_of_float32_kv():
    kl = mean_kl(exact_logprobs(), with_kv("int8"))
    assert 1e-6 < kl < MOST_KL, f"{kl:.2e} nats"


def test_values_of_four_bits_are_beyond_the_bound():
    kl = mean_kl(exact_logprobs(), with_kv("auto", CoarseValues))
    assert kl > 2 * MOST_KL, f"{kl:.2e} nats"
