"""`RequestTallies`: how many requests came to what end, and after which times; `RequestStats`: a
snapshot of them; `RequestTimes`: when one request came to what."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from cadenza.events import FinishReason
from cadenza.figures import Distribution, Tally

REQUEST_SECONDS_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)

RejectionReason = Literal["queue_full", "queue_tokens_full", "queue_too_long", "unavailable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStats:
    """`queue_seconds`: from acceptance to the first step; `prefill_seconds`: to the first token;
    `decode_seconds`: to the end; `resume_seconds`: from an engine's loss to the next token.
    `num_resumed`: a request counts for each engine that went on with it."""

    num_accepted: int
    ends: dict[FinishReason, int]
    rejections: dict[RejectionReason, int]
    queue_seconds: Distribution
    prefill_seconds: Distribution
    decode_seconds: Distribution
    num_resumed: int
    resume_seconds: Distribution


@dataclass(slots=True, eq=False)
class RequestTimes:
    """When a request came to what, in clock readings."""

    accepted_s: float | None = None
    started_s: float | None = None  # it left the queue
    first_token_s: float | None = None
    ended_s: float | None = None
    # from the loss of an engine in which it ran to its next token, or to its end
    pauses: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])


def _seconds() -> Tally:
    return Tally(REQUEST_SECONDS_BOUNDS)


@dataclass(slots=True, eq=False)
class RequestTallies:
    """See `RequestStats`."""

    num_accepted: int = 0
    num_resumed: int = 0
    ends: Counter[FinishReason] = field(default_factory=Counter[FinishReason])
    rejections: Counter[RejectionReason] = field(default_factory=Counter[RejectionReason])
    queue: Tally = field(default_factory=_seconds)
    prefill: Tally = field(default_factory=_seconds)
    decode: Tally = field(default_factory=_seconds)
    resume: Tally = field(default_factory=_seconds)

    def stats(self) -> RequestStats:
        return RequestStats(
            num_accepted=self.num_accepted,
            ends=dict(self.ends),
            rejections=dict(self.rejections),
            queue_seconds=self.queue.snapshot(),
            prefill_seconds=self.prefill.snapshot(),
            decode_seconds=self.decode.snapshot(),
            num_resumed=self.num_resumed,
            resume_seconds=self.resume.snapshot(),
        )
