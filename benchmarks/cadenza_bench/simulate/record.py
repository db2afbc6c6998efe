"""What clients see of a simulation, and the figures that follow from it. Pure arithmetic."""

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from cadenza import Finished, Token
from cadenza.bench.serve_figures import Spread, spread_of
from cadenza.config import SchedulingPolicy
from cadenza.errors import RunnerError
from cadenza.events import Started
from cadenza_bench.simulate.device import SimulatedReplica
from cadenza_bench.simulate.traffic import TrafficArrival, TrafficOptions

HISTOGRAM_BASE = 1.01  # gaps between tokens are counted in classes that are 1 % apart


@dataclass(slots=True, eq=False)
class GapCounts:
    """Times between tokens, in classes that are 1 % apart: millions of them need no memory."""

    counts: Counter[int] = field(default_factory=Counter[int])
    total_s: float = 0.0
    max_s: float = 0.0

    def add(self, gap_s: float) -> None:
        self.counts[round(math.log(max(gap_s, 1e-9), HISTOGRAM_BASE))] += 1
        self.total_s += gap_s
        self.max_s = max(self.max_s, gap_s)

    def spread(self) -> Spread | None:
        """Within 0.5 % of that of the times themselves; None without any."""
        count = self.counts.total()
        if not count:
            return None
        p50, p95, p99 = (self._percentile(share * count) for share in (0.5, 0.95, 0.99))
        mean_s = self.total_s / count
        return Spread(count=count, mean_s=mean_s, p50_s=p50, p95_s=p95, p99_s=p99, max_s=self.max_s)

    def _percentile(self, place: float) -> float:
        seen = 0
        for key in sorted(self.counts):
            seen += self.counts[key]
            if seen >= place:
                return min(HISTOGRAM_BASE**key, self.max_s)
        return self.max_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantFigures:
    """One tenant's requests; `per_token_s` is the mean time of a request for each of its tokens."""

    tenant: str
    num_answers: int
    num_output_tokens: int
    ttft: Spread | None
    per_token_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFigures:
    """One policy's figures. `waiting`: from arrival to the first step; `good_share`: of all
    requests, those within both limits; `num_rejected`: refused because the queue was full;
    `cached_share`: prompt tokens found in the prefix cache; `fairness`: Jain's index of the
    tenants' `per_token_s`: 1 where all are alike, 1 / tenants where one has all the delay."""

    policy: SchedulingPolicy
    num_answers: int
    num_rejected: int
    duration_s: float
    num_output_tokens: int
    ttft: Spread | None
    itl: Spread | None
    waiting: Spread | None
    good_share: float
    num_preemptions: int
    cached_share: float
    fairness: float
    tenants: tuple[TenantFigures, ...]

    @property
    def output_tok_s(self) -> float:
        return self.num_output_tokens / self.duration_s if self.duration_s else 0.0


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request that has not ended."""

    arrival: TrafficArrival
    last_s: float
    ttft_s: float = 0.0
    num_tokens: int = 0


@dataclass(slots=True, eq=False)
class _TenantRecord:
    ttfts_s: "array[float]" = field(default_factory=lambda: array("d"))
    num_tokens: int = 0
    per_token_s: float = 0.0


@dataclass(slots=True, eq=False)
class SimulationRecord:
    """What clients saw, from the events of the engines; `place` is of the one that is read."""

    options: TrafficOptions
    place: int = 0
    open: dict[tuple[int, int], SimulatedRequest] = field(
        default_factory=dict[tuple[int, int], SimulatedRequest]
    )
    tenants: dict[int, _TenantRecord] = field(default_factory=dict[int, _TenantRecord])
    waits_s: "array[float]" = field(default_factory=lambda: array("d"))
    gaps: GapCounts = field(default_factory=GapCounts)
    num_good: int = 0
    num_rejected: int = 0
    num_answers: int = 0

    @property
    def num_ended(self) -> int:
        return self.num_answers + self.num_rejected

    def take(self, event: object, now_s: float) -> None:
        if isinstance(event, Token):
            request = self.open[self.place, event.request_id]
            if request.num_tokens:
                self.gaps.add(now_s - request.last_s)
            else:
                request.ttft_s = now_s - request.arrival.after_s
            request.last_s = now_s
            request.num_tokens += 1
        elif isinstance(event, Finished):
            self._end(event, now_s)
        elif isinstance(event, Started):
            self.waits_s.append(now_s - self.open[self.place, event.request_id].arrival.after_s)

    def _end(self, event: Finished, now_s: float) -> None:
        request = self.open.pop((self.place, event.request_id))
        if event.finish_reason != "length":
            raise RunnerError(f"a simulated request ended by {event.finish_reason}: {event.error}")
        arrival, count = request.arrival, request.num_tokens
        tenant = self.tenants.setdefault(arrival.tenant, _TenantRecord())
        tenant.ttfts_s.append(request.ttft_s)
        tenant.num_tokens += count
        tenant.per_token_s += (now_s - arrival.after_s) / count
        self.num_answers += 1
        decode_s = request.last_s - arrival.after_s - request.ttft_s
        is_even = decode_s <= self.options.max_tpot_ms / 1000 * max(1, count - 1)
        self.num_good += request.ttft_s <= self.options.max_ttft_s and is_even


def policy_figures(
    record: SimulationRecord, replicas: Sequence[SimulatedReplica], policy: SchedulingPolicy
) -> PolicyFigures:
    schedulers = [each.core.scheduler for each in replicas]
    tenants = [_tenant_figures(at, each) for at, each in sorted(record.tenants.items())]
    delays = [each.per_token_s for each in tenants]
    squares = len(delays) * sum(delay * delay for delay in delays)
    queries = sum(each.prefix_counts.num_queries for each in schedulers)
    hits = sum(each.prefix_counts.num_hits for each in schedulers)
    return PolicyFigures(
        policy=policy,
        num_answers=record.num_answers,
        num_rejected=record.num_rejected,
        duration_s=max(each.clock.now_s for each in replicas),
        num_output_tokens=sum(each.num_output_tokens for each in tenants),
        ttft=spread_of([ttft for each in record.tenants.values() for ttft in each.ttfts_s]),
        itl=record.gaps.spread(),
        waiting=spread_of(record.waits_s),
        good_share=record.num_good / record.num_ended,
        num_preemptions=sum(each.num_preemptions for each in schedulers),
        cached_share=hits / queries if queries else 0.0,
        fairness=sum(delays) ** 2 / squares if squares else 1.0,
        tenants=tuple(tenants),
    )


def _tenant_figures(tenant: int, record: _TenantRecord) -> TenantFigures:
    count = len(record.ttfts_s)
    return TenantFigures(
        tenant=f"tenant-{tenant}",
        num_answers=count,
        num_output_tokens=record.num_tokens,
        ttft=spread_of(record.ttfts_s),
        per_token_s=record.per_token_s / count,
    )
