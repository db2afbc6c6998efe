"""The events that tell what came of a sequence.

Pure functions of a sequence and a step's output.
"""

from cadenza.core.sequence import Sequence
from cadenza.core.step_schema import StepOutput
from cadenza.request import ErrorKind, Finished, FinishReason, TokenLogprobs


def logprobs_of(output: StepOutput, index: int, count: int) -> TokenLogprobs:
    """Log probabilities of an output's logit row, with those of the `count` likeliest tokens."""
    return TokenLogprobs(
        logprob=float(output.logprobs[index]),
        rank=int(output.ranks[index]),
        top_ids=tuple(output.top_ids[index, :count].tolist()),
        top_logprobs=tuple(output.top_logprobs[index, :count].tolist()),
    )


def finished_event(
    sequence: Sequence,
    reason: FinishReason,
    *,
    stop_token_id: int | None = None,
    error: str | None = None,
    kind: ErrorKind | None = None,
) -> Finished:
    """The end of a sequence; `stop_token_id` is a token that its request named."""
    return Finished(
        request_id=sequence.request_id,
        finish_reason=reason,
        stop_token_id=stop_token_id,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_generated_tokens=sequence.num_generated_tokens,
        num_cached_tokens=sequence.num_cached_tokens or 0,
        sample=sequence.sample,
        error=error,
        error_kind=kind,
    )
