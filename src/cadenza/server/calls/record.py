"""A call's record: its token counts (`Usage`), times and end (`RequestRecord`), for its answer, log
line and metrics; no text. Invariants: a token is counted once, in `RequestRecord.take`; a record
ends once, with one line, whether the request finished, was left, or failed."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from cadenza.events import CacheMiss, FinishReason
from cadenza.frontend.image_prompts import num_image_tokens
from cadenza.frontend.output_processor import OutputProcessor
from cadenza.frontend.prepared_request import PreparedRequest
from cadenza.outputs import CompletionOutput, PromptUse
from cadenza.server.metrics import ServedCounts

logger = logging.getLogger("cadenza.requests")


@dataclass(slots=True, eq=False)
class Usage:
    """Tokens of a call by prompt and choice: of prompts those of images and computed ones, where
    asked (`used`); of outputs reasoning, accepted and rejected drafts."""

    prompt: dict[int, int] = field(default_factory=dict[int, int])
    images: dict[int, int] = field(default_factory=dict[int, int])
    cached: dict[int, int] = field(default_factory=dict[int, int])
    misses: dict[int, CacheMiss] = field(default_factory=dict[int, CacheMiss])
    generated: dict[int, int] = field(default_factory=dict[int, int])
    reasoning: dict[int, int] = field(default_factory=dict[int, int])
    used: dict[int, PromptUse] = field(default_factory=dict[int, PromptUse])
    accepted: dict[int, int] = field(default_factory=dict[int, int])
    rejected: dict[int, int] = field(default_factory=dict[int, int])

    @property
    def prompt_tokens(self) -> int:
        return sum(self.prompt.values())

    @property
    def reasoning_tokens(self) -> int:
        return sum(self.reasoning.values())

    @property
    def completion_tokens(self) -> int:
        return sum(self.generated.values())

    @property
    def image_tokens(self) -> dict[str, int]:
        """The member `image_tokens` of the prompt's details, where there are images."""
        count = sum(self.images.values())
        return {"image_tokens": count} if count else {}

    @property
    def cache_miss(self) -> dict[str, Any]:
        """That of the first prompt that has one; no member if all were found, or nothing was looked
        up."""
        if not self.misses:
            return {}
        miss = self.misses[min(self.misses)]
        return {"cache_miss": {"shared_tokens": miss.shared_tokens, "reason": miss.reason}}

    @property
    def kept_tokens(self) -> dict[str, Any]:
        """Where sparse prefill was asked for: tokens computed or cached, tokens left out, or why
        none."""
        if not self.used:
            return {}
        uses = self.used.values()
        found: dict[str, Any] = {
            "kept_tokens": sum(each.num_kept_tokens for each in uses),
            "skipped_tokens": sum(each.num_skipped_tokens for each in uses),
        }
        reasons = [each.whole_because for each in uses if each.whole_because is not None]
        return {**found, "whole_because": reasons[0]} if reasons else found

    def as_object(self) -> dict[str, Any]:
        """The `usage` of an answer."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(self.cached.values()),
                **self.image_tokens,
                **self.kept_tokens,
                **self.cache_miss,
            },
            "completion_tokens_details": {
                "reasoning_tokens": self.reasoning_tokens,
                "accepted_prediction_tokens": sum(self.accepted.values()),
                "rejected_prediction_tokens": sum(self.rejected.values()),
            },
        }


class CallTrace(Protocol):
    """Makes spans of a call, as `tracing.SpansOfCall` does."""

    def take(self, prepared: Sequence[PreparedRequest], model: str) -> None: ...

    def end(self, record: "RequestRecord") -> None:
        """The call has ended, with this record of it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerTimes:
    """Seconds of a call so far."""

    total_s: float = 0.0  # since it arrived
    first_s: float | None = None  # until its first token
    # until its first token, or until its prompts were read where nothing is generated
    prompt_s: float = 0.0
    decode_s: float = 0.0  # from its first token to its newest


@dataclass(slots=True, eq=False)
class PromptTimes:
    """Of a prompt's first and newest output tokens, or its end; clock seconds."""

    first_s: float | None = None
    last_s: float = 0.0
    read_s: float | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class RequestRecord:
    """One HTTP request that generates tokens."""

    request_id: str
    endpoint: str
    counts: ServedCounts
    clock: Callable[[], float]
    is_logged: bool
    trace: CallTrace | None = None
    user: str | None = None
    status: int = 200
    n: int = 1
    usage: Usage = field(default_factory=Usage)
    prompts: list[PromptTimes] = field(default_factory=list[PromptTimes])
    ends: dict[int, FinishReason] = field(default_factory=dict[int, FinishReason])
    arrived_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.arrived_s = self.clock()

    def start(self, prepared: Sequence[PreparedRequest]) -> None:
        self.n = prepared[0].request.params.n
        self.prompts = [PromptTimes() for _ in prepared]
        for index, each in enumerate(prepared):
            request = each.request
            count, num_of_images = len(request.prompt_token_ids), num_image_tokens(request)
            self.usage.prompt[index] = count
            self.counts.request_prompt_tokens.add(count)
            if num_of_images:
                self.usage.images[index] = num_of_images
            if each.prompt_use is not None:
                self.usage.used[index] = each.prompt_use

    def take(
        self, prompt: int, found: OutputProcessor, outputs: Sequence[CompletionOutput]
    ) -> CompletionOutput | None:
        """Counts what is new of a prompt's samples; returns the first output that has failed."""
        usage, num_new, failed = self.usage, 0, None
        usage.cached[prompt] = found.num_cached_tokens
        if found.cache_miss is not None:
            usage.misses[prompt] = found.cache_miss
        if found.prompt_use is not None:
            usage.used[prompt] = found.prompt_use
        for output in outputs:
            index, num_generated = prompt * self.n + output.index, output.num_generated_tokens
            num_new += num_generated - usage.generated.get(index, 0)
            usage.generated[index] = num_generated
            if output.num_reasoning_tokens:
                usage.reasoning[index] = output.num_reasoning_tokens
            if output.num_accepted_drafts or output.num_rejected_drafts:
                usage.accepted[index] = output.num_accepted_drafts
                usage.rejected[index] = output.num_rejected_drafts
            if output.finish_reason is not None and failed is None:
                self.end_choice(index, output.finish_reason)
                failed = output if output.finish_reason == "error" else None
        times = self.prompts[prompt]
        if num_new:
            self._measure(times, num_new)
        elif times.first_s is None and self.ends.get(prompt * self.n) in ("stop", "length"):
            times.read_s = self.clock()
        return failed

    def _measure(self, times: PromptTimes, num_new_tokens: int) -> None:
        now_s = self.clock()
        if times.first_s is None:
            times.first_s = now_s
            self.counts.first_token_s.add(now_s - self.arrived_s)
        else:
            gap_s = (now_s - times.last_s) / num_new_tokens
            self.counts.between_tokens_s.add(gap_s, num_new_tokens)
        times.last_s = now_s
        self.counts.generation_tokens += num_new_tokens

    def end_choice(self, index: int, reason: FinishReason) -> None:
        """Counts a choice's end; a later call for the same one changes nothing."""
        if index not in self.ends:
            self.ends[index] = reason
            self.counts.ends[reason] += 1

    def end(self, rest: FinishReason) -> None:
        """Ends the record; choices that have not ended get the reason `rest`."""
        for index in range(len(self.prompts) * self.n):
            self.end_choice(index, rest)
        now_s = self.clock()
        for use in self.usage.used.values():
            self.counts.count_use(use)
        for prompt, times in enumerate(self.prompts):
            num_generated = self._num_generated(prompt)
            self.counts.request_s.add(now_s - self.arrived_s)
            self.counts.request_generation_tokens.add(num_generated)
            if times.first_s is not None and num_generated > 1:
                rest_s = times.last_s - times.first_s
                self.counts.per_output_token_s.add(rest_s / (num_generated - 1))
        if self.is_logged:
            line = self._line(now_s, rest)
            logger.info("request", extra={"request": line})
        if self.trace is not None:
            self.trace.end(self)

    def times(self) -> AnswerTimes:
        return self._times(self.clock())

    def _times(self, now_s: float) -> AnswerTimes:
        begun = self._begun()
        first_s = min((times.first_s or 0.0 for times in begun), default=None)
        last_s = max((times.last_s for times in begun), default=0.0)
        read_s = max((times.read_s or 0.0 for times in self.prompts), default=0.0)
        ttft_s = None if first_s is None else first_s - self.arrived_s
        return AnswerTimes(
            total_s=now_s - self.arrived_s,
            first_s=ttft_s,
            prompt_s=read_s - self.arrived_s if ttft_s is None else ttft_s,
            decode_s=0.0 if first_s is None else last_s - first_s,
        )

    def _begun(self) -> list[PromptTimes]:
        return [times for times in self.prompts if times.first_s is not None]

    def _num_generated(self, prompt: int) -> int:
        indices = range(prompt * self.n, (prompt + 1) * self.n)
        return sum(self.usage.generated.get(index, 0) for index in indices)

    def _line(self, now_s: float, rest: FinishReason) -> dict[str, Any]:
        prompt_tokens = self.usage.prompt_tokens
        completion_tokens = self.usage.completion_tokens
        times, num_begun = self._times(now_s), len(self._begun())
        reasons = sorted(set(self.ends.values())) or [rest]
        line = {
            "request_id": self.request_id,
            "endpoint": self.endpoint,
            "status": self.status,
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tps": _rate(prompt_tokens, times.prompt_s),
            "generation_tps": _rate(completion_tokens - num_begun, times.decode_s),
            "total_tps": _rate(prompt_tokens + completion_tokens, times.total_s),
            "latency_ms": round(times.total_s * 1e3, 3),
            "ttft_ms": None if times.first_s is None else round(times.first_s * 1e3, 3),
            "finish_reason": ",".join(reasons),
            **self.usage.kept_tokens,
        }
        return line if self.user is None else {**line, "user": self.user}


def _rate(count: int, seconds: float) -> float:
    return round(count / seconds, 3) if seconds > 0 and count > 0 else 0.0
