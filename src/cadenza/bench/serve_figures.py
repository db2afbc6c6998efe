"""The figures of a served load, from the times of its requests.

Pure arithmetic. TTFT: sent to first content. ITL: gaps between content chunks, all pooled. TPOT:
(end - first content) / (output tokens - 1), one for each request. Tokens per second are the usage
counts, never chunks, over the time from the first request to the end of the last answer.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedRequest:
    """A request whose stream ended well; `content_s` are the arrivals of its content chunks.

    `num_content_tokens`: the tokens of each chunk, where the server was asked for their ids.
    """

    sent_s: float
    content_s: tuple[float, ...]
    end_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_content_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRequest:
    """A request that failed; `reason` is an HTTP status, or a cause in a word or two."""

    sent_s: float
    end_s: float
    reason: str


Outcome = CompletedRequest | FailedRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Statistics of `count` values, in seconds."""

    count: int
    mean_s: float
    p50_s: float
    p95_s: float
    p99_s: float
    max_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTimes:
    """Processor time during a load; the server's is None where its metrics lack it."""

    client_s: float
    server_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFigures:
    """The measured load; `concurrency` is None for arrivals at a rate."""

    concurrency: int | None
    num_answers: int
    errors: dict[str, int]
    duration_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    ttft: Spread | None
    itl: Spread | None
    tpot: Spread | None
    e2e: Spread | None
    cpu: CpuTimes

    @property
    def output_tok_s(self) -> float:
        return self.num_output_tokens / self.duration_s if self.duration_s else 0.0

    @property
    def total_tok_s(self) -> float:
        tokens = self.num_prompt_tokens + self.num_output_tokens
        return tokens / self.duration_s if self.duration_s else 0.0

    @property
    def requests_per_s(self) -> float:
        return self.num_answers / self.duration_s if self.duration_s else 0.0

    @property
    def client_us_per_token(self) -> float | None:
        return self._us_per_token(self.cpu.client_s)

    @property
    def server_us_per_token(self) -> float | None:
        return None if self.cpu.server_s is None else self._us_per_token(self.cpu.server_s)

    def _us_per_token(self, seconds: float) -> float | None:
        return 1e6 * seconds / self.num_output_tokens if self.num_output_tokens else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeFigures:
    """The figures of all loads on one server."""

    url: str
    model: str
    loads: tuple[LoadFigures, ...]

    @property
    def num_failures(self) -> int:
        return sum(sum(load.errors.values()) for load in self.loads)


def figures_of(
    outcomes: Sequence[Outcome], cpu: CpuTimes, *, concurrency: int | None
) -> LoadFigures:
    """The figures of one load; of at least one request."""
    answers = [each for each in outcomes if isinstance(each, CompletedRequest)]
    shown = [each for each in answers if each.content_s]
    start_s = min(each.sent_s for each in outcomes)
    return LoadFigures(
        concurrency=concurrency,
        num_answers=len(answers),
        errors=dict(Counter(each.reason for each in outcomes if isinstance(each, FailedRequest))),
        duration_s=max(each.end_s for each in outcomes) - start_s,
        num_prompt_tokens=sum(each.num_prompt_tokens for each in answers),
        num_output_tokens=sum(each.num_output_tokens for each in answers),
        ttft=spread_of([each.content_s[0] - each.sent_s for each in shown]),
        itl=spread_of([b - a for each in shown for a, b in pairwise(each.content_s)]),
        tpot=spread_of(
            [
                (each.end_s - each.content_s[0]) / (each.num_output_tokens - 1)
                for each in shown
                if each.num_output_tokens > 1
            ]
        ),
        e2e=spread_of([each.end_s - each.sent_s for each in answers]),
        cpu=cpu,
    )


def spread_of(values_s: Sequence[float]) -> Spread | None:
    """None without values. Percentiles are interpolated between the two nearest values."""
    if not values_s:
        return None
    p50, p95, p99 = np.percentile(values_s, [50, 95, 99]).tolist()
    return Spread(
        count=len(values_s),
        mean_s=math.fsum(values_s) / len(values_s),
        p50_s=p50,
        p95_s=p95,
        p99_s=p99,
        max_s=max(values_s),
    )
