"""The result of a simulation: the server, a row for each policy and, of several, each tenant."""

from cadenza.cli.report import Column, Columns, Text, as_table, keys, latency_text
from cadenza.cli.result import Result, Rows
from cadenza_bench.simulate.run import Simulated
from cadenza_bench.simulate.traffic import TrafficOptions

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
