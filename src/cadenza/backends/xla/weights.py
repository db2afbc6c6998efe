"""Converts a checkpoint's tensors to the decoder's weights, in the layouts of the op table.

`checkpoint.declaration` gives the tensor names and which tensors are fused into one operand. Tied
embeddings and each distinct rope are loaded once. For a norm that multiplies by 1 + weight, the 1
is added here.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from cadenza.backends.xla.decoder import (
    DecoderWeights,
    ExpertMLPWeights,
    GatedMLPWeights,
    LayerWeights,
)
from cadenza.backends.xla.ops.table import DecoderSpec, Linear, OpTable
from cadenza.checkpoint.declaration import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    ExpertMLPSpec,
    GatedMLPSpec,
    LinearSpec,
    TensorSpec,
    declare_layer,
)
from cadenza.checkpoint.model_config import ModelConfig
from cadenza.checkpoint.rope_factors import rope_factors
from cadenza.checkpoint.weights import Weights


def load_decoder(
    ops: OpTable, spec: DecoderSpec, weights: Weights, max_model_len: int
) -> DecoderWeights:
    """Host arrays in the op table's layouts, ready for `jax.device_put`."""
    model = spec.model
    return DecoderWeights(
        embedding=ops.load_embedding(weights[EMBEDDING]),
        layers=tuple(_load_layers(ops, model, weights)),
        final_norm=_norm(model, weights, FINAL_NORM),
        head=None if model.tie_word_embeddings else ops.load_linear([weights[HEAD]], []),
        ropes=tuple(rope_factors(rope, max_model_len) for rope in model.ropes),
    )


def _load_layers(ops: OpTable, model: ModelConfig, weights: Weights) -> Iterator[LayerWeights]:
    def norm(spec: TensorSpec | None) -> npt.NDArray[np.float32] | None:
        return None if spec is None else _norm(model, weights, spec.name)

    for index in range(model.num_layers):
        layer = declare_layer(model, index)
        yield LayerWeights(
            attention_norm=norm(layer.attention_norm),
            qkv=_linear(ops, weights, layer.qkv),
            qk_norms=None if layer.qk_norms is None else tuple(map(norm, layer.qk_norms)),
            attention_out=_linear(ops, weights, (layer.attention_out,)),
            attention_post_norm=norm(layer.attention_post_norm),
            mlp_norm=norm(layer.mlp_norm),
            mlp=_load_mlp(ops, weights, layer.mlp),
            mlp_post_norm=norm(layer.mlp_post_norm),
        )


def _load_mlp(
    ops: OpTable, weights: Weights, mlp: GatedMLPSpec | ExpertMLPSpec
) -> GatedMLPWeights | ExpertMLPWeights:
    if isinstance(mlp, GatedMLPSpec):
        return _load_gated_mlp(ops, weights, mlp)
    pairs = [tuple(linear.weight for linear in expert.gate_up) for expert in mlp.experts]
    return ExpertMLPWeights(
        router=_linear(ops, weights, (mlp.router,)),
        gate_up=ops.load_experts_gate_up([(weights[gate], weights[up]) for gate, up in pairs]),
        down=ops.load_experts_down([weights[expert.down.weight] for expert in mlp.experts]),
    )


def _load_gated_mlp(ops: OpTable, weights: Weights, mlp: GatedMLPSpec) -> GatedMLPWeights:
    gate, up = _halves([weights[linear.weight] for linear in mlp.gate_up])
    biases = _biases(weights, mlp.gate_up)
    return GatedMLPWeights(
        gate_up=ops.load_gate_up(gate, up, _halves(biases) if biases else []),
        down=_linear(ops, weights, (mlp.down,)),
    )


def _halves(parts: list[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
    """Gate and up, from two tensors or from the halves of a fused one."""
    return parts if len(parts) == 2 else list(np.split(parts[0], 2))


def _linear(ops: OpTable, weights: Weights, linears: tuple[LinearSpec, ...]) -> Linear:
    parts = [weights[linear.weight] for linear in linears]
    return ops.load_linear(parts, _biases(weights, linears))


def _biases(weights: Weights, linears: tuple[LinearSpec, ...]) -> list[npt.NDArray[Any]]:
    return [weights[linear.bias] for linear in linears if linear.bias is not None]


def _norm(model: ModelConfig, weights: Weights, name: str) -> npt.NDArray[np.float32]:
    weight = np.asarray(weights[name]).astype(np.float32)
    return weight + np.float32(1.0) if model.norm_adds_one else weight
