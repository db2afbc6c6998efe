"""`ExpertMLP`: the feed-forward whose router chooses among gated MLPs for each token."""

from typing import Any, NamedTuple

from cadenza.backends.xla.layers.residual import Residual
from cadenza.backends.xla.layers.weight_source import WeightSource
from cadenza.backends.xla.ops.table import Linear, OpTable
from cadenza.checkpoint.tensor_spec import ExpertMLPSpec, LayerSpec


class ExpertMLP(NamedTuple):
    """The weights of one layer's mixture: the weighted sum of the chosen experts' outputs."""

    norm: Any | None  # [E]
    router: Linear  # [X, E]
    gate_up: Linear  # [X, 2 F, E]
    down: Linear  # [X, E, F]

    @classmethod
    def load(cls, source: WeightSource, layer: LayerSpec) -> "ExpertMLP":
        mlp = layer.mlp
        assert isinstance(mlp, ExpertMLPSpec), "the layer has experts"
        assert layer.mlp_post_norm is None, "a norm after the experts is not supported"
        first = mlp.experts[0]
        gate_up = [source.operand(expert.gate_up) for expert in mlp.experts]
        down = [source.operand([expert.down]) for expert in mlp.experts]
        return cls(
            norm=source.optional_norm(layer.mlp_norm),
            router=source.linear(mlp.router),
            gate_up=source.ops.load_experts(gate_up, source.format_of(first.gate_up)),
            down=source.ops.load_experts(down, source.format_of([first.down])),
        )

    def add(self, ops: OpTable, stream: Residual) -> Residual:
        """The stream [N, E] with the mixture's output."""
        x, count = stream.x, stream.count
        normed = stream.normed(ops, self.norm)
        choice = ops.route_experts(normed, self.router, count)
        gated = ops.grouped_gated_linear(normed, self.gate_up, choice, count)
        return Residual(ops.grouped_linear(gated, self.down, choice, x, count), count)
