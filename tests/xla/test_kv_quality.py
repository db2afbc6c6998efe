"""KV in int8 on the bundled model: how far its distributions are from those over float32 KV.

The measure is the mean KL(float32 KV ‖ int8 KV) over all positions of held-out texts, in nats. All
else is float32 on the native kernels, so the difference is that of the KV alone.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cadenza.backends.xla.decoder import DecoderWeights, run_decoder
from cadenza.backends.xla.ops.native import NativeOps
from cadenza.backends.xla.ops.table import (
    AttendingLayer,
    DecoderSpec,
    HeadFactors,
    KVPool,
    Linear,
    StepArrays,
)
from cadenza.backends.xla.weights import load_decoder
from cadenza.checkpoint import open_checkpoint
from cadenza.config import KVCacheDType
from cadenza.text import Tokenizer
from tests.contract.steps import Geometry, Stream, build_inputs
from tests.xla.test_native_ops import device_step
from training.corpus.example import Split
from training.corpus.mixture import SHARES, make_example, open_source

pytestmark = pytest.mark.native

MOST_KL = 3e-4
EXAMPLES = 3
"""Of each kind of text."""

PAGE_SIZE, BUCKET = 16, 256
CHECKPOINT = open_checkpoint(None)


class LogitOps(NativeOps):
    """Gives the logits [L, V] of the logit rows in place of tokens."""

    def next_tokens(self, x: Any, head: Linear, step: StepArrays) -> Any:
        return self.linear(x, head, self._model.vocab_size, step.num_logits)


class CoarseValues(LogitOps):
    """Rounds the values of each head to 15 multiples of a scale, before they are stored."""

    def rope_append_attend(
        self,
        qkv: jax.Array,
        pool: KVPool,
        factors: HeadFactors,
        step: StepArrays,
        layer: AttendingLayer,
    ) -> tuple[jax.Array, KVPool]:
        model = self._model
        heads = qkv.reshape(len(qkv), -1, model.head_dim)
        kept, values = jnp.split(heads, [model.num_heads + model.num_kv_heads], axis=1)
        scale = jnp.max(jnp.abs(values), axis=-1, keepdims=True) / 7
        coarse = jnp.concatenate([kept, jnp.round(values / scale) * scale], axis=1)
        return super().rope_append_attend(coarse.reshape(qkv.shape), pool, factors, step, layer)


def held_out_texts() -> list[list[int]]:
    assert CHECKPOINT.tokenizer_source is not None
    tokenizer = Tokenizer(CHECKPOINT.tokenizer_source)
    found: list[list[int]] = []
    for kind in SHARES:
        for index in range(EXAMPLES):
            source = open_source(Split.HELD_OUT, "evaluate", kind, index)
            text = make_example(kind, source, max_tokens=300).text
            found.append(tokenizer.encode(text)[:BUCKET])
    return found


def logprobs_of(table: type[LogitOps], kv_cache_dtype: KVCacheDType) -> list[np.ndarray]:
    """The log probabilities [n, V] after each token of each text."""
    spec = DecoderSpec(
        model=CHECKPOINT.config,
        dtype=jnp.float32,
        page_size=PAGE_SIZE,
        kv_cache_dtype=kv_cache_dtype,
    )
    ops = table(spec)
    weights = load_decoder(ops, spec, CHECKPOINT.weights, BUCKET)
    geometry = Geometry(bucket=BUCKET, num_rows=BUCKET, page_size=PAGE_SIZE)
    pages = np.arange(BUCKET // PAGE_SIZE, dtype=np.int32)
    table_of_rows = np.broadcast_to(pages, (BUCKET, len(pages)))

    @functools.partial(jax.jit)
    def forward(weights: DecoderWeights, step: StepArrays) -> jax.Array:
        pool = ops.new_kv_pool(len(pages), float("nan"))
        logits, _ = run_decoder(ops, spec.model, weights, pool, step)
        return jax.nn.log_softmax(logits)

    found: list[np.ndarray] = []
    for text in held_out_texts():
        stream = Stream(row=0, pages=pages.tolist())
        chunk = stream.chunk(text, samples=True, num_choices=len(text))
        inputs = build_inputs([chunk], geometry)
        step = device_step(inputs, table_of_rows)
        found.append(np.asarray(forward(weights, step), np.float64)[: len(text)])
    return found


@functools.cache
def exact_logprobs() -> list[np.ndarray]:
    return logprobs_of(LogitOps, "auto")


def mean_kl(others: list[np.ndarray]) -> float:
    pairs = zip(exact_logprobs(), others, strict=True)
    return float(np.concatenate([(np.exp(p) * (p - q)).sum(axis=-1) for p, q in pairs]).mean())


def test_kv_in_int8_is_within_the_bound_of_float32_kv():
    kl = mean_kl(logprobs_of(LogitOps, "int8"))
    assert 1e-6 < kl < MOST_KL, f"{kl:.2e} nats"


def test_values_of_four_bits_are_beyond_the_bound():
    """The negative control."""
    kl = mean_kl(logprobs_of(CoarseValues, "auto"))
    assert kl > 2 * MOST_KL, f"{kl:.2e} nats"
