"""What a client asks (`Request`, `SamplingParams`) and the engine's answers (`Token`, `Finished`).

Owns the bounds of every number a client controls. Knows nothing of text, rows or pages.
Invariant: a `SamplingParams` that exists is finite and within bounds.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Literal, cast

from cadenza.config import MAX_LOGPROBS_BOUND, MAX_SEED
from cadenza.errors import InvalidRequestError

FinishReason = Literal["stop", "length", "abort", "error"]

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy (the field's convention)."""

MAX_STOP_TOKEN_IDS = 128
MAX_SHOWN_BITS = 64

_BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (1e-6, 1.0),
    "min_p": (0.0, 1.0),
    "top_k": (-1, 1 << 31),
    "seed": (0, MAX_SEED),
    "max_tokens": (1, 1 << 31),
    "logprobs": (0, MAX_LOGPROBS_BOUND),
}
_WHOLE = frozenset({"top_k", "seed", "max_tokens", "logprobs"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose a request's tokens.

    Args:
        max_tokens: at most this many new tokens; `None` means up to `max_model_len`.
        temperature: below 1e-5 is greedy.
        top_k: keep the k likeliest tokens; 0 or -1 is off.
        top_p: keep the smallest set of likeliest tokens whose mass reaches `top_p`.
        min_p: drop tokens less likely than `min_p` times the likeliest.
        seed: fixes the randomness; `None` derives one from the engine's seed and the request id.
        ignore_eos: the end-of-sequence token does not stop the request.
        stop_token_ids: further tokens that stop it.
        logprobs: log probabilities of the chosen token and of the n likeliest ones; `None` is off.

    Raises:
        InvalidRequestError: a value is not a finite number within its bounds.
    """

    max_tokens: int | None = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, (low, high) in _BOUNDS.items():
            _check_number(name, getattr(self, name), low, high)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequestError(
                f"ignore_eos is {self.ignore_eos!r}; it must be true or false", param="ignore_eos"
            )
        _check_token_ids("stop_token_ids", self.stop_token_ids)
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                f"stop_token_ids has {len(self.stop_token_ids)} entries; "
                f"at most {MAX_STOP_TOKEN_IDS} are allowed",
                param="stop_token_ids",
            )

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt and how to continue it; frozen.

    Args:
        prompt_token_ids: at least one token.
        cache_salt: requests share prefix-cache pages only under an equal salt.
    """

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    cache_salt: str = ""

    def __post_init__(self) -> None:
        _check_token_ids("prompt", self.prompt_token_ids)
        salt = self.cache_salt
        if not isinstance(salt, str) or not salt.isascii():
            raise InvalidRequestError(
                f"cache_salt is {salt!r}; it must be a text of ASCII characters", param="cache_salt"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log probabilities (natural log, of the unmodified logits) at one step.

    `top_ids` and `top_logprobs` are in falling order, as many as the request asked for.
    """

    logprob: float
    rank: int
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A new token of a request's stream. Never an end-of-sequence or stop token."""

    request_id: int
    token_id: int
    index: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The one terminal event of a request that was not cancelled.

    `num_generated_tokens` counts what the model produced, the stopping token included;
    `stop_token_id` is that token where it is one of the request's own `stop_token_ids`.
    """

    request_id: int
    finish_reason: FinishReason
    stop_token_id: int | None
    num_prompt_tokens: int
    num_generated_tokens: int
    num_cached_tokens: int
    error: str | None = None


Event = Token | Finished


def _check_number(name: str, value: object, low: float, high: float) -> None:
    if value is None and name in {"seed", "max_tokens", "logprobs"}:
        return
    is_number = isinstance(value, int) or (isinstance(value, float) and name not in _WHOLE)
    # Nothing is within bounds of NaN, and an integer of any size can be compared.
    if is_number and not isinstance(value, bool) and low <= cast(float, value) <= high:
        return
    kind = "a whole number" if name in _WHOLE else "a number"
    raise InvalidRequestError(
        f"{name} is {show(value)}; it must be {kind} from {low:g} to {high:g}", param=name
    )


def show(value: object) -> str:
    """A value in a message: short, and an integer too long to print by its size."""
    if isinstance(value, int) and value.bit_length() > MAX_SHOWN_BITS:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


def _check_token_ids(name: str, token_ids: object) -> None:
    if not isinstance(token_ids, tuple | list):
        raise InvalidRequestError(f"{name} is {show(token_ids)}; it must be token ids", param=name)
    for token_id in cast(SequenceOf[object], token_ids):
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise InvalidRequestError(
                f"{name} holds {show(token_id)}; token ids are whole numbers", param=name
            )
