"""A checkpoint's tensors become the decoder's weights, each loaded into its op's own layout.

Knows which stored tensors fuse into one operand; the names themselves are `checkpoint`'s.
Tied embeddings are loaded once.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from cadenza.backends.xla.decoder import DecoderWeights, LayerWeights
from cadenza.backends.xla.ops.table import DecoderSpec, Linear, OpTable
from cadenza.backends.xla.rope import rope_factors
from cadenza.checkpoint.declaration import EMBEDDING, FINAL_NORM, HEAD
from cadenza.checkpoint.model_config import ModelConfig
from cadenza.checkpoint.weights import Weights


def load_decoder(
    ops: OpTable, spec: DecoderSpec, weights: Weights, max_model_len: int
) -> DecoderWeights:
    """Host arrays in the op table's layouts, ready to be put on a device."""
    model = spec.model
    return DecoderWeights(
        embedding=ops.load_embedding(weights[EMBEDDING]),
        layers=tuple(_load_layers(ops, model, weights)),
        final_norm=_norm(weights, FINAL_NORM),
        head=None if model.tie_word_embeddings else ops.load_linear([weights[HEAD]], []),
        rope=rope_factors(model.rope, max_model_len),
    )


def _load_layers(ops: OpTable, model: ModelConfig, weights: Weights) -> Iterator[LayerWeights]:
    for index in range(model.num_layers):
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        gate_up = ["gate_proj", "up_proj"]
        yield LayerWeights(
            attention_norm=_norm(weights, f"{prefix}.input_layernorm.weight"),
            qkv=_linear(ops, weights, attention, ["q_proj", "k_proj", "v_proj"]),
            qk_norms=(
                (
                    _norm(weights, f"{attention}.q_norm.weight"),
                    _norm(weights, f"{attention}.k_norm.weight"),
                )
                if model.has_qk_norm
                else None
            ),
            attention_out=_linear(ops, weights, attention, ["o_proj"]),
            mlp_norm=_norm(weights, f"{prefix}.post_attention_layernorm.weight"),
            gate_up=ops.load_gate_up(
                weights[f"{mlp}.gate_proj.weight"],
                weights[f"{mlp}.up_proj.weight"],
                _biases(weights, mlp, gate_up),
            ),
            down=_linear(ops, weights, mlp, ["down_proj"]),
        )


def _linear(ops: OpTable, weights: Weights, prefix: str, names: list[str]) -> Linear:
    parts = [weights[f"{prefix}.{name}.weight"] for name in names]
    return ops.load_linear(parts, _biases(weights, prefix, names))


def _biases(weights: Weights, prefix: str, names: list[str]) -> list[npt.NDArray[Any]]:
    found = [f"{prefix}.{name}.bias" for name in names]
    return [weights[name] for name in found if name in weights]


def _norm(weights: Weights, name: str) -> npt.NDArray[np.float32]:
    return np.asarray(weights[name]).astype(np.float32)
