"""Op tables with one fault each, for `cadenza verify --self-test`, which must detect every fault: a
row's bits depend on other rows or on the chunks of its prompt. Faults of all layers are in the
reference table's subclasses and in libraries of their own (`csrc/core/faults.h`), those of a type
of layer (`LAYER_FAULTS`) in an operation's inputs. Legend as in `ops.table`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from cadenza.backends.base import Fault, FaultSet, LoadRunner
from cadenza.backends.xla.ops.attention_reference import BLOCK, LayerSlots
from cadenza.backends.xla.ops.cuda import CudaOps
from cadenza.backends.xla.ops.cuda_library import (
    CudaLibrary,
    faulty_cuda_library_path,
    load_faulty_cuda_library,
)
from cadenza.backends.xla.ops.native import NativeOps
from cadenza.backends.xla.ops.native_library import (
    faulty_library_path,
    has_native_library,
    load_faulty_library,
)
from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.ops.table import DecoderSpec, KVPool, Linear, StepArrays
from cadenza.backends.xla.runner import XlaRunner
from cadenza.backends.xla.tables import MakeOps
from cadenza.batch.step_schema import NO_WINDOW_START
from cadenza.config import Ops
from cadenza.models.layer_kind import LayerKind
from cadenza.models.model_config import ModelConfig

Given = tuple[Any, ...]


class FaultyTable(NamedTuple):
    """A table with a fault, and the tokens of its pages."""

    ops: OpTable
    page_size: int


Change = Callable[[FaultyTable, Given], Given]  # what an operation is given instead


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFault:
    """`layers` names the type, as in "the model has no …". `needs_windows`: a prompt must be longer
    than a window."""

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
    return step.rows.query_starts[1:] > step.rows.query_starts[:-1]


def _next_rows(step: StepArrays) -> jax.Array:
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


class RelativeBlocks(OpTable):
    """Attention blocks start at the row's first token of this step, not at absolute positions."""

    def _block_start(self, block: jax.Array, step: StepArrays) -> jax.Array:
        first = step.rows.query_starts[step.token_rows]  # [T]
        start = step.tokens.positions[jnp.minimum(first, len(step.tokens.positions) - 1)] % BLOCK
        return (block - 1) * BLOCK + start

    def _num_blocks(self, limits: jax.Array) -> jax.Array:
        return super()._num_blocks(limits) + 1


class RowKeys(OpTable):
    """The key of a draw is the index of its row in the batch."""

    def next_tokens(self, x: jax.Array, head: Linear, step: StepArrays) -> jax.Array:
        keys = step.logits.keys.at[:, 0].set(step.logits.rows.astype(jnp.uint32))
        changed = step._replace(logits=replace(step.logits, keys=keys))
        return super().next_tokens(x, head, changed)


class MultipliedPadding(OpTable):
    """Lanes outside a row's context are multiplied by zero instead of loaded as zero."""

    def _load(self, pool: KVPool, layer_slots: LayerSlots, valid: jax.Array) -> KVPool:
        slots, layer = layer_slots
        beyond = (jnp.where(valid, slots, slots.shape[1] - 1), layer)

        def load(side: jax.Array) -> jax.Array:
            lanes = valid.reshape(*valid.shape, *(1,) * (side.ndim - 2))
            return side[beyond] * lanes.astype(side.dtype)

        return jax.tree.map(load, pool)


MUTANTS: dict[str, type[OpTable]] = {
    "blocks relative instead of absolute": RelativeBlocks,
    "key taken from the row index": RowKeys,
    "padding multiplied instead of skipped": MultipliedPadding,
}
_ATTENTION, _DRAWS, _PRODUCTS = "attention", "draws", "products"
_LAYER_OF = {"key taken from the row index": _DRAWS}


def faults_of(ops: str, model: ModelConfig, *, are_built: bool) -> FaultSet:
    """The faults of the op table `ops`, or of the reference table if the former are not built."""
    if ops == "native" and are_built:
        return native_faults(model)
    if ops == "cuda" and are_built:
        return cuda_faults(load_faulty_cuda_library, model)
    own = [
        Fault(name=name, layer=_LAYER_OF.get(name, _ATTENTION), load_runner=_loads(table))
        for name, table in MUTANTS.items()
    ]
    return FaultSet(
        ops="reference",
        load_sound=_loads(OpTable),
        faults=(*own, *_faults_of_layers(OpTable, model)),
        note=_NOT_BUILT.get(ops),
    )


_NOT_BUILT = {
    "native": "the native kernels that serve were not tested, because no library of them with "
    "faults is built; the reference operations were tested instead. In a source checkout with a "
    "C++ compiler, `make -C csrc faults` builds that library",
    "cuda": "the kernels for GPUs that serve were not tested, because no library of them with "
    "faults is built; the reference operations were tested instead. In a source checkout with "
    "nvcc, `make -C csrc cuda-faults` builds that library",
}


# With a longest prompt of this many tokens, two rows of a step are past position 656.
FAR_TOKENS = 1200

_NO_NATIVE_FAULT = 0
# Name, layer, value of `cadenza::Fault` and `Fault.min_tokens` of each fault.
_NATIVE_FAULTS = (
    ("blocks relative instead of absolute", _ATTENTION, 1, 0),
    ("a page of another row", _ATTENTION, 2, 0),
    ("pages of another row from token 640 on", _ATTENTION, 3, FAR_TOKENS),
    ("key taken from the row index", _DRAWS, 4, 0),
    ("padding multiplied instead of skipped", _ATTENTION, 5, 0),
)

_CUDA_FAULTS = (*_NATIVE_FAULTS, ("sums in an order that depends on the rows", _PRODUCTS, 6, 0))


def has_native_faults() -> bool:
    return has_native_library() and faulty_library_path().exists()


def has_cuda_faults() -> bool:
    return faulty_cuda_library_path().exists()


def native_faults(model: ModelConfig) -> FaultSet:
    return _kernel_faults("native", _native_table, _NATIVE_FAULTS, model)


def cuda_faults(load: Callable[[], CudaLibrary], model: ModelConfig) -> FaultSet:
    return _kernel_faults("cuda", partial(_cuda_table, load), _CUDA_FAULTS, model)


def _kernel_faults(
    ops: Ops,
    table: Callable[[int], MakeOps],
    faults: Sequence[tuple[str, str, int, int]],
    model: ModelConfig,
) -> FaultSet:
    sound = table(_NO_NATIVE_FAULT)
    own = [
        Fault(name=name, layer=layer, load_runner=_loads(table(value)), min_tokens=min_tokens)
        for name, layer, value, min_tokens in faults
    ]
    return FaultSet(
        ops=ops, load_sound=_loads(sound), faults=(*own, *_faults_of_layers(sound, model))
    )


def _faults_of_layers(make_ops: MakeOps, model: ModelConfig) -> list[Fault]:
    return [
        Fault(
            name=each.name,
            layer=each.layers,
            load_runner=_loads(partial(each.planted, make_ops)),
            absent=None if each.is_in(model) else f"the model has no {each.layers}",
            min_tokens=each.min_tokens(model),
        )
        for each in LAYER_FAULTS
    ]


def _loads(make_ops: MakeOps) -> LoadRunner:
    return partial(XlaRunner, make_ops=make_ops)


def _native_table(fault: int) -> MakeOps:
    # The fault is global: making a table replaces the previous.
    def make(spec: DecoderSpec) -> OpTable:
        library = load_faulty_library()
        library.handle.cadenza_inject_fault(fault)
        return NativeOps(spec, library)

    return make


class UnprovenCudaOps(CudaOps):
    """Its kernels serve whatever bits they have."""

    is_proved_at_load = False


def _cuda_table(load: Callable[[], CudaLibrary], fault: int) -> MakeOps:
    def make(spec: DecoderSpec) -> OpTable:
        library = load()
        library.handle.cadenza_cuda_inject_fault(fault)
        return UnprovenCudaOps(spec, library)

    return make
