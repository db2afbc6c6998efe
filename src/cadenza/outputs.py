"""Results of `LLM` and `AsyncEngine`, under the field names that vLLM uses. Plain values."""

import sys
from array import array
from dataclasses import dataclass
from typing import Literal

from cadenza.events import CacheMiss, ErrorKind, FinishReason
from cadenza.fingerprint import Receipt

# Contents of each output: everything so far; only what is new; or everything, once at the end.
OutputKind = Literal["cumulative", "delta", "final"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """Natural logarithm, rank (1 = most likely) and text of a token. `token_bytes`: of a part of a
    character, which has no text of its own."""

    logprob: float
    rank: int | None
    decoded_token: str | None
    token_bytes: bytes | None = None


PartKind = Literal["content", "reasoning", "tool_call"]


@dataclass(frozen=True, slots=True)
class OutputPart:
    """A piece of a continuation's text. A tool call is one part: its arguments as JSON, its
    function's `name`."""

    kind: PartKind
    text: str
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One continuation so far; `finish_reason` is None while it runs. `logprobs` has one dict per
    token, from token id to `Logprob`: the chosen token and the most likely ones. `stop_reason` is
    the entry of `stop` or `stop_token_ids` that ended the continuation. `num_generated_tokens` is
    the number reported as usage: it includes the stopping token and excludes tokens after a stop
    string. `num_accepted_drafts` counts the tokens that were drafted, `num_rejected_drafts` drafts
    that were verified in vain; both depend on the load. `num_reasoning_tokens` are those within
    reasoning, which a parser tells from the rest. In a delta, `cumulative_logprob` and the numbers
    still cover all tokens so far. `parts` is the text split by the request's output parser, without
    the markers between the parts; None without a parser, where all of it is content. `error_fields`
    names those of the request that are the cause of an error, where some are. `receipt` is there at
    the end, where one was asked for. `embedding` is that of a pooled request, as float32, little
    endian. `is_schema_valid` is there at the end of an answer whose schema has keywords that its
    grammar does not hold."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, Logprob], ...] | None
    cumulative_logprob: float | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    num_generated_tokens: int = 0
    num_accepted_drafts: int = 0
    num_rejected_drafts: int = 0
    num_reasoning_tokens: int = 0
    error: str | None = None
    error_kind: ErrorKind | None = None
    error_fields: tuple[str, ...] = ()
    parts: tuple[OutputPart, ...] | None = None
    receipt: Receipt | None = None
    embedding: bytes | None = None
    is_schema_valid: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptUse:
    """How much of a prompt is computed, where sparse prefill was asked for; planned, before it
    starts."""

    num_kept_tokens: int
    num_skipped_tokens: int
    # Why it is all of it (`frontend.sparse_prompts.WholeReason`, `events.WholePromptReason`);
    # None where it is pruned.
    whole_because: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A request with its continuations so far; a delta has only those that changed.
    `prompt_logprobs` has one entry per prompt token; the first entry is None. Requests that are
    equal, seed included, have equal tokens and log probabilities where `system_fingerprint` is.
    `cache_miss` says why the prompt was not found whole in the prefix cache; None if it was, or
    without one. `prompt_use` is there where the request, or the server, asked for sparse
    prefill."""

    request_id: int
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None
    num_cached_tokens: int
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    system_fingerprint: str | None = None
    cache_miss: CacheMiss | None = None
    prompt_use: PromptUse | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingOutput:
    """A vector of unit length; empty if there is none because of an `error`, or of an abort."""

    embedding: tuple[float, ...]
    finish_reason: FinishReason | None
    error: str | None = None
    error_kind: ErrorKind | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequestOutput:
    """A prompt and its embedding."""

    request_id: int
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    num_cached_tokens: int
    outputs: EmbeddingOutput


def embedding_of(output: RequestOutput) -> EmbeddingRequestOutput:
    (sample,) = output.outputs
    return EmbeddingRequestOutput(
        request_id=output.request_id,
        prompt=output.prompt,
        prompt_token_ids=output.prompt_token_ids,
        num_cached_tokens=output.num_cached_tokens,
        outputs=EmbeddingOutput(
            embedding=tuple(values_of(sample.embedding or b"")),
            finish_reason=sample.finish_reason,
            error=sample.error,
            error_kind=sample.error_kind,
        ),
    )


def values_of(embedding: bytes) -> list[float]:
    values = array("f", embedding)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()
