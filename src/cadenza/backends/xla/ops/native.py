"""The op table over the native CPU kernels, called through XLA's FFI: one call for a whole step. A
kernel receives the true number of rows, so padding is not computed. Legend as in `ops.table`."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy.typing as npt

from cadenza.backends.xla.ops.native_library import NativeLibrary, load_native_library
from cadenza.backends.xla.ops.native_packing import plan_packing
from cadenza.backends.xla.ops.native_program import NativeProgram
from cadenza.backends.xla.ops.packed_file import PackedFile
from cadenza.backends.xla.ops.packed_memory import PackedMemory
from cadenza.backends.xla.ops.program_ops import ProgramOps
from cadenza.backends.xla.ops.table import DecoderSpec, Linear
from cadenza.weights.quantised_weight import HostWeight
from cadenza.weights.weight_format import WeightFormat

# Steps of at most this many tokens use smaller arrays; the arithmetic is the same.
DECODE_BUCKET = 64

# Enough rows for matrix products to reach full speed. 512 would double the inter-token latency of
# running streams while a prompt is computed, for 3 % more prompt tokens per second.
DEFAULT_MAX_TOKENS = 256


class NativeOps(ProgramOps):
    """Calls kernels; weights are packed once, when the checkpoint is loaded."""

    name = "native"
    skips_padding = True

    def __init__(self, spec: DecoderSpec, library: NativeLibrary | None = None) -> None:
        super().__init__(spec)
        self._library = library or load_native_library()
        self._memory = PackedMemory(place=self._library.place_pages)

    def token_buckets(self, max_num_batched_tokens: int) -> tuple[int, ...]:
        """A small bucket for decode steps, and the full token budget."""
        small = min(DECODE_BUCKET, max_num_batched_tokens)
        return tuple(sorted({small, max_num_batched_tokens}))

    @contextmanager
    def loading(self, packed: Path | None) -> Generator[None]:
        file = None if packed is None else PackedFile(packed)
        self._memory = PackedMemory(file, self._library.place_pages)
        yield
        self._memory.keep()

    def _hold(
        self,
        experts: Sequence[Sequence[HostWeight]],
        format: WeightFormat | None,
        *,
        is_gated: bool = False,
    ) -> Linear:
        own = format or self._spec.weight_format
        packing = plan_packing(self._library, experts, own, is_gated=is_gated)

        def write_all(packed: npt.NDArray[Any]) -> None:
            for place, write in zip(packed, packing.writers, strict=True):
                write(place)

        shape = (len(experts), *packing.shape)
        weight = self._memory.hold(shape, packing.dtype, write_all)
        return Linear(weight, None, packing.format, sum(map(len, experts[0])))

    def _new_program(self) -> NativeProgram:
        return NativeProgram(self._library, is_portable=self._spec.is_portable)
