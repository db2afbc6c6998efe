"""`Resumption`: what a request has brought so far, with which an engine continues it.

A stream is a function of its request alone, so an engine that is given the request and the tokens
that came of it goes on at the next one, with the same bits. The prompt and these tokens are
computed again, as after a preemption. Plain values; knows no process and no engine.
"""

import msgspec

from cadenza.events import WholePromptReason


class ResumedSample(msgspec.Struct, frozen=True, kw_only=True):
    """A sample that has not ended.

    `num_cached_tokens` is what it reported with its first token; None before.
    """

    sample: int
    token_ids: tuple[int, ...] = ()
    num_cached_tokens: int | None = None


class Resumption(msgspec.Struct, frozen=True, kw_only=True):
    """A request's samples that have not ended, and how many log probabilities of its prompt's
    tokens have come.

    Of one with a sparse prefill that has started, `kept` and `whole_because` are as in `Started`.
    """

    samples: tuple[ResumedSample, ...]
    num_prompt_logprobs: int = 0
    kept: bytes | None = None
    whole_because: WholePromptReason | None = None
