"""The op table over the kernels for NVIDIA GPUs: one FFI call for a whole step.

The host does not know a step's true number of rows, so a program computes its bucket, and buckets
are many. Weights of floats keep the checkpoint's layout, [N, K]. Legend as in `ops.table`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from cadenza.backends.xla.ops.cuda_library import CudaLibrary, load_cuda_library
from cadenza.backends.xla.ops.native_program import NativeProgram, ProgramWords
from cadenza.backends.xla.ops.program_ops import ProgramOps
from cadenza.backends.xla.ops.quantised import are_codes, as_floats, as_operand
from cadenza.backends.xla.ops.table import DecoderSpec, Linear, StepArrays, expert_biases
from cadenza.checkpoint.quantised_weight import HostWeight
from cadenza.checkpoint.weight_format import WeightFormat
from cadenza.errors import ConfigError

DEFAULT_CUDA_TOKENS = 2048
"""Enough rows for the tensor cores to be busy; a step of them takes some tens of milliseconds."""


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

    def token_buckets(self, max_num_batched_tokens: int) -> tuple[int, ...]:
        """Powers of two, and the full token budget."""
        powers = (1 << power for power in range(max_num_batched_tokens.bit_length()))
        return tuple(sorted({*powers, max_num_batched_tokens}))

    def load_linear(
        self,
        parts: Sequence[HostWeight],
        bias: Sequence[npt.NDArray[Any]] = (),
        format: WeightFormat | None = None,
    ) -> Linear:
        own = format or self._spec.weight_format
        all_biases = np.concatenate(bias).astype(np.float32) if len(bias) else None
        return Linear(self._joined(parts, own), all_biases, own, sum(map(len, parts)))

    def load_experts(
        self,
        experts: Sequence[Sequence[HostWeight]],
        format: WeightFormat | None = None,
        biases: Sequence[Sequence[npt.NDArray[Any]]] = (),
    ) -> Linear:
        own = format or self._spec.weight_format
        weight = np.stack([self._joined(parts, own) for parts in experts])
        return Linear(weight, expert_biases(biases), own, sum(map(len, experts[0])))

    def _joined(self, parts: Sequence[HostWeight], format: WeightFormat) -> npt.NDArray[Any]:
        """Weights [Ni, K] as one [N, K]; a single one of the right type without a copy."""
        held = as_operand(parts, format)
        if are_codes(held, format):
            raise ConfigError(f"there are no kernels for GPUs for weights in {format.name}")
        floats = [as_floats(part).astype(jnp.dtype(format.name), copy=False) for part in held]
        return floats[0] if len(floats) == 1 else np.concatenate(floats)

    def embed(self, table: Linear, step: StepArrays) -> jax.Array:
        self._bound(step)
        return super().embed(table, step)

    def next_tokens(self, x: jax.Array, head: Linear, step: StepArrays) -> jax.Array:
        self._bound(step)
        return super().next_tokens(x, head, step)

    def _bound(self, step: StepArrays) -> None:
        """Tells the program that is recorded the tokens of its step."""
        if isinstance(self._program, CudaProgram):
            self._program.row_bound = len(step.tokens.ids)

    def _new_program(self) -> NativeProgram:
        return CudaProgram(self._library)
