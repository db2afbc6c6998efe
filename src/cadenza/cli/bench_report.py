"""What `cadenza bench throughput` and `roofline` print, and the line on the machine."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cadenza.bench.bounds import Roofline
from cadenza.bench.runs import StepProfile
from cadenza.bench.throughput import ConcurrencyResult, Throughput, ThroughputWatch
from cadenza.cli.report import (
    Column,
    Columns,
    RowLines,
    Text,
    as_object,
    as_table,
    bytes_text,
    digits_text,
    picked,
    value_text,
)
from cadenza.cli.result import Machine, Result, machine_text
from cadenza.cli.status import Status

if TYPE_CHECKING:
    from rich.table import Table


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


def throughput_result(found: Throughput) -> Result:
    """The object; as text, what follows below the rows of `throughput_watch`."""
    results = [as_object(_THROUGHPUT, each) | _profiles(each) for each in found.results]
    facts = {
        "machine": found.machine,
        "workload": found.workload,
        "roofline": found.roofline and picked(found.roofline, "read_gb_s", "gflop_s"),
        "results": results,
    }
    return Result(facts=facts, text=_throughput_text(found))


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


def _throughput_text(found: Throughput) -> Text:
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


def roofline_result(machine: Machine, found: Sequence[Roofline]) -> Result:
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
    return Result(facts={"machine": machine, "roofline": rates}, text=text)


def _multiply_text(roofline: Roofline) -> str:
    text = f"{roofline.gflop_s:.0f} GFLOP/s in {roofline.dtype}"
    if roofline.method == "numpy":
        text += " (measured with numpy: without the native CPU kernels, a low estimate)"
    return text
