"""The user's options (`EngineConfig`) and the limits resolved from them (`EngineLimits`).

Owns the options' defaults and bounds, and how a field is described as a flag (`flag`). Knows no
checkpoints, devices or memory; `loading.plan` uses those to resolve one into the other. Invariant:
every `EngineConfig` instance is within bounds.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from operator import index
from pathlib import Path
from typing import Any, Literal, TypedDict, cast, get_args

from cadenza.errors import ConfigError, show
from cadenza.spec_prefill_config import SpecPrefillConfig, parse_spec_prefill
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
MaxItlMs = float | str
"""Milliseconds, "auto" or "none"."""
WholeOrAuto = int | Literal["auto"] | None
"""None is as "auto"; `EngineConfig` says what that is."""

PACKAGED_MODELS = ("bundled", "bundled-vision")
"""Models of the package, by the names that commands take; a folder of that name comes before."""

PAGE_SIZE_UNIT = 16
DEFAULT_SNAPSHOT_INTERVAL = 512
DEFAULT_IMAGE_CACHE_BYTES = 256 << 20
DEFAULT_IMAGE_MAX_TOKENS, MIN_IMAGE_MAX_TOKENS, MAX_IMAGE_MAX_TOKENS = 4096, 64, 1 << 16
MAX_NUM_SEQS_BOUND = 1 << 14
DEFAULT_MAX_NUM_SEQS = 16
MAX_MODEL_LEN_BOUND = 1 << 24
MAX_LOGPROBS_BOUND = 20
MAX_NUM_QUEUED_TOKENS_BOUND = 1 << 40
MAX_SEED = (1 << 63) - 1
MIN_MAX_ITL_MS, MAX_MAX_ITL_MS = 1.0, 600_000.0
MIN_GUARD_S, MAX_GUARD_S = 0.001, 86_400.0
MAX_HEADROOM_GB = 1_000_000.0
MIN_UTILIZATION = 0.01
MIN_DISK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A flag of the command line: what does not follow from the field that it sets.

    Args:
        names: in place of the field's own name.
        aliases: further names.
        has_variable: can also be set by an environment variable, whose name has the prefix.
        settings: keyword arguments of `typer.Option`, say `metavar` or `parser`.
    """

    help: str
    names: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    has_variable: bool = False
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])


def flag(default: Any, help: str, *names: str, has_variable: bool = False, **settings: Any) -> Any:
    """A dataclass field that is a flag; the arguments are `Flag`'s."""
    described = Flag(help=help, names=names, has_variable=has_variable, settings=settings)
    return dataclasses.field(default=default, metadata={"flag": described})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Engine options; `None` means that a value is chosen at load time.

    Options take the words that their flags take: "auto" for a whole number, or for a share that may
    be None, is None, or the field's default where None is no value of it.
    `backend` is only checked to be printable; `backends.find_backend` refuses unknown names.
    `max_itl_ms` bounds the time of a step; "none" does not, "auto" derives the bound of a server
    from measured steps and is "none" elsewhere.

    Raises:
        ConfigError: a value is outside its bounds; the message names the flag.
    """

    backend: str = "auto"
    device: str = "auto"
    ops: Ops = "auto"
    tensor_parallel_size: int | None = None
    """Devices that share the model; None: one, whose arithmetic is not that of several."""
    revision: str | None = None
    dtype: DType = "auto"
    quantization: Quantization = "none"
    weight_cache_bytes: int | None = None
    kv_cache_dtype: KVCacheDType = "auto"
    arithmetic: Arithmetic = "fast"
    max_model_len: int | None = None
    max_num_seqs: int | None = DEFAULT_MAX_NUM_SEQS
    max_num_batched_tokens: int | None = None
    kv_cache_memory_bytes: int | None = None
    num_pages: int | None = None
    gpu_memory_utilization: float | None = None
    scheduler_headroom_gb: float = 0.0
    kv_layout: KVLayout = "auto"
    page_size: int = PAGE_SIZE_UNIT
    enable_prefix_caching: bool = True
    prefix_cache_memory_share: float = 1.0
    max_state_snapshots: int | None = None
    state_snapshot_interval: int = DEFAULT_SNAPSHOT_INTERVAL
    prefix_cache_disk: str | None = None
    prefix_cache_disk_bytes: int | None = None
    images: bool = True
    mmproj: str | None = None
    """A GGUF file with the tower of the model; None: the one beside it, if there is one."""
    image_cache_bytes: int = DEFAULT_IMAGE_CACHE_BYTES
    image_max_tokens: int = DEFAULT_IMAGE_MAX_TOKENS
    scheduler: SchedulerLoop = "overlap"
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    max_consecutive_step_errors: int = 10
    max_itl_ms: MaxItlMs = "auto"
    batching: Batching = "continuous"
    scheduling_policy: SchedulingPolicy = "fcfs"
    starvation_guard: float = 10.0
    admission: AdmissionMode = "balanced"
    seed: int = 0
    generation_config: GenerationConfig = "auto"
    chat_template: str | None = None
    """A file, or the text of a template, in place of the model's own; "none" has none."""
    speculative_config: SpeculativeConfig | str | None = None
    """None and "none" are no drafts. Other text, and a mapping, is parsed."""
    spec_prefill: SpecPrefillConfig | str | None = None
    """None and "none" compute every prompt whole. Other text, and a mapping, is parsed."""

    def __post_init__(self) -> None:
        self._resolve_auto()
        for name, parse in _OBJECTS.items():
            given: object = getattr(self, name)
            is_off = given is None or (isinstance(given, str) and given == "none")
            object.__setattr__(self, name, None if is_off else parse(given))
        refuse_fp8_kv(self.kv_cache_dtype)
        for name, allowed in _CHOICES.items():
            chosen = _as_choice(name.replace("_", "-"), getattr(self, name), allowed)
            object.__setattr__(self, name, chosen)
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                number = _as_integer(name.replace("_", "-"), value, low, high)
                object.__setattr__(self, name, number)
        for name, (lowest, highest, kind) in _NUMBERS.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                number = _as_number(name.replace("_", "-"), value, lowest, highest, kind)
                object.__setattr__(self, name, number)
        if self.tensor_parallel_size is not None:
            object.__setattr__(self, "ops", _divided(self.ops))
        object.__setattr__(self, "max_itl_ms", _as_max_itl_ms(self.max_itl_ms))
        if not isinstance(self.backend, str) or not self.backend.isprintable():
            raise ConfigError(f"--backend {show(self.backend)} must be auto, or a backend's name")
        object.__setattr__(self, "backend", str.__str__(self.backend))
        if not isinstance(self.device, str) or not _DEVICE.fullmatch(self.device):
            raise ConfigError(
                f"--device {show(self.device)} is not one of auto, cpu, cuda[:n], metal, tpu[:n]"
            )
        object.__setattr__(self, "device", str.__str__(self.device))
        if self.revision is not None:
            if not isinstance(self.revision, str) or not self.revision.isprintable():
                raise ConfigError(
                    f"--revision {show(self.revision)} must be a branch, a tag or a commit"
                )
            object.__setattr__(self, "revision", str.__str__(self.revision))
        if self.chat_template is not None:
            object.__setattr__(self, "chat_template", _as_chat_template(self.chat_template))
        if self.prefix_cache_disk is not None:
            object.__setattr__(self, "prefix_cache_disk", _as_folder(self.prefix_cache_disk))
        if self.mmproj is not None:
            object.__setattr__(self, "mmproj", _as_projector(self.mmproj))
        for name in ("enable_prefix_caching", "images"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(
                    f"--{name.replace('_', '-')} {show(getattr(self, name))} must be true or false"
                )
        if self.page_size % PAGE_SIZE_UNIT:
            raise ConfigError(
                f"--page-size {self.page_size} is not a multiple of {PAGE_SIZE_UNIT}; "
                f"use 16, 32, 64, …"
            )

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """`speculative_config`, parsed."""
        return cast(SpeculativeConfig | None, self.speculative_config)

    @property
    def sparse_prompts(self) -> SpecPrefillConfig | None:
        """`spec_prefill`, parsed."""
        return cast(SpecPrefillConfig | None, self.spec_prefill)

    def _resolve_auto(self) -> None:
        for field in fields(self):
            is_number = field.name in _RANGES or field.name in _OPTIONAL
            given: object = getattr(self, field.name)
            if is_number and isinstance(given, str) and given == "auto":
                chosen = None if field.name in _OPTIONAL else field.default
                object.__setattr__(self, field.name, chosen)


class EngineOptions(TypedDict, total=False):
    """The options of `LLM` and `AsyncEngine.from_model`: `EngineConfig`'s fields, with what may be
    given in place of their values."""

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
    """The operations of a model that devices share."""
    if ops not in ("auto", "split"):
        raise ConfigError(
            f"--tensor-parallel-size is for --ops split, and --ops is {ops}; leave one of them out"
        )
    return "split"


def _as_chat_template(value: object) -> str:
    text = str(value) if isinstance(value, Path) else value
    if not isinstance(text, str) or not text.strip() or not _is_encodable(text):
        raise ConfigError(
            f"--chat-template {show(value)} must be a file, or the text of a chat template"
        )
    return str.__str__(text)


def _as_projector(value: object) -> str:
    text = str(value) if isinstance(value, Path) else value
    if not isinstance(text, str) or not text.strip() or not _is_encodable(text):
        raise ConfigError(f"--mmproj {show(value)} must be a GGUF file")
    return str.__str__(text)


def _is_encodable(text: str) -> bool:
    """Whether a text can go to a file's name, and to another process."""
    return "\0" not in text and not any("\ud800" <= each <= "\udfff" for each in text)


_OBJECTS: Mapping[str, Callable[[object], object]] = {
    "speculative_config": parse_speculative_config,
    "spec_prefill": parse_spec_prefill,
}
"""Options that are JSON objects, and what reads them."""

_DEVICE = re.compile(r"auto|metal|(cpu|cuda|tpu)(:[0-9]{1,4})?")

_CHOICES: Mapping[str, tuple[str, ...]] = {
    "ops": get_args(Ops),
    "dtype": get_args(DType),
    "quantization": get_args(Quantization),
    "kv_cache_dtype": get_args(KVCacheDType),
    "arithmetic": get_args(Arithmetic),
    "kv_layout": get_args(KVLayout),
    "scheduler": get_args(SchedulerLoop),
    "batching": get_args(Batching),
    "scheduling_policy": get_args(SchedulingPolicy),
    "admission": get_args(AdmissionMode),
    "generation_config": get_args(GenerationConfig),
}

_RANGES: Mapping[str, tuple[int, int]] = {
    "max_num_seqs": (1, MAX_NUM_SEQS_BOUND),
    "max_model_len": (1, MAX_MODEL_LEN_BOUND),
    "max_num_batched_tokens": (1, MAX_MODEL_LEN_BOUND),
    "kv_cache_memory_bytes": (1, 1 << 60),
    "num_pages": (1, 1 << 31),
    "tensor_parallel_size": (1, 8),
    "max_num_queued_reqs": (1, 1 << 31),
    "max_num_queued_tokens": (1, MAX_NUM_QUEUED_TOKENS_BOUND),
    "max_consecutive_step_errors": (1, 1 << 31),
    "seed": (0, MAX_SEED),
    "page_size": (PAGE_SIZE_UNIT, 1 << 16),
    "max_state_snapshots": (0, 1 << 24),
    "state_snapshot_interval": (PAGE_SIZE_UNIT, MAX_MODEL_LEN_BOUND),
    "prefix_cache_disk_bytes": (MIN_DISK_BYTES, 1 << 60),
    "weight_cache_bytes": (0, 1 << 60),
    "image_cache_bytes": (1, 1 << 60),
    "image_max_tokens": (MIN_IMAGE_MAX_TOKENS, MAX_IMAGE_MAX_TOKENS),
}
"""Integer options with their inclusive bounds."""

_NUMBERS: Mapping[str, tuple[float, float, str]] = {
    "starvation_guard": (MIN_GUARD_S, MAX_GUARD_S, "a number of seconds"),
    "scheduler_headroom_gb": (0.0, MAX_HEADROOM_GB, "a number of GB"),
    "gpu_memory_utilization": (MIN_UTILIZATION, 1.0, "a share"),
    "prefix_cache_memory_share": (0.0, 1.0, "a share"),
}
"""Other numbers, with their inclusive bounds and what they are."""

_OPTIONAL = frozenset(
    "max_num_seqs max_model_len max_num_batched_tokens kv_cache_memory_bytes num_pages "
    "max_num_queued_reqs max_num_queued_tokens max_state_snapshots prefix_cache_disk_bytes "
    "gpu_memory_utilization weight_cache_bytes tensor_parallel_size".split()
)
"""Numbers that may be None."""


def refuse_fp8_kv(kv_cache_dtype: object) -> None:
    """Raises ConfigError for a type of KV that other servers have, and int8 replaces here."""
    if isinstance(kv_cache_dtype, str) and kv_cache_dtype.startswith("fp8"):
        raise ConfigError(
            f"--kv-cache-dtype {show(kv_cache_dtype)} is not supported: with as many bits, fp8 is "
            f"less accurate than int8 and slower on a CPU; use --kv-cache-dtype int8"
        )


def config_from_options(options: Mapping[str, object]) -> EngineConfig:
    """An `EngineConfig` from keyword options. Raises ConfigError, also for unknown names."""
    known = [field.name for field in fields(EngineConfig)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ConfigError(f"there is no option {', '.join(unknown)}; there are {', '.join(known)}")
    return EngineConfig(**cast(Mapping[str, Any], options))


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """Of an engine whose model sees.

    Args:
        token_id: that of placeholders.
        num_slots: of embeddings on the device, one for each placeholder.
        has_rope_axes: placeholders have rope positions of their own (`core.rope_positions`).
    """

    token_id: int
    num_slots: int
    has_rope_axes: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """The resolved limits of the engine core; every numeric field is a count.

    `max_num_batched_tokens` >= `max_num_seqs`, so that every running row gets a token in each step.
    `slot_unit` says where a sequence's prefix can be continued by another one, if each has a slot
    of its own: see `core.slot_prefixes`. None if sequences have pages.
    `num_state_slots` is 0 for a model without recurrent state; `state_snapshot_interval` is that of
    `EngineConfig`. `images` is None where none are encoded; they change the bits of no answer.
    """

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
    def placeholder(self) -> int | None:
        """The token that stands for images, which is never generated; None without any."""
        return None if self.images is None else self.images.token_id

    @property
    def max_num_open_reqs(self) -> int:
        """Most requests that may be queued or running at the same time."""
        return self.max_num_queued_reqs + self.max_num_seqs

    @property
    def max_pages_per_seq(self) -> int:
        """Pages needed for `max_model_len` tokens."""
        return -(-self.max_model_len // self.page_size)


def _as_choice(flag: str, value: object, allowed: tuple[str, ...]) -> str:
    if isinstance(value, str) and value in allowed:
        return str.__str__(value)
    raise ConfigError(f"--{flag} {show(value)} is not one of {', '.join(allowed)}")


def _as_integer(flag: str, value: object, low: int, high: int) -> int:
    """`value` as a Python int. Raises ConfigError unless it is an integer in [`low`, `high`]."""
    if not is_integer(value) or not low <= cast(int, value) <= high:
        raise ConfigError(f"--{flag} {show(value)} must be a whole number from {low} to {high}")
    return index(cast(int, value))


def _as_number(flag: str, value: object, low: float, high: float, kind: str) -> float:
    """Raises ConfigError unless it is a number in [`low`, `high`]."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if is_number and low <= cast(float, value) <= high:
        return float(cast(float, value))
    raise ConfigError(f"--{flag} {show(value)} must be {kind} from {low:g} to {high:g}")


def _as_folder(value: object) -> str:
    """A folder's path, without NUL. Raises ConfigError."""
    text = str(value) if isinstance(value, Path) else value
    if not isinstance(text, str) or not text.isprintable() or not text:
        raise ConfigError(f"--prefix-cache-disk {show(text)} must be a folder's path")
    return str.__str__(text)


def _as_max_itl_ms(value: object) -> MaxItlMs:
    """Raises ConfigError unless it is a number of milliseconds within bounds, auto or none."""
    if isinstance(value, str) and value in ("auto", "none"):
        return str.__str__(value)
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if is_number and MIN_MAX_ITL_MS <= cast(float, value) <= MAX_MAX_ITL_MS:
        return float(cast(float, value))
    raise ConfigError(
        f"--max-itl-ms {show(value)} must be auto, none or a number of milliseconds from "
        f"{MIN_MAX_ITL_MS:g} to {MAX_MAX_ITL_MS:g}"
    )


def is_integer(value: object) -> bool:
    """Whether `value` is a Python or numpy integer; bool is excluded."""
    return isinstance(value, Integral) and not isinstance(value, bool)
