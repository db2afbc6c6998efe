"""The tensors of a model as values: `TensorSpec`, and what layers are made of. A layer is a tree of
named tuples, whose leaves say which tensors are held and multiplied together (`OperandSpec`).
Shapes: E embed, F MLP, Hq/Hkv heads, D head dim, X experts; a linear is [out, in]. Of recurrences:
M channels, J inputs of their convolution, Hv heads of values, Dv their size."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

# `norm` weights may be stored less 1 (`ModelConfig.norm_adds_one`); a `scale` norm never is.
# `filter`: of a depthwise convolution. `decay`: the logarithm of a rate. `sink`: scores of heads.
# `tower`: linears of image towers, `positions` their tables, and `bound` a number at which the
# input or output of one is clipped
TensorKind = Literal[
    "embedding",
    "head",
    "linear",
    "router",
    "norm",
    "scale",
    "bias",
    "filter",
    "decay",
    "sink",
    "tower",
    "positions",
    "bound",
]

_FIRST_LAYER = "model.layers.0."


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor, by its name in the Hugging Face layout."""

    name: str
    shape: tuple[int, ...]
    kind: TensorKind

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def is_in_first_layer(self) -> bool:
        return self.name.startswith(_FIRST_LAYER)

    def tensors(self) -> "tuple[TensorSpec, ...]":
        return (self,)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSpec:
    """One stored linear: its weight [out, in] and optional bias [out]."""

    name: str
    num_out: int
    num_in: int
    has_bias: bool = False
    kind: TensorKind = "linear"

    @property
    def weight(self) -> str:
        return f"{self.name}.weight"

    @property
    def bias(self) -> str | None:
        return f"{self.name}.bias" if self.has_bias else None

    @property
    def weight_spec(self) -> TensorSpec:
        return TensorSpec(name=self.weight, shape=(self.num_out, self.num_in), kind=self.kind)

    def tensors(self) -> tuple[TensorSpec, ...]:
        if self.bias is None:
            return (self.weight_spec,)
        return self.weight_spec, TensorSpec(name=self.bias, shape=(self.num_out,), kind="bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchSpec:
    """The linear of a patch's values: [E, P], or a convolution's [E, channels, height, width]."""

    weight: TensorSpec
    bias: TensorSpec | None

    def tensors(self) -> tuple[TensorSpec, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperandSpec:
    """Linears that are held in one type: those of one input, or those of all experts. Only those
    side by side may be in several formats of codes. Codes of one that `is_transposed`, whole or in
    part, are not kept: their groups are along the other axis."""

    linears: tuple[LinearSpec, ...]
    are_side_by_side: bool = False
    is_transposed: bool = False

    def tensors(self) -> tuple[TensorSpec, ...]:
        return tuple(spec for linear in self.linears for spec in linear.tensors())


Leaf = TensorSpec | LinearSpec | PatchSpec | OperandSpec
# a leaf, None for what a family does not have, or a node of these, in order of use
SpecTree: TypeAlias = "Leaf | tuple[SpecTree, ...] | None"


def tensors_of(tree: SpecTree) -> Sequence[TensorSpec]:
    """All tensors in order of use."""
    if not isinstance(tree, tuple):
        return () if tree is None else tree.tensors()
    found: list[TensorSpec] = []
    for each in tree:
        found += tensors_of(each)
    return found


def operands_of(tree: SpecTree) -> Sequence[OperandSpec]:
    """The linears that are held together; a router is always held in floats."""
    if isinstance(tree, OperandSpec):
        return (tree,)
    if isinstance(tree, LinearSpec):
        return () if tree.kind == "router" else (OperandSpec(linears=(tree,)),)
    found: list[OperandSpec] = []
    if isinstance(tree, ExpertMLPSpec):
        gate_ups = tuple(each for expert in tree.experts for each in expert.gate_up.linears)
        downs = tuple(expert.down for expert in tree.experts)
        found += OperandSpec(linears=gate_ups), OperandSpec(linears=downs)
        found += operands_of(tree.shared)
    elif isinstance(tree, tuple):
        for each in tree:
            found += operands_of(each)
    return found


class GatedMLPSpec(NamedTuple):
    """down(activation(gate(x)) * up(x))."""

    gate_up: OperandSpec  # gate and up, or one fused linear
    down: LinearSpec


class ExpertMLPSpec(NamedTuple):
    """A mixture of experts: a router and its gated MLPs, and one for all tokens if it has one."""

    router: LinearSpec  # [X, E]
    choice_bias: TensorSpec | None  # [X], of `SigmoidChoice`
    experts: tuple[GatedMLPSpec, ...]
    shared: GatedMLPSpec | None
    shared_gate: LinearSpec | None  # [1, E]


class ParallelMLPSpec(NamedTuple):
    """An MLP beside a mixture of experts, whose normed outputs are summed."""

    dense: GatedMLPSpec
    experts: ExpertMLPSpec
    dense_norm: TensorSpec  # [E], of its output, like `experts_norm`
    input_norm: TensorSpec  # [E], of what the experts read
    experts_norm: TensorSpec
    router_scale: TensorSpec  # [E]
    expert_scale: TensorSpec  # [X]


MLPSpec = GatedMLPSpec | ExpertMLPSpec | ParallelMLPSpec


class AttentionSpec(NamedTuple):
    """The tensors of attention; None for norms that the family does not have. Without keys of its
    own, it has the linear and the norm of the queries only. With a gate
    (`ModelConfig.has_attention_gate`), the linear of the queries has twice as many outputs: for
    each head its query, then the gate of its output."""

    qkv: OperandSpec  # q, k and v, or one fused linear
    norms: tuple[TensorSpec, ...] | None
    sinks: TensorSpec | None  # [Hq]
    out: LinearSpec


class LatentSpec(NamedTuple):
    """The tensors of attention over latents; L rank of the latent, R values that are rotated."""

    query: tuple[LinearSpec, ...]  # [Hq D, E], or [rank, E] and then [Hq D, rank]
    latent: LinearSpec  # [L + R, E]
    query_norm: TensorSpec | None  # [rank], between the two
    latent_norm: TensorSpec  # [L]
    keys_values: OperandSpec  # [Hq (D - R + Dv), L]: for each head, its key and then its value
    out: LinearSpec  # [E, Hq Dv]


class DeltaSpec(NamedTuple):
    """The tensors of a gated delta net."""

    mixed: LinearSpec  # [M, E]: queries, keys and values
    gate: LinearSpec  # [Hv Dv, E]
    rates: OperandSpec  # two of [Hv, E]: of the decays, and of the write strengths
    conv: TensorSpec  # [M, 1, J]
    decay: TensorSpec  # [Hv]: ln(-rate), or the rates
    decay_bias: TensorSpec  # [Hv]
    norm: TensorSpec  # [Dv]
    out: LinearSpec  # [E, Hv Dv]


class ConvSpec(NamedTuple):
    """The tensors of a gated short convolution."""

    mixed: LinearSpec  # [3 M, E]: B, C and x
    conv: TensorSpec  # [M, 1, J]
    conv_bias: TensorSpec | None  # [M]
    out: LinearSpec  # [E, M]


class ScanSpec(NamedTuple):
    """The tensors of a selective scan; `mixed` has the gate's rows, those of the convolution's
    channels, and a head's rate each."""

    mixed: LinearSpec  # [Hv Dv + M + Hv, E]
    conv: TensorSpec  # [M, 1, J]
    conv_bias: TensorSpec | None  # [M]
    decay: TensorSpec  # [Hv]: ln(-A)
    rate_bias: TensorSpec  # [Hv]
    skip: TensorSpec  # [Hv]
    norm: TensorSpec  # [Hv Dv]
    out: LinearSpec  # [E, Hv Dv]


MixerSpec = AttentionSpec | LatentSpec | DeltaSpec | ConvSpec | ScanSpec


class LayerInputSpec(NamedTuple):
    """How a layer adds its values P of each token's per-layer embedding."""

    gate: LinearSpec  # [P, E]
    out: LinearSpec  # [E, P]
    post_norm: TensorSpec


class LayerSpec(NamedTuple):
    """The tensors of one decoder layer; None for what the family does not have."""

    mixer_norm: TensorSpec | None
    mixer: MixerSpec
    mixer_post_norm: TensorSpec | None
    mlp_norm: TensorSpec | None
    mlp: MLPSpec
    mlp_post_norm: TensorSpec | None
    inputs: LayerInputSpec | None
    scale: TensorSpec | None  # [1], of the stream after the layer
