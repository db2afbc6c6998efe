"""Op tables with one fault each, for `cadenza verify --self-test`, which must detect every fault: a
row's bits depend on other rows or on the chunks of its prompt. Faults of all layers are in the
reference table's subclasses and in libraries of their own (`csrc/core/faults.h`), those of a type
of layer (`layer_faults`) in an operation's inputs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from cadenza.backends.base import Fault, FaultSet, LoadRunner
from cadenza.backends.xla.layer_faults import LAYER_FAULTS
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
from cadenza.backends.xla.ops.table import DecoderSpec as Spec
from cadenza.backends.xla.ops.table import KVPool, Linear, StepArrays
from cadenza.backends.xla.runner import XlaRunner
from cadenza.backends.xla.tables import MakeOps
from cadenza.checkpoint.model_config import ModelConfig
from cadenza.config import Ops


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


FAR_TOKENS = 1200
"""With a longest prompt of this many tokens, two rows of a step are past position 656."""

_NO_NATIVE_FAULT = 0
_NATIVE_FAULTS = (
    ("blocks relative instead of absolute", _ATTENTION, 1, 0),
    ("a page of another row", _ATTENTION, 2, 0),
    ("pages of another row from token 640 on", _ATTENTION, 3, FAR_TOKENS),
    ("key taken from the row index", _DRAWS, 4, 0),
    ("padding multiplied instead of skipped", _ATTENTION, 5, 0),
)
"""Name, layer, value of `cadenza::Fault` and `Fault.min_tokens` of each fault."""

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
        ops=ops,
        load_sound=_loads(sound),
        faults=(*own, *_faults_of_layers(sound, model)),
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
    """Makes op tables with `fault`. The fault is global: making a table replaces the previous."""

    def make(spec: Spec) -> OpTable:
        library = load_faulty_library()
        library.handle.cadenza_inject_fault(fault)
        return NativeOps(spec, library)

    return make


class UnprovenCudaOps(CudaOps):
    """Its kernels serve whatever bits they have."""

    is_proved_at_load = False


def _cuda_table(load: Callable[[], CudaLibrary], fault: int) -> MakeOps:
    """As `_native_table`, of the kernels for GPUs, which are not proved when they are loaded."""

    def make(spec: Spec) -> OpTable:
        library = load()
        library.handle.cadenza_cuda_inject_fault(fault)
        return UnprovenCudaOps(spec, library)

    return make
