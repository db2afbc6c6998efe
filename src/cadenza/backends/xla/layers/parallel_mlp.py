"""`ParallelMLP`: a gated MLP beside a mixture of experts, whose normed outputs are summed."""

from typing import Any, NamedTuple

import numpy as np

from cadenza.backends.xla.layers.experts import load_experts
from cadenza.backends.xla.layers.residual import Residual
from cadenza.backends.xla.layers.weight_source import WeightSource
from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.ops.table import Linear
from cadenza.checkpoint.tensor_spec import LayerSpec, ParallelMLPSpec


class ParallelMLP(NamedTuple):
    """The weights of one layer's MLP and of its experts.

    `router_norm` is the router's scale over sqrt(E): it reads the normed stream times this.
    """

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
        """The stream [N, E] with the sum of both outputs, normed once more."""
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
