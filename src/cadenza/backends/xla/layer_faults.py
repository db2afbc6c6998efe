"""`LAYER_FAULTS`: faults of one type of layer each, for `cadenza verify --self-test`. A fault
changes an operation's inputs where another row takes part in the step, so that it is the same in
every op table, and absent from a step of one row. Legend as in `ops.table`."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.ops.table import DecoderSpec, StepArrays
from cadenza.backends.xla.tables import MakeOps
from cadenza.checkpoint.layer_kind import LayerKind
from cadenza.checkpoint.model_config import ModelConfig
from cadenza.core.step_schema import NO_WINDOW_START

Given = tuple[Any, ...]


class FaultyTable(NamedTuple):
    """A table with a fault, and the tokens of its pages."""

    ops: OpTable
    page_size: int


Change = Callable[[FaultyTable, Given], Given]
"""What an operation is given instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFault:
    """A fault in one operation of the table; `layers` names the type, as in "the model has no …".
    With `needs_windows` a prompt is longer than a window (`backends.base.Fault.min_tokens`)."""

    name: str
    layers: str
    is_in: Callable[[ModelConfig], bool]
    operation: str
    change: Change
    needs_windows: bool = False

    def planted(self, make_ops: MakeOps, spec: DecoderSpec) -> OpTable:
        ops = make_ops(spec)
        sound, table = getattr(ops, self.operation), FaultyTable(ops, spec.page_size)
        setattr(ops, self.operation, lambda *given: sound(*self.change(table, given)))
        return ops

    def min_tokens(self, model: ModelConfig) -> int:
        windows = [kind.window for kind in model.layer_kinds if kind.window is not None]
        return 1 + min(windows, default=0) if self.needs_windows else 0


def _busy_rows(step: StepArrays) -> jax.Array:
    """[R]: whether a row has tokens in the step."""
    return step.rows.query_starts[1:] > step.rows.query_starts[:-1]


def _next_rows(step: StepArrays) -> jax.Array:
    """[R]: of each row the next one with tokens in the step, or itself."""
    is_busy = _busy_rows(step)
    rows = jnp.arange(len(is_busy))
    others = (rows[:, None] + 1 + rows) % len(rows)  # [R, R], the row itself last
    return others[rows, jnp.argmax(is_busy[others], axis=1)]


def _latent_of_next_row(table: FaultyTable, given: Given) -> Given:
    inputs, pool, factors, step, layer = given
    return inputs, pool, factors, _with_page_of_next_row(table, step), layer


def _shared_kv_of_next_row(table: FaultyTable, given: Given) -> Given:
    inputs, pool, factors, step, layer = given
    if inputs.qkv.shape[1] == layer.heads.query_size:
        step = _with_page_of_next_row(table, step)
    return inputs, pool, factors, step, layer


def _with_page_of_next_row(table: FaultyTable, step: StepArrays) -> StepArrays:
    pages, others = step.page_table, _next_rows(step)
    if pages.shape[1] < 2:
        return step
    is_full = step.rows.kv_lens >= 2 * table.page_size
    second = jnp.where(is_full & is_full[others], pages[others, 1], pages[:, 1])
    return step._replace(page_table=pages.at[:, 1].set(second))


def _window_of_next_row(table: FaultyTable, given: Given) -> Given:  # noqa: ARG001
    inputs, pool, factors, step, layer = given
    if layer.window is None:
        return given
    others = _next_rows(step)[step.token_rows]
    first = jnp.clip(step.rows.kv_lens[others] - layer.window, 0, step.tokens.positions)
    starts = jnp.where(others == step.token_rows, NO_WINDOW_START, first)
    tokens = replace(step.tokens, window_starts=starts)
    layer = replace(layer, has_starts=True)
    return inputs, pool, factors, step._replace(tokens=tokens), layer


def _sinks_of_next_heads(table: FaultyTable, given: Given) -> Given:  # noqa: ARG001
    inputs, pool, factors, step, layer = given
    if factors.sinks is None:
        return given
    is_alone = jnp.sum(_busy_rows(step)) < 2
    sinks = jnp.where(is_alone, factors.sinks, jnp.roll(factors.sinks, 1))
    return inputs, pool, factors._replace(sinks=sinks), step, layer


def _embedding_of_next_row(table: FaultyTable, given: Given) -> Given:  # noqa: ARG001
    weights, step = given
    ids, last = step.tokens.ids, jnp.maximum(step.rows.query_starts[1:] - 1, 0)
    indices = jnp.where(_busy_rows(step), last, len(ids))  # none of idle rows
    changed = ids.at[indices].set(ids[last[_next_rows(step)]], mode="drop")
    return weights, step._replace(tokens=replace(step.tokens, ids=changed))


def _experts_of_next_token(table: FaultyTable, given: Given) -> Given:
    x, router, count, *rest = given
    others = (jnp.arange(len(x), dtype=jnp.int32) + 1) % jnp.maximum(count, 1)
    return table.ops.take_rows(x, others, count), router, count, *rest


def _any(has: Callable[[LayerKind], object]) -> Callable[[ModelConfig], bool]:
    return lambda model: any(map(has, model.layer_kinds))


LAYER_FAULTS = (
    LayerFault(
        name="a window of another row",
        layers="sliding windows",
        is_in=_any(lambda kind: kind.window),
        operation="rope_append_attend",
        change=_window_of_next_row,
        needs_windows=True,
    ),
    LayerFault(
        name="the sink of another head beside other rows",
        layers="attention sinks",
        is_in=lambda model: model.has_attention_sinks,
        operation="rope_append_attend",
        change=_sinks_of_next_heads,
    ),
    LayerFault(
        name="latents of another row",
        layers="latents",
        is_in=_any(lambda kind: kind.latent),
        operation="latent_attend",
        change=_latent_of_next_row,
    ),
    LayerFault(
        name="an earlier layer's KV of another row",
        layers="shared KV",
        is_in=_any(lambda kind: kind.kv_source is not None),
        operation="rope_append_attend",
        change=_shared_kv_of_next_row,
    ),
    LayerFault(
        name="per-layer embeddings of another row's token",
        layers="per-layer embeddings",
        is_in=lambda model: model.layer_inputs is not None,
        operation="embed_for_layers",
        change=_embedding_of_next_row,
    ),
    LayerFault(
        name="the experts of the step's next token",
        layers="experts",
        is_in=_any(lambda kind: kind.has_experts),
        operation="route_experts",
        change=_experts_of_next_token,
    ),
)
