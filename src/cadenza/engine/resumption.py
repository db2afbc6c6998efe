"""`Resumption`: what a request has brought so far, with which another engine goes on at its next
token with the same bits, since a stream is a function of its request alone; the prompt and these
tokens are computed again, as after a preemption."""

import msgspec

from cadenza.events import WholePromptReason


class ResumedSample(msgspec.Struct, frozen=True, kw_only=True):
    """`num_cached_tokens`: as reported with its first token."""

    sample: int
    token_ids: tuple[int, ...] = ()
    num_cached_tokens: int | None = None


class Resumption(msgspec.Struct, frozen=True, kw_only=True):
    """Samples that have not ended; `kept` and `whole_reason` as in `Started`."""

    samples: tuple[ResumedSample, ...]
    num_prompt_logprobs: int = 0
    kept: bytes | None = None
    whole_reason: WholePromptReason | None = None
