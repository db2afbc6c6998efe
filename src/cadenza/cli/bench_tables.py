"""What `cadenza bench` prints for people.

Owns the tables' forms. Knows no terminal but the table's width.
"""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from cadenza.bench.bounds import Roofline
from cadenza.bench.load import Load
from cadenza.bench.profile import StepProfile
from cadenza.bench.serve_figures import ServeFigures, Spread
from cadenza.bench.startup import PHASES, Startup
from cadenza.bench.throughput import Measured, Throughput
from cadenza.cli.words import bytes_text, counted

_LIMITS = {"read": "reading", "multiply": "multiplying"}
_NUMPY_NOTE = "measured with numpy: the native CPU kernels are not built, so this is a low estimate"


def print_throughput(found: Throughput) -> None:
    """The machine, the setting, one row for each concurrency, and the profiles."""
    facts = found.workload
    _print_machine(found.machine)
    _print_rates(found.roofline)
    print(
        f"model: {facts['model']}, {facts['dtype']}, {facts['ops']} ops; {facts['input_len']} "
        f"prompt tokens, {facts['output_len']} new ones; medians of {facts['repeats']}"
    )
    table = _table(("rows", "decode", "of bound", "by", "prefill", "of bound", "by"))
    for each in found.results:
        table.add_row(*_cells(each))
    Console().print(table)
    print("tokens per second, their share of the bound, and whether reading or multiplying sets it")
    for each in found.results:
        for kind, rate in (("decode", each.decode), ("prefill", each.prefill)):
            if rate.profile is not None:
                _print_profile(f"{kind} step at {each.concurrency} rows", rate.profile)


def print_serving(found: ServeFigures) -> None:
    """One row for each load, then what failed."""
    print(f"{found.url}: {found.model}")
    table = _table(("clients", "done", "tok/s", "TTFT ms", "ITL ms", "TPOT ms", "CPU µs"))
    for load in found.loads:
        table.add_row(
            "rate" if load.concurrency is None else str(load.concurrency),
            str(load.num_answers),
            f"{load.output_tok_s:.0f}",
            *(_ms(spread) for spread in (load.ttft, load.itl, load.tpot)),
            f"{_micro(load.client_us_per_token)} {_micro(load.server_us_per_token)}",
        )
    Console().print(table)
    print("tok/s: output tokens by usage; times: p50 and p99; CPU: client and server, a token")
    for load in found.loads:
        for reason, count in sorted(load.errors.items()):
            where = "at a rate" if load.concurrency is None else f"{load.concurrency} clients"
            print(f"failed ({where}): {counted(count, 'request')}: {reason}")


def _ms(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    p50, p99 = (1000 * seconds for seconds in (spread.p50_s, spread.p99_s))
    return " ".join(f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" for ms in (p50, p99))


def _micro(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def print_roofline(machine: dict[str, object], found: Sequence[Roofline]) -> None:
    """The machine and what it can do."""
    _print_machine(machine)
    print(f"read: {max(each.read_gb_s for each in found):.1f} GB/s")
    for each in found:
        print(f"multiply: {each.gflop_s:.0f} GFLOP/s in {each.dtype}")
    if found[0].method == "numpy":
        print(_NUMPY_NOTE)


def print_startup(found: Sequence[Startup]) -> None:
    """Median seconds of each phase."""
    table = _table(("caches", *(phase.replace("_", " ") for phase in PHASES), "total", "worst"))
    for each in found:
        table.add_row(
            each.caches,
            *(f"{each.phase_median_s(phase):.2f} s" for phase in PHASES),
            f"{each.median_s:.2f} s",
            f"{max(start.total_s for start in each.starts):.2f} s",
        )
    Console().print(table)
    starts = counted(len(found[0].starts), "start")
    print(f"median of {starts}; total: process start to the first token")


def print_load(machine: dict[str, object], found: Load) -> None:
    """The rates, their shares, and the memory that loading took."""
    _print_machine(machine)
    repeats = counted(len(found.load_s), "load")
    print(
        f"{bytes_text(found.file_bytes)} of files, {bytes_text(found.weight_bytes)} of weights; "
        f"medians of {repeats}, {counted(found.num_threads, 'thread')}"
    )
    print(f"load: {found.load_gb_s:.1f} GB/s")
    for where, rate, share in (
        ("into memory that is there", found.read_gb_s, found.share_of_read),
        ("into new memory", found.read_new_gb_s, found.share_of_read_new),
    ):
        print(f"page cache, {where}: {rate:.1f} GB/s, of which loading has {share:.0%}")
    if found.peak_private_bytes is not None:
        print(
            f"private memory: {bytes_text(found.peak_private_bytes)} at most; allowed are weights, "
            f"largest tensor and 500 MB: {bytes_text(found.allowed_private_bytes)}"
        )


def _print_machine(machine: dict[str, object]) -> None:
    native = f"{machine['isa']}, {machine['threads']} threads" if machine["isa"] else "no kernels"
    print(
        f"machine: {machine['cpu']}, {machine['cores']} cores, {native}; "
        f"load {machine['load_average']}"
    )


def _print_rates(roofline: Roofline) -> None:
    print(
        f"roofline: {roofline.read_gb_s:.1f} GB/s, {roofline.gflop_s:.0f} GFLOP/s "
        f"in {roofline.dtype}"
    )
    if roofline.method == "numpy":
        print(_NUMPY_NOTE)


def _cells(found: Measured) -> tuple[str, ...]:
    cells = [str(found.concurrency)]
    for rate in (found.decode, found.prefill):
        cells += [f"{rate.tok_s:.0f}", f"{rate.share_of_bound:.0%}", _LIMITS[rate.limit]]
    return tuple(cells)


def _print_profile(title: str, profile: StepProfile) -> None:
    table = _table(("operation", "calls", "ms", "of step", "read", "GB/s"))
    for share in profile.ops:
        table.add_row(
            share.op,
            str(share.calls),
            f"{share.ms:.3f}",
            _part(share.ms, profile),
            bytes_text(share.read_bytes),
            f"{share.read_gb_s:.1f}",
        )
    table.add_row(
        "left in XLA and host", "", f"{profile.rest_ms:.3f}", _part(profile.rest_ms, profile)
    )
    table.add_row("step", "", f"{profile.step_ms:.3f}", "", bytes_text(profile.read_bytes))
    print(f"{title}:")
    Console().print(table)


def _part(ms: float, profile: StepProfile) -> str:
    return f"{ms / profile.step_ms:.0%}" if profile.step_ms else ""


def _table(columns: Sequence[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    return table
