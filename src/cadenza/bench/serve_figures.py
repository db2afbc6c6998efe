"""The figures of a served load, from the times of its requests. Pure arithmetic. A request starts
when it is due, or when it is sent where nothing sets a time: a client that is late, or waits for
the server, shortens no latency. `LoadFigures` defines the figures."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from cadenza.bench.datasets import Arrivals
from cadenza.bench.serve_options import Goodput

PERCENTILES = (50.0, 95.0, 99.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedRequest:
    """`content_s`: arrivals of its content chunks; `num_content_tokens`: the tokens of each, where
    the server was asked for their ids."""

    sent_s: float
    content_s: tuple[float, ...]
    end_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_content_tokens: tuple[int, ...] = ()
    due_s: float | None = None

    @property
    def start_s(self) -> float:
        return self.sent_s if self.due_s is None else self.due_s

    @property
    def ttft_s(self) -> float | None:
        return self.content_s[0] - self.start_s if self.content_s else None

    @property
    def tpot_s(self) -> float | None:
        if not self.content_s or self.num_output_tokens < 2:
            return None
        return (self.end_s - self.content_s[0]) / (self.num_output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRequest:
    """`reason` is an HTTP status, or a cause in a word or two."""

    sent_s: float
    end_s: float
    reason: str
    due_s: float | None = None

    @property
    def start_s(self) -> float:
        return self.sent_s if self.due_s is None else self.due_s


Outcome = CompletedRequest | FailedRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Statistics of `count` values, in seconds, with the percentiles that were asked for."""

    count: int
    mean_s: float
    p50_s: float
    p95_s: float
    p99_s: float
    max_s: float
    percentiles_s: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTimes:
    """Processor time during a load; the server's is None where its metrics lack it.
    `num_probe_tokens`: of the answers to probes, which took a part of it."""

    client_s: float
    server_s: float | None
    num_probe_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientShare:
    """This client's own part of a load. `cpu_share`: of all processors that it may use. `lag_s`: by
    which it was late on average, to wake up, to read, and to send what was due; `lag_share`: of the
    mean time to first token. `longest_busy_s`: in which it read no socket."""

    cpu_share: float
    lag_s: float
    lag_share: float
    longest_busy_s: float

    @property
    def largest(self) -> float:
        """Of the two, at most 1."""
        return min(1.0, max(self.cpu_share, self.lag_share))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSetting:
    """`percentiles`: of each `Spread`, besides those that every one has."""

    concurrency: int | None = None
    arrivals: Arrivals | None = None
    goodput: Goodput | None = None
    percentiles: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFigures:
    """The measured load; `concurrency`: None for arrivals at a rate. TTFT: start to first content.
    ITL: gaps between content chunks, all pooled. TPOT: (end - first content) / (output tokens - 1),
    one for each request. E2E: start to end. Tokens per second are the usage counts, never chunks,
    over the time from the first request to the end of the last answer. `num_good`: answers that
    keep the bounds of --goodput; None without it. `send_lag`: due to sent, in an open loop.
    `probe`: the whole latency of probe requests. `client`: None where it was not watched."""

    concurrency: int | None
    arrivals: Arrivals | None
    num_answers: int
    errors: dict[str, int]
    duration_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    ttft: Spread | None
    itl: Spread | None
    tpot: Spread | None
    e2e: Spread | None
    send_lag: Spread | None
    num_good: int | None
    cpu: CpuTimes
    probe: Spread | None = None
    client: ClientShare | None = None

    @property
    def loop(self) -> str:
        return "closed" if self.arrivals is None else "open"

    @property
    def label(self) -> str:
        """Say 8 clients, 2.5/s, or 1 to 8/s."""
        if self.arrivals is None:
            return f"{self.concurrency} client{'' if self.concurrency == 1 else 's'}"
        start, end = self.arrivals.rate, self.arrivals.end_rate
        return f"{start:.3g}/s" if end is None else f"{start:.3g} to {end:.3g}/s"

    @property
    def num_failures(self) -> int:
        return sum(self.errors.values())

    @property
    def good_share(self) -> float | None:
        """Of all requests, failed ones too."""
        if self.num_good is None:
            return None
        return self.num_good / max(1, self.num_answers + self.num_failures)

    @property
    def goodput_rps(self) -> float | None:
        if self.num_good is None or not self.duration_s:
            return None
        return self.num_good / self.duration_s

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
        num_tokens = self.num_output_tokens + self.cpu.num_probe_tokens
        return 1e6 * seconds / num_tokens if num_tokens else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeFigures:
    """`timelines`: the outcomes of each load. `capacity_rps`: of a sweep."""

    url: str
    model: str
    loads: tuple[LoadFigures, ...]
    timelines: tuple[Sequence[Outcome], ...] = ()
    capacity_rps: float | None = None

    @property
    def num_failures(self) -> int:
        return sum(load.num_failures for load in self.loads)


def figures_of(outcomes: Sequence[Outcome], cpu: CpuTimes, setting: LoadSetting) -> LoadFigures:
    """Of at least one request."""
    answers = [each for each in outcomes if isinstance(each, CompletedRequest)]
    start_s = min(each.start_s for each in outcomes)

    def spread(values: Sequence[float | None]) -> Spread | None:
        return spread_of([each for each in values if each is not None], setting.percentiles)

    late_s = [each.sent_s - each.due_s for each in outcomes if each.due_s is not None]
    return LoadFigures(
        concurrency=setting.concurrency,
        arrivals=setting.arrivals,
        num_answers=len(answers),
        errors=dict(Counter(each.reason for each in outcomes if isinstance(each, FailedRequest))),
        duration_s=max(each.end_s for each in outcomes) - start_s,
        num_prompt_tokens=sum(each.num_prompt_tokens for each in answers),
        num_output_tokens=sum(each.num_output_tokens for each in answers),
        ttft=spread([each.ttft_s for each in answers]),
        itl=spread([b - a for each in answers for a, b in pairwise(each.content_s)]),
        tpot=spread([each.tpot_s for each in answers]),
        e2e=spread([each.e2e_s for each in answers]),
        send_lag=spread(late_s),
        num_good=None if setting.goodput is None else num_good(answers, setting.goodput),
        cpu=cpu,
    )


def num_good(answers: Sequence[CompletedRequest], bounds: Goodput) -> int:
    """An answer without text, or of one token, has no TPOT."""

    def keeps(value_s: float | None, bound_ms: float | None, absent: bool) -> bool:
        if bound_ms is None:
            return True
        return absent if value_s is None else 1000 * value_s <= bound_ms

    return sum(
        keeps(each.ttft_s, bounds.ttft_ms, absent=False)
        and keeps(each.tpot_s, bounds.tpot_ms, absent=True)
        and keeps(each.e2e_s, bounds.e2el_ms, absent=True)
        for each in answers
    )


def spread_of(values_s: Sequence[float], further: Sequence[float] = ()) -> Spread | None:
    if not values_s:
        return None
    p50, p95, p99, *others = np.percentile(values_s, [*PERCENTILES, *further]).tolist()
    return Spread(
        count=len(values_s),
        mean_s=math.fsum(values_s) / len(values_s),
        p50_s=p50,
        p95_s=p95,
        p99_s=p99,
        max_s=max(values_s),
        percentiles_s={f"{at:g}": value for at, value in zip(further, others, strict=True)},
    )
