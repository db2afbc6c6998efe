"""Converts a checkpoint's tensors to the decoder's weights, in the layouts of the op table.

`checkpoint.declaration` gives the tensor names and which tensors are fused into one operand. Tied
embeddings and each distinct rope are loaded once. For a norm that multiplies by 1 + weight, the 1
is added here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cadenza.backends.xla.decoder import (
    DecoderWeights,
    ExpertMLPWeights,
    GatedMLPWeights,
    HiddenInputWeights,
    LayerWeights,
)
from cadenza.backends.xla.ops.table import DecoderSpec, Linear, OpTable
from cadenza.checkpoint.declaration import (
    EMBEDDING,
    EMBEDDING_NORM,
    FINAL_NORM,
    HEAD,
    HIDDEN_NORM,
    ExpertMLPSpec,
    GatedMLPSpec,
    LinearSpec,
    TensorSpec,
    declare_embedding,
    declare_head,
    declare_input_proj,
    declare_layer,
)
from cadenza.checkpoint.float8_weight import Float8Weight
from cadenza.checkpoint.model_config import ModelConfig
from cadenza.checkpoint.quantised_weight import HostWeight, have_one_order
from cadenza.checkpoint.rope_factors import rope_factors
from cadenza.checkpoint.weight_format import WeightFormat
from cadenza.checkpoint.weights import Weights
from cadenza.errors import CheckpointError


def load_decoder(
    ops: OpTable, spec: DecoderSpec, weights: Weights, max_model_len: int
) -> DecoderWeights:
    """Host arrays in the op table's layouts, ready for `jax.device_put`."""
    model = spec.model
    embedding, head = declare_embedding(model), declare_head(model)
    return _load_rest(
        _Source(ops, spec, weights),
        max_model_len,
        embedding=ops.load_embedding(weights[EMBEDDING], spec.format_of(embedding)),
        head=None
        if model.tie_word_embeddings
        else ops.load_linear([weights[HEAD]], [], spec.format_of(head)),
    )


def load_head(
    ops: OpTable, spec: DecoderSpec, weights: Weights, max_model_len: int, target: DecoderWeights
) -> DecoderWeights:
    """As `load_decoder`, of a model that reads the hidden states of `target`, whose embedding and
    head it shares."""
    source = _Source(ops, spec, weights)
    return _load_rest(source, max_model_len, embedding=target.embedding, head=target.head)


def _load_rest(
    source: "_Source", max_model_len: int, *, embedding: Linear, head: Linear | None
) -> DecoderWeights:
    model = source.spec.model
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(_load_layers(source)),
        final_norm=_norm(model, source.weights, FINAL_NORM),
        head=head,
        ropes=tuple(rope_factors(rope, max_model_len) for rope in model.ropes),
        inputs=_load_inputs(source) if model.reads_hidden else None,
    )


@dataclass(frozen=True, slots=True)
class _Source:
    """The tensors, and the op table that they are loaded for."""

    ops: OpTable
    spec: DecoderSpec
    weights: Weights

    def format_of(self, linears: Sequence[LinearSpec]) -> WeightFormat:
        """The format of linears that are loaded together."""
        return self.spec.format_of(linears[0].weight_spec)

    def operand(self, linears: Sequence[LinearSpec]) -> tuple[HostWeight, ...]:
        """The weights of linears that are multiplied as one.

        Raises CheckpointError if their codes have the inputs in different orders.
        """
        parts = tuple(self.weights[linear.weight] for linear in linears)
        coded = [part for part in parts if not isinstance(part, np.ndarray | Float8Weight)]
        if len(coded) == len(parts) and not have_one_order(coded):
            names = ", ".join(linear.name for linear in linears)
            raise CheckpointError(
                f"the groups (g_idx) of {names} have the inputs in different orders, but these "
                f"linears are computed as one; use a checkpoint with desc_act false"
            )
        return parts


def _load_inputs(source: _Source) -> HiddenInputWeights:
    """The two halves of the input's linear apart: each has a norm of its own."""
    model, weights = source.spec.model, source.weights
    linear, embed = declare_input_proj(model), model.hidden_size
    both, format = weights[linear.weight], source.format_of((linear,))

    def half(start: int) -> Linear:
        part = np.ascontiguousarray(both[:, start : start + embed])
        return source.ops.load_linear([part], [], format)

    layout = model.mtp_layout
    assert layout is not None, "a model that reads hidden states is an MTP layer"
    of_hidden, of_embedding = (0, embed) if layout.puts_hidden_first else (embed, 0)
    return HiddenInputWeights(
        hidden_norm=_norm(model, weights, HIDDEN_NORM),
        embedding_norm=_norm(model, weights, EMBEDDING_NORM),
        of_hidden=half(of_hidden),
        of_embedding=half(of_embedding),
    )


def _load_layers(source: _Source) -> Iterator[LayerWeights]:
    model, weights = source.spec.model, source.weights

    def norm(spec: TensorSpec | None) -> npt.NDArray[np.float32] | None:
        return None if spec is None else _norm(model, weights, spec.name)

    for index in range(model.num_layers):
        layer = declare_layer(model, index)
        yield LayerWeights(
            attention_norm=norm(layer.attention_norm),
            qkv=_linear(source, layer.qkv),
            qk_norms=None if layer.qk_norms is None else tuple(map(norm, layer.qk_norms)),
            attention_out=_linear(source, (layer.attention_out,)),
            attention_post_norm=norm(layer.attention_post_norm),
            mlp_norm=norm(layer.mlp_norm),
            mlp=_load_mlp(source, layer.mlp),
            mlp_post_norm=norm(layer.mlp_post_norm),
        )


def _load_mlp(
    source: _Source, mlp: GatedMLPSpec | ExpertMLPSpec
) -> GatedMLPWeights | ExpertMLPWeights:
    if isinstance(mlp, GatedMLPSpec):
        return _load_gated_mlp(source, mlp)
    ops, weights = source.ops, source.weights
    gate_up = [*_pairs(source, mlp)]
    down = [weights[expert.down.weight] for expert in mlp.experts]
    return ExpertMLPWeights(
        router=_linear(source, (mlp.router,)),
        gate_up=ops.load_experts_gate_up(gate_up, source.format_of(mlp.experts[0].gate_up)),
        down=ops.load_experts_down(down, source.format_of([mlp.experts[0].down])),
    )


def _pairs(source: _Source, mlp: ExpertMLPSpec) -> Iterator[tuple[HostWeight, HostWeight]]:
    """Gate and up of each expert."""
    for expert in mlp.experts:
        gate, up = source.operand(expert.gate_up)
        yield gate, up


def _load_gated_mlp(source: _Source, mlp: GatedMLPSpec) -> GatedMLPWeights:
    weights, format = source.weights, source.format_of(mlp.gate_up)
    gate, up = _halves(source.operand(mlp.gate_up))
    biases = _biases(weights, mlp.gate_up)
    if len(biases) == 1:
        biases = np.split(biases[0], 2)
    return GatedMLPWeights(
        gate_up=source.ops.load_gate_up(gate, up, biases, format),
        down=_linear(source, (mlp.down,)),
    )


def _halves(parts: Sequence[HostWeight]) -> Sequence[HostWeight]:
    """Gate and up, from two tensors or from the halves of a fused one."""
    if len(parts) == 2:
        return parts
    (fused,) = parts
    half = len(fused) // 2
    if isinstance(fused, np.ndarray):
        return fused[:half], fused[half:]
    return fused.rows(0, half), fused.rows(half, len(fused))


def _linear(source: _Source, linears: tuple[LinearSpec, ...]) -> Linear:
    biases = _biases(source.weights, linears)
    return source.ops.load_linear(source.operand(linears), biases, source.format_of(linears))


def _biases(weights: Weights, linears: tuple[LinearSpec, ...]) -> list[npt.NDArray[Any]]:
    return [weights[linear.bias] for linear in linears if linear.bias is not None]


def _norm(model: ModelConfig, weights: Weights, name: str) -> npt.NDArray[np.float32]:
    weight = np.asarray(weights[name]).astype(np.float32)
    return weight + np.float32(1.0) if model.norm_adds_one else weight
