"""`StepProgram`: one step, from the uploaded buffer to the tokens. An MTP head computes a token at
p from the hidden state of the token before it, at p - 1 in its own sequence; for a token that it
drew and that is still on the device, from its own newest output of the row. Legend as in
`ops.table`."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cadenza.backends.token_choice import COLUMN_TOKEN
from cadenza.backends.xla.decoder import DecoderWeights, LayerOutputs, run_layers
from cadenza.backends.xla.device_state import DeviceState, RowState
from cadenza.backends.xla.layers.residual import StepContext
from cadenza.backends.xla.ops.in_range import set_first_rows, set_rows
from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.ops.table import DecoderSpec, LayerPools, Linear, RuleArrays, StepArrays
from cadenza.batch.step_schema import LAST_SAMPLED, NO_TARGET, LogitInputs, StepLayout
from cadenza.models.model_config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProgram:
    """A step of one size, to compile or export: its tokens enter, its layers run, its tokens are
    chosen. `begin` is the first two and `choose` the third, for steps whose masks follow.
    `num_logits` are the logit rows that it computes; None is all."""

    ops: OpTable
    spec: DecoderSpec
    layout: StepLayout
    keeps_hidden: bool = False
    num_logits: int | None = None

    def step(
        self, weights: DecoderWeights, state: DeviceState, wire: jax.Array, kept: Any = None
    ) -> tuple[DeviceState, jax.Array, jax.Array]:
        """(weights, state, wire [·]) to (state, result [L, C], last hidden states [L, E]). A model
        that reads hidden states takes those of another runner, `kept` [slots, E]; no token of the
        step may be a sequence's first."""
        state, arrays, read_hidden = self.enter(state, wire, kept)
        context = self.context(weights, state, arrays)

        def decode(table: OpTable) -> tuple[jax.Array, LayerOutputs]:
            made = self._run_layers(context.within(table), weights, state.pools, read_hidden)
            return table.next_tokens(made.hidden, weights.lm_head, arrays), made

        result, made = self.ops.compute(decode)
        state = self._with_states(state, arrays, made)
        rows = _with_choices(state.rows, arrays, result)
        return state._replace(rows=rows), result, made.hidden

    def begin(
        self, weights: DecoderWeights, state: DeviceState, wire: jax.Array
    ) -> tuple[DeviceState, jax.Array]:
        """(weights, state, wire [·]) to (state, last hidden states [L, E])."""
        state, arrays, _ = self.enter(state, wire, None)
        context = self.context(weights, state, arrays)
        made = self.ops.compute(
            lambda table: self._run_layers(context.within(table), weights, state.pools, None)
        )
        return self._with_states(state, arrays, made), made.hidden

    def choose(
        self, head: Linear, rows: RowState, wire: jax.Array, hidden: jax.Array
    ) -> tuple[RowState, jax.Array]:
        """(head, rows, wire [·], last hidden states [L, E]) to (rows, result [L, C])."""
        arrays = self._arrays(wire, rows)
        result = self.ops.compute(lambda table: table.next_tokens(hidden, head, arrays))
        return _with_choices(rows, arrays, result), result

    def enter(
        self, state: DeviceState, wire: jax.Array, kept: jax.Array | None
    ) -> tuple[DeviceState, StepArrays, jax.Array | None]:
        """The state with the step's tokens at their slots, the step's arrays, and the hidden states
        [T, E] that it reads."""
        arrays = self._arrays(wire, state.rows)
        slots, history = arrays.tokens.slots, state.rows.token_history
        history = set_first_rows(history, slots, arrays.tokens.ids, arrays.num_tokens)
        arrays = self._without_placeholders(arrays)
        arrays = arrays._replace(rules=RuleArrays(state.rows.rule_records, history))
        state = state._replace(rows=state.rows._replace(token_history=history))
        if kept is None:
            return state, arrays, None
        arrays = as_head_step(arrays, self.spec.page_size)
        is_drawn = are_last_sampled(self.layout, wire)
        read_hidden = read_states(kept, state.own_hidden, arrays, is_drawn, self.spec.dtype)
        return state, arrays, read_hidden

    def _arrays(self, wire: jax.Array, rows: RowState) -> StepArrays:
        arrays = unpack(self.layout, wire, rows.last_sampled, rows.page_table)
        if self.num_logits is not None:
            logits = jax.tree.map(lambda each: each[: self.num_logits], arrays.logits)
            arrays = arrays._replace(logits=logits)
        return arrays._replace(rules=RuleArrays(rows.rule_records, rows.token_history))

    def _without_placeholders(self, arrays: StepArrays) -> StepArrays:
        vision, tokens = self.spec.model.vision, arrays.tokens
        if vision is None:
            return arrays
        ids = jnp.where(tokens.image_slots >= 0, vision.fill_token_id, tokens.ids)
        return arrays._replace(tokens=replace(tokens, ids=ids))

    def context(
        self, weights: DecoderWeights, state: DeviceState, arrays: StepArrays
    ) -> StepContext:
        return StepContext.of(self.ops, self.spec, arrays, weights.ropes, state.image_rows)

    def _run_layers(
        self,
        context: StepContext,
        weights: DecoderWeights,
        pools: LayerPools,
        read_hidden: jax.Array | None,
    ) -> LayerOutputs:
        return run_layers(context, weights, pools, read_hidden, keeps_hidden=self.keeps_hidden)

    def _with_states(
        self, state: DeviceState, arrays: StepArrays, made: LayerOutputs
    ) -> DeviceState:
        dtype, kept, own = self.spec.dtype, state.kept_hidden, state.own_hidden
        if made.kept is not None:
            kept = keep_states(kept, made.kept, arrays.tokens.slots, dtype)
        if own is not None:
            own = keep_newest(own, made.hidden, arrays.logits, dtype)
        return state._replace(pools=made.pools, kept_hidden=kept, own_hidden=own)


def _with_choices(rows: RowState, arrays: StepArrays, result: jax.Array) -> RowState:
    # The logit rows of a row are in ascending order of position.
    logits, last_sampled = arrays.logits, rows.last_sampled
    is_choice = (logits.token_indices >= 0) & (logits.targets == NO_TARGET)  # [L]
    indices = jnp.arange(len(is_choice), dtype=jnp.int32)
    chosen = jnp.where(is_choice, indices, -1)
    newest = jnp.full(len(last_sampled), -1, jnp.int32).at[logits.rows].max(chosen)  # [R]
    # Whole rows by index: IREE compiles no column by index for CUDA.
    token_ids = result[jnp.maximum(newest, 0)][:, COLUMN_TOKEN]
    last = jnp.where(newest >= 0, token_ids, last_sampled)
    return rows._replace(last_sampled=last)


def can_split_steps(ops: OpTable, model: ModelConfig) -> bool:
    """Whether `StepProgram.begin` and `choose` have the bits of `step`."""
    return ops.is_opaque and not model.reads_hidden


def keep_states(stored: jax.Array, hidden: jax.Array, slots: jax.Array, dtype: Any) -> jax.Array:
    """`stored` with hidden states [T, E] written to the slots [T]; negative ones are ignored."""
    return set_rows(stored, slots, _to_stored(hidden, dtype), slots >= 0)


def read_states(
    stored: jax.Array, own: jax.Array, step: StepArrays, is_drawn: jax.Array, dtype: Any
) -> jax.Array:
    """Float32 [T, E]: those stored for the tokens' slots, or `own` [R, E] of their rows where
    `is_drawn` [T]."""
    of_target = stored[jnp.maximum(step.tokens.slots, 0)]
    chosen = jnp.where(is_drawn[:, None], own[step.token_rows], of_target)
    if dtype == jnp.bfloat16:
        chosen = jax.lax.bitcast_convert_type(chosen, jnp.bfloat16)
    return chosen.astype(jnp.float32)


def keep_newest(
    own: jax.Array, hidden: jax.Array, logits: LogitInputs[jax.Array], dtype: Any
) -> jax.Array:
    """`own` [R, E] with the last hidden states [L, E] of the logit rows, at most one a row."""
    return set_rows(own, logits.rows, _to_stored(hidden, dtype), logits.token_indices >= 0)


def as_head_step(step: StepArrays, page_size: int) -> StepArrays:
    """The step with its tokens at the positions and slots that they have in a head's sequence."""
    positions = jnp.maximum(step.tokens.positions - 1, 0)
    pages = step.page_table[step.token_rows, positions // page_size]
    slots = jnp.where(step.tokens.slots >= 0, pages * page_size + positions % page_size, -1)
    lengths = step.rows.kv_lens
    turned, windows = (
        jnp.where(each > 0, each - 1, each)
        for each in (step.tokens.rope_positions, step.tokens.window_starts)
    )
    return step._replace(
        tokens=replace(
            step.tokens,
            positions=positions,
            slots=slots,
            rope_positions=turned,
            window_starts=windows,
        ),
        rows=replace(step.rows, kv_lens=jnp.maximum(lengths - 1, jnp.minimum(lengths, 1))),
    )


def _to_stored(states: jax.Array, dtype: Any) -> jax.Array:
    cast = states.astype(dtype)
    return jax.lax.bitcast_convert_type(cast, jnp.uint16) if dtype == jnp.bfloat16 else cast


def unpack(
    layout: StepLayout, words: jax.Array, last_sampled: jax.Array, page_table: jax.Array
) -> StepArrays:
    """The step's arrays of one buffer, since an upload costs less than one per array
    (`StepLayout`), with each token's row, and LAST_SAMPLED replaced by `last_sampled`."""
    groups = layout.split(words, _bits_as)
    starts = groups.rows.query_starts
    indices = jnp.arange(layout.num_tokens)
    token_rows = jnp.searchsorted(starts[1:], indices, side="right", method="scan_unrolled")
    token_rows = jnp.minimum(token_rows, layout.num_rows - 1).astype(jnp.int32)
    ids = groups.tokens.ids
    ids = jnp.where(ids == LAST_SAMPLED, last_sampled[token_rows], ids)
    return StepArrays(
        num_tokens=groups.counts.num_tokens[0],
        num_logits=groups.counts.num_logits[0],
        tokens=replace(groups.tokens, ids=ids),
        token_rows=token_rows,
        rows=groups.rows,
        logits=groups.logits,
        page_table=page_table,
    )


def are_last_sampled(layout: StepLayout, words: jax.Array) -> jax.Array:
    return layout.split(words, _bits_as).tokens.ids == LAST_SAMPLED


def _bits_as(words: jax.Array, dtype: np.dtype) -> jax.Array:
    return jax.lax.bitcast_convert_type(words, dtype)
