"""The interface of the device side: a `Backend` reports its traits for a device, then loads the
`Runner` that computes there, which turns `ModelInputs` into `StepOutput`, one step a launch.
Runners know pages, rows and slots, not requests. All pass the same tests (`tests/contract`)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from cadenza.batch.image_cost import ImageWork
from cadenza.batch.step_schema import MaskUpdate, ModelInputs, StepOutput
from cadenza.batch.whole_spans import SpanShape
from cadenza.checkpoint.folder import Checkpoint
from cadenza.config import Arithmetic, EngineLimits, KVCacheDType, Ops, Quantization
from cadenza.kernel_proof import KernelProof
from cadenza.models.model_config import ModelConfig
from cadenza.request import Attachment
from cadenza.weights.weight_format import WeightDType
from cadenza.weights.weights import Weights

ProductDType = WeightDType | Literal["int8"]
Exactness = Literal["bitwise", "token"]
# What a backend can do beyond plain tokens (`BackendTraits`), what of it a runner is asked for
# (`RunnerSetup`), and what it has. `attachments`: it is an `ImageRunner` if it has image slots.
# `drafts`: a row samples several tokens in a step, each with the bits of a step of its own, and a
# token computed after a rejected one replaces it. `late_masks`: a step may be launched before its
# masks are known (`ModelInputs.masks_follow`), and its handle is then a `LateStepHandle`.
# `sparse_prompts`: it reads `TokenInputs.rope_positions` and `window_starts` of every token.
# `scores`, `page_copies`: it is a `PromptScorer`, a `PageCopier`. `hidden_states`: it keeps that of
# each token for `RunnerSetup.hidden_of`, with the bits of a runner that does not.
Capability = Literal[
    "logprobs",
    "attachments",
    "whole_spans",
    "drafts",
    "late_masks",
    "sparse_prompts",
    "scores",
    "page_copies",
    "hidden_states",
]
KVArrangement = Literal["paged", "dense"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMemory:
    """Bytes that a model takes on a device."""

    weight_bytes: int
    kv_bytes_per_token: int
    row_bytes: int  # of each row, for a context of any length
    scratch_bytes: int  # of everything that does not last longer than a step
    # of a slot of recurrent state (`EngineLimits.num_state_slots`); 0 for a model without
    state_bytes: int = 0
    image_slot_bytes: int = 0  # of an image slot; 0 for a model that does not see
    image_work_bytes: int = 0  # of what is needed while an image is encoded


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledSizes:
    """The most that programs take which were compiled ahead: rows, and tokens of a context and of a
    step."""

    num_rows: int
    max_model_len: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendTraits:
    """The properties of a backend on a device, available before anything is loaded."""

    name: str  # display name of backend and device: `xla:cpu`
    ops: str  # display name of the implementation of the model's operations
    # what is identical for a request run alone and in any batch: every bit of its results
    # (bitwise), or its tokens only. `verify` compares accordingly.
    exactness: Exactness
    dtypes: tuple[WeightDType, ...]  # the supported compute types
    # the default compute type for each checkpoint type
    dtype_for: Mapping[WeightDType, WeightDType]
    max_num_batched_tokens: int  # the default token budget
    # None if the device uses host memory or does not report its size
    device_memory_bytes: int | None
    # all memory of a device that has its own, of which `device_memory_bytes` can be allocated; None
    # where that is unknown or the device uses host memory
    device_total_bytes: int | None = None
    quantizations: tuple[Quantization, ...] = ("none",)  # the supported values of `--quantization`
    keeps_packed_weights: bool = False  # `RunnerSetup.packed_weights` is read and written
    # the supported values of `--kv-cache-dtype`
    kv_cache_dtypes: tuple[KVCacheDType, ...] = ("auto",)
    arithmetics: tuple[Arithmetic, ...] = ("fast",)  # the supported values of `--arithmetic`
    # the supported arrangements of KV, the default one first
    kv_layouts: tuple[KVArrangement, ...] = ("paged", "dense")
    # the longest context that is chosen by default; None is no bound
    default_max_model_len: int | None = None
    # what `verify` fills unwritten KV slots with: a value that changes every result that depends on
    # one. NaN, unless the backend multiplies masked values by 0.
    unwritten_fill: float = nan
    compiled_for: CompiledSizes | None = None  # None if programs are compiled when they are loaded
    # after which tokens a slot of the dense layout can be continued by another sequence
    # (`kv.slot_prefixes`); None if only pages are shared
    slot_unit: int | None = None
    # the model's memory by compute type; None if it follows from its `ModelConfig`
    memory: Mapping[WeightDType, ModelMemory] | None = None
    # after how many tokens of context attention may compute in another way; `verify` plays prompts
    # of more than two spans
    attention_span: int = 512
    # tokens of an image, at most, that a step computes together because they see each other both
    # ways (the capability `whole_spans`); 0 if there are none
    whole_span: int = 0
    # what its runners can have, of models that can
    capabilities: frozenset[Capability] = frozenset({"drafts"})
    # whether it writes all KV slots when it starts, so that their memory is resident before it is
    # used
    fills_kv: bool = True
    process_bytes: int = 0  # private memory of a process beside its models: libraries and programs
    # float32 arrays [L, V] that exist at the same time while tokens are chosen
    logit_copies: int = 0
    workspace_bytes: int = 0  # what a step's operations use for themselves, whatever the model
    # whether the float32 result of a layer's widest product exists beside what is made of it
    has_float_results: bool = False
    # how often a step holds one layer's keys, and values, of a whole context
    gathered_layers: int = 0
    # a sentence about kernels for the device that do not serve, or instructions that it has and its
    # kernels cannot use
    kernels_note: str | None = None
    # from how many rows products with quantised weights use tile registers, as text; None without
    # them
    tile_rows: str | None = None


class StepHandle(Protocol):
    """A launched step."""

    def result(self) -> StepOutput:
        """Waits for the step. Raises RunnerError, or the device's own error, if it failed."""
        ...


@runtime_checkable
class LateStepHandle(StepHandle, Protocol):
    """A launched step whose layers run, and which chooses its tokens when it is given its masks,
    with the bits of a step that is launched with them."""

    def choose(self, masks: Sequence[MaskUpdate]) -> None:
        """Chooses the step's tokens without waiting for them. Once, before `result` and the next
        launch. Raises RunnerError if the runner was closed or reset since the launch."""
        ...


class Runner(Protocol):
    """One model on one device, with its KV pages."""

    @property
    def name(self) -> str: ...

    @property
    def capabilities(self) -> frozenset[Capability]:
        """Supported features beyond plain tokens; requests that need others are rejected."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int | None:
        """Of the last hidden states for `ModelInputs.hidden_rows`; None if it gives none."""
        ...

    @property
    def token_buckets(self) -> tuple[int, ...]:
        """The padded step sizes it compiles, ascending; the last one caps the token budget."""
        ...

    def warmup(self) -> None: ...

    def launch(self, inputs: ModelInputs) -> StepHandle:
        """Starts a step and returns without waiting; steps run in launch order."""
        ...

    def reset(self) -> None:
        """Recovers from a failed step: waits for launched steps and discards all KV."""
        ...

    def close(self) -> None:
        """Waits for launched steps, frees device memory. Idempotent; no launch may follow."""
        ...


@runtime_checkable
class PageCopier(Protocol):
    """A runner whose pages are copied to the host and back, with the capability `page_copies`. A
    page's bytes are all that later steps read of it, and mean the same in every runner with equal
    checkpoints, arithmetic, types and page size."""

    def read_pages(self, page_ids: Sequence[int]) -> list[bytes]:
        """The bytes of pages, once all launched steps have run."""
        ...

    def write_pages(self, page_ids: Sequence[int], contents: Sequence[bytes]) -> None:
        """Writes what `read_pages` gave, before any later step runs. Raises RunnerError for a wrong
        size."""
        ...


@runtime_checkable
class StateCopier(PageCopier, Protocol):
    """The `PageCopier` of a model with recurrent state, whose slots it copies likewise."""

    def read_states(self, slots: Sequence[int]) -> list[bytes]:
        """The bytes of state slots, once all launched steps have run."""
        ...

    def write_states(self, slots: Sequence[int], contents: Sequence[bytes]) -> None:
        """Writes what `read_states` gave, before any later step runs. Raises RunnerError for a
        wrong size."""
        ...


@runtime_checkable
class ImageRunner(Protocol):
    """A runner that encodes images (`ModelInputs.image_calls`), with the capability `attachments`.
    Embeddings are a function of an image's pixels, the processor's settings and the weights,
    however calls are cut into quanta. `reset` loses them."""

    @property
    def num_image_slots(self) -> int:
        """Rows of embeddings on the device, one for each placeholder."""
        ...

    def image_work(self, part: Attachment) -> ImageWork:
        """What encoding an image part takes, from its size alone."""
        ...

    def check_image(self, part: Attachment) -> None:
        """Raises InvalidRequestError for a part that the model's processor makes of no image."""
        ...


@runtime_checkable
class PromptScorer(Protocol):
    """A runner that scores the tokens of prompts, with the capability `scores`. A query is the last
    token of a row in a step with `RowInputs.score_lens` n: the prompt's last token, at position n -
    1, which begins the row's scores, and each one after it, in order. It scores each key before n:
    the softmax over these keys in each layer without a window and each head, averaged over the
    `POOL` keys around it, of which those outside count as 0; then the largest of all layers and
    heads. What it scores depends on the row's tokens alone, bit by bit, neither on other rows nor
    on how its steps were cut."""

    def read_scores(self, row: int, num_tokens: int, num_queries: int) -> npt.NDArray[np.float32]:
        """The mean [num_tokens] over the row's `num_queries` queries so far, whose `score_lens` is
        `num_tokens`, once all launched steps have run. A score is NaN if anything that it was made
        of is."""
        ...


@runtime_checkable
class SpanRunner(Protocol):
    """A runner that may compute spans in passes (`ModelInputs.span_calls`), with the bits of steps
    that compute them whole, however calls are cut. `reset` loses what was computed."""

    @property
    def span_shape(self) -> SpanShape | None:
        """None if it computes spans in steps alone, or none at all."""
        ...


@runtime_checkable
class ProvenRunner(Protocol):
    """A runner that compares its kernels' bits when it is warmed up."""

    @property
    def proof(self) -> KernelProof | None:
        """None before `warmup`, or if its operations need none."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSetup:
    """How to load a model onto a device."""

    limits: EngineLimits
    device: str = "auto"  # with `ops`: as in `Backend.describe`
    ops: Ops = "auto"
    # of activations, and of KV and weights that are not quantised; one of `BackendTraits.dtypes`
    dtype: WeightDType = "float32"
    # how weights are quantised while they are loaded; one of `BackendTraits.quantizations`
    quantization: Quantization = "none"
    kv_cache_dtype: KVCacheDType = "auto"  # the type of KV; one of `BackendTraits.kv_cache_dtypes`
    arithmetic: Arithmetic = "fast"  # one of `BackendTraits.arithmetics`
    # the initial value of KV slots (`verify` uses `BackendTraits.unwritten_fill`); None leaves it
    # to the backend: no slot is read before it is written
    fill: float | None = None
    cache_folder: Path | None = None  # where to cache compiled programs; None disables the cache
    # a warm runner of the same model, perhaps with other weights, on whose KV and rows this one
    # computes; it has no pages of its own. `limits` may have a smaller token budget.
    kv_of: "Runner | None" = None
    # a warm runner that keeps hidden states, which this one reads, with equal numbers of rows and
    # pages; for a model with `ModelConfig.reads_hidden`, which shares embedding and head. A step
    # computes no sequence's first token, and a token that was known when a step was packed from the
    # hidden state kept for the one before it.
    hidden_of: "Runner | None" = None
    # what it must have beside what it always has; some of `BackendTraits`'s
    capabilities: frozenset[Capability] = frozenset()
    # a file whose name stands for checkpoint, `quantization` and arithmetic: the weights that were
    # quantised, as an earlier load kept them. A backend may read and write it; None: nothing is
    # kept.
    packed_weights: Path | None = None
    num_image_slots: int = 0  # 0: no images are encoded; otherwise it must be an `ImageRunner`
    # how many devices of one kind share the model, from `device` on; only with operations for that,
    # whose bits do not depend on it
    num_devices: int = 1


LoadRunner = Callable[[ModelConfig, Weights, RunnerSetup], Runner]


class SequenceModel(Protocol):
    """The reference model for a single sequence, in float32, which shares no arithmetic with the
    backend's runner, so an error in either makes them disagree."""

    @property
    def vocab_size(self) -> int: ...

    def start(self) -> None:
        """Resets to an empty sequence; the next token is at position 0."""
        ...

    def append(self, token_ids: list[int]) -> npt.NDArray[np.float32]:
        """Appends tokens to the sequence; returns the logits [V] after the last one."""
        ...


@runtime_checkable
class SeeingModel(Protocol):
    """A reference model that takes images."""

    def see(self, attachments: Sequence[Attachment]) -> None:
        """The images of the prompt of an empty sequence, whose tokens are then appended."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTotals:
    """Totals of one operation: calls, time, and the bytes it has to read at least once."""

    name: str
    num_calls: int
    elapsed_s: float
    read_bytes: int


class Instruments(Protocol):
    """Measurements of the machine's limits and of the time that each operation takes."""

    @property
    def cpu_isa(self) -> str: ...

    @property
    def num_threads(self) -> int: ...

    def new_buffer(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Allocates a buffer for `read_bytes_per_s`."""
        ...

    def read_bytes_per_s(self, buffer: npt.NDArray[np.uint8], *, repeats: int) -> float:
        """The highest read bandwidth of `repeats` passes of all threads over a `new_buffer`."""
        ...

    def operations_per_s(self, dtype: ProductDType, *, repeats: int) -> float:
        """The highest rate of `repeats` runs of all threads multiplying `dtype` values in
        registers; a multiply-add is two operations. int8 is that of quantised products."""
        ...

    def start_profile(self) -> None: ...

    def stop_profile(self) -> tuple[OpTotals, ...]:
        """Stops counting; the totals of every operation, including those never called."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A runner with one known fault, which `verify` must detect."""

    name: str
    layer: str  # what it is planted in, for people: "attention", "a sliding window"
    load_runner: LoadRunner
    absent: str | None = None  # why a model cannot show it; None if it can
    # the longest prompt of the run must have at least this many tokens for the fault to change a
    # result
    min_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSet:
    """The faults of an op table. `load_sound` loads the control: the same table without a fault.
    `note` says why `ops` differs from the op table used for serving; None if they are the same."""

    ops: Ops
    load_sound: LoadRunner
    faults: tuple[Fault, ...]
    note: str | None = None


class Backend(Protocol):
    """One implementation of the device side. Stateless: its constructor loads nothing. The defaults
    are those of a backend without reference model, compiler, instruments or faults."""

    def reserve_memory(self, share: float) -> None:
        """Asks for this share of a GPU's memory, before a device is used for the first time in the
        process. Whether it was given is in `BackendTraits.device_memory_bytes`."""

    def describe(self, device: str, ops: Ops, checkpoint: Checkpoint) -> BackendTraits:
        """The traits on `device` for a checkpoint. Finds the device; loads no weights.

        Raises:
            CheckpointError: the backend does not support the model.
            ConfigError: the backend does not support this device or these operations.
            DeviceUnavailableError: this machine does not have the device.
        """
        ...

    def describe_arithmetic(self, device: str, ops: Ops, checkpoint: Checkpoint) -> tuple[str, ...]:
        """What decides the bits of a step on `device`, besides the checkpoint, the type and the
        limits: versions, instruction set, kernels. Raises the errors of `describe`."""
        ...

    def name_arithmetic(self, checkpoint: Checkpoint, setup: RunnerSetup) -> str | None:
        """The class of a step's arithmetic: with equal names, revisions (`ARITHMETIC_REVISION`) and
        checkpoints, a step has equal bits on every machine. Raises the errors of `describe`."""

    def find_setting(self, arithmetic: str) -> str | None:
        """What to set in the environment so that this machine computes in a class that
        `name_arithmetic` names; None if nothing does."""

    def load_runner(self, checkpoint: Checkpoint, setup: RunnerSetup) -> Runner:
        """A runner with its weights loaded, before `warmup`. Raises the errors of `describe`."""
        ...

    def describe_machine(self) -> Mapping[str, Mapping[str, Any]]:
        """What this backend finds of `processor` and `device`, for `cadenza doctor`."""
        return {}

    def load_reference(self, checkpoint: Checkpoint, max_model_len: int) -> SequenceModel | None:
        """The independent model for contexts of `max_model_len` tokens; None if there is none."""

    def watch_compiles(self) -> Callable[[], int]:
        """Starts counting compilations in this process and returns the reader of the count. Once
        per process."""
        return int

    def open_instruments(self, ops: str = "native") -> Instruments | None:
        """The instruments of the op table named `ops` in the traits; None if there are none. Raises
        ConfigError if loading fails."""

    def find_faults(self, ops: str, model: ModelConfig) -> FaultSet | None:
        """The faults of the op table named `ops` in the traits, those that the model cannot show
        among them; None if there are none."""
