"""`DeviceState`, which stays on the device between steps, and the functions that make, change, copy
and read it. Legend as in `ops.table`; S slots."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from cadenza.backends.base import RunnerSetup
from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.ops.table import DecoderSpec, KVPool, LayerPools, StatePool
from cadenza.backends.xla.vision.stages import TowerState, tower_state
from cadenza.batch.step_schema import NUM_EXTRA_LOGIT_ROWS, Int32Array
from cadenza.batch.token_rules import MASK, RuleLayout
from cadenza.config import PAGE_SIZE_UNIT
from cadenza.errors import RunnerError
from cadenza.models.model_config import ModelConfig

PAGE_UPDATES = 256  # page-table entries per call of `write_page_table`
PAGE_COPIES = 64  # pages per call of `copy_pages`
MASK_ROWS = 32  # records per call of `copy_rules` and `write_masks`
ITEMS_PER_CALL = 16  # pages or slots per call of the programs
TakeArrays = Callable[[Any], Any]  # the arrays that the items of a state consist of
PutArrays = Callable[[Any, Any], Any]  # a state with those arrays replaced


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
                return with_page_arrays(state, (kv, history, kept))

            return jax.lax.fori_loop(0, (num_tokens + size - 1) // size, copy_block, state)

        return jax.lax.fori_loop(0, count, copy_page, state)

    return copy_pages


def page_arrays(state: DeviceState) -> tuple[tuple[KVPool, ...], Any, Any | None]:
    """What a page consists of: its part of each of these arrays, along the first axis."""
    return state.pools.kv, state.rows.token_history, state.kept_hidden


def with_page_arrays(state: DeviceState, arrays: Any) -> DeviceState:
    kv, history, kept = arrays
    rows, pools = state.rows._replace(token_history=history), state.pools._replace(kv=kv)
    return state._replace(pools=pools, rows=rows, kept_hidden=kept)


def slot_arrays(state: DeviceState) -> StatePool:
    assert state.pools.states is not None, "the model has states"
    return state.pools.states


def with_slot_arrays(state: DeviceState, arrays: StatePool) -> DeviceState:
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


# Of what each of several devices has a part.
PARTS_OF_STATE = DeviceState(
    pools=cast(Any, True),
    rows=cast(Any, False),
    kept_hidden=False,
    own_hidden=False,
    image_rows=False,
    tower=cast(Any, False),
    span=False,
)


def new_states(count: int, width: int, dtype: Any) -> jax.Array:
    """Hidden states [count, width]; bfloat16 as uint16, since XLA updates it through float32 on a
    CPU."""
    stored = jnp.uint16 if dtype == jnp.bfloat16 else dtype
    return jnp.zeros((count, width), stored)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPrograms:
    """Copies items, pages or slots of states, to the host and back. An item is its part of each of
    several arrays along their first axis; its bytes are those parts, one after another, with the
    shapes and types of `parts`."""

    read: Callable[..., Any]
    write: Callable[..., Any]
    parts: Any


def read_function(take: TakeArrays, num_items: int) -> Callable[..., Any]:
    """The program (state, items [ITEMS_PER_CALL]) to their parts [ITEMS_PER_CALL, elements] of each
    array. The state is not donated."""

    def read_items(state: Any, items: jax.Array) -> Any:
        def parts(array: jax.Array) -> jax.Array:
            by_item = array.reshape(num_items, -1)
            indices = range(ITEMS_PER_CALL)
            return jnp.concatenate(
                [jax.lax.dynamic_index_in_dim(by_item, items[k]) for k in indices]
            )

        return jax.tree.map(parts, take(state))

    return read_items


def write_function(take: TakeArrays, put: PutArrays, num_items: int) -> Callable[..., Any]:
    """The program (state, items [ITEMS_PER_CALL], parts as `read_function` gives them, count []) to
    the state with the first `count` items overwritten."""

    def write_items(state: Any, items: jax.Array, parts: Any, count: jax.Array) -> Any:
        def write_item(index: jax.Array, state: Any) -> Any:
            def write(array: jax.Array, new: jax.Array) -> jax.Array:
                by_item = array.reshape(num_items, -1)
                part = jax.lax.dynamic_index_in_dim(new, index)
                changed = jax.lax.dynamic_update_slice_in_dim(by_item, part, items[index], 0)
                return changed.reshape(array.shape)

            return put(state, jax.tree.map(write, take(state), parts))

        return jax.lax.fori_loop(0, count, write_item, state)

    return write_items


def padded_items(items: Sequence[int]) -> Int32Array:
    padded = np.full(ITEMS_PER_CALL, items[-1], np.int32)
    padded[: len(items)] = items
    return padded


def bytes_of_items(arrays: Any, count: int) -> list[bytes]:
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(arrays)]  # [ITEMS_PER_CALL, ·]
    return [b"".join([leaf[k].tobytes() for leaf in leaves]) for k in range(count)]


def parts_of_items(shapes: Any, contents: Sequence[bytes]) -> Any:
    """The parts [ITEMS_PER_CALL, elements] of each array, as the tree `shapes`, from the bytes of
    at most ITEMS_PER_CALL items. Raises RunnerError if one has another size."""
    each_shape, tree = jax.tree.flatten(shapes)
    sizes = [each.shape[1] * each.dtype.itemsize for each in each_shape]
    leaves = [np.zeros(each.shape, each.dtype) for each in each_shape]
    for index, content in enumerate(contents):
        if len(content) != sum(sizes):
            raise RunnerError(f"an item has {sum(sizes)} bytes, not {len(content)}")
        start = 0
        for leaf, size in zip(leaves, sizes, strict=True):
            leaf[index] = np.frombuffer(content[start : start + size], leaf.dtype)
            start += size
    return jax.tree.unflatten(tree, leaves)
