"""The figures of a served load, from the times of its requests.

Pure arithmetic. TTFT: sent to first content. ITL: gaps between content chunks, all pooled. TPOT:
(end - first content) / (output tokens - 1), one for each request. Tokens per second are of usage
counts over the time from the first request to the last answer, never of chunks.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A request that was answered in full; `content_s` are the times of its content chunks."""

    sent_s: float
    content_s: tuple[float, ...]
    end_s: float
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A request that was not: an HTTP status, or what went wrong, in a word or two."""

    sent_s: float
    end_s: float
    reason: str


Outcome = Answer | Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Seconds, over `count` values."""

    count: int
    mean_s: float
    p50_s: float
    p95_s: float
    p99_s: float
    max_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTimes:
    """Seconds of computing during a load; the server's is None where it does not tell."""

    client_s: float
    server_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFigures:
    """One load. `concurrency` is None for arrivals at a rate."""

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
    """All loads on one server."""

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
    answers = [each for each in outcomes if isinstance(each, Answer)]
    shown = [each for each in answers if each.content_s]
    start_s = min(each.sent_s for each in outcomes)
    return LoadFigures(
        concurrency=concurrency,
        num_answers=len(answers),
        errors=dict(Counter(each.reason for each in outcomes if isinstance(each, Failure))),
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
    """None of no values."""
    if not values_s:
        return None
    ordered = sorted(values_s)
    return Spread(
        count=len(ordered),
        mean_s=math.fsum(ordered) / len(ordered),
        p50_s=percentile(ordered, 50),
        p95_s=percentile(ordered, 95),
        p99_s=percentile(ordered, 99),
        max_s=ordered[-1],
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of sorted values, between the two nearest ones in proportion."""
    at = (len(ordered) - 1) * percent / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)
