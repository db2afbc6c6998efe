"""What a quantum of each stage computes: functions over an op table and a `TowerState`, for every
family. A stage writes the rows of its block, and only such as depend on nothing after the image's
last row. Legend: B rows of a block · N rows of the stream · E the tower's width · P values of a
patch · H heads · D head size · R values of a head that are rotated · M tokens · S image slots."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cadenza.backends.base import RunnerSetup
from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.ops.table import (
    DecoderSpec,
    EncoderBlock,
    EncoderFactors,
    EncoderHeads,
    EncoderShape,
    ImageRows,
    Linear,
)
from cadenza.backends.xla.vision.tower_weights import ClippedLinear
from cadenza.models.tower_spec import Entry, LayerOutput, Norm, Projector, TowerLayer
from cadenza.vision.quanta import Blocks, Workspace
from cadenza.vision.tower_config import ProjectorConfig, TowerConfig, VisionConfig


class TowerState(NamedTuple):
    """Donated to every program that changes it. A step takes it and gives it back unchanged, so
    that encoding and steps run in the order of their launch. N rows for the patches of the largest
    part, M for its tokens."""

    stream: Any  # [N, E], float32
    heads: EncoderHeads  # of N rows
    rows: Any  # [M, parts E'], activations: those of the part that is being encoded


def encoder_shape(tower: TowerConfig) -> EncoderShape:
    return EncoderShape(
        num_heads=tower.num_heads,
        head_dim=tower.head_dim,
        scale=tower.scale,
        norm_eps=tower.norm_eps,
    )


def tower_state(ops: OpTable, spec: DecoderSpec, setup: RunnerSetup) -> TowerState | None:
    """A new state, every element `RunnerSetup.fill` or unwritten; None for a runner that encodes no
    images. Called under tracing."""
    vision = spec.model.vision
    if vision is None or not setup.num_image_slots:
        return None
    space, fill = Workspace.of(vision), setup.fill

    def array(count: int, columns: int, dtype: Any) -> jax.Array:
        if fill is not None:
            return jnp.full((count, columns), fill, dtype)
        return ops.unwritten((count, columns), dtype)

    return TowerState(
        stream=array(space.patches, vision.tower.hidden_size, jnp.float32),
        heads=ops.new_encoder_heads(space.patches, encoder_shape(vision.tower), fill),
        rows=array(space.tokens, vision.num_parts * spec.model.hidden_size, spec.dtype),
    )


class BlockInputs(NamedTuple):
    """What a stage takes from the host for a block; None for what the tower does not have."""

    block: EncoderBlock
    patches: Any | None = None  # [B, P], float32
    positions: Any | None = None  # [B, E], float32
    rotations: Any | None = None  # [B, R], float32
    bounds: Any | None = None  # [B, 2]


@dataclass(frozen=True, slots=True)
class TowerStages:
    """`ops` is a table for its `DecoderSpec`, `dtype` that of activations."""

    ops: OpTable
    vision: VisionConfig
    blocks: Blocks
    dtype: Any

    @property
    def tower(self) -> TowerConfig:
        return self.vision.tower

    def enter(self, weights: Entry, state: TowerState, given: BlockInputs) -> TowerState:
        count, values = given.block.num_defined, given.patches
        assert values is not None, "the first stage takes patches"
        if weights.patch_norms is not None:
            return self._enter_normed(weights, state, given)

        def compute(ops: OpTable) -> jax.Array:
            patches = ops.to_activations(values, count)
            if given.positions is None:
                x = ops.project(patches, weights.patch, count)
            else:
                x = ops.linear(patches, weights.patch, count, residual=given.positions)
            if weights.pre_norm is None:
                return x
            return ops.norm_add(x, weights.pre_norm.weight, None, count)

        x = self.ops.compute(compute)
        return state._replace(stream=_with_rows(state.stream, x, given.block.start))

    def _enter_normed(self, weights: Entry, state: TowerState, given: BlockInputs) -> TowerState:
        count, norms = given.block.num_defined, weights.patch_norms
        values = given.patches
        assert norms is not None, "the patches are normed"
        assert values is not None, "the first stage takes patches"

        def product(ops: OpTable) -> jax.Array:
            x = ops.project(self._normed(ops, values, norms[0], count), weights.patch, count)
            return self._normed(ops, x, norms[1], count)

        x = self.ops.compute(product).astype(jnp.float32)
        if given.positions is not None:
            x = x + given.positions
        norm = weights.pre_norm
        if norm is not None:
            summed = x
            normed = self.ops.compute(lambda ops: self._normed(ops, summed, norm, count))
            x = normed.astype(jnp.float32)
        return state._replace(stream=_with_rows(state.stream, x, given.block.start))

    def project(self, layer: TowerLayer, state: TowerState, given: BlockInputs) -> TowerState:
        count, tower = given.block.num_defined, self.tower
        x = self._rows(state.stream, given.block.start)
        factors = EncoderFactors(given.rotations, layer.head_norms, tower.norms_values)
        if isinstance(layer.qkv, tuple):
            normed = self.ops.compute(lambda ops: self._normed(ops, x, layer.norm1, count))
            parts = [self._clipped(normed, linear, count) for linear in layer.qkv]
            joined, shape = jnp.concatenate(parts, axis=1).astype(self.dtype), encoder_shape(tower)
            heads = self.ops.compute(
                lambda ops: ops.keep_heads(joined, state.heads, factors, given.block, shape)
            )
            return state._replace(heads=heads)
        weight = layer.qkv

        def compute(ops: OpTable) -> Any:
            normed = self._normed(ops, x, layer.norm1, count)
            qkv = ops.linear(normed, weight, count)
            return ops.keep_heads(qkv, state.heads, factors, given.block, encoder_shape(tower))

        return state._replace(heads=self.ops.compute(compute))

    def attend(self, layer: TowerLayer, state: TowerState, given: BlockInputs) -> TowerState:
        count, shape = given.block.num_defined, encoder_shape(self.tower)
        x = self._rows(state.stream, given.block.start)
        if self.tower.clips_linears:
            y = self._attend_clipped(layer, x, state, given)
            return state._replace(stream=_with_rows(state.stream, y, given.block.start))

        def compute(ops: OpTable) -> jax.Array:
            mixed = ops.encode_attend(
                state.heads, given.block, shape, self.blocks.patches, given.bounds
            )
            y = self._plus(ops, x, mixed, layer.attention_out, count)
            inner = self._inner(ops, self._normed(ops, y, layer.norm2, count), layer, count)
            return self._plus(ops, y, inner, layer.mlp_out, count)

        y = self.ops.compute(compute)
        return state._replace(stream=_with_rows(state.stream, y, given.block.start))

    def _attend_clipped(
        self, layer: TowerLayer, x: jax.Array, state: TowerState, given: BlockInputs
    ) -> jax.Array:
        block, shape = given.block, encoder_shape(self.tower)
        count, size = block.num_defined, self.blocks.patches
        mixed = self.ops.compute(
            lambda ops: ops.encode_attend(state.heads, block, shape, size, given.bounds)
        )
        y = self._plus_clipped(x, mixed, layer.attention_out, count)
        normed = self.ops.compute(lambda ops: self._normed(ops, y, layer.norm2, count))
        assert isinstance(layer.up, tuple), "gate and up are apart"
        gate, up = (self._clipped(normed, each, count) for each in layer.up)
        gates = gate.astype(self.dtype)
        activated = self.ops.compute(lambda ops: ops.activate(gates, self.tower.activation, count))
        inner = (activated.astype(jnp.float32) * up).astype(self.dtype)
        return self._plus_clipped(y, inner, layer.mlp_out, count)

    def _plus_clipped(
        self, x: jax.Array, y: jax.Array, output: LayerOutput, count: jax.Array
    ) -> jax.Array:
        norm = output.norm
        assert isinstance(output.linear, ClippedLinear), "the tower's linears are clipped"
        product = self._clipped(y, output.linear, count)
        if norm is None:
            return x + product
        return self.ops.compute(lambda ops: ops.norm_add(product, norm.weight, x, count))

    def _clipped(self, x: jax.Array, weight: ClippedLinear, count: jax.Array) -> jax.Array:
        least, largest, *of_output = (weight.bounds[index] for index in range(4))
        clamped = jnp.clip(x.astype(jnp.float32), least, largest).astype(self.dtype)
        y = self.ops.compute(lambda ops: ops.project(clamped, weight.linear, count))
        return jnp.clip(y, *of_output)

    def merge(self, index: int) -> Callable[..., TowerState]:
        """The stage of projector `index`: (projector, state, block of tokens) to the state."""
        config = self.tower.projectors[index]
        size, each = self.blocks.tokens, config.side**2

        def merge(projector: Projector, state: TowerState, given: BlockInputs) -> TowerState:
            block = given.block
            x = jax.lax.dynamic_slice_in_dim(state.stream, block.start * each, size * each)
            y = self._projected(projector, config, x, block.num_defined)
            # Not by `dynamic_update_slice`: XLA copies all of bfloat16 by way of float32 on a CPU.
            images = ImageRows(state.rows, block.start + jnp.arange(size, dtype=jnp.int32))
            count = block.num_defined
            rows = self.ops.compute(lambda ops: ops.keep_rows(y, images, index, count))
            return state._replace(rows=rows)

        return merge

    def keep(
        self, rows: jax.Array, image_rows: jax.Array, slots: jax.Array, count: jax.Array
    ) -> jax.Array:
        """`image_rows` [S, parts E'] with the first `count` of `rows` [M, parts E'] at `slots`
        [M]."""
        images = ImageRows(image_rows, slots)
        return self.ops.compute(lambda ops: ops.keep_rows(rows, images, 0, count))

    def _projected(
        self, projector: Projector, config: ProjectorConfig, x: jax.Array, count: jax.Array
    ) -> jax.Array:
        each = config.side**2
        patches = self._before(projector, config, x, count * each)
        if config.reduction == "average":
            joined = _average(patches.astype(jnp.float32), each)
            joined = joined * np.float32(self.tower.output_scale)
            if (standard := projector.standard) is not None:
                joined = (joined - standard.bias) * standard.factor
        else:
            joined = patches.reshape(len(x) // each, -1)
        is_normed = config.norm_is_behind and projector.norm is not None
        joined = joined.astype(jnp.float32 if is_normed else self.dtype)

        def finish(ops: OpTable) -> jax.Array:
            y = self._normed_by(ops, joined, config, projector, count) if is_normed else joined
            for linear, settings in zip(projector.linears, config.linears, strict=True):
                y = ops.linear(y, linear, count)
                if settings.activation is not None:
                    y = ops.activate(y, settings.activation, count)
            return y

        return self.ops.compute(finish)

    def _before(
        self, projector: Projector, config: ProjectorConfig, x: jax.Array, count: jax.Array
    ) -> jax.Array:
        norm = projector.post_norm
        if norm is not None:
            return self.ops.compute(lambda ops: self._normed(ops, x, norm, count))
        if projector.norm is None or config.norm_is_behind:
            return x
        return self.ops.compute(lambda ops: self._normed_by(ops, x, config, projector, count))

    def _inner(self, ops: OpTable, x: jax.Array, layer: TowerLayer, count: jax.Array) -> jax.Array:
        assert isinstance(layer.up, Linear), "the tower's linears are not clipped"
        if self.tower.is_gated:
            return ops.gated_linear(x, layer.up, count)
        return ops.activate(ops.linear(x, layer.up, count), self.tower.activation, count)

    def _plus(
        self, ops: OpTable, x: jax.Array, y: jax.Array, output: LayerOutput, count: jax.Array
    ) -> jax.Array:
        weight = output.linear
        assert isinstance(weight, Linear), "the tower's linears are not clipped"
        if output.norm is None:
            return ops.linear(y, weight, count, residual=x)
        return ops.linear_norm_add(y, weight, output.norm.weight, x, count)

    def _normed(self, ops: OpTable, x: jax.Array, norm: Norm, count: jax.Array) -> jax.Array:
        if self.tower.norm == "layer":
            return ops.layer_norm(x, norm.weight, norm.bias, count, self.tower.norm_eps)
        return ops.rms_norm(x, norm.weight, count, self.tower.norm_eps)

    def _normed_by(
        self,
        ops: OpTable,
        x: jax.Array,
        config: ProjectorConfig,
        projector: Projector,
        count: jax.Array,
    ) -> jax.Array:
        norm = projector.norm
        assert norm is not None, "the projector has a norm"
        if config.norm == "layer":
            return ops.layer_norm(x, norm.weight, norm.bias, count, config.norm_eps)
        return ops.rms_norm(x, norm.weight, count, config.norm_eps)

    def _rows(self, stream: jax.Array, start: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(stream, start, self.blocks.patches)


def _average(x: jax.Array, each: int) -> jax.Array:
    # Added one after the other.
    parts = x.reshape(len(x) // each, each, x.shape[1])
    total = parts[:, 0]
    for index in range(1, each):
        total = total + parts[:, index]
    return total / np.float32(each)


def _with_rows(stream: jax.Array, rows: jax.Array, start: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(stream, rows, start, 0)
