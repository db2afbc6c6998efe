"""The compiled programs of one runner: a step per bucket, and the updates of the device state.
`compile_programs` compiles everything ahead of time; a compiled program raises for another shape,
so nothing can compile after warm-up. `DeviceState` stays on the device between steps."""

import itertools
import os
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from cadenza.backends.base import RunnerSetup
from cadenza.backends.step_result import COLUMN_TOKEN
from cadenza.backends.xla.decoder import DecoderWeights, LayerOutputs, run_layers
from cadenza.backends.xla.hidden_states import (
    as_head_step,
    keep_newest,
    keep_states,
    new_states,
    read_states,
)
from cadenza.backends.xla.layers.residual import StepContext
from cadenza.backends.xla.ops.in_range import set_first_rows
from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.ops.table import (
    DecoderSpec,
    KVPool,
    LayerPools,
    Linear,
    RuleArrays,
    StatePool,
    StepArrays,
)
from cadenza.backends.xla.page_copies import (
    ITEMS_PER_CALL,
    CopyPrograms,
    PutArrays,
    TakeArrays,
    read_function,
    write_function,
)
from cadenza.backends.xla.placement import DevicePlacement
from cadenza.backends.xla.vision.tower_state import TowerState, tower_state
from cadenza.backends.xla.wire import are_last_sampled, unpack
from cadenza.batch.step_schema import NO_TARGET, NUM_EXTRA_LOGIT_ROWS, StepLayout
from cadenza.batch.token_rules import MASK, RuleLayout
from cadenza.config import PAGE_SIZE_UNIT
from cadenza.models.model_config import ModelConfig

Compiled = Callable[..., Any]

PAGE_UPDATES = 256  # page-table entries per call of `write_page_table`

PAGE_COPIES = 64  # pages per call of `copy_pages`

MASK_ROWS = 32  # records per call of `copy_rules` and `write_masks`

_Options = dict[str, str | bool]  # compiler options of XLA

# By platform. The concurrency-optimised schedule runs operations on XLA's own threads beside the
# kernels, which use every core: a step of one row takes 10 % longer.
STEP_OPTIONS: dict[str, _Options] = {
    "cpu": {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
}

# By platform, for programs that only pass integers on. Without XLA's optimisations they take some
# microseconds more with hundreds of rows, and are compiled sooner: in a third of the time, where
# XLA can still generate the code of fusions without MLIR.
_ROUTING_OPTIONS: dict[str, _Options] = {
    "cpu": {"xla_backend_optimization_level": "0"}
    | ({"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11, 1) else {})
}


# By platform: a GPU has many buckets, each of which takes XLA a second. On a CPU there are few, and
# XLA uses threads itself.
_COMPILING_THREADS = {"gpu": min(8, os.cpu_count() or 1)}


class RowState(NamedTuple):
    """The rows' data besides their KV. Programs that need no more take it alone, since a call takes
    longer the more arrays it passes."""

    last_sampled: Any  # [R]
    page_table: Any  # [R, P]
    rule_records: Any  # [L, W]
    token_history: Any  # [slots]


class DeviceState(NamedTuple):
    """Donated, whole or its rows, to every program that changes it, which returns it updated."""

    pools: LayerPools
    rows: RowState
    kept_hidden: Any = None  # [slots, E], of a runner that keeps hidden states
    own_hidden: Any = None  # [R, E], of a runner that reads them
    image_rows: Any = None  # [S, parts E], of a runner that encodes images
    tower: TowerState | None = None  # of such a runner
    span: Any = None  # [2 N, E] or [N, E], of a runner that computes spans of N rows in passes


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPrograms:
    """Each changes a `RowState`."""

    write_page_table: Compiled
    write_rules: Compiled
    copy_rules: Compiled
    write_masks: Compiled


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """`step` maps a bucket (padded tokens) to its step; `begin` and `choose` to its two parts, for
    steps whose masks follow: none if XLA sees the operations, or the model reads hidden states."""

    new_state: Compiled
    rows: RowPrograms
    copy_pages: Compiled
    pages: CopyPrograms | None = None
    states: CopyPrograms | None = None
    read_scores: Compiled | None = None
    step: dict[int, Compiled] = field(default_factory=dict[int, Compiled])
    begin: dict[int, Compiled] = field(default_factory=dict[int, Compiled])
    choose: dict[int, Compiled] = field(default_factory=dict[int, Compiled])


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


def write_page_table(rows: RowState, updates: jax.Array) -> RowState:
    """Applies updates [PAGE_UPDATES, 3] of (row, index, page)."""
    table = rows.page_table.at[updates[:, 0], updates[:, 1]].set(updates[:, 2])
    return rows._replace(page_table=table)


def write_rules(rows: RowState, row: jax.Array, record: jax.Array) -> RowState:
    return rows._replace(rule_records=rows.rule_records.at[row].set(record))


def copy_rules(rows: RowState, record_rows: jax.Array) -> RowState:
    """Copies rule records without their masks, by `record_rows` [MASK_ROWS, 2] of (record, row)."""
    records, owners = record_rows[:, 0], record_rows[:, 1]
    rules = rows.rule_records[owners, :MASK]
    changed = rows.rule_records.at[records, :MASK].set(rules)
    return rows._replace(rule_records=changed)


def write_masks(rows: RowState, records: jax.Array, masks: jax.Array) -> RowState:
    """Sets the masks [MASK_ROWS, W - MASK] of records [MASK_ROWS]."""
    changed = rows.rule_records.at[records, MASK:].set(masks)
    return rows._replace(rule_records=changed)


def scores_of_row(scores: jax.Array, row: jax.Array) -> jax.Array:
    return scores[1, row]


def copy_function(ops: OpTable, page_size: int) -> Callable[..., DeviceState]:
    """The program (state, copies [PAGE_COPIES, 3] of `PageCopy`, count []) to the updated state. A
    page can be as large as a sequence, so only the blocks that contain tokens are copied."""
    size = PAGE_SIZE_UNIT

    def copy_pages(state: DeviceState, copies: jax.Array, count: jax.Array) -> DeviceState:
        def copy_page(index: jax.Array, state: DeviceState) -> DeviceState:
            source, destination, num_tokens = copies[index]

            def copy_block(block: jax.Array, state: DeviceState) -> DeviceState:
                slots = source * page_size + block * size, destination * page_size + block * size

                def copy(side: jax.Array) -> jax.Array:
                    part = jax.lax.dynamic_slice_in_dim(side, slots[0], size)
                    return jax.lax.dynamic_update_slice_in_dim(side, part, slots[1], 0)

                history, kept = jax.tree.map(copy, (state.rows.token_history, state.kept_hidden))
                kv = tuple(ops.copy_slots(pool, *slots, size) for pool in state.pools.kv)
                rows = state.rows._replace(token_history=history)
                pools = state.pools._replace(kv=kv)
                return state._replace(pools=pools, rows=rows, kept_hidden=kept)

            return jax.lax.fori_loop(0, (num_tokens + size - 1) // size, copy_block, state)

        return jax.lax.fori_loop(0, count, copy_page, state)

    return copy_pages


def page_arrays(state: DeviceState) -> tuple[tuple[KVPool, ...], Any, Any | None]:
    """What a page consists of: its part of each of these arrays, along the first axis."""
    return state.pools.kv, state.rows.token_history, state.kept_hidden


def _with_page_arrays(state: DeviceState, arrays: Any) -> DeviceState:
    kv, history, kept = arrays
    rows, pools = state.rows._replace(token_history=history), state.pools._replace(kv=kv)
    return state._replace(pools=pools, rows=rows, kept_hidden=kept)


def _state_arrays(state: DeviceState) -> StatePool:
    assert state.pools.states is not None, "the model has states"
    return state.pools.states


def _with_state_arrays(state: DeviceState, arrays: StatePool) -> DeviceState:
    return state._replace(pools=state.pools._replace(states=arrays))


def state_function(ops: OpTable, spec: DecoderSpec, setup: RunnerSetup) -> Callable[[], Any]:
    """The program () to a new `DeviceState` with every KV element `setup.fill`, or unwritten."""
    limits, width = setup.limits, spec.model.hidden_size
    num_words = RuleLayout(spec.model.vocab_size).num_words
    num_slots = limits.num_pages * spec.page_size

    def kept_states() -> jax.Array:
        if setup.fill is not None:
            return new_states(num_slots, width, spec.dtype)
        like = jax.eval_shape(lambda: new_states(num_slots, width, spec.dtype))
        return ops.unwritten(like.shape, like.dtype)

    def image_rows() -> jax.Array | None:
        if spec.model.vision is None or not setup.num_image_slots:
            return None
        shape = setup.num_image_slots, spec.model.vision.num_parts * width
        if setup.fill is not None:
            return jnp.full(shape, setup.fill, spec.dtype)
        return ops.unwritten(shape, spec.dtype)

    def span_stream() -> jax.Array | None:
        num_rows = span_rows(ops, spec.model, setup)
        if not num_rows:
            return None
        shape = num_rows * (2 if ops.skips_padding else 1), width
        return jnp.full(shape, 0.0 if setup.fill is None else setup.fill, jnp.float32)

    def scores() -> jax.Array | None:
        if "scores" not in setup.capabilities:
            return None
        length = -(-limits.max_model_len // PAGE_SIZE_UNIT) * PAGE_SIZE_UNIT
        return jnp.zeros((2, limits.max_num_seqs, length), jnp.float32)

    def pools() -> LayerPools:
        groups, model = spec.model.kv_groups, spec.model
        kv = tuple(ops.new_kv_pool(group, limits.num_pages, setup.fill) for group in groups)
        if model.recurrence is None:
            return LayerPools(kv, scores=scores())
        layers, num_slots = len(model.recurrent_layers), limits.num_state_slots
        return LayerPools(kv, ops.new_state_pool(num_slots, layers, model.recurrence))

    def new_state() -> DeviceState:
        rows = RowState(
            jnp.zeros(limits.max_num_seqs, jnp.int32),
            jnp.zeros((limits.max_num_seqs, limits.max_pages_per_seq), jnp.int32),
            jnp.zeros((limits.max_num_seqs + NUM_EXTRA_LOGIT_ROWS, num_words), jnp.int32),
            jnp.full(num_slots, -1, jnp.int32),
        )
        reads_hidden = spec.model.reads_hidden
        return DeviceState(
            pools(),
            rows,
            kept_states() if "hidden_states" in setup.capabilities else None,
            new_states(limits.max_num_seqs, width, spec.dtype) if reads_hidden else None,
            image_rows(),
            tower_state(ops, spec, setup),
            span_stream(),
        )

    return new_state


def abstract_state(
    ops: OpTable, spec: DecoderSpec, setup: RunnerSetup, sharding: Any
) -> DeviceState:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(state_function(ops, spec, setup)),
    )


def span_rows(ops: OpTable, model: ModelConfig, setup: RunnerSetup) -> int:
    """Rows for the longest span that a runner computes in passes; 0 if it computes none so: where
    XLA sees the operations, it may round them otherwise in another program than the step's."""
    can_divide = ops.is_opaque and not ("hidden_states" in setup.capabilities or model.reads_hidden)
    if model.vision is None or not (setup.num_image_slots and can_divide):
        return 0
    longest, budget = model.vision.whole_span, setup.limits.max_num_batched_tokens
    if not longest or ops.skips_padding:
        return longest
    return next(size for size in ops.token_buckets(budget) if size >= longest)


def can_split_steps(ops: OpTable, model: ModelConfig) -> bool:
    """Whether `StepProgram.begin` and `choose` have the bits of `step`."""
    return ops.is_opaque and not model.reads_hidden


# Of what each of several devices has a part.
_STATE = DeviceState(
    pools=cast(Any, True),
    rows=cast(Any, False),
    kept_hidden=False,
    own_hidden=False,
    image_rows=False,
    tower=cast(Any, False),
    span=False,
)


def compile_programs(
    ops: OpTable,
    spec: DecoderSpec,
    setup: RunnerSetup,
    weights: DecoderWeights,
    placement: DevicePlacement,
) -> Programs:
    return _Compiler(ops, spec, setup, placement).compile(weights)


class _Compiler:
    def __init__(
        self, ops: OpTable, spec: DecoderSpec, setup: RunnerSetup, placement: DevicePlacement
    ) -> None:
        self._ops = ops
        self._spec = spec
        self._setup = setup
        self._placement = placement
        self._platform = placement.platform
        self._step_options = STEP_OPTIONS.get(placement.platform, {})
        self._routing_options = _ROUTING_OPTIONS.get(placement.platform, {})
        state = jax.eval_shape(state_function(ops, spec, setup))
        pools = placement.abstract_parts(state.pools)
        self._state = self._abstract(state._replace(pools=None))._replace(pools=pools)

    def compile(self, weights: DecoderWeights) -> Programs:
        wrap, copies = self._placement.wrap, (self._words(PAGE_COPIES, 3), self._words())
        copy_pages = copy_function(self._ops, self._spec.page_size)
        copy_pages = jax.jit(wrap(copy_pages, (_STATE, False, False), _STATE), donate_argnums=0)
        new_state = wrap(state_function(self._ops, self._spec, self._setup), (), _STATE)
        programs = Programs(
            new_state=self._placement.jit_new(new_state).lower().compile(),
            rows=self._row_programs(),
            copy_pages=copy_pages.lower(self._state, *copies).compile(),
        )
        if "scores" in self._setup.capabilities:
            reading = jax.jit(scores_of_row).lower(self._state.pools.scores, self._words())
            programs = replace(programs, read_scores=reading.compile())
        if "page_copies" in self._setup.capabilities:
            programs = replace(programs, **self._all_copy_programs())
        with ThreadPoolExecutor(_COMPILING_THREADS.get(self._platform, 1)) as compiling:
            added = [
                self._start_step(compiling, bucket, _as_abstract(weights))
                for bucket in self._ops.token_buckets(self._setup.limits.max_num_batched_tokens)
            ]
        for bucket, name, compiled in itertools.chain(*added):
            getattr(programs, name)[bucket] = compiled.result()
        return programs

    def _start_step(
        self, compiling: Executor, bucket: int, weights: DecoderWeights
    ) -> list[tuple[int, str, "Future[Compiled]"]]:
        # Traced one after another, since an op table records one program at a time.
        spec, setup = self._spec, self._setup
        layout = StepLayout(bucket, setup.limits.max_num_seqs)
        program = StepProgram(
            ops=self._ops,
            spec=spec,
            layout=layout,
            keeps_hidden="hidden_states" in setup.capabilities,
        )
        whole = weights, self._state, self._words(layout.num_words)
        kept: list[Any] = []
        if spec.model.reads_hidden:
            num_slots, width = setup.limits.num_pages * spec.page_size, spec.model.hidden_size
            states = jax.eval_shape(lambda: new_states(num_slots, width, spec.dtype))
            kept.append(self._abstract(states))
        marks = (True, _STATE, False, *(False for _ in kept))
        whole_step = self._placement.wrap(program.step, marks, (_STATE, False, False))
        step, _ = self._part(compiling, whole_step, *whole, *kept)
        if not can_split_steps(self._ops, spec.model):
            return [(bucket, "step", step)]
        begin, (_, hidden) = self._part(compiling, program.begin, *whole)
        rest = weights.lm_head, self._state.rows, whole[2], hidden
        choose, _ = self._part(compiling, program.choose, *rest)
        return [(bucket, "step", step), (bucket, "begin", begin), (bucket, "choose", choose)]

    def _part(self, compiling: Executor, function: Callable[..., Any], *inputs: Any) -> Any:
        has_states = "hidden_states" in self._setup.capabilities or self._spec.model.reads_hidden
        options = self._step_options
        if self._ops.is_opaque and not has_states:
            options = options | self._routing_options
        lowered = jax.jit(function, donate_argnums=1).lower(*inputs)
        return compiling.submit(lowered.compile, options), self._abstract(lowered.out_info)

    def _row_programs(self) -> RowPrograms:
        rows = self._state.rows
        num_words = rows.rule_records.shape[1]

        def lower(function: Callable[..., RowState], *shapes: tuple[int, ...]) -> Any:
            inputs = (self._words(*each) for each in shapes)
            return jax.jit(function, donate_argnums=0).lower(rows, *inputs)

        options = self._routing_options or None
        return RowPrograms(
            write_page_table=lower(write_page_table, (PAGE_UPDATES, 3)).compile(options),
            write_rules=lower(write_rules, (), (num_words,)).compile(options),
            copy_rules=lower(copy_rules, (MASK_ROWS, 2)).compile(options),
            write_masks=lower(write_masks, (MASK_ROWS,), (MASK_ROWS, num_words - MASK)).compile(),
        )

    def _all_copy_programs(self) -> dict[str, CopyPrograms]:
        limits = self._setup.limits
        found = {"pages": self._copy_programs(page_arrays, _with_page_arrays, limits.num_pages)}
        if self._spec.model.recurrence is not None:
            parts = _state_arrays, _with_state_arrays, limits.num_state_slots
            found["states"] = self._copy_programs(*parts)
        return found

    def _copy_programs(self, take: TakeArrays, put: PutArrays, num_items: int) -> CopyPrograms:
        items = self._words(ITEMS_PER_CALL)
        reading = jax.jit(read_function(take, num_items)).lower(self._state, items)
        parts = self._abstract(reading.out_info)
        writing = jax.jit(write_function(take, put, num_items), donate_argnums=0)
        writing = writing.lower(self._state, items, parts, self._words())
        return CopyPrograms(read=reading.compile(), write=writing.compile(), parts=parts)

    def _words(self, *shape: int) -> jax.ShapeDtypeStruct:
        return self._placement.abstract(jax.ShapeDtypeStruct(shape, jnp.int32))

    def _abstract(self, tree: Any) -> Any:
        return self._placement.abstract(tree)


def _as_abstract(weights: DecoderWeights) -> Any:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), weights
    )
