"""What `cadenza bench` prints: the JSON objects and texts of its results, each described once.

Owns the keys, headings and forms.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cadenza.bench.bounds import Roofline
from cadenza.bench.load import Load
from cadenza.bench.runs import StepProfile
from cadenza.bench.simulate import Simulated
from cadenza.bench.startup import PHASES, Startup
from cadenza.bench.throughput import ConcurrencyResult, Throughput, ThroughputWatch
from cadenza.bench.traffic import TrafficOptions
from cadenza.cli.report import (
    Column,
    Columns,
    RowLines,
    Text,
    as_object,
    as_table,
    bytes_text,
    counted,
    digits_text,
    keys,
    latency_text,
    picked,
    section_text,
    show_result,
    value_text,
)
from cadenza.cli.status import Status

if TYPE_CHECKING:
    from rich.table import Table

Machine = Mapping[str, object]


def _rate(kind: str) -> Columns:
    """The columns of `decode` or `prefill`."""

    def column(name: str, heading: str | None = None, **options: Any) -> Column:
        return Column(f"{kind}_{name}", heading, f"{kind}.{name}", **options)

    return (
        column("tok_s", kind, show=digits_text),
        column("bound_tok_s", "bound", show=digits_text),
        column("share_of_bound", "of bound"),
        column("limit", "by"),
        *map(column, ("tok_s_runs", "share_runs")),
    )


def _phase(name: str) -> Column:
    return Column(f"{name}_s", name.replace("_", " "), lambda found: found.phases_s[name])


_THROUGHPUT: Columns = (
    Column("concurrency", "rows"),
    *_rate("decode"),
    *_rate("prefill"),
    Column("average_context", read=lambda found: found.decode.runs[0].run.context),
    Column("num_decode_steps", read=lambda found: found.decode.runs[0].run.num_steps),
    Column("num_prefill_tokens", read="prefill.num_tokens"),
)
_OPERATION: Columns = (
    Column("op", "operation"),
    Column("calls", "calls"),
    Column("ms", "ms"),
    Column("read_bytes", "read"),
    Column("read_gb_s", "rate"),
)
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
_STARTUP: Columns = (
    Column("caches", "caches"),
    *keys("phases_s"),
    Column("total_s", "total"),
    *keys("total_s_runs"),
)
_LOAD = (
    *("file_bytes", "read_bytes", "weight_bytes", "largest_tensor_bytes", "num_threads"),
    *("load_gb_s", "read_gb_s", "share_of_read", "read_new_gb_s", "share_of_read_new"),
    *("peak_private_bytes", "allowed_private_bytes", "load_s", "read_s", "read_new_s"),
)


def throughput_facts(found: Throughput) -> dict[str, Any]:
    """The JSON object."""
    results = [as_object(_THROUGHPUT, each) | _profiles(each) for each in found.results]
    return {
        "machine": found.machine,
        "workload": found.workload,
        "roofline": found.roofline and picked(found.roofline, "read_gb_s", "gflop_s"),
        "results": results,
    }


def throughput_watch(status: Status) -> ThroughputWatch:
    """Prints the machine, the setting and each row as soon as they are known."""
    rows = RowLines(_THROUGHPUT)

    def on_workload(setting: Mapping[str, object]) -> None:
        status.print(
            f"model: {setting['model']}, {setting['dtype']}, {setting['ops']} ops; "
            f"{setting['input_len']} prompt tokens, {setting['output_len']} new ones; "
            f"medians of {setting['repeats']}\n\n{rows.head}"
        )

    return ThroughputWatch(
        report=status,
        on_machine=lambda machine: status.print(machine_text(machine)),
        on_workload=on_workload,
        on_result=lambda result: status.print(rows.row(result)),
    )


def throughput_text(found: Throughput) -> Text:
    """What follows below the rows."""
    roofline, setting = found.roofline, found.workload
    yield ""
    if roofline is None:
        yield f"tokens per second; no bound is known for {setting['backend']}, so no share of one"
    else:
        yield (
            "tokens per second, beside the bound and their share of it; by: whether reading or "
            "multiplying sets it"
        )
        yield f"roofline: read {roofline.read_gb_s:.1f} GB/s, {_multiply_text(roofline)}"
    for each in found.results:
        for kind, profile in each.profiles.items():
            yield f"{kind} step at {each.concurrency} rows:"
            yield _profile_table(profile)


def _profiles(found: ConcurrencyResult) -> dict[str, Any]:
    """The member `profile`, where there is one."""
    members = ("step_ms", "kernels_ms", "rest_ms", "read_bytes", "ops")
    profiles = {kind: picked(profile, *members) for kind, profile in found.profiles.items()}
    return {"profile": profiles} if profiles else {}


def _profile_table(profile: StepProfile) -> "Table":
    def share(ms: float) -> str:
        return f"{ms / profile.step_ms:.0%}"

    table = as_table((*_OPERATION, Column(None, "of step", "ms", share)), profile.ops)
    rest, read = profile.rest_ms, bytes_text(profile.read_bytes)
    table.add_row("left in XLA and host", "", value_text("ms", rest), "", "", share(rest))
    table.add_row("step", "", value_text("ms", profile.step_ms), read, "", "")
    return table


def print_simulation(found: Simulated, options: TrafficOptions, *, as_json: bool) -> None:
    """The server, one row for each policy and, of several tenants, for each of them."""
    results = [as_object(_SIMULATED, each) for each in found.results]
    facts = {"server": found.server, "traffic": options, "results": results}
    show_result(facts, _simulation_text(found, options), as_json=as_json)


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


def print_roofline(machine: Machine, found: Sequence[Roofline], *, as_json: bool) -> None:
    """The machine and its highest rates; `found` has one measurement for each type."""
    read_gb_s = max(each.read_gb_s for each in found)
    rates = {
        "read_gb_s": read_gb_s,
        "gflop_s": found[0].gflop_s,
        "gflop_s_by_dtype": {each.dtype: each.gflop_s for each in found},
        "method": found[0].method,
    }
    multiply = (f"multiply: {_multiply_text(each)}" for each in found)
    text = (machine_text(machine), f"read: {read_gb_s:.1f} GB/s", *multiply)
    show_result({"machine": machine, "roofline": rates}, text, as_json=as_json)


def print_startup(machine: Machine, found: Sequence[Startup], *, as_json: bool) -> None:
    """Seconds of each phase of the middle start."""
    results = [as_object(_STARTUP, each) for each in found]
    show_result({"machine": machine, "results": results}, _startup_text(found), as_json=as_json)


def _startup_text(found: Sequence[Startup]) -> Text:
    worst = Column("worst_s", "worst", lambda startup: max(startup.total_s_runs))
    yield as_table((_STARTUP[0], *map(_phase, PHASES), *_STARTUP[1:], worst), found)
    starts = counted(len(found[0].starts), "start")
    yield (
        f"the start of the median time of {starts}, and its phases; total: process start to the "
        f"first token"
    )


def print_load(machine: Machine, found: Load, *, as_json: bool) -> None:
    """The rates, their shares, and the memory that loading took."""
    results = picked(found, *_LOAD)
    title = f"medians of {counted(len(found.load_s), 'load')}"
    text = (machine_text(machine), section_text(title, results))
    show_result({"machine": machine, "results": results}, text, as_json=as_json)


def machine_text(machine: Machine) -> str:
    """The first line of a report."""
    native = f"{machine['isa']}, {machine['threads']} threads" if machine["isa"] else "no kernels"
    cores, load = machine["cores"], machine["load_average"]
    return f"machine: {machine['cpu']}, {cores} cores, {native}; load {load}"


def _multiply_text(roofline: Roofline) -> str:
    text = f"{roofline.gflop_s:.0f} GFLOP/s in {roofline.dtype}"
    if roofline.method == "numpy":
        text += " (measured with numpy: without the native CPU kernels, a low estimate)"
    return text
