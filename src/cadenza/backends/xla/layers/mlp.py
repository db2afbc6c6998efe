"""`GatedMLP`: the feed-forward down(activation(gate(x)) * up(x))."""

from typing import Any, NamedTuple

from cadenza.backends.xla.layers.residual import Residual
from cadenza.backends.xla.layers.weight_source import WeightSource
from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.ops.table import Linear
from cadenza.checkpoint.tensor_spec import GatedMLPSpec, LayerSpec


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
        """The stream [N, E] with the MLP's output."""
        gated = ops.gated_linear(stream.normed(ops, self.norm), self.gate_up, stream.count)
        return stream.plus(ops, gated, self.down, self.post_norm)
