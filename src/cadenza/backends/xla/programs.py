"""The compiled programs of one runner: the step (one for each bucket) and its two servants.

Everything is compiled ahead of time by `compile_programs`; calling a compiled program with another
shape raises instead of compiling, so nothing compiles after warm-up by construction. Knows no
scheduler; `DeviceState` is what lives on the device between steps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from cadenza.backends.xla.decoder import DecoderWeights, run_decoder
from cadenza.backends.xla.ops.table import (
    COLUMN_TOKEN,
    DecoderSpec,
    KVPool,
    OpTable,
)
from cadenza.backends.xla.wire import WireShape, unpack
from cadenza.checkpoint.model_config import ModelConfig

Compiled = Callable[..., Any]

PAGE_UPDATES = 256
"""Page-table entries that one call of `write_page_table` takes."""


class DeviceState(NamedTuple):
    """Donated to every step and given back updated."""

    pools: tuple[KVPool, ...]
    last_sampled: Any  # [R]
    page_table: Any  # [R, P]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramShape:
    """The static sizes of a runner's programs."""

    num_rows: int
    max_pages_per_seq: int
    num_pages: int
    token_buckets: tuple[int, ...]
    fill: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """Compiled; `step` by bucket."""

    step: dict[int, Compiled]
    new_state: Compiled
    write_page_table: Compiled


def step_function(ops: OpTable, model: ModelConfig, shape: WireShape) -> Callable[..., Any]:
    """(weights, state, wire [·]) to (state, result [L, C]), to be compiled or exported."""

    def step(
        weights: DecoderWeights, state: DeviceState, wire: jax.Array
    ) -> tuple[DeviceState, jax.Array]:
        arrays = unpack(shape, wire, state.last_sampled, state.page_table)
        result, pools = run_decoder(ops, model, weights, state.pools, arrays)
        in_use = arrays.logit_indices >= 0
        rows = jnp.where(in_use, arrays.logit_rows, shape.num_rows)
        last = state.last_sampled.at[rows].set(result[:, COLUMN_TOKEN], mode="drop")
        return DeviceState(pools, last, state.page_table), result

    return step


def write_page_table(state: DeviceState, updates: jax.Array) -> DeviceState:
    """Applies updates [PAGE_UPDATES, 3] of (row, index, page); rows out of range are dropped."""
    table = state.page_table.at[updates[:, 0], updates[:, 1]].set(updates[:, 2], mode="drop")
    return state._replace(page_table=table)


def state_function(ops: OpTable, spec: DecoderSpec, shape: ProgramShape) -> Callable[[], Any]:
    """() to a fresh `DeviceState` whose every KV element is `shape.fill`."""

    def new_state() -> DeviceState:
        return DeviceState(
            tuple(
                ops.new_kv_pool(shape.num_pages, shape.fill) for _ in range(spec.model.num_layers)
            ),
            jnp.zeros(shape.num_rows, jnp.int32),
            jnp.zeros((shape.num_rows, shape.max_pages_per_seq), jnp.int32),
        )

    return new_state


def compile_programs(
    ops: OpTable,
    spec: DecoderSpec,
    shape: ProgramShape,
    weights: DecoderWeights,
    device: Any,
) -> Programs:
    """Compiles everything a runner will ever call."""
    sharding = SingleDeviceSharding(device)

    def abstract(tree: Any) -> Any:
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
        )

    new_state = state_function(ops, spec, shape)
    state = abstract(jax.eval_shape(new_state))
    abstract_weights = abstract(weights)
    steps: dict[int, Compiled] = {}
    for bucket in shape.token_buckets:
        wire_shape = WireShape(bucket, shape.num_rows)
        wire = jax.ShapeDtypeStruct((wire_shape.size,), jnp.int32, sharding=sharding)
        jitted = jax.jit(step_function(ops, spec.model, wire_shape), donate_argnums=1)
        steps[bucket] = jitted.lower(abstract_weights, state, wire).compile()
    updates = jax.ShapeDtypeStruct((PAGE_UPDATES, 3), jnp.int32, sharding=sharding)
    return Programs(
        step=steps,
        new_state=jax.jit(new_state, out_shardings=sharding).lower().compile(),
        write_page_table=jax.jit(write_page_table, donate_argnums=0)
        .lower(state, updates)
        .compile(),
    )
