"""The user's options (`EngineConfig`) and the limits that `loading.plan` resolves from them
(`EngineLimits`). An option is declared once (`option`). Invariant: every `EngineConfig` is within
bounds."""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypedDict, cast

from cadenza.errors import ConfigError, show
from cadenza.option import checked, is_folder_name, is_number, is_path_or_text, option, text
from cadenza.sparse_prefill import SpecPrefillConfig, parse_spec_prefill
from cadenza.speculative_config import SpeculativeConfig, parse_speculative_config

Ops = Literal["auto", "native", "reference", "cuda", "split"]
DType = Literal["auto", "float32", "bfloat16"]
Quantization = Literal["none", "int8", "int4"]
KVCacheDType = Literal["auto", "int8"]
KVLayout = Literal["auto", "paged", "dense"]
Arithmetic = Literal["fast", "portable"]
SchedulerLoop = Literal["plain", "overlap"]
GenerationConfig = Literal["auto", "none"]
Batching = Literal["continuous", "static"]
SchedulingPolicy = Literal["fcfs", "shortest_first", "priority"]
AdmissionMode = Literal["conservative", "balanced", "optimistic"]
MaxItlMs = float | str  # milliseconds, "auto" or "none"
WholeOrAuto = int | Literal["auto"] | None  # None is as "auto"; `EngineConfig` says what that is

# Models of the package, by the names that commands take; a folder of that name comes before.
PACKAGED_MODELS = ("bundled", "bundled-vision")

PAGE_SIZE_UNIT = 16
DEFAULT_SNAPSHOT_INTERVAL = 512
DEFAULT_IMAGE_CACHE_BYTES = 256 << 20
DEFAULT_IMAGE_MAX_TOKENS, MIN_IMAGE_MAX_TOKENS, MAX_IMAGE_MAX_TOKENS = 4096, 64, 1 << 16
MAX_NUM_SEQS_BOUND = 1 << 14
DEFAULT_MAX_NUM_SEQS = 16
MAX_MODEL_LEN_BOUND = 1 << 24
MAX_LOGPROBS_BOUND = 20
MAX_NUM_QUEUED_REQS_BOUND = 1 << 31
MAX_NUM_QUEUED_TOKENS_BOUND = 1 << 40
MAX_SEED = (1 << 63) - 1
MIN_MAX_ITL_MS, MAX_MAX_ITL_MS = 1.0, 600_000.0
MIN_GUARD_S, MAX_GUARD_S = 0.001, 86_400.0
MAX_HEADROOM_GB = 1_000_000.0
MIN_UTILIZATION = 0.01
MIN_DISK_BYTES = 1 << 20


_DEVICE = re.compile(r"auto|metal|(cpu|cuda|tpu)(:[0-9]{1,4})?")


def _as_drafts(_: str, value: object) -> SpeculativeConfig | None:
    return None if _is_none(value) else parse_speculative_config(value)


def _as_sparse_prompts(_: str, value: object) -> SpecPrefillConfig | None:
    return None if _is_none(value) else parse_spec_prefill(value)


def _is_none(value: object) -> bool:
    return isinstance(value, str) and value == "none"


def _as_max_itl_ms(_: str, value: object) -> MaxItlMs:
    if isinstance(value, str) and value in ("auto", "none"):
        return str.__str__(value)
    if is_number(value) and MIN_MAX_ITL_MS <= cast(float, value) <= MAX_MAX_ITL_MS:
        return float(cast(float, value))
    raise ConfigError(
        f"--max-itl-ms {show(value)} must be auto, none or a number of milliseconds from "
        f"{MIN_MAX_ITL_MS:g} to {MAX_MAX_ITL_MS:g}"
    )


def refuse_fp8_kv(kv_cache_dtype: object) -> None:
    """Raises ConfigError for a type of KV that other servers have, and int8 replaces here."""
    if isinstance(kv_cache_dtype, str) and kv_cache_dtype.startswith("fp8"):
        raise ConfigError(
            f"--kv-cache-dtype {show(kv_cache_dtype)} is not supported: with as many bits, fp8 is "
            f"less accurate than int8 and slower on a CPU; use --kv-cache-dtype int8"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Engine options; `None` means that a value is chosen at load time. Raises ConfigError where a
    value is out of bounds; the message names the flag.

    Options take the words that their flags take: "auto" for a whole number, or for a share that may
    be None, is None, or the field's default where None is no value of it. `max_itl_ms`: "none"
    bounds nothing; "auto" derives the bound of a server from measured steps and is "none"
    elsewhere."""

    backend: str = option("auto", "What computes.", read=text("must be auto, or a backend's name"))
    device: str = option(
        "auto",
        "Where it computes.",
        read=text("is not one of auto, cpu, cuda[:n], metal, tpu[:n]", _DEVICE.fullmatch),
        metavar="auto|cpu|cuda[:n]|metal|tpu[:n]",
    )
    ops: Ops = option("auto", "The implementation of the model's operations.")
    tensor_parallel_size: int | None = option(
        None,
        "Devices of one kind that share the model: 1, 2, 4 or 8, with the same answers, bit for "
        "bit; auto: one, with the operations made for it.",
        *("-tp", "--tp-size"),
        within=(1, 8),
    )
    revision: str | None = option(
        None,
        "Branch, tag or commit of a hub model; all files are read at that one commit "
        "(default: main).",
        read=text("must be a branch, a tag or a commit"),
        metavar="NAME",
    )
    dtype: DType = option(
        "auto", "Type of activations, and of KV and weights that are not quantised."
    )
    quantization: Quantization = option(
        "none", "Quantise the weights while they are loaded; activations are then int8 in products."
    )
    weight_cache_bytes: int | None = option(
        None,
        "Bytes on disk for weights that --quantization made, which later starts read; 0: none; "
        "auto: 16 GiB.",
        within=(0, 1 << 60),
    )
    kv_cache_dtype: KVCacheDType = option(
        "auto",
        "Type of the KV cache: auto is that of the activations, int8 halves bfloat16's memory.",
    )
    arithmetic: Arithmetic = option(
        "fast",
        "fast takes the best instructions of this CPU; portable gives the same bits on every CPU, "
        "and takes longer where there are bf16 instructions, which round in another way.",
    )
    max_model_len: int | None = option(
        None,
        "Most tokens of a request, prompt and answer together; auto fits the memory.",
        *("--ctx-size", "-c", "--context-length"),
        within=(1, MAX_MODEL_LEN_BOUND),
    )
    max_num_seqs: int | None = option(
        DEFAULT_MAX_NUM_SEQS,
        "Requests that run at the same time: the rows of the batch; auto: as many as the KV "
        "pool has room for at 1,024 tokens each, and at most as many as a step has tokens.",
        *("--parallel", "-np", "--max-running-requests", "--decode-concurrency"),
        "--max-batch-size",
        within=(1, MAX_NUM_SEQS_BOUND),
    )
    max_num_batched_tokens: int | None = option(
        None, "Tokens computed in one step.", "--prefill-step-size", within=(1, MAX_MODEL_LEN_BOUND)
    )
    kv_cache_memory_bytes: int | None = option(
        None, "Bytes of memory for KV pages.", within=(1, 1 << 60)
    )
    num_pages: int | None = option(
        None, "KV pages, in place of --kv-cache-memory-bytes.", within=(1, 1 << 31)
    )
    gpu_memory_utilization: float | None = option(
        None,
        "The share of a GPU's memory that the engine takes; auto: what the backend takes anyway, "
        "0.75 with xla (default: auto).",
        within=(MIN_UTILIZATION, 1.0),
        unit="a share",
        metavar="SHARE|auto",
    )
    scheduler_headroom_gb: float = option(
        0.0,
        "Memory that the engine leaves free, in GB, beside weights and KV.",
        within=(0.0, MAX_HEADROOM_GB),
        unit="a number of GB",
        metavar="GB",
    )
    kv_layout: KVLayout = option(
        "auto", "KV in pages, or in one block for each row; auto: as the backend has it."
    )
    page_size: int = option(
        PAGE_SIZE_UNIT, "Tokens of a KV page, a multiple of 16.", within=(PAGE_SIZE_UNIT, 1 << 16)
    )
    enable_prefix_caching: bool = option(True, "Reuse the KV of prompts that begin alike.")
    prefix_cache_memory_share: float = option(
        1.0,
        "The most of the KV pages that may hold prefixes for reuse, in use or not.",
        within=(0.0, 1.0),
        unit="a share",
        metavar="SHARE",
    )
    max_state_snapshots: int | None = option(
        None,
        "Of a model with recurrent state, slots for states of prompts that begin alike, beside two "
        "for each row, as far as they fit a quarter of the memory that is left; auto: one for each "
        "row, at least 16.",
        within=(0, 1 << 24),
    )
    state_snapshot_interval: int = option(
        DEFAULT_SNAPSHOT_INTERVAL,
        "Tokens of a prompt between two such states, beside those at its end and where it parts "
        "from earlier ones; a prompt has few: a long one has them further apart.",
        within=(PAGE_SIZE_UNIT, MAX_MODEL_LEN_BOUND),
    )
    prefix_cache_disk: str | None = option(
        None,
        "Store the KV of prompts in this folder too, from where later starts and other servers "
        "take it.",
        read=text("must be a folder's path", is_folder_name, takes_path=True),
        metavar="DIR",
    )
    prefix_cache_disk_bytes: int | None = option(
        None, "Bytes that the folder may take; auto: 8 GiB.", within=(MIN_DISK_BYTES, 1 << 60)
    )
    images: bool = option(
        True, "Take images, if the model sees; without, its tower takes no memory."
    )
    mmproj: str | None = option(
        None,
        "A GGUF file with the model's image tower; by default the one beside a GGUF model whose "
        "name has mmproj.",
        read=text("must be a GGUF file", is_path_or_text, takes_path=True),
        metavar="FILE",
    )
    image_cache_bytes: int = option(
        DEFAULT_IMAGE_CACHE_BYTES,
        "Bytes for embeddings of images on the device, which are kept until others need the room.",
        within=(1, 1 << 60),
    )
    image_max_tokens: int = option(
        DEFAULT_IMAGE_MAX_TOKENS,
        "The most tokens of an image whose size decides their number; larger ones are reduced.",
        within=(MIN_IMAGE_MAX_TOKENS, MAX_IMAGE_MAX_TOKENS),
    )
    scheduler: SchedulerLoop = option(
        "overlap", "Whether a step is launched before the previous one is read."
    )
    max_num_queued_reqs: int | None = option(
        None,
        "Requests that may wait; auto: as many as a 512th part of the memory holds, at least "
        "1,024.",
        within=(1, MAX_NUM_QUEUED_REQS_BOUND),
    )
    max_num_queued_tokens: int | None = option(
        None,
        "Prompt tokens that may wait; auto: as many as 3 512ths of the memory hold, at least "
        "262,144.",
        within=(1, MAX_NUM_QUEUED_TOKENS_BOUND),
    )
    max_consecutive_step_errors: int = option(
        10, "Failed steps in a row after which a server restarts its engine.", within=(1, 1 << 31)
    )
    max_itl_ms: MaxItlMs = option(
        "auto",
        "Most milliseconds of a step, and so between two tokens of a stream while prompts are "
        "computed; auto: in a server twice a decode step of all rows, at least 50.",
        read=_as_max_itl_ms,
        metavar="MS|auto|none",
    )
    batching: Batching = option(
        "continuous", "static starts no request before all of the batch have ended, for comparison."
    )
    scheduling_policy: SchedulingPolicy = option(
        "fcfs",
        "Which waiting request starts next: the first to come, the one with the fewest uncached "
        "tokens, or the one with the smallest priority.",
        "--scheduler-policy",
    )
    starvation_guard: float = option(
        10.0,
        "Seconds of waiting after which shortest_first takes a request first, and which count as "
        "one step of priority.",
        within=(MIN_GUARD_S, MAX_GUARD_S),
        unit="a number of seconds",
        metavar="SECONDS",
    )
    admission: AdmissionMode = option(
        "balanced",
        "How much of its remaining output a request must find room for before it starts: all of "
        "it, half or none. Less preempts more.",
    )
    seed: int = option(0, "Seed of requests that set none.", within=(0, MAX_SEED))
    generation_config: GenerationConfig = option(
        "auto",
        "Whether the model's generation_config.json or GGUF metadata sets the sampling that is not "
        "given; what a GGUF file leaves open is as in llama.cpp (temperature 0.8, top-k 40, top-p "
        "0.95, min-p 0.05). none: temperature 1, no cuts.",
    )
    chat_template: str | None = option(
        None,
        "The chat template, as a file or its text, in place of the model's own, or none.",
        read=text(
            "must be a file, or the text of a chat template", is_path_or_text, takes_path=True
        ),
        metavar="FILE|TEXT|none",
    )
    speculative_config: SpeculativeConfig | str | None = option(
        None,
        "Verify several tokens of a stream in one step: a JSON object with vLLM's names, such as "
        '{"method": "ngram", "num_speculative_tokens": 5}, or none (default: none).',
        read=_as_drafts,
        metavar="JSON|none",
    )
    spec_prefill: SpecPrefillConfig | str | None = option(
        None,
        "Of prompts of at least `threshold` tokens compute only the chunks that a draft model "
        "finds important, an approximation: a JSON object such as "
        '{"model": "small-model", "keep": 0.3, "threshold": 8192}, or none (default: none).',
        read=_as_sparse_prompts,
        metavar="JSON|none",
    )

    def __post_init__(self) -> None:
        refuse_fp8_kv(self.kv_cache_dtype)
        for field in fields(self):
            object.__setattr__(self, field.name, checked(field, getattr(self, field.name)))
        if self.tensor_parallel_size is not None:
            object.__setattr__(self, "ops", _divided(self.ops))
        if self.page_size % PAGE_SIZE_UNIT:
            raise ConfigError(
                f"--page-size {self.page_size} is not a multiple of {PAGE_SIZE_UNIT}; "
                f"use 16, 32, 64, …"
            )

    @property
    def speculation(self) -> SpeculativeConfig | None:
        return cast(SpeculativeConfig | None, self.speculative_config)

    @property
    def sparse_prompts(self) -> SpecPrefillConfig | None:
        return cast(SpecPrefillConfig | None, self.spec_prefill)


class EngineOptions(TypedDict, total=False):
    """The options of `LLM` and `AsyncEngine.from_model`: `EngineConfig`'s fields, of other types
    too."""

    backend: str
    device: str
    ops: Ops
    tensor_parallel_size: WholeOrAuto
    revision: str | None
    dtype: DType
    quantization: Quantization
    weight_cache_bytes: WholeOrAuto
    kv_cache_dtype: KVCacheDType
    arithmetic: Arithmetic
    max_model_len: WholeOrAuto
    max_num_seqs: WholeOrAuto
    max_num_batched_tokens: WholeOrAuto
    kv_cache_memory_bytes: WholeOrAuto
    num_pages: WholeOrAuto
    gpu_memory_utilization: float | Literal["auto"] | None
    scheduler_headroom_gb: float
    kv_layout: KVLayout
    page_size: int | Literal["auto"]
    enable_prefix_caching: bool
    prefix_cache_memory_share: float
    max_state_snapshots: WholeOrAuto
    state_snapshot_interval: int | Literal["auto"]
    prefix_cache_disk: str | Path | None
    prefix_cache_disk_bytes: WholeOrAuto
    images: bool
    mmproj: str | Path | None
    image_cache_bytes: int | Literal["auto"]
    image_max_tokens: int | Literal["auto"]
    scheduler: SchedulerLoop
    max_num_queued_reqs: WholeOrAuto
    max_num_queued_tokens: WholeOrAuto
    max_consecutive_step_errors: int | Literal["auto"]
    max_itl_ms: MaxItlMs
    batching: Batching
    scheduling_policy: SchedulingPolicy
    starvation_guard: float
    admission: AdmissionMode
    seed: int | Literal["auto"]
    generation_config: GenerationConfig
    chat_template: str | Path | None
    speculative_config: SpeculativeConfig | Mapping[str, object] | str | None
    spec_prefill: SpecPrefillConfig | Mapping[str, object] | str | None


def _divided(ops: Ops) -> Ops:
    if ops not in ("auto", "split"):
        raise ConfigError(
            f"--tensor-parallel-size is for --ops split, and --ops is {ops}; leave one of them out"
        )
    return "split"


def config_from_options(options: Mapping[str, object]) -> EngineConfig:
    known = [field.name for field in fields(EngineConfig)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ConfigError(f"there is no option {', '.join(unknown)}; there are {', '.join(known)}")
    return EngineConfig(**cast(Mapping[str, Any], options))


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """Of an engine whose model sees."""

    token_id: int  # that of placeholders
    num_slots: int  # of embeddings on the device, one for each placeholder
    has_rope_axes: bool = True  # placeholders have rope positions of their own (`core.packing`)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """The resolved limits of the engine core; every numeric field is a count.
    `max_num_batched_tokens` >= `max_num_seqs`, so that every running row gets a token in each step.
    `slot_unit`: where a sequence's prefix can be continued by another one, if each has a slot of
    its own; None with pages. `num_state_slots`: 0 without recurrent state. `images`: None where
    none are encoded."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    page_size: int
    num_pages: int
    max_num_queued_reqs: int
    max_num_queued_tokens: int = MAX_NUM_QUEUED_TOKENS_BOUND
    max_consecutive_step_errors: int = 10
    enable_prefix_caching: bool = True
    prefix_cache_memory_share: float = 1.0
    slot_unit: int | None = None
    num_state_slots: int = 0
    state_snapshot_interval: int = DEFAULT_SNAPSHOT_INTERVAL
    images: ImageLimits | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} is below "
                f"--max-num-seqs {self.max_num_seqs}: a full batch could not advance each row; "
                f"set --max-num-seqs {self.max_num_batched_tokens}, or raise the first"
            )
        if self.num_state_slots and self.slot_unit is not None:
            raise ConfigError(
                "--kv-layout dense cannot share prefixes of a model with recurrent state; set "
                "--kv-layout paged"
            )

    @property
    def of_steps(self) -> "EngineLimits":
        """What may decide bits of a step: not the sizes of pools and queues, which follow the free
        memory."""
        return dataclasses.replace(
            self,
            num_pages=0,
            num_state_slots=0,
            max_num_queued_reqs=0,
            max_num_queued_tokens=0,
            max_consecutive_step_errors=0,
        )

    @property
    def placeholder(self) -> int | None:
        """The token that stands for images, which is never generated."""
        return None if self.images is None else self.images.token_id

    @property
    def max_num_open_reqs(self) -> int:
        return self.max_num_queued_reqs + self.max_num_seqs

    @property
    def max_pages_per_seq(self) -> int:
        return -(-self.max_model_len // self.page_size)
