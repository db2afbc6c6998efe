"""The engine's events: what came of a request (`Event`). msgspec structs, since one is made for
each token. Invariant: each sample that was not cancelled ends with one `Finished`."""

from typing import Literal

from msgspec import Struct

FinishReason = Literal["stop", "length", "abort", "error"]

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
"""Why a request ended with an error. In order: its logits were not finite; its own options ruled
out every token; its structured output could not be followed; its step failed on the device; its
tokens could not be decoded to text; the engine process died or hung; it did so each time that it
computed this request, at last alone; the engine was shut down; the queue timeout; the total
timeout."""


CacheMissReason = Literal[
    "new", "differs", "evicted", "in_flight", "no_snapshot", "short", "not_used"
]
"""Why the look-up of a prompt in the prefix cache ended where it did. In order: no known prompt of
its tenant and salt goes on from there; one does, and differs; an earlier one had more of it, which
was removed to make room; one that is being computed has more of it and is too far from it to wait
for; more of it is there, but without a snapshot of the recurrent state after it; the prompt does
not fill a page that can be shared; its log probabilities or hidden states were asked for, so that
it is computed in any case."""


class CacheMiss(Struct, frozen=True, kw_only=True):
    """Why a prompt was not found whole in the prefix cache. `shared_tokens` of its first tokens are
    known from earlier prompts of its tenant and salt, whether their KV is still there or not."""

    shared_tokens: int
    reason: CacheMissReason


WholePromptReason = Literal["scoring_failed", "cached"]
"""Why the whole prompt of a request with a sparse prefill was computed: its scoring failed; it was
asked for only where the prompt is not in the prefix cache, and it was."""


class TokenLogprobs(Struct, frozen=True, kw_only=True):
    """Log probabilities at one position (natural log, of the logits before sampling options).
    `top_ids` and `top_logprobs` have as many entries as requested, in descending order."""

    logprob: float
    rank: int
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class _Event(Struct, frozen=True, kw_only=True, omit_defaults=True, array_like=True, tag=True):
    """Crosses the socket as an array that begins with the name of its class."""

    request_id: int


class Started(_Event, frozen=True):
    """A request has left the queue: it got its first row. Sent once per request. Of one with a
    sparse prefill `kept` are the chunks that are computed (`KeptTokens.mask`); None if the whole
    prompt is, for the reason `whole_because`."""

    kept: bytes | None = None
    whole_because: WholePromptReason | None = None


class Preparing(_Event, frozen=True):
    """A waiting request's prompt is about to be scored, or an image of it to be encoded: it has
    left the queue. Only announced, before the step, which may end the engine's process; never among
    a step's events."""


class Token(_Event, frozen=True):
    """A new token of a sample's stream; never an end-of-sequence or stop token. `index` counts the
    stream's tokens from 0. `num_cached_tokens` comes with the first token, because a stream that is
    cancelled, for example at a stop string, gets no `Finished`; so does `cache_miss`. A token that
    was drafted `is_draft`; one that took the place of drafts counts these."""

    token_id: int
    index: int
    sample: int = 0
    logprobs: TokenLogprobs | None = None
    num_cached_tokens: int | None = None
    cache_miss: CacheMiss | None = None
    is_draft: bool = False
    num_rejected_drafts: int = 0


class PromptLogprobs(_Event, frozen=True):
    """Log probabilities of consecutive prompt tokens from position `start`, which is at least 1.
    Sent in order as the prompt is computed, all before the first `Token` of sample 0."""

    start: int
    entries: tuple[TokenLogprobs, ...]


class Finished(_Event, frozen=True):
    """The last event of a sample that was not cancelled. A request ends when all of its `n` samples
    have ended. `num_generated_tokens` includes the stopping token; `stop_token_id` is that token if
    it is one of the request's `stop_token_ids`. `error` and `error_kind` are set if and only if
    `finish_reason` is "error"; `error_fields` names the request's fields that are the cause, where
    some are. `embedding` is that of a pooled request: float32 numbers, little endian."""

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

Report = Event | Preparing
"""What an engine process sends."""
