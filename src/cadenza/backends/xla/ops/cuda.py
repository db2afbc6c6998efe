"""The op table over the kernels for NVIDIA GPUs: one FFI call for a whole step. The host does not
know a step's true number of rows, so a program computes its bucket, and buckets are many. Legend as
in `ops.table`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from cadenza.backends.xla.ops.cuda_library import CudaLibrary, load_cuda_library
from cadenza.backends.xla.ops.native_library import load_native_library
from cadenza.backends.xla.ops.native_program import NativeProgram, ProgramWords
from cadenza.backends.xla.ops.packed_memory import PackedMemory, plan_packing
from cadenza.backends.xla.ops.program_ops import Product, ProgramOps
from cadenza.backends.xla.ops.quantised import are_codes, are_float8, as_floats, as_operand
from cadenza.backends.xla.ops.table import (
    AttendingLayer,
    DecoderSpec,
    HeadFactors,
    HeadInputs,
    KVPool,
    Linear,
    StepArrays,
)
from cadenza.kernel_proof import ProvenProduct
from cadenza.weights.quantised_weight import HostWeight
from cadenza.weights.weight_format import WeightFormat

# Enough rows for the tensor cores to be busy; a step of them takes some tens of milliseconds.
DEFAULT_CUDA_TOKENS = 2048


class CudaProgram(NativeProgram):
    """A program that knows how many tokens its step has at most."""

    def __init__(self, library: CudaLibrary) -> None:
        super().__init__(library)
        self._kernels = library
        self.row_bound = 0

    def _settings(self, words: ProgramWords) -> tuple[dict[str, Any], int]:
        needed = self._kernels.workspace_bytes(words.operations, words.arrays, self.row_bound)
        return {"row_bound": self.row_bound, "workspace_bytes": needed}, needed


class CudaOps(ProgramOps):
    """Calls kernels; weights are loaded as they are stored."""

    name = "cuda"
    is_proved_at_load = True

    def __init__(self, spec: DecoderSpec, library: CudaLibrary | None = None) -> None:
        super().__init__(spec)
        self._library = library or load_cuda_library()

    def prove_products(
        self, products: Sequence[Product], rows: Sequence[int]
    ) -> tuple[ProvenProduct, ...]:
        return tuple(self._prove(each, rows) for each in products)

    def _prove(self, product: Product, rows: Sequence[int]) -> ProvenProduct:
        weight = product.weight
        found = self._library.prove_product(product, rows)
        shared = {each["rows"] for each in found if each["kernel"] != "own"}
        differing = {each["rows"] for each in found if each["cublaslt_differs"]}
        shape = "x".join(map(str, weight.shape))
        return ProvenProduct(
            weight=f"{shape} {weight.dtype.name}{', gate and up' * product.is_gated}",
            own_rows=tuple(each for each in rows if each not in shared),
            library_rows=tuple(sorted(shared)),
            differing_rows=tuple(sorted(differing)),
            algorithm=found[-1]["found"],
        )

    def token_buckets(self, max_num_batched_tokens: int) -> tuple[int, ...]:
        powers = (1 << power for power in range(max_num_batched_tokens.bit_length()))
        return tuple(sorted({*powers, max_num_batched_tokens}))

    def _hold(
        self,
        experts: Sequence[Sequence[HostWeight]],
        format: WeightFormat | None,
        *,
        is_gated: bool = False,
    ) -> Linear:
        own = format or self._spec.weight_format
        held = hold_weights(experts, own, is_gated=is_gated)
        return Linear(held.weights, None, held.format, sum(map(len, experts[0])))

    def embed(self, table: Linear, step: StepArrays) -> jax.Array:
        self._bound(step)
        return super().embed(table, step)

    def rope_append_attend(
        self,
        given: HeadInputs,
        pool: KVPool,
        factors: HeadFactors,
        step: StepArrays,
        layer: AttendingLayer,
    ) -> tuple[jax.Array, KVPool]:
        self._bound(step)  # a pass of a span embeds no tokens
        return super().rope_append_attend(given, pool, factors, step, layer)

    def next_tokens(self, x: jax.Array, head: Linear, step: StepArrays) -> jax.Array:
        self._bound(step)
        return super().next_tokens(x, head, step)

    def _bound(self, step: StepArrays) -> None:
        if isinstance(self._program, CudaProgram):
            self._program.row_bound = len(step.tokens.ids)

    def _new_program(self) -> NativeProgram:
        return CudaProgram(self._library)

    def _placed(self, weight: npt.NDArray[Any]) -> jax.Array:
        # On the device before the next one is read: the host holds no second copy of all.
        return jax.block_until_ready(jax.device_put(weight))


class HeldWeights(NamedTuple):
    """The weights of experts with equal parts, [X, ...]; `format` is that of the first part."""

    weights: npt.NDArray[Any]
    format: WeightFormat


def hold_weights(
    experts: Sequence[Sequence[HostWeight]], format: WeightFormat, *, is_gated: bool
) -> HeldWeights:
    """Weights [Ni, K] side by side of each expert. Floats keep the checkpoint's layout, [N, K], and
    those of one expert and one part are not copied; codes are packed as for the CPU, whose panels
    are what a warp reads."""
    held = [as_operand(parts, format) for parts in experts]
    are_packed = all(are_float8(parts) for parts in experts) or all(
        are_codes(parts, format) for parts in held
    )
    if are_packed:
        return _pack(experts, format, is_gated=is_gated)
    floats = [_join([as_floats(part) for part in parts], format) for parts in held]
    return HeldWeights(floats[0][None] if len(floats) == 1 else np.stack(floats), format)


def _join(parts: Sequence[npt.NDArray[Any]], format: WeightFormat) -> npt.NDArray[Any]:
    floats = [part.astype(jnp.dtype(format.name), copy=False) for part in parts]
    return floats[0] if len(floats) == 1 else np.concatenate(floats)


def _pack(
    experts: Sequence[Sequence[HostWeight]], format: WeightFormat, *, is_gated: bool
) -> HeldWeights:
    packing = plan_packing(load_native_library(), experts, format, is_gated=is_gated)
    packed = PackedMemory().empty((len(experts), *packing.shape), packing.dtype)
    for place, write in zip(packed, packing.writers, strict=True):
        write(place)
    return HeldWeights(packed, packing.format)
