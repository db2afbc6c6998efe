"""Results in the field's own names, for `LLM` and `AsyncEngine`. Plain values; stdlib only."""

from dataclasses import dataclass

from cadenza.request import FinishReason


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
    likeliest ones. `stop_reason` is the token that stopped it, where one of the request's own did.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, Logprob], ...] | None
    cumulative_logprob: float | None
    finish_reason: FinishReason | None
    stop_reason: int | None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A request and its continuations so far."""

    request_id: int
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: None
    num_cached_tokens: int
    outputs: tuple[CompletionOutput, ...]

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)
