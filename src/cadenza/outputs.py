"""Results in the field's own names, for `LLM` and `AsyncEngine`. Plain values; stdlib only."""

from dataclasses import dataclass
from typing import Literal

from cadenza.request import ErrorKind, FinishReason

OutputKind = Literal["cumulative", "delta", "final"]
"""What an output holds: all so far, what is new since the last one, or all, once at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """Natural-log probability of one token, its rank (1 is the likeliest) and its text."""

    logprob: float
    rank: int | None
    decoded_token: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One continuation so far; `finish_reason` is None while it runs.

    `logprobs` holds for each token a dict from token id to `Logprob`: the chosen token and the
    likeliest ones. `stop_reason` is the token or the stop string of the request's own that ended
    it. `num_generated_tokens` is what usage counts: the stopping token is in it, what the model
    wrote after a stop string is not. `cumulative_logprob` and `num_generated_tokens` are of all
    tokens in a delta, too.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, Logprob], ...] | None
    cumulative_logprob: float | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    num_generated_tokens: int = 0
    error: str | None = None
    error_kind: ErrorKind | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A request and its continuations so far; a delta has only those with something new.

    `prompt_logprobs` has an entry for each token of the prompt, None for the first.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None
    num_cached_tokens: int
    outputs: tuple[CompletionOutput, ...]
    finished: bool
