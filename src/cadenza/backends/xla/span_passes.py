"""`SpanPasses`: a bidirectional span in passes over its rows. Pass 0 enters the rows and writes the
first layer's KV; pass n finishes layer n - 1 from the stream on the device and writes layer n's KV.
A call has the bits of a whole step, if every row had the passes before. Legend as in `ops.table`; N
rows of the longest span; the stream has 2 N, since calls read and write N rows from their first."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cadenza.backends.base import RunnerSetup
from cadenza.backends.xla.decoder import DecoderStream, DecoderWeights
from cadenza.backends.xla.device_state import DeviceState, span_rows
from cadenza.backends.xla.layers.residual import Residual, StepContext
from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.ops.table import DecoderSpec, KVPool, LayerPools, StepArrays
from cadenza.backends.xla.programs import STEP_OPTIONS
from cadenza.backends.xla.step_program import StepProgram
from cadenza.batch.step_schema import SpanCall, StepLayout
from cadenza.batch.whole_spans import SpanShape
from cadenza.errors import RunnerError

Compiled = Callable[..., DeviceState]

# Rows of the shortest call. With fewer, reading the weights takes longer than computing.
BLOCK_ROWS = 32


class SpanPasses:
    """The compiled passes of one runner, of which each has a layer's weights and the next one's."""

    def __init__(self, ops: OpTable, spec: DecoderSpec, setup: RunnerSetup, platform: str) -> None:
        num_rows = span_rows(ops, spec.model, setup)
        assert num_rows, "the runner computes spans in passes"
        block_rows = BLOCK_ROWS if ops.skips_padding else num_rows
        self.shape = SpanShape(
            num_passes=spec.model.num_layers, max_rows=num_rows, block_rows=block_rows
        )
        self._options = STEP_OPTIONS.get(platform, {})
        self._layout = StepLayout(num_rows, setup.limits.max_num_seqs)
        self._program = StepProgram(ops=ops, spec=spec, layout=self._layout)
        self._compiled: tuple[Compiled, ...] = ()

    def compile(self, weights: DecoderWeights, state: Any, sharding: Any) -> None:
        def words(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)

        def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)

        inputs = state, words(self._layout.num_words), words()
        self._compiled = tuple(
            jax.jit(self._pass(index), donate_argnums=1)
            .lower(jax.tree.map(abstract, _weights_of(weights, index)), *inputs)
            .compile(self._options)
            for index in range(self.shape.num_passes)
        )

    def run(self, weights: DecoderWeights, state: DeviceState, call: SpanCall) -> DeviceState:
        """Dispatches a call; the state is donated. Raises RunnerError for rows that do not fit."""
        num_rows = int(call.groups.counts.num_tokens[0])
        if len(call.words) != self._layout.num_words or not (
            0 <= call.pass_index < len(self._compiled)
            and 0 <= call.first <= self.shape.max_rows - num_rows
        ):
            raise RunnerError(
                f"rows {call.first} to {call.first + num_rows} of pass {call.pass_index}: there "
                f"are {len(self._compiled)} passes over up to {self.shape.max_rows} rows"
            )
        own = _weights_of(weights, call.pass_index)
        return self._compiled[call.pass_index](own, state, call.words, np.int32(call.first))

    def _pass(self, index: int) -> Callable[..., DeviceState]:
        program = self._program

        def compute(
            weights: DecoderWeights, state: DeviceState, wire: jax.Array, first: jax.Array
        ) -> DeviceState:
            state, arrays, _ = program.enter(state, wire, None)
            context = program.context(weights, state, arrays)
            rows = jax.lax.dynamic_slice_in_dim(state.span, first, self.shape.max_rows)

            def decode(table: OpTable) -> tuple[jax.Array, dict[int, KVPool]]:
                at = context.within(table)
                if index == 0:
                    entered, pools = DecoderStream.of(at, weights), state.pools
                else:
                    entered, pools = _finish(at, weights, rows, index - 1, state.pools)
                pools = weights.layers[-1].append(at, index, entered.stream, pools)
                return entered.stream.x, _changed(pools, state.pools)

            stream, changed = program.ops.compute(decode)
            kept = _with_rows(state.span, rows, stream, (first, arrays))
            pools = state.pools
            for group, pool in changed.items():
                pools = pools.with_kv(group, pool)
            return state._replace(pools=pools, span=kept)

        return compute


def _weights_of(weights: DecoderWeights, index: int) -> DecoderWeights:
    layers = weights.layers[max(0, index - 1) : index + 1]
    return weights._replace(layers=layers, final_norm=None, head=None)


def _finish(
    context: StepContext, weights: DecoderWeights, rows: jax.Array, index: int, pools: LayerPools
) -> tuple[DecoderStream, LayerPools]:
    if weights.layer_embedding is None:
        entered = DecoderStream.of_stream(context, Residual(rows, context.step.num_tokens))
    else:
        # Per-layer embeddings are of the first stream, which is cheap to make again.
        entered = DecoderStream.of(context, weights)
        entered = entered._replace(stream=Residual(rows, context.step.num_tokens))
    layer = weights.layers[0]
    mixed, pools = layer.mix(context, index, entered.stream, pools)
    return entered.after(context, layer, index, mixed), pools


def _changed(pools: LayerPools, before: LayerPools) -> dict[int, KVPool]:
    pairs = zip(pools.kv, before.kv, strict=True)
    return {group: new for group, (new, old) in enumerate(pairs) if new is not old}


def _with_rows(
    span: jax.Array, old: jax.Array, new: jax.Array, place: tuple[jax.Array, StepArrays]
) -> jax.Array:
    # The rows after the defined ones are another call's.
    first, arrays = place
    is_defined = jnp.arange(len(new)) < arrays.num_tokens
    rows = jnp.where(is_defined[:, None], new, old)
    return jax.lax.dynamic_update_slice_in_dim(span, rows, first, 0)
