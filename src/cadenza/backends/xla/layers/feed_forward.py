"""The feed-forwards: `GatedMLP`, `ExpertMLP`, whose router chooses among gated MLPs for each token,
and `ParallelMLP`, both beside each other with their normed outputs summed."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from cadenza.backends.xla.layers.residual import Residual
from cadenza.backends.xla.layers.weight_source import WeightSource
from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.ops.table import Linear
from cadenza.weights.tensor_spec import (
    ExpertMLPSpec,
    GatedMLPSpec,
    LayerSpec,
    LinearSpec,
    ParallelMLPSpec,
)


class GatedMLP(NamedTuple):
    """The weights of one layer's MLP; a norm that the model family does not have is None."""

    norm: Any | None  # [E]
    gate_up: Linear  # [2 F, E]
    down: Linear  # [E, F]
    post_norm: Any | None  # [E]

    @classmethod
    def load(cls, source: WeightSource, layer: LayerSpec) -> "GatedMLP":
        mlp = layer.mlp
        assert isinstance(mlp, GatedMLPSpec), "the layer has a gated MLP"
        return cls(
            norm=source.leaf(layer.mlp_norm),
            gate_up=source.gate_up(mlp.gate_up),
            down=source.linear(mlp.down),
            post_norm=source.post_norm(layer),
        )

    def add(self, ops: OpTable, stream: Residual) -> Residual:
        gated = ops.gated_linear(stream.normed(ops, self.norm), self.gate_up, stream.count)
        return stream.plus(ops, gated, self.down, self.post_norm)


class SharedMLP(NamedTuple):
    """The MLP for all tokens beside the chosen experts. One with a gate is a mixture of a single
    expert, whose weight is the gate's sigmoid."""

    gate: Linear | None  # [1, E]
    gate_up: Linear  # [2 F, E], or [1, 2 F, E] with a gate
    down: Linear  # [E, F], or [1, E, F]

    @classmethod
    def load(cls, source: WeightSource, mlp: ExpertMLPSpec) -> "SharedMLP | None":
        spec, ops = mlp.shared, source.ops
        if spec is None:
            return None
        if mlp.shared_gate is None:
            return source.load(cls, spec, gate=None, gate_up=source.gate_up(spec.gate_up))
        parts, linears = source.gate_and_up(spec.gate_up), spec.gate_up.linears
        return cls(
            gate=source.linear(mlp.shared_gate),
            gate_up=ops.load_experts([parts], source.format_of(linears)),
            down=ops.load_experts([source.operand([spec.down])], source.format_of([spec.down])),
        )

    def add(self, ops: OpTable, normed: jax.Array, stream: Residual) -> Residual:
        x, count = stream.x, stream.count
        if self.gate is None:
            gated = ops.gated_linear(normed, self.gate_up, count)
            return Residual(ops.linear(gated, self.down, count, residual=x), count)
        choice = ops.gate_expert(normed, self.gate, count)
        gated = ops.grouped_gated_linear(normed, self.gate_up, choice, count)
        return Residual(ops.grouped_linear(gated, self.down, choice, x, count), count)


class ExpertMLP(NamedTuple):
    """The weights of one layer's mixture: the weighted sum of the chosen experts' outputs."""

    norm: Any | None  # [E]
    router: Linear  # [X, E]
    gate_up: Linear  # [X, 2 F, E]
    down: Linear  # [X, E, F]
    choice_bias: Any | None  # [X]
    shared: SharedMLP | None

    @classmethod
    def load(cls, source: WeightSource, layer: LayerSpec) -> "ExpertMLP":
        mlp = layer.mlp
        assert isinstance(mlp, ExpertMLPSpec), "the layer has experts"
        assert layer.mlp_post_norm is None, "a norm after the experts is not supported"
        gate_up, down = load_experts(source, mlp)
        return source.load(
            cls,
            mlp,
            norm=source.leaf(layer.mlp_norm),
            router=source.linear(mlp.router),
            gate_up=gate_up,
            down=down,
            shared=SharedMLP.load(source, mlp),
        )

    def add(self, ops: OpTable, stream: Residual) -> Residual:
        x, count = stream.x, stream.count
        normed = stream.normed(ops, self.norm)
        choice = ops.route_experts(normed, self.router, count, None, self.choice_bias)
        gated = ops.grouped_gated_linear(normed, self.gate_up, choice, count)
        stream = Residual(ops.grouped_linear(gated, self.down, choice, x, count), count)
        return stream if self.shared is None else self.shared.add(ops, normed, stream)


def load_experts(source: WeightSource, mlp: ExpertMLPSpec) -> tuple[Linear, Linear]:
    def stacked(experts: Sequence[Sequence[LinearSpec]]) -> Linear:
        return source.ops.load_experts(
            [source.operand(linears) for linears in experts],
            source.format_of(experts[0]),
            [source.biases(linears) for linears in experts],
        )

    gate_up = stacked([expert.gate_up.linears for expert in mlp.experts])
    return gate_up, stacked([[expert.down] for expert in mlp.experts])


class ParallelMLP(NamedTuple):
    """The weights of one layer's MLP and of its experts. `router_norm` is the router's scale over
    sqrt(E): it reads the normed stream times this."""

    norm: Any  # [E], like all norms
    gate_up: Linear  # [2 F, E]
    down: Linear  # [E, F]
    dense_norm: Any
    router_norm: Any
    router: Linear  # [X, E]
    factors: Any  # [X]
    experts_input_norm: Any
    experts_gate_up: Linear  # [X, 2 F, E]
    experts_down: Linear  # [X, E, F]
    experts_norm: Any
    post_norm: Any

    @classmethod
    def load(cls, source: WeightSource, layer: LayerSpec) -> "ParallelMLP":
        mlp = layer.mlp
        assert isinstance(mlp, ParallelMLPSpec), "the layer has experts beside its MLP"
        gate_up, down = load_experts(source, mlp.experts)
        scale = source.scale(mlp.router_scale)
        return source.load(
            cls,
            mlp,
            norm=source.leaf(layer.mlp_norm),
            gate_up=source.gate_up(mlp.dense.gate_up),
            down=source.linear(mlp.dense.down),
            router_norm=scale * np.float32(len(scale) ** -0.5),
            router=source.linear(mlp.experts.router),
            factors=source.scale(mlp.expert_scale),
            experts_input_norm=source.leaf(mlp.input_norm),
            experts_gate_up=gate_up,
            experts_down=down,
            post_norm=source.post_norm(layer),
        )

    def add(self, ops: OpTable, stream: Residual) -> Residual:
        count = stream.count
        choice = ops.route_experts(
            stream.normed(ops, self.router_norm), self.router, count, self.factors
        )
        normed = stream.normed(ops, self.experts_input_norm)
        gated = ops.grouped_gated_linear(normed, self.experts_gate_up, choice, count)
        mixture = ops.grouped_linear(gated, self.experts_down, choice, None, count)
        total = ops.norm_add(mixture, self.experts_norm, None, count)
        gated = ops.gated_linear(stream.normed(ops, self.norm), self.gate_up, count)
        total = ops.linear_norm_add(gated, self.down, self.dense_norm, total, count)
        return Residual(ops.norm_add(total, self.post_norm, stream.x, count), count)
