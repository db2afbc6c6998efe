"""`ExpertMLP`: the feed-forward whose router chooses among gated MLPs for each token."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from cadenza.backends.xla.layers.residual import Residual
from cadenza.backends.xla.layers.weight_source import WeightSource
from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.ops.table import Linear
from cadenza.checkpoint.tensor_spec import ExpertMLPSpec, LayerSpec, LinearSpec


class SharedMLP(NamedTuple):
    """The MLP for all tokens beside the chosen experts.

    One with a gate is a mixture of a single expert, whose weight is the gate's sigmoid.
    """

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
        """The stream [N, E] with its output for `normed` [N, E]."""
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
        """The stream [N, E] with the mixture's output."""
        x, count = stream.x, stream.count
        normed = stream.normed(ops, self.norm)
        choice = ops.route_experts(normed, self.router, count, None, self.choice_bias)
        gated = ops.grouped_gated_linear(normed, self.gate_up, choice, count)
        stream = Residual(ops.grouped_linear(gated, self.down, choice, x, count), count)
        return stream if self.shared is None else self.shared.add(ops, normed, stream)


def load_experts(source: WeightSource, mlp: ExpertMLPSpec) -> tuple[Linear, Linear]:
    """Gate and up of all experts [X, 2 F, E], and their down [X, E, F]."""

    def stacked(experts: Sequence[Sequence[LinearSpec]]) -> Linear:
        return source.ops.load_experts(
            [source.operand(linears) for linears in experts],
            source.format_of(experts[0]),
            [source.biases(linears) for linears in experts],
        )

    gate_up = stacked([expert.gate_up.linears for expert in mlp.experts])
    return gate_up, stacked([[expert.down] for expert in mlp.experts])
