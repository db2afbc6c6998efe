"""The op tables that `--ops` names: what each needs, its traits, and the choice of one; loads no
weights. A table that was named is never replaced by another, and what `auto` passes over is
reported (`Choice.note`)."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from cadenza.backends.base import BackendTraits, RunnerSetup
from cadenza.backends.xla.ops.cuda_library import CudaLibrary, load_cuda_library
from cadenza.backends.xla.ops.native_library import has_native_library, load_native_library
from cadenza.backends.xla.ops.reference import MAX_TOKENS, OpTable
from cadenza.backends.xla.ops.split import SplitOps
from cadenza.backends.xla.ops.table import DecoderSpec
from cadenza.checkpoint.folder import Checkpoint
from cadenza.checkpoint.tensor_formats import format_of
from cadenza.config import Ops
from cadenza.errors import ConfigError
from cadenza.models.declaration import declare
from cadenza.models.model_config import ModelConfig
from cadenza.models.split import obstacle_to_split
from cadenza.weights.tensor_spec import TensorKind
from cadenza.weights.weight_format import WeightDType
from cadenza.weights.weights import Weights

PORTABLE = "portable"

# Of a table of tests, which computes the bits of instructions that the CPU lacks.
_EMULATED = "_emulated"

# Weights whose products take time; routers are small.
_LARGE: frozenset[TensorKind] = frozenset({"embedding", "head", "linear", "tower"})


def takes_portable_kernels(model: ModelConfig, weights: Weights, setup: RunnerSetup) -> bool:
    """Whether a step takes the kernels without bf16 instructions: on request, or where they cost
    nothing, since integer codes in all large weights and in KV leave only norms and routers."""
    if setup.arithmetic == "portable":
        return True
    dtype: WeightDType = "float32" if setup.dtype == "float32" else "bfloat16"
    return setup.kv_cache_dtype == "int8" and all(
        format_of(spec, dtype, setup.quantization, weights.format(spec.name)).is_quantised
        for spec in declare(model)
        if spec.kind in _LARGE
    )


def name_class(isa: str, portable_isa: str, *, is_portable: bool, dtype: str) -> str:
    """The class of a step of the table `isa`, which decides its bits. All tables without bf16
    instructions compute the same, `PORTABLE`; with them products of bfloat16 round in another way.
    Products of float32 are the same in all."""
    own = isa.removesuffix(_EMULATED)
    has_same_bits = is_portable or isa == portable_isa or dtype == "float32"
    return PORTABLE if has_same_bits else own


MakeOps = Callable[[DecoderSpec], OpTable]

# The attention of kernels supports head sizes that are multiples of this, up to `MAX_HEAD`.
HEAD_UNIT = 16

MAX_HEAD = 512
MAX_LATENT = 1024

NATIVE_PROCESS_BYTES = 160_000_000
REFERENCE_PROCESS_BYTES = 330_000_000
# What a process holds that has imported JAX and compiled a model's programs: with kernels 151 MB,
# with the reference operations 333 MB for 4 layers and 390 for 30.
REFERENCE_LAYER_BYTES = 4_000_000

# Of each thread, for each token of the vocabulary: the candidates of the row that it samples.
THREAD_VOCAB_BYTES = 32

THREAD_BYTES = 2_000_000

REFERENCE_LOGIT_COPIES = 7

LEAST_CAPABILITY = (8, 0)  # of a card: bfloat16 in tensor cores, and copies that do not wait

_STORED: dict[WeightDType, WeightDType] = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "bfloat16",
}


class Table(Protocol):
    """One implementation of the model's operations."""

    @property
    def name(self) -> Ops: ...

    def obstacle(self, device: Any, model: ModelConfig) -> str | None:
        """Why it cannot run a model on a device; None if it can."""
        ...

    def new_ops(self, spec: DecoderSpec) -> OpTable: ...

    def add_traits(self, common: BackendTraits, model: ModelConfig) -> BackendTraits: ...

    def describe_arithmetic(self, device: Any) -> tuple[str, ...]: ...

    def name_class(self, device: Any, checkpoint: Checkpoint, setup: RunnerSetup) -> str | None: ...


class Choice(NamedTuple):
    """A table, and why it is not the one that `auto` prefers on such a device, if it is not."""

    table: Table
    note: str | None = None


@dataclass(frozen=True, slots=True)
class ReferenceTable:
    """The definition of the operations, in plain JAX: on every device, for every model."""

    name: Ops = "reference"

    def obstacle(self, device: Any, model: ModelConfig) -> str | None:  # noqa: ARG002
        return None

    def new_ops(self, spec: DecoderSpec) -> OpTable:
        return OpTable(spec)

    def add_traits(self, common: BackendTraits, model: ModelConfig) -> BackendTraits:
        return replace(
            common,
            ops=self.name,
            dtype_for=dict.fromkeys(_STORED, "float32"),
            max_num_batched_tokens=MAX_TOKENS,
            # A program that keeps hidden states may be fused, and so rounded, otherwise by XLA.
            capabilities=common.capabilities - {"hidden_states"},
            fills_kv=True,
            process_bytes=REFERENCE_PROCESS_BYTES + model.num_layers * REFERENCE_LAYER_BYTES,
            logit_copies=REFERENCE_LOGIT_COPIES,
            gathered_layers=2,
        )

    def describe_arithmetic(self, device: Any) -> tuple[str, ...]:  # noqa: ARG002
        return ("reference",)

    def name_class(self, device: Any, checkpoint: Checkpoint, setup: RunnerSetup) -> str | None:  # noqa: ARG002
        return None


SPLIT_REVISION = "2"  # of the order of sums in `SplitOps`; to be raised where its bits change


@dataclass(frozen=True, slots=True)
class SplitTable(ReferenceTable):
    """The definition, for a model that devices share."""

    name: Ops = "split"

    def obstacle(self, device: Any, model: ModelConfig) -> str | None:  # noqa: ARG002
        return obstacle_to_split(model)

    def new_ops(self, spec: DecoderSpec) -> OpTable:
        return SplitOps(spec)

    def add_traits(self, common: BackendTraits, model: ModelConfig) -> BackendTraits:
        traits = ReferenceTable.add_traits(self, common, model)
        return replace(
            traits,
            ops=self.name,
            quantizations=("none",),
            capabilities=traits.capabilities - {"page_copies", "sparse_prompts", "scores"},
        )

    def describe_arithmetic(self, device: Any) -> tuple[str, ...]:  # noqa: ARG002
        return ("split", SPLIT_REVISION)


@dataclass(frozen=True, slots=True)
class NativeTable:
    """The kernels for CPUs."""

    name: Ops = "native"

    def obstacle(self, device: Any, model: ModelConfig) -> str | None:
        if device.platform != "cpu":
            return f"the native kernels run on cpu, not on {device.platform}"
        unsupported = _obstacle_of_heads(model)
        if unsupported is not None or has_native_library():
            return unsupported
        return "this installation was built without a C++ compiler"

    def new_ops(self, spec: DecoderSpec) -> OpTable:
        from cadenza.backends.xla.ops.native import NativeOps

        return NativeOps(spec)

    def add_traits(self, common: BackendTraits, model: ModelConfig) -> BackendTraits:
        from cadenza.backends.xla.ops.native import DEFAULT_MAX_TOKENS

        library = load_native_library()
        thread_bytes = THREAD_BYTES + THREAD_VOCAB_BYTES * model.vocab_size
        return replace(
            common,
            ops=self.name,
            dtype_for=_STORED,
            max_num_batched_tokens=DEFAULT_MAX_TOKENS,
            keeps_packed_weights=True,
            fills_kv=False,
            arithmetics=("fast", "portable"),
            process_bytes=NATIVE_PROCESS_BYTES + library.num_threads * thread_bytes,
            logit_copies=1,
            kernels_note=library.refusal_of_tiles,
            tile_rows=library.tile_rows,
        )

    def describe_arithmetic(self, device: Any) -> tuple[str, ...]:  # noqa: ARG002
        library = load_native_library()
        isas = (library.cpu_isa, library.cpu_integer_isa)
        return ("native", *isas, library.digest)

    def name_class(self, device: Any, checkpoint: Checkpoint, setup: RunnerSetup) -> str | None:  # noqa: ARG002
        library = load_native_library()
        return name_class(
            library.cpu_isa,
            library.portable_isa,
            is_portable=takes_portable_kernels(checkpoint.config, checkpoint.weights, setup),
            dtype=setup.dtype,
        )


@dataclass(frozen=True, slots=True)
class CudaTable:
    """The kernels for NVIDIA GPUs, or those of `load` over an emulation of one on `platform`."""

    name: Ops = "cuda"
    platform: str = "gpu"
    load: Callable[[], CudaLibrary] = load_cuda_library

    def obstacle(self, device: Any, model: ModelConfig) -> str | None:
        if device.platform != self.platform:
            return f"its kernels run on cuda, not on {device.platform}"
        unsupported = _obstacle_of_heads(model)
        if unsupported is None and self.platform == "gpu":
            unsupported = _obstacle_of_card(device)
        if unsupported is not None:
            return unsupported
        try:
            self.load()
        except ConfigError as error:
            return str(error)
        return None

    def new_ops(self, spec: DecoderSpec) -> OpTable:
        from cadenza.backends.xla.ops.cuda import CudaOps

        return CudaOps(spec, self.load())

    def add_traits(self, common: BackendTraits, model: ModelConfig) -> BackendTraits:  # noqa: ARG002
        from cadenza.backends.xla.ops.cuda import DEFAULT_CUDA_TOKENS

        return replace(
            common,
            ops=self.name,
            dtype_for=_STORED,
            max_num_batched_tokens=DEFAULT_CUDA_TOKENS,
            capabilities=common.capabilities - {"scores"},
            fills_kv=False,
            process_bytes=NATIVE_PROCESS_BYTES,
            logit_copies=1,
            workspace_bytes=CUDA_WORKSPACE_BYTES,
            has_float_results=True,
        )

    def describe_arithmetic(self, device: Any) -> tuple[str, ...]:
        platform = getattr(device.client, "platform_version", "")
        return ("cuda", _capability_of(device), platform, self.load().digest)

    def name_class(self, device: Any, checkpoint: Checkpoint, setup: RunnerSetup) -> str | None:  # noqa: ARG002
        return f"cuda_{_capability_of(device)}"


# Partial results of attention, at most 64 MiB (`kMostPartialBytes`), and prepared queries.
CUDA_WORKSPACE_BYTES = 128 << 20

_PREFERRED = {"cpu": "native", "gpu": "cuda"}  # the table that is made for a platform

# In the order of preference of `auto`; the last one runs everywhere.
TABLES: Sequence[Table] = (NativeTable(), CudaTable(), ReferenceTable())

NAMED_ONLY: Sequence[Table] = (SplitTable(),)  # those that `auto` does not choose


def choose_table(
    ops: Ops, device: Any, model: ModelConfig, tables: Sequence[Table] = TABLES
) -> Choice:
    """`auto` is the first that runs the model on the device. Raises ConfigError if a named one does
    not."""
    if ops != "auto":
        (named,) = (table for table in (*tables, *NAMED_ONLY) if table.name == ops)
        obstacle = named.obstacle(device, model)
        if obstacle is not None:
            raise ConfigError(f"--ops {ops}: {obstacle}; use --ops auto")
        return Choice(named)
    made_for_device = _PREFERRED.get(device.platform)
    note = None
    for table in tables:
        obstacle = table.obstacle(device, model)
        if obstacle is None:
            return Choice(table, note)
        if table.name == made_for_device:
            note = f"the {table.name} operations do not serve: {obstacle}"
    raise AssertionError("the last table runs everywhere")


def _obstacle_of_heads(model: ModelConfig) -> str | None:
    if (latent := model.latent) is not None:
        sizes = latent.rank, latent.rotary_size
        if any(size % HEAD_UNIT for size in sizes) or sum(sizes) > MAX_LATENT:
            return (
                f"latents of {sizes[0]} values and {sizes[1]} that are rotated are not multiples "
                f"of {HEAD_UNIT}, of at most {MAX_LATENT} together"
            )
    elif model.head_dim % HEAD_UNIT or model.head_dim > MAX_HEAD:
        return (
            f"heads of {model.head_dim} values are not a multiple of {HEAD_UNIT} "
            f"of at most {MAX_HEAD}"
        )
    return None


def _obstacle_of_card(device: Any) -> str | None:
    capability = _capability_of(device)
    found = re.fullmatch(r"(\d+)\.(\d+)", capability)
    if found is None:
        return f"its kernels are for NVIDIA GPUs, not for {device.device_kind}"
    if tuple(map(int, found.groups())) < LEAST_CAPABILITY:
        least = ".".join(map(str, LEAST_CAPABILITY))
        has = f"{device.device_kind} has compute capability {capability}"
        return f"{has}, and its kernels need {least}"
    return None


def _capability_of(device: Any) -> str:
    return str(getattr(device, "compute_capability", "emulated"))
