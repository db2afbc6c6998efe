"""What `cadenza bench` prints: the JSON objects and texts of its results, each described once.

Owns the keys, headings and forms. Knows no flags.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from cadenza.bench.bounds import Roofline
from cadenza.bench.load import Load
from cadenza.bench.runs import StepProfile
from cadenza.bench.serve_figures import ServeFigures, Spread
from cadenza.bench.simulate import Simulated
from cadenza.bench.startup import PHASES, Startup
from cadenza.bench.throughput import ConcurrencyResult, Throughput
from cadenza.bench.traffic import TrafficOptions
from cadenza.bench.workloads import ServeOptions
from cadenza.cli.report import (
    Column,
    Columns,
    as_object,
    as_table,
    bytes_text,
    counted,
    json_line,
    keys,
    print_table,
    section_text,
    value_text,
)

Machine = dict[str, object]

_LIMITS = {"read": "reading", "multiply": "multiplying"}


def _rate(kind: str) -> Columns:
    """The columns of `decode` or `prefill`."""

    def column(name: str, heading: str | None = None, **options: Any) -> Column:
        return Column(f"{kind}_{name}", heading, f"{kind}.{name}", **options)

    return (
        column("tok_s", kind),
        column("share_of_bound", "of bound"),
        column("limit", "by", show=_LIMITS.__getitem__),
        *map(column, ("bound_tok_s", "tok_s_runs", "share_runs")),
    )


def _milliseconds(spread: Spread) -> str:
    """The p50 and the p99."""
    both = (1000 * spread.p50_s, 1000 * spread.p99_s)
    return " ".join(f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" for ms in both)


def _percent(share: float) -> str:
    return f"{share:.1%}"


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
_SERVED_LOAD: Columns = (
    Column("concurrency", "clients", absent="rate"),
    Column("num_answers", "done"),
    Column("output_tok_s", "tok/s"),
    Column("ttft", "TTFT ms", show=_milliseconds),
    Column("itl", "ITL ms", show=_milliseconds),
    Column("tpot", "TPOT ms", show=_milliseconds),
    Column("client_us_per_token", "client µs"),
    Column("server_us_per_token", "server µs"),
    *keys("e2e", "errors", "duration_s", "num_prompt_tokens", "num_output_tokens", "cpu"),
    *keys("total_tok_s", "requests_per_s"),
)
_SIMULATED: Columns = (
    Column("policy", "policy"),
    Column("num_answers", "done"),
    Column("num_rejected", "refused"),
    Column("output_tok_s", "tok/s"),
    Column("ttft", "TTFT ms", show=_milliseconds),
    Column("itl", "ITL ms", show=_milliseconds),
    Column("waiting", "waiting ms", show=_milliseconds),
    Column("good_share", "good", show=_percent),
    Column("num_preemptions", "preempted"),
    Column("cached_share", "cached", show=_percent),
    Column("fairness", "fairness", show="{:.3f}".format),
    *keys("duration_s", "num_output_tokens", "tenants"),
)
_SIMULATED_TENANT: Columns = (
    Column("tenant", "tenant"),
    Column("num_answers", "done"),
    Column("num_output_tokens", "tokens"),
    Column("ttft", "TTFT ms", show=_milliseconds),
    Column(None, "ms a token", lambda found: 1000 * found.per_token_s, show="{:.1f}".format),
)
_STARTUP: Columns = (
    Column("caches", "caches"),
    *keys("phases_s"),
    Column("total_s", "total"),
    *keys("total_s_runs"),
)
_LOAD: Columns = keys(
    *("file_bytes", "weight_bytes", "largest_tensor_bytes", "num_threads"),
    *("load_gb_s", "read_gb_s", "share_of_read", "read_new_gb_s", "share_of_read_new"),
    *("peak_private_bytes", "allowed_private_bytes", "load_s", "read_s", "read_new_s"),
)


def print_throughput(found: Throughput, *, as_json: bool) -> None:
    """The machine, the setting, one row for each concurrency, and the profiles."""
    roofline, setting = found.roofline, found.workload
    if as_json:
        results = [as_object(_THROUGHPUT, each) | _profiles(each) for each in found.results]
        rates = roofline and {"read_gb_s": roofline.read_gb_s, "gflop_s": roofline.gflop_s}
        facts = {"machine": found.machine, "workload": setting, "roofline": rates}
        print(json_line(facts | {"results": results}))
        return
    _print_machine(found.machine)
    if roofline is not None:
        print(f"roofline: read {roofline.read_gb_s:.1f} GB/s, {_multiply_text(roofline)}")
    print(
        f"model: {setting['model']}, {setting['dtype']}, {setting['ops']} ops; "
        f"{setting['input_len']} prompt tokens, {setting['output_len']} new ones; "
        f"medians of {setting['repeats']}"
    )
    print_table(as_table(_THROUGHPUT, found.results))
    if roofline is None:
        print(f"tokens per second; no bound is known for {setting['backend']}, so no share of one")
    else:
        print("tokens per second, share of the bound, whether reading or multiplying sets it")
    for each in found.results:
        for kind, profile in each.profiles.items():
            _print_profile(f"{kind} step at {each.concurrency} rows", profile)


def _profiles(found: ConcurrencyResult) -> dict[str, Any]:
    """The member `profile`, where there is one."""
    step = keys("step_ms", "kernels_ms", "rest_ms", "read_bytes", "ops")
    profiles = {kind: as_object(step, profile) for kind, profile in found.profiles.items()}
    return {"profile": profiles} if profiles else {}


def _print_profile(title: str, profile: StepProfile) -> None:
    def share(ms: float) -> str:
        return f"{ms / profile.step_ms:.0%}"

    columns = (*_OPERATION, Column(None, "of step", "ms", share))
    table = as_table(columns, profile.ops)
    rest, read = profile.rest_ms, bytes_text(profile.read_bytes)
    table.add_row("left in XLA and host", "", value_text("ms", rest), "", "", share(rest))
    table.add_row("step", "", value_text("ms", profile.step_ms), read, "", "")
    print(f"{title}:")
    print_table(table)


def print_serving(found: ServeFigures, options: ServeOptions, *, as_json: bool) -> None:
    """One row for each load, then what failed. The API key is printed nowhere."""
    if as_json:
        setting = {name: value for name, value in asdict(options).items() if name != "api_key"}
        results = [as_object(_SERVED_LOAD, load) for load in found.loads]
        facts = {"url": found.url, "model": found.model, "workload": setting}
        print(json_line(facts | {"results": results}))
        return
    print(f"{found.url}: {found.model}")
    print_table(as_table(_SERVED_LOAD, found.loads))
    print("tok/s: output tokens by usage; ms: p50 and p99; µs: processor time for each token")
    for load in found.loads:
        where = "at a rate" if load.concurrency is None else f"{load.concurrency} clients"
        for reason, count in sorted(load.errors.items()):
            print(f"failed ({where}): {counted(count, 'request')}: {reason}")


def print_simulation(found: Simulated, options: TrafficOptions, *, as_json: bool) -> None:
    """The server, one row for each policy and, of several tenants, for each of them."""
    server = found.server
    if as_json:
        results = [as_object(_SIMULATED, each) for each in found.results]
        facts = {"server": server, "traffic": options}
        print(json_line(facts | {"results": results}))
        return
    cost, limits = server.cost, server.limits
    bound = "none" if server.max_itl_ms is None else f"{server.max_itl_ms:.0f} ms"
    print(
        f"step: {cost.fixed_ms:.3g} ms, {cost.token_ms:.3g} a token, {cost.logit_ms:.3g} a logit "
        f"row, {cost.key_ms:.3g} a key; at most {bound}"
    )
    print(
        f"{limits.max_num_seqs} rows, {limits.num_pages} pages of {limits.page_size}, "
        f"{limits.max_num_batched_tokens} tokens a step, {limits.max_num_queued_reqs} in the queue"
    )
    print_table(as_table(_SIMULATED, found.results))
    if options.num_tenants > 1:
        for each in found.results:
            print(f"{each.policy}:")
            print_table(as_table(_SIMULATED_TENANT, each.tenants))
    print(
        f"ms: p50 and p99; good: first token within {options.max_ttft_s:g} s, further ones within "
        f"{options.max_tpot_ms:g} ms on average"
    )


def print_roofline(machine: Machine, found: Sequence[Roofline], *, as_json: bool) -> None:
    """The machine and its highest rates; `found` has one measurement for each type."""
    read_gb_s = max(each.read_gb_s for each in found)
    if as_json:
        rates = {
            "read_gb_s": read_gb_s,
            "gflop_s": found[0].gflop_s,
            "gflop_s_by_dtype": {each.dtype: each.gflop_s for each in found},
            "method": found[0].method,
        }
        print(json_line({"machine": machine, "roofline": rates}))
        return
    _print_machine(machine)
    print(f"read: {read_gb_s:.1f} GB/s")
    for each in found:
        print(f"multiply: {_multiply_text(each)}")


def print_startup(machine: Machine, found: Sequence[Startup], *, as_json: bool) -> None:
    """Median seconds of each phase."""
    if as_json:
        results = [as_object(_STARTUP, each) for each in found]
        print(json_line({"machine": machine, "results": results}))
        return
    phases = [_phase(name) for name in PHASES]
    worst = Column("worst_s", "worst", lambda startup: max(startup.total_s_runs))
    print_table(as_table((_STARTUP[0], *phases, *_STARTUP[1:], worst), found))
    starts = counted(len(found[0].starts), "start")
    print(f"medians of {starts}; total: process start to the first token")


def print_load(machine: Machine, found: Load, *, as_json: bool) -> None:
    """The rates, their shares, and the memory that loading took."""
    results = as_object(_LOAD, found)
    if as_json:
        print(json_line({"machine": machine, "results": results}))
        return
    _print_machine(machine)
    print(section_text(f"medians of {counted(len(found.load_s), 'load')}", results))


def _print_machine(machine: Machine) -> None:
    native = f"{machine['isa']}, {machine['threads']} threads" if machine["isa"] else "no kernels"
    cores, load = machine["cores"], machine["load_average"]
    print(f"machine: {machine['cpu']}, {cores} cores, {native}; load {load}")


def _multiply_text(roofline: Roofline) -> str:
    text = f"{roofline.gflop_s:.0f} GFLOP/s in {roofline.dtype}"
    if roofline.method == "numpy":
        text += " (measured with numpy: without the native CPU kernels, a low estimate)"
    return text
