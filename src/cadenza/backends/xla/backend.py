"""`XlaBackend`: `backends.base.Backend` on JAX: the traits of a device and the count of compiled
programs. Modules that serving does not need are imported on use."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import jax
import jaxlib.version

from cadenza.backends.base import (
    Backend,
    BackendTraits,
    Capability,
    FaultSet,
    Instruments,
    Runner,
    RunnerSetup,
    SequenceModel,
)
from cadenza.backends.xla.device import find_device, memory_of_device, reserve_memory
from cadenza.backends.xla.ops.native_library import has_native_library, load_native_library
from cadenza.backends.xla.tables import TABLES, Choice, Table, choose_table
from cadenza.checkpoint.folder import Checkpoint
from cadenza.config import KVCacheDType, Ops, Quantization
from cadenza.models.model_config import ModelConfig
from cadenza.weights.weight_format import WeightDType

DTYPES: tuple[WeightDType, ...] = ("float32", "bfloat16")
QUANTIZATIONS: tuple[Quantization, ...] = ("none", "int8", "int4")
KV_CACHE_DTYPES: tuple[KVCacheDType, ...] = ("auto", "int8")

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class XlaBackend(Backend):
    """CPU, NVIDIA and TPU, through JAX, with one of the op tables `tables`."""

    def __init__(self, tables: Sequence[Table] = TABLES) -> None:
        self._tables = tables

    def reserve_memory(self, share: float) -> None:
        reserve_memory(share, os.environ)

    def describe(self, device: str, ops: Ops, checkpoint: Checkpoint) -> BackendTraits:
        found = find_device(device)
        memory = memory_of_device(found, os.environ)
        chosen, vision = self._choose(ops, found, checkpoint), checkpoint.config.vision
        common = BackendTraits(
            name=f"xla:{found.platform}",
            ops=chosen.table.name,
            exactness="bitwise",
            dtypes=DTYPES,
            dtype_for={},
            max_num_batched_tokens=0,
            whole_span=0 if vision is None else vision.whole_span,
            quantizations=QUANTIZATIONS,
            kv_cache_dtypes=KV_CACHE_DTYPES,
            capabilities=frozenset(get_args(Capability)),
            device_memory_bytes=memory and memory.allocator_bytes,
            device_total_bytes=memory and memory.total_bytes,
            kernels_note=chosen.note,
        )
        return chosen.table.add_traits(common, checkpoint.config)

    def describe_arithmetic(self, device: str, ops: Ops, checkpoint: Checkpoint) -> tuple[str, ...]:
        found = find_device(device)
        versions = (jax.__version__, jaxlib.version.__version__)
        table = self._choose(ops, found, checkpoint).table
        own = table.describe_arithmetic(found)
        return (*versions, found.platform, found.device_kind, *own)

    def name_arithmetic(self, checkpoint: Checkpoint, setup: RunnerSetup) -> str | None:
        found = find_device(setup.device)
        return self._choose(setup.ops, found, checkpoint).table.name_class(found, checkpoint, setup)

    def _choose(self, ops: Ops, device: Any, checkpoint: Checkpoint) -> Choice:
        return choose_table(ops, device, checkpoint.config, self._tables)

    def find_setting(self, arithmetic: str) -> str | None:
        isas = load_native_library().available_isas if has_native_library() else ()
        return f"CADENZA_CPU_ISA={arithmetic}" if arithmetic in isas else None

    def load_runner(self, checkpoint: Checkpoint, setup: RunnerSetup) -> Runner:
        from cadenza.backends.xla.programs import enable_compilation_cache
        from cadenza.backends.xla.runner import XlaRunner

        if setup.cache_folder is not None:
            enable_compilation_cache(setup.cache_folder / "xla")
        table = self._choose(setup.ops, find_device(setup.device), checkpoint).table
        weights = checkpoint.weights.released_by_layer()
        return XlaRunner(checkpoint.config, weights, setup, table.new_ops)

    def describe_machine(self) -> Mapping[str, Mapping[str, Any]]:
        return {"processor": _kernel_facts(), "device": _device_facts()}

    def load_reference(self, checkpoint: Checkpoint, max_model_len: int) -> SequenceModel | None:
        from cadenza.backends.xla.reference_model import ReferenceModel

        return ReferenceModel(checkpoint.config, checkpoint.weights, max_model_len)

    def watch_compiles(self) -> Callable[[], int]:
        return CompileCount()

    def open_instruments(self, ops: str = "native") -> Instruments | None:
        if ops == "cuda":
            from cadenza.backends.xla.ops.cuda_library import CudaInstruments, load_cuda_library

            return CudaInstruments(load_cuda_library())
        if not has_native_library():
            return None
        from cadenza.backends.xla.ops.native import NativeInstruments

        return NativeInstruments()

    def find_faults(self, ops: str, model: ModelConfig) -> FaultSet | None:
        from cadenza.backends.xla.mutants import faults_of, has_cuda_faults, has_native_faults

        has_faults = {"native": has_native_faults, "cuda": has_cuda_faults}
        return faults_of(ops, model, are_built=ops in has_faults and has_faults[ops]())


def _kernel_facts() -> Mapping[str, Any]:
    if not has_native_library():
        return {}
    library = load_native_library()
    return {
        "isa": library.cpu_isa,
        "integer_isa": library.cpu_integer_isa,
        "portable_isa": library.portable_isa,
        "available_isas": library.available_isas,
        "available_integer_isas": library.available_integer_isas,
        "refusal_of_tiles": library.refusal_of_tiles,
        "num_threads": library.num_threads,
    }


def _device_facts() -> Mapping[str, Any]:
    try:
        devices = jax.devices()
    except RuntimeError as error:  # a plug-in whose device does not answer
        return {"error": str(error).splitlines()[0]}
    return {
        "platform": devices[0].platform,
        "name": devices[0].device_kind,
        "num_devices": len(devices),
    }


class CompileCount:
    """The number of programs that JAX has compiled in this process since construction; at most one
    per process, since JAX's event listener is never unregistered."""

    def __init__(self) -> None:
        self._count = 0
        jax.monitoring.register_event_duration_secs_listener(self._hear)

    def __call__(self) -> int:
        return self._count

    def _hear(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == COMPILE_EVENT and duration_secs >= 0:
            self._count += 1
