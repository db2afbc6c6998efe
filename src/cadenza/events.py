"""The engine's events: what came of a request (`Event`). msgspec structs, since one is made for
each token. Invariant: each sample that was not cancelled ends with one `Finished`."""

from typing import Literal

from msgspec import Struct

FinishReason = Literal["stop", "length", "abort", "error"]

# Why a request ended with an error. In order: its logits were not finite; its own options ruled out
# every token; its structured output could not be followed; its step failed on the device; its
# tokens could not be decoded to text; the engine process died or hung; it did so each time that it
# computed this request, at last alone; the engine was shut down; the queue timeout; the total
# timeout.
ErrorKind = Literal[
    "not_finite",
    "none_allowed",
    "constraint_failed",
    "step_failed",
    "text_failed",
    "engine_lost",
    "engine_failed",
    "engine_closed",
    "queue_timeout",
    "request_timeout",
]


# Why the look-up of a prompt in the prefix cache ended where it did. In order: no known prompt of
# its tenant and salt goes on from there; one does, and differs; an earlier one had more of it,
# which was removed to make room; one that is being computed has more of it and is too far from it
# to wait for; more of it is there, but without a snapshot of the recurrent state after it; the
# prompt does not fill a page that can be shared; its log probabilities or hidden states were asked
# for, so that it is computed in any case.
CacheMissReason = Literal[
    "new", "differs", "evicted", "in_flight", "no_snapshot", "short", "not_used"
]


class CacheMiss(Struct, frozen=True, kw_only=True):
    """`shared_tokens` of a prompt's first tokens are known from earlier prompts of its tenant and
    salt, whether their KV is still there or not."""

    shared_tokens: int
    reason: CacheMissReason


# Why the whole prompt of a request with a sparse prefill was computed: its scoring failed; it was
# asked for only where the prompt is not in the prefix cache, and it was.
WholePromptReason = Literal["scoring_failed", "cached"]


class TokenLogprobs(Struct, frozen=True, kw_only=True):
    """Natural logarithms at one position, before sampling options; the top ones in descending
    order."""

    logprob: float
    rank: int
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class _Event(Struct, frozen=True, kw_only=True, omit_defaults=True, array_like=True, tag=True):
    """Crosses the socket as an array that begins with the name of its class."""

    request_id: int


class Started(_Event, frozen=True):
    """A request got its first row; sent once. Of a sparse prefill `kept` are the chunks that are
    computed (`KeptTokens.mask`), or None for the reason `whole_because`."""

    kept: bytes | None = None
    whole_because: WholePromptReason | None = None


class Preparing(_Event, frozen=True):
    """A waiting request's prompt is about to be scored, or an image of it encoded. Announced before
    the step, which may end the engine's process; never among a step's events."""


class Token(_Event, frozen=True):
    """A new token of a sample's stream; never an end-of-sequence or stop token. `index` counts the
    stream's tokens from 0. `num_cached_tokens` and `cache_miss` come with the first one, because a
    stream that is cancelled gets no `Finished`. A token that was drafted `is_draft`; one that took
    the place of drafts counts these."""

    token_id: int
    index: int
    sample: int = 0
    logprobs: TokenLogprobs | None = None
    num_cached_tokens: int | None = None
    cache_miss: CacheMiss | None = None
    is_draft: bool = False
    num_rejected_drafts: int = 0


class PromptLogprobs(_Event, frozen=True):
    """Of consecutive prompt tokens from position `start`, at least 1; in order, all before the
    first `Token` of sample 0."""

    start: int
    entries: tuple[TokenLogprobs, ...]


class Finished(_Event, frozen=True):
    """The last event of a sample that was not cancelled; a request ends with its last sample.
    `num_generated_tokens` includes the stopping token; `stop_token_id`: that token if it is one of
    `stop_token_ids`. `error` and `error_kind` are set if and only if `finish_reason` is "error";
    `error_fields`: those of the request that are the cause. `embedding`: of a pooled request,
    float32, little endian."""

    finish_reason: FinishReason
    stop_token_id: int | None
    num_prompt_tokens: int
    num_generated_tokens: int
    num_cached_tokens: int
    sample: int = 0
    error: str | None = None
    error_kind: ErrorKind | None = None
    error_fields: tuple[str, ...] = ()
    embedding: bytes | None = None
    cache_miss: CacheMiss | None = None


Event = Started | Token | PromptLogprobs | Finished

Report = Event | Preparing  # what an engine process sends
