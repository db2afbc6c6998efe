"""What the user asked for (`EngineConfig`) and what the engine resolved it to (`EngineLimits`).

Owns the options' defaults and bounds. Knows nothing of checkpoints, devices or memory: those turn
one into the other (see `engine.plan`). Invariant: an `EngineConfig` that exists is within bounds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from cadenza.errors import ConfigError

Backend = Literal["auto", "xla"]
Ops = Literal["auto", "native", "reference"]
DType = Literal["auto", "float32", "bfloat16"]
KVLayout = Literal["paged", "dense"]
SchedulerLoop = Literal["plain", "overlap"]
GenerationConfig = Literal["auto", "none"]

PAGE_SIZE_UNIT = 16
MAX_NUM_SEQS_BOUND = 1024
MAX_MODEL_LEN_BOUND = 1 << 24
MAX_LOGPROBS_BOUND = 20
MAX_NUM_QUEUED_TOKENS_BOUND = 1 << 40
MAX_SEED = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of an engine; `None` means "choose for me".

    Raises:
        ConfigError: a value is outside its bounds; the message names the flag.
    """

    backend: Backend = "auto"
    device: str = "auto"
    ops: Ops = "auto"
    revision: str | None = None
    dtype: DType = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int | None = None
    kv_cache_memory_bytes: int | None = None
    num_pages: int | None = None
    kv_layout: KVLayout = "paged"
    page_size: int = PAGE_SIZE_UNIT
    enable_prefix_caching: bool = True
    scheduler: SchedulerLoop = "overlap"
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    max_consecutive_step_errors: int = 10
    seed: int = 0
    generation_config: GenerationConfig = "auto"

    def __post_init__(self) -> None:
        _check_choice("backend", self.backend, get_args(Backend))
        _check_choice("ops", self.ops, get_args(Ops))
        _check_choice("dtype", self.dtype, get_args(DType))
        _check_choice("kv-layout", self.kv_layout, get_args(KVLayout))
        _check_choice("scheduler", self.scheduler, get_args(SchedulerLoop))
        _check_choice("generation-config", self.generation_config, get_args(GenerationConfig))
        if self.revision is not None and not isinstance(self.revision, str):
            raise ConfigError(f"--revision {self.revision!r} must be a branch, a tag or a commit")
        _check_range("max-num-seqs", self.max_num_seqs, 1, MAX_NUM_SEQS_BOUND)
        _check_range("max-model-len", self.max_model_len, 1, MAX_MODEL_LEN_BOUND)
        _check_range("max-num-batched-tokens", self.max_num_batched_tokens, 1, MAX_MODEL_LEN_BOUND)
        _check_range("kv-cache-memory-bytes", self.kv_cache_memory_bytes, 1, 1 << 60)
        _check_range("num-pages", self.num_pages, 1, 1 << 31)
        _check_range("max-num-queued-reqs", self.max_num_queued_reqs, 1, 1 << 31)
        _check_range(
            "max-num-queued-tokens", self.max_num_queued_tokens, 1, MAX_NUM_QUEUED_TOKENS_BOUND
        )
        _check_range("max-consecutive-step-errors", self.max_consecutive_step_errors, 1, 1 << 31)
        _check_range("seed", self.seed, 0, MAX_SEED)
        _check_range("page-size", self.page_size, PAGE_SIZE_UNIT, 1 << 16)
        if self.page_size % PAGE_SIZE_UNIT:
            raise ConfigError(
                f"--page-size {self.page_size} is not a multiple of {PAGE_SIZE_UNIT}; "
                f"use 16, 32, 64, …"
            )


def config_from_options(options: Mapping[str, Any]) -> EngineConfig:
    """The keywords of a Python face as a config. Raises ConfigError, for unknown names too."""
    known = [field.name for field in fields(EngineConfig)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ConfigError(f"there is no option {', '.join(unknown)}; there are {', '.join(known)}")
    return EngineConfig(**options)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """The concrete bounds the core works within; every field is a count.

    `max_num_batched_tokens` >= `max_num_seqs`, so that each active row can advance every step
    and a prompt beside full decodes still gets at least one token.
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

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} is below "
                f"--max-num-seqs {self.max_num_seqs}: a full batch could not advance each row; "
                f"raise the first or lower the second"
            )

    @property
    def max_pages_per_seq(self) -> int:
        """Pages that hold `max_model_len` tokens."""
        return -(-self.max_model_len // self.page_size)


def _check_choice(flag: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"--{flag} {value!r} is not one of {', '.join(allowed)}")


def _check_range(flag: str, value: int | None, low: int, high: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"--{flag} {value!r} must be a whole number from {low} to {high}")
