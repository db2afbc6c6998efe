"""The tensors of a model as values: `TensorSpec`, and what layers are made of.

Owns which linears are held and multiplied together (`operands`). Names are those of the Hugging
Face layout; `declaration` gives a model's.

Shapes: E embed, F MLP, Hq/Hkv heads, D head dim, X experts; a linear is [out, in]. Of recurrences:
M channels, J inputs of their convolution, Hv heads of values, Dv their size.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

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
"""`norm` weights may be stored less 1 (`ModelConfig.norm_adds_one`); a `scale` norm never is.
`filter`: of a depthwise convolution. `decay`: the logarithm of a rate. `sink`: scores of heads.
`tower`: linears of image towers, `positions` their tables, and `bound` a number at which the input
or output of one is clipped."""

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

    def tensors(self) -> Iterator[TensorSpec]:
        yield self.weight_spec
        if self.bias is not None:
            yield TensorSpec(name=self.bias, shape=(self.num_out,), kind="bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMLPSpec:
    """down(activation(gate(x)) * up(x))."""

    gate_up: tuple[LinearSpec, ...]  # gate and up, or one fused linear
    down: LinearSpec

    def tensors(self) -> Iterator[TensorSpec]:
        for linear in (*self.gate_up, self.down):
            yield from linear.tensors()

    def operands(self) -> Iterator["OperandSpec"]:
        yield OperandSpec(linears=self.gate_up)
        yield OperandSpec(linears=(self.down,))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMLPSpec:
    """A mixture of experts: a router and its gated MLPs, and one for all tokens if it has one."""

    router: LinearSpec  # [X, E]
    experts: tuple[GatedMLPSpec, ...]
    shared: GatedMLPSpec | None = None
    shared_gate: LinearSpec | None = None  # [1, E]
    choice_bias: TensorSpec | None = None  # [X], of `SigmoidChoice`

    def tensors(self) -> Iterator[TensorSpec]:
        yield from self.router.tensors()
        yield from filter(None, [self.choice_bias])
        for expert in self.experts:
            yield from expert.tensors()
        if self.shared is not None:
            yield from self.shared.tensors()
        if self.shared_gate is not None:
            yield from self.shared_gate.tensors()

    def operands(self) -> Iterator["OperandSpec"]:
        yield OperandSpec(linears=tuple(each for expert in self.experts for each in expert.gate_up))
        yield OperandSpec(linears=tuple(expert.down for expert in self.experts))
        if self.shared is not None:
            yield from self.shared.operands()


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelMLPSpec:
    """An MLP beside a mixture of experts, whose normed outputs are summed."""

    dense: GatedMLPSpec
    dense_norm: TensorSpec  # [E], of its output, like `experts_norm`
    experts: ExpertMLPSpec
    input_norm: TensorSpec  # [E], of what the experts read
    experts_norm: TensorSpec
    router_scale: TensorSpec  # [E]
    expert_scale: TensorSpec  # [X]

    def tensors(self) -> Iterator[TensorSpec]:
        yield from self.dense.tensors()
        yield from self.experts.tensors()
        yield from (self.dense_norm, self.input_norm, self.experts_norm)
        yield from (self.router_scale, self.expert_scale)

    def operands(self) -> Iterator["OperandSpec"]:
        yield from self.dense.operands()
        yield from self.experts.operands()


MLPSpec = GatedMLPSpec | ExpertMLPSpec | ParallelMLPSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """The tensors of attention; None for norms that the family does not have.

    Without keys of its own, it has the linear and the norm of the queries only.

    With `has_gate`, the linear of the queries has twice as many outputs: for each head its query,
    then the gate of its output.
    """

    qkv: tuple[LinearSpec, ...]  # q, k and v, or one fused linear
    norms: tuple[TensorSpec, ...] | None
    out: LinearSpec
    has_gate: bool = False
    sinks: TensorSpec | None = None  # [Hq]

    def tensors(self) -> Iterator[TensorSpec]:
        """All tensors in order of use."""
        for linear in self.qkv:
            yield from linear.tensors()
        yield from self.norms or ()
        yield from filter(None, [self.sinks])
        yield from self.out.tensors()

    def operands(self) -> Iterator["OperandSpec"]:
        yield OperandSpec(linears=self.qkv, are_side_by_side=True)
        yield OperandSpec(linears=(self.out,))


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """The tensors of attention over latents; L rank of the latent, R values that are rotated."""

    query: tuple[LinearSpec, ...]  # [Hq D, E], or [rank, E] and then [Hq D, rank]
    query_norm: TensorSpec | None  # [rank], between the two
    latent: LinearSpec  # [L + R, E]
    latent_norm: TensorSpec  # [L]
    keys_values: LinearSpec  # [Hq (D - R + Dv), L]: for each head, its key and then its value
    out: LinearSpec  # [E, Hq Dv]

    def tensors(self) -> Iterator[TensorSpec]:
        """All tensors in order of use."""
        for linear in (*self.query, self.latent):
            yield from linear.tensors()
        yield from filter(None, [self.query_norm, self.latent_norm])
        for linear in (self.keys_values, self.out):
            yield from linear.tensors()

    def operands(self) -> Iterator["OperandSpec"]:
        for linear in (*self.query, self.latent, self.out):
            yield OperandSpec(linears=(linear,))
        yield OperandSpec(linears=(self.keys_values,), is_transposed=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSpec:
    """The tensors of a gated delta net."""

    mixed: LinearSpec  # [M, E]: queries, keys and values
    gate: LinearSpec  # [Hv Dv, E]
    rates: tuple[LinearSpec, LinearSpec]  # [Hv, E] each: of the decays, and of the write strengths
    conv: TensorSpec  # [M, 1, J]
    decay: TensorSpec  # [Hv]: ln(-rate), or the rates
    decay_bias: TensorSpec  # [Hv]
    norm: TensorSpec  # [Dv]
    out: LinearSpec  # [E, Hv Dv]

    def tensors(self) -> Iterator[TensorSpec]:
        """All tensors in order of use."""
        for linear in (self.mixed, self.gate, *self.rates):
            yield from linear.tensors()
        yield from (self.conv, self.decay, self.decay_bias, self.norm)
        yield from self.out.tensors()

    def operands(self) -> Iterator["OperandSpec"]:
        for linears in ((self.mixed,), (self.gate,), self.rates, (self.out,)):
            yield OperandSpec(linears=linears)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputSpec:
    """How a layer adds its values P of each token's per-layer embedding."""

    gate: LinearSpec  # [P, E]
    out: LinearSpec  # [E, P]
    post_norm: TensorSpec

    def tensors(self) -> Iterator[TensorSpec]:
        yield from self.gate.tensors()
        yield from self.out.tensors()
        yield self.post_norm

    def operands(self) -> Iterator["OperandSpec"]:
        for linear in (self.gate, self.out):
            yield OperandSpec(linears=(linear,))


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvSpec:
    """The tensors of a gated short convolution."""

    mixed: LinearSpec  # [3 M, E]: B, C and x
    conv: TensorSpec  # [M, 1, J]
    conv_bias: TensorSpec | None  # [M]
    out: LinearSpec  # [E, M]

    def tensors(self) -> Iterator[TensorSpec]:
        """All tensors in order of use."""
        yield from self.mixed.tensors()
        yield from filter(None, [self.conv, self.conv_bias])
        yield from self.out.tensors()

    def operands(self) -> Iterator["OperandSpec"]:
        for linear in (self.mixed, self.out):
            yield OperandSpec(linears=(linear,))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanSpec:
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

    def tensors(self) -> Iterator[TensorSpec]:
        """All tensors in order of use."""
        yield from self.mixed.tensors()
        yield from filter(None, [self.conv, self.conv_bias])
        yield from (self.decay, self.rate_bias, self.skip, self.norm)
        yield from self.out.tensors()

    def operands(self) -> Iterator["OperandSpec"]:
        for linear in (self.mixed, self.out):
            yield OperandSpec(linears=(linear,))


MixerSpec = AttentionSpec | LatentSpec | DeltaSpec | ConvSpec | ScanSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """The tensors of one decoder layer; None for what the family does not have."""

    mixer_norm: TensorSpec | None
    mixer: MixerSpec
    mixer_post_norm: TensorSpec | None
    mlp_norm: TensorSpec | None
    mlp: MLPSpec
    mlp_post_norm: TensorSpec | None
    inputs: LayerInputSpec | None = None
    scale: TensorSpec | None = None  # [1], of the stream behind the layer

    def tensors(self) -> Iterator[TensorSpec]:
        """All tensors in order of use."""
        yield from filter(None, [self.mixer_norm])
        yield from self.mixer.tensors()
        yield from filter(None, [self.mixer_post_norm, self.mlp_norm])
        yield from self.mlp.tensors()
        yield from filter(None, [self.mlp_post_norm])
        if self.inputs is not None:
            yield from self.inputs.tensors()
        yield from filter(None, [self.scale])

    def operands(self) -> Iterator["OperandSpec"]:
        """The linears that are held together."""
        yield from self.mixer.operands()
        yield from self.mlp.operands()
        if self.inputs is not None:
            yield from self.inputs.operands()


@dataclass(frozen=True, slots=True, kw_only=True)
class OperandSpec:
    """Linears that are held in one type: those of one input, or those of all experts.

    Only those side by side may be in several formats of codes. Codes of one that `is_transposed`,
    whole or in part, are not kept: their groups are along the other axis.
    """

    linears: tuple[LinearSpec, ...]
    are_side_by_side: bool = False
    is_transposed: bool = False
