"""`XlaBackend`: `backends.base.Backend` on JAX.

Owns the traits of a device and the count of compiled programs; other modules implement the rest.
Modules that serving does not need are imported on use.
"""

import os
from collections.abc import Callable

import jax
import jaxlib.version

from cadenza.backends.base import (
    Backend,
    BackendTraits,
    FaultSet,
    Instruments,
    Runner,
    RunnerSetup,
    SequenceModel,
)
from cadenza.backends.xla.arithmetic import name_class, takes_portable_kernels
from cadenza.backends.xla.device import (
    find_device,
    find_ops,
    memory_of_device,
    reserve_memory,
)
from cadenza.backends.xla.ops.native_library import (
    digest_of_library,
    has_native_library,
    load_native_library,
)
from cadenza.backends.xla.ops.reference import MAX_TOKENS, ReferenceOps
from cadenza.checkpoint.dtypes import WeightDType
from cadenza.checkpoint.folder import Checkpoint
from cadenza.checkpoint.model_config import ModelConfig
from cadenza.config import KVCacheDType, Ops, Quantization

DTYPES: tuple[WeightDType, ...] = ("float32", "bfloat16")
QUANTIZATIONS: tuple[Quantization, ...] = ("none", "int8", "int4")
KV_CACHE_DTYPES: tuple[KVCacheDType, ...] = ("auto", "int8")

NATIVE_PROCESS_BYTES = 160_000_000
REFERENCE_PROCESS_BYTES = 330_000_000
REFERENCE_LAYER_BYTES = 4_000_000
"""What a process holds that has imported JAX and compiled a model's programs: with the native
kernels 151 MB, with the reference operations 333 MB for 4 layers and 390 for 30."""

THREAD_VOCAB_BYTES = 32
"""Of each thread, for each token of the vocabulary: the candidates of the row that it samples."""

THREAD_BYTES = 2_000_000

REFERENCE_LOGIT_COPIES = 7

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class XlaBackend(Backend):
    """CPU, NVIDIA and TPU, through JAX."""

    def reserve_memory(self, share: float) -> None:
        reserve_memory(share, os.environ)

    def describe(self, device: str, ops: Ops, checkpoint: Checkpoint) -> BackendTraits:
        found = find_device(device)
        memory = memory_of_device(found, os.environ)
        is_reference = find_ops(ops, found, checkpoint.config) is ReferenceOps
        stored: dict[WeightDType, WeightDType] = {
            "float32": "float32",
            "bfloat16": "bfloat16",
            "float16": "bfloat16",
        }
        return BackendTraits(
            name=f"xla:{found.platform}",
            ops="reference" if is_reference else "native",
            exactness="bitwise",
            dtypes=DTYPES,
            dtype_for=dict.fromkeys(stored, "float32") if is_reference else stored,
            max_num_batched_tokens=MAX_TOKENS if is_reference else _native_budget(),
            quantizations=QUANTIZATIONS,
            keeps_packed_weights=not is_reference,
            kv_cache_dtypes=KV_CACHE_DTYPES,
            copies_pages=True,
            # A program that keeps them may be fused, and so rounded, otherwise by XLA.
            keeps_hidden=not is_reference,
            fills_kv=is_reference,
            arithmetics=("fast",) if is_reference else ("fast", "portable"),
            device_memory_bytes=memory and memory.allocator_bytes,
            device_total_bytes=memory and memory.total_bytes,
            process_bytes=_process_bytes(checkpoint.config, is_reference=is_reference),
            logit_copies=REFERENCE_LOGIT_COPIES if is_reference else 1,
            gathered_layers=2 if is_reference else 0,
            kernels_note=None if is_reference else load_native_library().refusal_of_tiles,
            tile_rows=None if is_reference else load_native_library().tile_rows,
        )

    def describe_arithmetic(self, device: str, ops: Ops, checkpoint: Checkpoint) -> tuple[str, ...]:
        found = find_device(device)
        versions = (jax.__version__, jaxlib.version.__version__)
        described = (*versions, found.platform, found.device_kind)
        if find_ops(ops, found, checkpoint.config) is ReferenceOps:
            return (*described, "reference")
        library = load_native_library()
        isas = (library.cpu_isa, library.cpu_integer_isa)
        return (*described, "native", *isas, digest_of_library())

    def name_arithmetic(self, checkpoint: Checkpoint, setup: RunnerSetup) -> str | None:
        if find_ops(setup.ops, find_device(setup.device), checkpoint.config) is ReferenceOps:
            return None
        library = load_native_library()
        return name_class(
            library.cpu_isa,
            library.portable_isa,
            is_portable=takes_portable_kernels(checkpoint.config, checkpoint.weights, setup),
            dtype=setup.dtype,
        )

    def find_setting(self, arithmetic: str) -> str | None:
        isas = load_native_library().available_isas if has_native_library() else ()
        return f"CADENZA_CPU_ISA={arithmetic}" if arithmetic in isas else None

    def load_runner(self, checkpoint: Checkpoint, setup: RunnerSetup) -> Runner:
        from cadenza.backends.xla.runner import XlaRunner, enable_compilation_cache

        if setup.cache_folder is not None:
            enable_compilation_cache(setup.cache_folder / "xla")
        return XlaRunner(checkpoint.config, checkpoint.weights.released_by_layer(), setup)

    def load_witness(self, checkpoint: Checkpoint, max_model_len: int) -> SequenceModel | None:
        from cadenza.backends.xla.reference_model import ReferenceModel

        return ReferenceModel(checkpoint.config, checkpoint.weights, max_model_len)

    def watch_compiles(self) -> Callable[[], int]:
        return CompileCount()

    def open_instruments(self) -> Instruments | None:
        if not has_native_library():
            return None
        from cadenza.backends.xla.ops.native_measure import NativeInstruments

        return NativeInstruments()

    def find_faults(self, ops: str) -> FaultSet | None:
        from cadenza.backends.xla.mutants import faults_of, has_native_faults

        return faults_of(ops, are_built=ops == "native" and has_native_faults())


def _process_bytes(model: ModelConfig, *, is_reference: bool) -> int:
    if is_reference:
        return REFERENCE_PROCESS_BYTES + model.num_layers * REFERENCE_LAYER_BYTES
    num_threads = load_native_library().num_threads
    return NATIVE_PROCESS_BYTES + num_threads * (
        THREAD_BYTES + THREAD_VOCAB_BYTES * model.vocab_size
    )


def _native_budget() -> int:
    from cadenza.backends.xla.ops.native import DEFAULT_MAX_TOKENS

    return DEFAULT_MAX_TOKENS


class CompileCount:
    """The number of programs that JAX has compiled in this process since construction.

    The JAX event listener is never unregistered, so construct at most one per process.
    """

    def __init__(self) -> None:
        self._count = 0
        jax.monitoring.register_event_duration_secs_listener(self._hear)

    def __call__(self) -> int:
        return self._count

    def _hear(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == COMPILE_EVENT and duration_secs >= 0:
            self._count += 1
