"""`TowerWeights`: the tensors of a tower and its projectors, in the layouts of an op table.

`checkpoint.tower_spec` gives their names. What a family stores in another order than the stages
compute in is put into that order here. Legend as in `stages`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cadenza.backends.xla.layers.weight_source import rows_of
from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.ops.table import DecoderSpec, Linear
from cadenza.checkpoint.quantised_weight import HostWeight
from cadenza.checkpoint.tensor_spec import LinearSpec, TensorSpec
from cadenza.checkpoint.tower_spec import (
    NormSpec,
    PatchSpec,
    ProjectorSpec,
    TowerLayerSpec,
    declare_tower,
)
from cadenza.checkpoint.weights import Weights
from cadenza.vision.tower_config import ProjectorConfig, VisionConfig


class Norm(NamedTuple):
    """A LayerNorm, or an RMS norm, which has no bias."""

    weight: Any  # [E]
    bias: Any | None  # [E]


class ClippedLinear(NamedTuple):
    """A linear whose input and output are clamped."""

    linear: Linear
    bounds: Any  # [4], float32: least and largest input, least and largest output


class Standard(NamedTuple):
    """What is taken off, then multiplied by."""

    bias: Any  # [E]
    factor: Any  # [E]


class LayerOutput(NamedTuple):
    """The last linear of attention or MLP, and the norm of what it gives, if there is one."""

    linear: Linear | ClippedLinear  # [E, H D] or [E, F]
    norm: Norm | None


class TowerLayer(NamedTuple):
    """Attention, then an MLP."""

    norm1: Norm
    qkv: Linear | tuple[ClippedLinear, ...]  # [3 H D, E], or [H D, E] each
    head_norms: tuple[Any, Any] | None  # [D] each
    attention_out: LayerOutput
    norm2: Norm
    up: Linear | tuple[ClippedLinear, ...]  # [F, E], or gate and up
    mlp_out: LayerOutput


class Projector(NamedTuple):
    """One of `TowerConfig.projectors`; the main one has the norm behind the last layer."""

    post_norm: Norm | None
    norm: Norm | None
    linears: tuple[Linear, ...]
    standard: Standard | None = None  # of what the reduction gives


class Entry(NamedTuple):
    """What makes the first stream of patches."""

    patch: Linear  # [E, P]
    pre_norm: Norm | None
    patch_norms: tuple[Norm, Norm] | None = None  # [P] and [E]


class TowerWeights(NamedTuple):
    """All that stages compute with on the device."""

    entry: Entry
    layers: tuple[TowerLayer, ...]
    projectors: tuple[Projector, ...]


@dataclass(frozen=True, slots=True)
class TowerSource:
    """The tensors of a model, and the op table that its tower is loaded for."""

    ops: OpTable
    spec: DecoderSpec
    weights: Weights
    vision: VisionConfig

    def load(self) -> TowerWeights:
        """Host arrays, ready for `jax.device_put`."""
        declared = declare_tower(self.vision)
        post_norms = (declared.post_norm, *(None for _ in declared.projectors[1:]))
        projectors = zip(self.vision.tower.projectors, declared.projectors, post_norms, strict=True)
        main, *others = (self._projector(*each) for each in projectors)
        standard = self._standard(declared.standard)
        return TowerWeights(
            entry=Entry(
                self._patch(declared.patch),
                self._norm(declared.pre_norm),
                self._patch_norms(declared.patch_norms),
            ),
            layers=tuple(self._layer(layer) for layer in declared.layers),
            projectors=(main._replace(standard=standard), *others),
        )

    def table(self) -> npt.NDArray[Any] | None:
        """The embeddings of positions [rows, E] as they are stored."""
        spec = declare_tower(self.vision).table
        if spec is None:
            return None
        stored = np.asarray(self.weights[spec.name])
        table = self.vision.tower.table
        if table is not None and table.axes_are_inner:
            stored = stored.swapaxes(0, 1)
        return stored.reshape(-1, stored.shape[-1])

    def _patch(self, spec: PatchSpec) -> Linear:
        stored = np.asarray(self.weights[spec.weight.name])
        bias = [] if spec.bias is None else [self.weights[spec.bias.name]]
        return self.ops.load_linear([stored.reshape(len(stored), -1)], bias)

    def _patch_norms(self, specs: tuple[NormSpec, NormSpec] | None) -> tuple[Norm, Norm] | None:
        return None if specs is None else (self._some_norm(specs[0]), self._some_norm(specs[1]))

    def _standard(self, specs: tuple[TensorSpec, TensorSpec] | None) -> Standard | None:
        if specs is None:
            return None
        return Standard(self._vector(specs[0]), self._vector(specs[1]))

    def _layer(self, spec: TowerLayerSpec) -> TowerLayer:
        if spec.bounds:
            return self._clipped_layer(spec)
        return TowerLayer(
            norm1=self._some_norm(spec.norm1),
            qkv=self._qkv(spec.qkv),
            head_norms=self._head_norms(spec.head_norms),
            attention_out=LayerOutput(self._linear(spec.out), self._norm(spec.post_norm1)),
            norm2=self._some_norm(spec.norm2),
            up=self._up(spec.up),
            mlp_out=LayerOutput(self._linear(spec.down), self._norm(spec.post_norm2)),
        )

    def _clipped_layer(self, spec: TowerLayerSpec) -> TowerLayer:
        """A layer whose linears have bounds of their own, and so are not computed together."""
        query, key, value = (self._qkv_alone(linear, spec.qkv[2]) for linear in spec.qkv)
        linears = [query, key, value, self._linear(spec.out)]
        linears += [self._linear(each) for each in (*spec.up, spec.down)]
        values = np.array([np.asarray(self.weights[each.name]) for each in spec.bounds], np.float32)
        pairs = zip(linears, values.reshape(len(linears), -1), strict=True)
        *qkv, out, gate, up, down = (ClippedLinear(*pair) for pair in pairs)
        return TowerLayer(
            norm1=self._some_norm(spec.norm1),
            qkv=tuple(qkv),
            head_norms=self._head_norms(spec.head_norms),
            attention_out=LayerOutput(out, self._norm(spec.post_norm1)),
            norm2=self._some_norm(spec.norm2),
            up=(gate, up),
            mlp_out=LayerOutput(down, self._norm(spec.post_norm2)),
        )

    def _qkv_alone(self, spec: LinearSpec, value: LinearSpec) -> Linear:
        """Queries, keys or values; of the first two the rows as in `_qkv`."""
        tower = self.vision.tower
        if tower.rope is None or not tower.rope.halves_are_apart or spec is value:
            return self._linear(spec)
        (part,), biases = self._parts([spec]), self._biases([spec])
        pieces = _head_quarters(tower.num_heads, tower.head_dim)
        return self.ops.load_linear(
            [rows_of(part, *piece) for piece in pieces],
            [bias[slice(*piece)] for bias in biases for piece in pieces],
        )

    def _qkv(self, linears: Sequence[LinearSpec]) -> Linear:
        """Queries, keys and values; where the halves of a head are rotated by themselves, its rows
        of queries and keys are reordered (`_head_quarters`)."""
        rope = self.vision.tower.rope
        if rope is None or not rope.halves_are_apart:
            return self._linear(*linears)
        assert len(linears) == 3, "queries, keys and values are stored apart"
        *turned, values = self._parts(linears)
        biases = self._biases(linears)
        tower = self.vision.tower
        pieces = _head_quarters(tower.num_heads, tower.head_dim)
        ordered = [rows_of(part, *piece) for part in turned for piece in pieces]
        of_biases = [bias[slice(*piece)] for bias in biases[:2] for piece in pieces]
        return self.ops.load_linear([*ordered, values], [*of_biases, *biases[2:]])

    def _head_norms(self, specs: tuple[TensorSpec, TensorSpec] | None) -> tuple[Any, Any] | None:
        if specs is None:
            return None
        query, key = (self._vector(spec) for spec in specs)
        rope = self.vision.tower.rope
        if rope is None or not rope.halves_are_apart:
            return query, key
        order = np.concatenate(
            [np.arange(*piece) for piece in _head_quarters(1, self.vision.tower.head_dim)]
        )
        return query[order], key[order]

    def _up(self, linears: Sequence[LinearSpec]) -> Linear:
        if len(linears) == 1:
            return self._linear(*linears)
        return self.ops.load_gate_up(self._parts(linears), self._biases(linears))

    def _projector(
        self, config: ProjectorConfig, spec: ProjectorSpec, post_norm: NormSpec | None
    ) -> Projector:
        norm = self._norm(spec.norm)
        if norm is None and config.norm is not None:
            width = self.vision.tower.hidden_size
            size = config.num_in(width) if config.norm_is_behind else width
            norm = Norm(np.ones(size, np.float32), None)
        if norm is not None and config.norm_adds_one:
            norm = norm._replace(weight=norm.weight + np.float32(1.0))
        first, *others = spec.linears
        if config.is_transposed and not others:
            linears = (self._transposed(first),)
        else:
            linears = (self._joining(config, first), *(self._linear(each) for each in others))
        return Projector(
            post_norm=self._norm(post_norm),
            norm=norm,
            linears=linears,
        )

    def _transposed(self, spec: LinearSpec) -> Linear:
        """A linear that is stored as [in, out]."""
        stored = np.asarray(self.weights[spec.weight])
        return self.ops.load_linear([np.ascontiguousarray(stored.T)], self._biases([spec]))

    def _joining(self, config: ProjectorConfig, spec: LinearSpec) -> Linear:
        """The linear of what the reduction gives, whose columns may be in another order."""
        if not config.joins_channels_first:
            return self._linear(spec)
        stored = np.asarray(self.weights[spec.weight])
        patches = config.side**2
        ordered = stored.reshape(len(stored), -1, patches).swapaxes(1, 2).reshape(stored.shape)
        return self.ops.load_linear([ordered], self._biases([spec]))

    def _linear(self, *linears: LinearSpec) -> Linear:
        """Linears with the same input, as one."""
        return self.ops.load_linear(self._parts(linears), self._biases(linears))

    def _parts(self, linears: Sequence[LinearSpec]) -> list[HostWeight]:
        return [self.weights[linear.weight] for linear in linears]

    def _biases(self, linears: Sequence[LinearSpec]) -> list[npt.NDArray[Any]]:
        return [self.weights[linear.bias] for linear in linears if linear.bias is not None]

    def _norm(self, spec: NormSpec | None) -> Norm | None:
        return None if spec is None else self._some_norm(spec)

    def _some_norm(self, spec: NormSpec) -> Norm:
        bias = None if spec.bias is None else self._vector(spec.bias)
        return Norm(self._vector(spec.weight), bias)

    def _vector(self, spec: TensorSpec) -> npt.NDArray[np.float32]:
        return np.asarray(self.weights[spec.name]).astype(np.float32)


def _head_quarters(num_heads: int, head_dim: int) -> list[tuple[int, int]]:
    """The quarters [start, stop) of each head in the order 0, 2, 1, 3: value i of each half, which
    pairs with value i + D / 4, then pairs with value i + D / 2 of the head."""
    quarter = head_dim // 4
    firsts = [
        head * head_dim + place * quarter for head in range(num_heads) for place in (0, 2, 1, 3)
    ]
    return [(first, first + quarter) for first in firsts]
