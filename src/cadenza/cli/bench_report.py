"""`cadenza bench serve`, and what it, `throughput` and `roofline` print. Nothing heavy is imported
before something is measured. Invariants: a load in which the client itself took too much is called
void, and the command fails; no API key is printed."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cadenza.bench.serve_options import LoadOptions, ServerAddress
from cadenza.cli.report import (
    Chart,
    Column,
    Columns,
    Machine,
    Result,
    RowLines,
    Rows,
    Shown,
    Text,
    as_object,
    as_table,
    bytes_text,
    counted,
    digits_text,
    keys,
    latency_text,
    machine_text,
    picked,
    value_text,
)
from cadenza.cli.status import Status, status_line

if TYPE_CHECKING:
    from rich.table import Table

    from cadenza.bench.machine import Roofline
    from cadenza.bench.runs import StepProfile
    from cadenza.bench.serve_figures import LoadFigures, ServeFigures
    from cadenza.bench.throughput import ConcurrencyResult, Throughput, ThroughputWatch


def _rate(kind: str) -> Columns:
    def column(name: str, heading: str | None = None, **options: Any) -> Column:
        return Column(f"{kind}_{name}", heading, f"{kind}.{name}", **options)

    return (
        column("tok_s", kind, show=digits_text),
        column("bound_tok_s", "bound", show=digits_text),
        column("share_of_bound", "of bound"),
        column("limit", "by"),
        *map(column, ("tok_s_runs", "share_runs")),
    )


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


def throughput_result(found: "Throughput") -> Result:
    """The object; as text, what follows below the rows of `throughput_watch`."""
    results = [as_object(_THROUGHPUT, each) | _profiles(each) for each in found.results]
    facts = {
        "machine": found.machine,
        "workload": found.workload,
        "roofline": found.roofline and picked(found.roofline, "read_gb_s", "gflop_s"),
        "results": results,
    }
    return Result(facts=facts, text=_throughput_text(found))


def throughput_watch(status: Status) -> "ThroughputWatch":
    from cadenza.bench.throughput import ThroughputWatch

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


def _throughput_text(found: "Throughput") -> Text:
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


def _profiles(found: "ConcurrencyResult") -> dict[str, Any]:
    members = ("step_ms", "kernels_ms", "rest_ms", "read_bytes", "ops")
    profiles = {kind: picked(profile, *members) for kind, profile in found.profiles.items()}
    return {"profile": profiles} if profiles else {}


def _profile_table(profile: "StepProfile") -> "Table":
    def share(ms: float) -> str:
        return f"{ms / profile.step_ms:.0%}"

    table = as_table((*_OPERATION, Column(None, "of step", "ms", share)), profile.ops)
    rest, read = profile.rest_ms, bytes_text(profile.read_bytes)
    table.add_row("left in XLA and host", "", value_text("ms", rest), "", "", share(rest))
    table.add_row("step", "", value_text("ms", profile.step_ms), read, "", "")
    return table


def roofline_result(machine: Machine, found: "Sequence[Roofline]") -> Result:
    """`found` has one measurement for each type."""
    read_gb_s = max(each.read_gb_s for each in found)
    rates = {
        "read_gb_s": read_gb_s,
        "gflop_s": found[0].gflop_s,
        "gflop_s_by_dtype": {each.dtype: each.gflop_s for each in found},
        "method": found[0].method,
    }
    multiply = (f"multiply: {_multiply_text(each)}" for each in found)
    text = (machine_text(machine), f"read: {read_gb_s:.1f} GB/s", *multiply)
    return Result(facts={"machine": machine, "roofline": rates}, text=text)


def _multiply_text(roofline: "Roofline") -> str:
    text = f"{roofline.gflop_s:.0f} GFLOP/s in {roofline.dtype}"
    if roofline.method == "numpy":
        text += " (measured with numpy: without the native CPU kernels, a low estimate)"
    return text


_URL: Mapping[str, Any] = {
    "url": typer.Argument(metavar="URL", help="Such as http://127.0.0.1:8000.")
}
ENOUGH_FOR_P99 = 100


def bench_serve(address: Annotated[ServerAddress, _URL], options: LoadOptions, shown: Shown) -> int:
    """Load a server that has the OpenAI API with streamed answers, and time them.

    Exits with 1 when a request failed, or when a load is void because this client took too much.
    """
    from cadenza.bench.serve import measure_serving

    with status_line("starting") as report:
        found = measure_serving(address, options, report)
    return serving_result(found, options).show(shown)


def serving_result(found: "ServeFigures", options: LoadOptions) -> Result:
    """The exit code is 1 where a request failed or a load is void."""

    def charts() -> Sequence[Chart]:
        from cadenza_bench.plots import serving_charts

        return serving_charts(found)

    voids = void_reasons([("", load) for load in found.loads], options.max_client_share)
    facts = {
        "url": found.url,
        "model": found.model,
        "workload": asdict(options),
        "capacity_rps": found.capacity_rps,
        "void": voids,
    }
    return Result(
        facts=facts,
        rows={"results": Rows(columns=LOAD_COLUMNS, rows=found.loads)},
        text=_serving_text(found, options, voids),
        title=f"{found.model} at {found.url}",
        charts=charts,
        exit_code=1 if found.num_failures or voids else 0,
    )


def void_reasons(loads: Iterable[tuple[str, "LoadFigures"]], most: float) -> list[str]:
    """Of each load in which the client's own share was above `most`."""
    found: list[str] = []
    for server, load in loads:
        client = load.client
        if client is not None and load.num_answers and client.largest > most:
            where = ", ".join(filter(None, (server, load.label)))
            found.append(
                f"{where}: this client took {client.cpu_share:.1%} of the processors, and its lag "
                f"was {1000 * client.lag_s:.2f} ms, {client.lag_share:.1%} of the time to first "
                f"token; at most {most:.1%} are allowed (--max-client-share)"
            )
    return found


def rate_of(load: "LoadFigures") -> float | None:
    return None if load.arrivals is None else load.arrivals.rate


def _good(share: float) -> str:
    return f"{share:.1%}"


def _share(load: "LoadFigures") -> float | None:
    return None if load.client is None else load.client.largest


LOAD_COLUMNS: Columns = (
    Column(None, "load", "label"),
    *keys("loop", "concurrency"),
    Column("request_rate", read=rate_of),
    *keys("arrivals"),
    Column("num_answers", "done"),
    Column("output_tok_s", "tok/s"),
    Column("ttft", "TTFT ms", show=latency_text),
    Column("itl", "ITL ms", show=latency_text),
    Column("tpot", "TPOT ms", show=latency_text),
    Column("good_share", "good", show=_good),
    Column("client_us_per_token", "client µs"),
    Column("server_us_per_token", "server µs"),
    Column(None, "client", _share, show=_good),
    *keys("e2e", "send_lag", "probe", "num_good", "goodput_rps"),
    *keys("errors", "duration_s", "num_prompt_tokens", "num_output_tokens", "cpu", "client"),
    *keys("total_tok_s", "requests_per_s"),
)


def _serving_text(found: "ServeFigures", options: LoadOptions, voids: Sequence[str]) -> Text:
    yield f"{found.url}: {found.model}"
    yield as_table(LOAD_COLUMNS, found.loads)
    yield (
        "tok/s: output tokens by usage; ms: p50 and p99; µs: processor time for each token; "
        "client: this client's largest share"
    )
    if any(load.loop == "closed" for load in found.loads):
        yield "closed loop: each client waits for its answer, so that a slow server is sent less"
    if any(load.loop == "open" for load in found.loads):
        yield "open loop: requests are sent when they are due, and timed from then"
    few = {load.label: load.ttft.count for load in found.loads if load.ttft is not None}
    if few and min(few.values()) < ENOUGH_FOR_P99:
        counts = ", ".join(f"{count} ({label})" for label, count in few.items())
        yield f"p99 needs {ENOUGH_FOR_P99} requests to be more than the slowest; it has {counts}"
    for load in found.loads:
        yield from load_lines(load)
    if options.sweep is not None:
        yield f"capacity: {_capacity(found.capacity_rps)}"
    yield from (f"void: {each}" for each in voids)


def load_lines(load: "LoadFigures") -> Iterable[str]:
    if load.num_good is not None:
        yield (
            f"goodput ({load.label}): {load.goodput_rps or 0:.2f} good requests a second, "
            f"{load.num_good} of {load.num_answers + load.num_failures}"
        )
    if load.probe is not None:
        yield f"probes ({load.label}): {load.probe.count}, ms: {latency_text(load.probe)}"
    for reason, count in sorted(load.errors.items()):
        yield f"failed ({load.label}): {counted(count, 'request')}: {reason}"


def _capacity(rps: float | None) -> str:
    return "below the lowest rate" if rps is None else f"{rps:.2f} requests a second"
