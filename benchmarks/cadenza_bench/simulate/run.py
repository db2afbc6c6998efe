"""`cadenza bench simulate`: a server's scheduler, admission, pages, prefix cache and overlapped
loop, over a device that only takes time. Invariant: a simulation is a function of its options.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from cadenza import Request, SamplingParams
from cadenza.cli.report import Column, Columns, Result, Rows, Text, as_table, keys, latency_text
from cadenza.cluster.router import Router
from cadenza.config import SchedulingPolicy
from cadenza.errors import QueueFullError
from cadenza.tenant import Tenant
from cadenza_bench.simulate.device import (
    SimulatedClock,
    SimulatedGroup,
    SimulatedReplica,
    SimulatedServer,
    happenings,
    make_simulated_core,
)
from cadenza_bench.simulate.record import (
    PolicyFigures,
    SimulatedRequest,
    SimulationRecord,
    policy_figures,
)
from cadenza_bench.simulate.traffic import TrafficArrival, TrafficOptions

REPORT_EVERY = 1000  # requests that end between two reports of progress

# Called with how many requests have ended, and how many there are.
OnProgress = Callable[[int, int], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """The figures of all policies, and what was simulated."""

    server: SimulatedServer
    results: tuple[PolicyFigures, ...]


def simulate(
    server: SimulatedServer,
    options: TrafficOptions,
    policy: SchedulingPolicy,
    on_progress: OnProgress = lambda _, __: None,
) -> PolicyFigures:
    clocks = [SimulatedClock() for _ in range(options.replicas)]
    replicas = [
        SimulatedReplica(make_simulated_core(server, policy, clock), clock) for clock in clocks
    ]
    record = SimulationRecord(options)
    num_reported = 0
    arrivals = options.traffic(server.limits.max_model_len)
    for _ in play_traffic(replicas, arrivals, policy, record):
        if record.num_ended >= num_reported + REPORT_EVERY:
            num_reported = record.num_ended
            on_progress(num_reported, options.num_requests)
    return policy_figures(record, replicas, policy)


def play_traffic(
    replicas: Sequence[SimulatedReplica],
    traffic: Iterator[TrafficArrival],
    policy: SchedulingPolicy,
    record: SimulationRecord,
    router: Router | None = None,
) -> Iterator[float]:
    """Submits each request when it arrives and steps the engines; yields the time of each step.
    `router` may be another one than that of `EngineGroup`."""
    group = SimulatedGroup(replicas, router)
    places = {id(each): at for at, each in enumerate(replicas)}
    tenants = [Tenant(name=f"tenant-{at}") for at in range(record.options.num_tenants)]
    for each in happenings(replicas, traffic):
        if each.arrival is not None:
            request = _request_of(each.arrival, policy, tenants[each.arrival.tenant])
            _submit(group, request, each.arrival, record)
        elif each.replica is not None:
            record.place = places[id(each.replica)]
            each.replica.clock.now_s = each.at_s
            for event in each.replica.core.step():
                record.take(event, each.replica.clock.now_s)
            group.stepped(record.place)
            yield each.replica.clock.now_s


def _request_of(arrival: TrafficArrival, policy: SchedulingPolicy, tenant: Tenant) -> Request:
    return Request(
        prompt_token_ids=arrival.prompt_token_ids,
        params=SamplingParams(temperature=0.0, max_tokens=arrival.max_tokens, ignore_eos=True),
        priority=arrival.priority if policy == "priority" else 0,
        tenant=tenant,
    )


def _submit(
    group: SimulatedGroup, request: Request, arrival: TrafficArrival, record: SimulationRecord
) -> None:
    try:
        place, request_id = group.submit(request, arrival.after_s)
    except QueueFullError:
        record.num_rejected += 1
    else:
        record.open[place, request_id] = SimulatedRequest(arrival, arrival.after_s)


def simulate_all(
    server: SimulatedServer, options: TrafficOptions, on_progress: OnProgress
) -> Simulated:
    """The same traffic under each policy; the progress is that of all of them."""
    total = options.num_requests * len(options.policies)
    results: list[PolicyFigures] = []
    for index, policy in enumerate(options.policies):
        before = index * options.num_requests

        def on_each(done: int, _: int, before: int = before) -> None:
            on_progress(before + done, total)

        results.append(simulate(server, options, policy, on_each))
    return Simulated(server=server, results=tuple(results))


_SIMULATED: Columns = (
    Column("policy", "policy"),
    Column("num_answers", "done"),
    Column("num_rejected", "refused"),
    Column("output_tok_s", "tok/s"),
    Column("ttft", "TTFT ms", show=latency_text),
    Column("itl", "ITL ms", show=latency_text),
    Column("waiting", "waiting ms", show=latency_text),
    Column("good_share", "good", show="{:.1%}".format),
    Column("num_preemptions", "preempted"),
    Column("cached_share", "cached", show="{:.1%}".format),
    Column("fairness", "fairness", show="{:.3f}".format),
    *keys("duration_s", "num_output_tokens", "tenants"),
)
_SIMULATED_TENANT: Columns = (
    Column("tenant", "tenant"),
    Column("num_answers", "done"),
    Column("num_output_tokens", "tokens"),
    Column("ttft", "TTFT ms", show=latency_text),
    Column(None, "ms a token", lambda found: 1000 * found.per_token_s, show="{:.1f}".format),
)


def simulation_result(found: Simulated, options: TrafficOptions) -> Result:
    return Result(
        facts={"server": found.server, "traffic": options},
        rows={"results": Rows(columns=_SIMULATED, rows=found.results)},
        text=_simulation_text(found, options),
    )


def _simulation_text(found: Simulated, options: TrafficOptions) -> Text:
    server, cost, limits = found.server, found.server.cost, found.server.limits
    bound = "none" if server.max_itl_ms is None else f"{server.max_itl_ms:.0f} ms"
    yield (
        f"step: {cost.fixed_ms:.3g} ms, {cost.token_ms:.3g} a token, {cost.logit_ms:.3g} a logit "
        f"row, {cost.key_ms:.3g} a key; at most {bound}"
    )
    yield (
        f"{limits.max_num_seqs} rows, {limits.num_pages} pages of {limits.page_size}, "
        f"{limits.max_num_batched_tokens} tokens a step, {limits.max_num_queued_reqs} in the queue"
    )
    yield as_table(_SIMULATED, found.results)
    for each in found.results if options.num_tenants > 1 else ():
        yield f"{each.policy}:"
        yield as_table(_SIMULATED_TENANT, each.tenants)
    yield (
        f"ms: p50 and p99; good: first token within {options.max_ttft_s:g} s, further ones within "
        f"{options.max_tpot_ms:g} ms on average"
    )
