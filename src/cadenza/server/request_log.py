"""What is kept of a request for its line in the log and for the metrics: `RequestRecord`.

Owns the line's fields and their arithmetic. Never sees a prompt's text. Invariant: a record ends
once, with one line, whether the request finished, was left, or failed.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cadenza.request import FinishReason
from cadenza.server.metrics import ServedCounts

logger = logging.getLogger("cadenza.requests")


@dataclass(slots=True, eq=False, kw_only=True)
class PromptTimes:
    """One prompt's way through the engine; seconds of the clock."""

    num_prompt_tokens: int
    num_generated_tokens: int = 0
    first_s: float | None = None
    last_s: float = 0.0


@dataclass(slots=True, eq=False, kw_only=True)
class RequestRecord:
    """One HTTP request for tokens."""

    request_id: str
    endpoint: str
    counts: ServedCounts
    clock: Callable[[], float]
    is_logged: bool
    user: str | None = None
    status: int = 200
    prompts: list[PromptTimes] = field(default_factory=list[PromptTimes])
    ends: dict[int, FinishReason] = field(default_factory=dict[int, FinishReason])
    arrived_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.arrived_s = self.clock()

    def start(self, num_prompt_tokens: list[int]) -> None:
        """The engine has accepted the prompts."""
        self.prompts = [PromptTimes(num_prompt_tokens=count) for count in num_prompt_tokens]
        self.counts.prompt_tokens += sum(num_prompt_tokens)
        for count in num_prompt_tokens:
            self.counts.request_prompt_tokens.add(count)

    def take(self, prompt: int, num_new_tokens: int) -> None:
        """Tokens of a prompt's answers have come, in one step."""
        if not num_new_tokens:
            return
        now_s, times = self.clock(), self.prompts[prompt]
        if times.first_s is None:
            times.first_s = now_s
            self.counts.first_token_s.add(now_s - self.arrived_s)
        else:
            gap_s = (now_s - times.last_s) / num_new_tokens
            for _ in range(num_new_tokens):
                self.counts.between_tokens_s.add(gap_s)
        times.last_s = now_s
        times.num_generated_tokens += num_new_tokens
        self.counts.generation_tokens += num_new_tokens

    def end_choice(self, index: int, reason: FinishReason) -> None:
        """Each choice ends once; a later call for the same one changes nothing."""
        if index not in self.ends:
            self.ends[index] = reason
            self.counts.ends[reason] += 1

    def end(self, num_choices: int, rest: FinishReason) -> None:
        """It is over; choices that have no reason yet get `rest`."""
        for index in range(num_choices if self.prompts else 0):
            self.end_choice(index, rest)
        now_s = self.clock()
        for times in self.prompts:
            self.counts.request_s.add(now_s - self.arrived_s)
            self.counts.request_generation_tokens.add(times.num_generated_tokens)
            if times.first_s is not None and times.num_generated_tokens > 1:
                rest_s = times.last_s - times.first_s
                self.counts.per_output_token_s.add(rest_s / (times.num_generated_tokens - 1))
        if self.is_logged:
            line = self._line(now_s, rest)
            logger.info("request", extra={"request": line})

    def _line(self, now_s: float, rest: FinishReason) -> dict[str, Any]:
        prompt_tokens = sum(times.num_prompt_tokens for times in self.prompts)
        completion_tokens = sum(times.num_generated_tokens for times in self.prompts)
        begun = [times for times in self.prompts if times.first_s is not None]
        first_s = min((times.first_s or 0.0 for times in begun), default=None)
        last_s = max((times.last_s for times in begun), default=0.0)
        latency_s = now_s - self.arrived_s
        ttft_s = None if first_s is None else first_s - self.arrived_s
        decode_s = 0.0 if first_s is None else last_s - first_s
        reasons = sorted(set(self.ends.values())) or [rest]
        line = {
            "request_id": self.request_id,
            "endpoint": self.endpoint,
            "status": self.status,
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tps": _rate(prompt_tokens, ttft_s or 0.0),
            "generation_tps": _rate(completion_tokens - len(begun), decode_s),
            "total_tps": _rate(prompt_tokens + completion_tokens, latency_s),
            "latency_ms": round(latency_s * 1e3, 3),
            "ttft_ms": None if ttft_s is None else round(ttft_s * 1e3, 3),
            "finish_reason": ",".join(reasons),
        }
        return line if self.user is None else {**line, "user": self.user}


def _rate(count: int, seconds: float) -> float:
    return round(count / seconds, 3) if seconds > 0 and count > 0 else 0.0
