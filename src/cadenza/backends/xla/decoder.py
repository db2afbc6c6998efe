"""The decoder: token ids to next tokens, through the op table and nothing else.

Owns the order of the operations; knows no layout, no device and no batch policy. One definition
serves every dense family: what differs between them is in `ModelConfig` and in which weights are
present. Legend as in `ops.table`.
"""

from typing import Any, NamedTuple

import jax

from cadenza.backends.xla.ops.table import KVPool, Linear, OpTable, StepArrays
from cadenza.checkpoint.model_config import ModelConfig


class LayerWeights(NamedTuple):
    """One layer; `qk_norms` is None where the family has none."""

    attention_norm: Any  # [E]
    qkv: Linear  # [(Hq + 2 Hkv) D, E]
    qk_norms: tuple[Any, Any] | None  # [D] each
    attention_out: Linear  # [E, Hq D]
    mlp_norm: Any  # [E]
    gate_up: Linear  # [2 F, E]
    down: Linear  # [E, F]


class DecoderWeights(NamedTuple):
    """`head` is None where it is the embedding, which is stored once."""

    embedding: Linear  # [V, E]
    layers: tuple[LayerWeights, ...]
    final_norm: Any  # [E]
    head: Linear | None  # [V, E]
    rope: Any  # [positions, rotary_dim]


def run_decoder(
    ops: OpTable,
    model: ModelConfig,
    weights: DecoderWeights,
    pools: tuple[KVPool, ...],
    step: StepArrays,
) -> tuple[jax.Array, tuple[KVPool, ...]]:
    """One step: the int32 result [L, C] of the logit rows, and the pools with this step's KV."""
    count = step.num_tokens
    embed, qkv_size = model.hidden_size, model.query_size + 2 * model.kv_size
    x = ops.embed(weights.embedding, step)  # [T, E]
    new_pools: list[KVPool] = []
    for layer, pool in zip(weights.layers, pools, strict=True):
        qkv = ops.linear(ops.rms_norm(x, layer.attention_norm, count), layer.qkv, qkv_size, count)
        attended, new_pool = ops.rope_append_attend(qkv, pool, layer.qk_norms, weights.rope, step)
        new_pools.append(new_pool)
        x = ops.linear(attended, layer.attention_out, embed, count, residual=x)
        gated = ops.gated_linear(ops.rms_norm(x, layer.mlp_norm, count), layer.gate_up, count)
        x = ops.linear(gated, layer.down, embed, count, residual=x)
    normed = ops.rms_norm_logit_rows(x, weights.final_norm, step)  # [L, E]
    head = weights.embedding if weights.head is None else weights.head
    return ops.next_tokens(normed, head, step), tuple(new_pools)
