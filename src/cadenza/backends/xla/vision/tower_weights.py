"""Loads the weights of a tower: the declared tree with arrays as leaves. What a family stores in
another order than the stages compute in is put into that order here. Legend as in `stages`."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cadenza.backends.xla.layers.weight_source import WeightSource, rows_of
from cadenza.backends.xla.ops.table import Linear
from cadenza.models.tower_spec import (
    BOUNDS,
    LayerOutput,
    Norm,
    Projector,
    ProjectorSpec,
    Tower,
    TowerLayer,
    TowerLayerSpec,
    declare_tower,
)
from cadenza.vision.tower_config import ProjectorConfig, VisionConfig
from cadenza.weights.tensor_spec import LinearSpec, OperandSpec, TensorSpec


class ClippedLinear(NamedTuple):
    """A linear whose input and output are clamped."""

    linear: Linear
    bounds: Any  # [4], float32: least and largest input, least and largest output


@dataclass(frozen=True, slots=True)
class TowerSource:
    """The tensors of a model, and the op table that its tower is loaded for."""

    source: WeightSource
    vision: VisionConfig

    def load(self) -> Tower:
        """Host arrays, ready for `jax.device_put`; the table of positions stays on the host."""
        declared = declare_tower(self.vision)
        projectors = zip(self.vision.tower.projectors, declared.projectors, strict=True)
        return Tower(
            entry=self.source.leaf(declared.entry),
            table=None,
            layers=tuple(map(self._layer, declared.layers)),
            projectors=tuple(self._projector(*each) for each in projectors),
        )

    def table(self) -> npt.NDArray[Any] | None:
        spec = declare_tower(self.vision).table
        if spec is None:
            return None
        stored = self._stored(spec.name)
        table = self.vision.tower.table
        if table is not None and table.axes_are_inner:
            stored = stored.swapaxes(0, 1)
        return stored.reshape(-1, stored.shape[-1])

    def _layer(self, spec: TowerLayerSpec) -> TowerLayer:
        head_norms, ups = self._head_norms(spec.head_norms), spec.up.linears
        if spec.bounds:
            return self._clipped_layer(spec, head_norms)
        up = self.source.gate_up(spec.up) if len(ups) > 1 else self.source.linear(*ups)
        return self.source.load(
            TowerLayer, spec, qkv=self._qkv(spec.qkv), head_norms=head_norms, up=up
        )

    def _clipped_layer(self, spec: TowerLayerSpec, head_norms: Any) -> TowerLayer:
        # Linears with bounds of their own are not computed together.
        load, (query, key, value) = self.source.linear, spec.qkv.linears
        ends = spec.attention_out, spec.mlp_out
        turned = [self._qkv(OperandSpec(linears=(each,))) for each in (query, key)]
        linears = [*turned, load(value), load(ends[0].linear)]
        linears += [load(each) for each in (*spec.up.linears, ends[1].linear)]
        values = np.array([self._stored(each.name) for each in spec.bounds], np.float32)
        pairs = zip(linears, values.reshape(-1, len(BOUNDS)), strict=True)
        *qkv, out, gate, up, down = (ClippedLinear(*pair) for pair in pairs)
        return self.source.load(
            TowerLayer,
            spec,
            qkv=tuple(qkv),
            head_norms=head_norms,
            attention_out=LayerOutput(out, self.source.leaf(ends[0].norm)),
            up=(gate, up),
            mlp_out=LayerOutput(down, self.source.leaf(ends[1].norm)),
            bounds=(),
        )

    @property
    def _halves_are_apart(self) -> bool:
        rope = self.vision.tower.rope
        return rope is not None and rope.halves_are_apart

    def _qkv(self, spec: OperandSpec) -> Linear:
        if not self._halves_are_apart:
            return self.source.linear(*spec.linears)
        tower = self.vision.tower
        assert tower.names.qkv is None, "queries, keys and values are stored apart"
        parts, biases = self.source.operand(spec.linears), self.source.biases(spec.linears)
        pieces = _head_quarters(tower.num_heads, tower.head_dim)
        ordered = [rows_of(part, *piece) for part in parts[:2] for piece in pieces]
        of_biases = [bias[slice(*piece)] for bias in biases[:2] for piece in pieces]
        return self.source.ops.load_linear([*ordered, *parts[2:]], [*of_biases, *biases[2:]])

    def _head_norms(self, specs: tuple[TensorSpec, TensorSpec] | None) -> tuple[Any, Any] | None:
        if specs is None or not self._halves_are_apart:
            return self.source.leaf(specs)
        pieces = _head_quarters(1, self.vision.tower.head_dim)
        order = np.concatenate([np.arange(*piece) for piece in pieces])
        query, key = self.source.leaf(specs)
        return query[order], key[order]

    def _projector(self, config: ProjectorConfig, spec: ProjectorSpec) -> Projector:
        norm = self.source.leaf(spec.norm)
        if norm is None and config.norm is not None:
            width = self.vision.tower.hidden_size
            size = config.num_in(width) if config.norm_is_behind else width
            norm = Norm(np.ones(size, np.float32), None)
        if norm is not None and config.norm_adds_one:
            norm = norm._replace(weight=norm.weight + np.float32(1.0))
        first, *others = spec.linears
        linears = self._joining(config, first), *map(self.source.linear, others)
        return self.source.load(Projector, spec, norm=norm, linears=linears)

    def _joining(self, config: ProjectorConfig, spec: LinearSpec) -> Linear:
        # It may be stored as [in, out], or with its columns in another order.
        if config.is_transposed and len(config.linears) == 1:
            ordered = np.ascontiguousarray(self._stored(spec.weight).T)
        elif config.joins_channels_first:
            stored, patches = self._stored(spec.weight), config.side**2
            ordered = stored.reshape(len(stored), -1, patches).swapaxes(1, 2).reshape(stored.shape)
        else:
            return self.source.linear(spec)
        return self.source.ops.load_linear([ordered], self.source.biases([spec]))

    def _stored(self, name: str) -> npt.NDArray[Any]:
        return np.asarray(self.source.weights[name])


def _head_quarters(num_heads: int, head_dim: int) -> list[tuple[int, int]]:
    # In the order 0, 2, 1, 3: value i of each half, which pairs with value i + D / 4, then pairs
    # with value i + D / 2.
    quarter = head_dim // 4
    firsts = [
        head * head_dim + place * quarter for head in range(num_heads) for place in (0, 2, 1, 3)
    ]
    return [(first, first + quarter) for first in firsts]
