"""`cadenza bench serve` and `cadenza bench compare`: load servers, and say what was measured.

Owns these commands, their tables and JSON. Invariants: a load in which the client itself took too
much is called void, and the command fails; an API key is printed nowhere.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cadenza.bench.serve_options import CompareOptions, LoadOptions, ServerAddress
from cadenza.cli.options import JsonFlag
from cadenza.cli.report import (
    NOTHING,
    Column,
    Columns,
    Text,
    as_object,
    as_table,
    counted,
    keys,
    latency_text,
    show_result,
)
from cadenza.cli.status import status_line

if TYPE_CHECKING:
    from cadenza.bench.compare import ComparedLoad, Comparison
    from cadenza.bench.plots import Chart
    from cadenza.bench.serve_figures import LoadFigures, ServeFigures

_URL: Mapping[str, Any] = {
    "url": typer.Argument(metavar="URL", help="Such as http://127.0.0.1:8000.")
}
ENOUGH_FOR_P99 = 100
PlotFlag = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Also draw the figures: PNGs, and index.html with all of them, in this folder.",
    ),
]


def bench_serve(
    address: Annotated[ServerAddress, _URL],
    options: LoadOptions,
    plot: PlotFlag = None,
    json: JsonFlag = False,
) -> int:
    """Load a server that has the OpenAI API with streamed answers, and time them.

    Exits with 1 when a request failed, or when a load is void because this client took too much.
    """
    from cadenza.bench.serve import measure_serving

    _check_plot(plot)
    with status_line("starting") as report:
        found = measure_serving(address, options, report)
    voids = void_reasons([("", load) for load in found.loads], options.max_client_share)
    facts = {
        "url": found.url,
        "model": found.model,
        "workload": asdict(options),
        "capacity_rps": found.capacity_rps,
        "void": voids,
        "results": [as_object(_LOAD, load) for load in found.loads],
    }
    show_result(facts, _serving_text(found, options, voids), as_json=json)
    if plot is not None:
        from cadenza.bench.serve_plots import serving_charts

        _plot(plot, f"{found.model} at {found.url}", serving_charts(found), facts)
    return 1 if found.num_failures or voids else 0


def bench_compare(
    compared: CompareOptions,
    options: LoadOptions,
    plot: PlotFlag = None,
    json: JsonFlag = False,
) -> int:
    """Load servers in alternating rounds with the same requests, and compare their answers' times.

    Any server with the OpenAI API will do. Exits with 1 when a request failed, or a load is void.
    """
    from cadenza.bench.compare import compare_servers

    _check_plot(plot)
    with status_line("starting") as report:
        found = compare_servers(compared, options, report)
    voids = void_reasons(found.measured, options.max_client_share)
    facts = {
        "servers": {
            name: {"url": found.urls[name], "model": model} for name, model in found.models.items()
        },
        "workload": asdict(options),
        "rounds": compared.rounds,
        "void": voids,
        "results": [_compared_object(each) for each in found.loads],
    }
    show_result(facts, _comparison_text(found, voids), as_json=json)
    if plot is not None:
        from cadenza.bench.serve_plots import comparison_charts

        _plot(plot, " and ".join(found.models), comparison_charts(found), facts)
    num_failures = sum(load.num_failures for _, load in found.measured)
    return 1 if num_failures or voids else 0


def void_reasons(loads: Iterable[tuple[str, "LoadFigures"]], most: float) -> list[str]:
    """A line for each load in which the client's own share was above `most`."""
    found: list[str] = []
    for server, load in loads:
        client = load.client
        if client is not None and load.num_answers and client.largest > most:
            where = ", ".join(filter(None, (server, _label(load))))
            found.append(
                f"{where}: this client took {client.cpu_share:.1%} of the processors, and its lag "
                f"was {1000 * client.lag_s:.2f} ms, {client.lag_share:.1%} of the time to first "
                f"token; at most {most:.1%} are allowed (--max-client-share)"
            )
    return found


def _label(load: "LoadFigures") -> str:
    from cadenza.bench.serve_plots import load_label

    return load_label(load)


def _rate(load: "LoadFigures") -> float | None:
    return None if load.arrivals is None else load.arrivals.rate


def _good(share: float) -> str:
    return f"{share:.1%}"


def _share(load: "LoadFigures") -> float | None:
    return None if load.client is None else load.client.largest


_LOAD: Columns = (
    Column(None, "load", _label),
    *keys("loop", "concurrency"),
    Column("request_rate", read=_rate),
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
_COMPARED: Mapping[str, str] = {
    "output_tok_s": "tok/s",
    "ttft_mean_s": "TTFT ms",
    "ttft_p99_s": "TTFT p99",
    "tpot_mean_s": "TPOT ms",
    "itl_p99_s": "ITL p99",
    "e2e_mean_s": "E2E ms",
}


def _serving_text(found: "ServeFigures", options: LoadOptions, voids: Sequence[str]) -> Text:
    yield f"{found.url}: {found.model}"
    yield as_table(_LOAD, found.loads)
    yield (
        "tok/s: output tokens by usage; ms: p50 and p99; µs: processor time for each token; "
        "client: this client's largest share"
    )
    if any(load.loop == "closed" for load in found.loads):
        yield "closed loop: each client waits for its answer, so that a slow server is sent less"
    if any(load.loop == "open" for load in found.loads):
        yield "open loop: requests are sent when they are due, and timed from then"
    few = {_label(load): load.ttft.count for load in found.loads if load.ttft is not None}
    if few and min(few.values()) < ENOUGH_FOR_P99:
        counts = ", ".join(f"{count} ({label})" for label, count in few.items())
        yield f"p99 needs {ENOUGH_FOR_P99} requests to be more than the slowest; it has {counts}"
    for load in found.loads:
        yield from _load_lines(load)
    if options.sweep is not None:
        yield f"capacity: {_capacity(found.capacity_rps)}"
    yield from (f"void: {each}" for each in voids)


def _load_lines(load: "LoadFigures") -> Iterable[str]:
    if load.num_good is not None:
        yield (
            f"goodput ({_label(load)}): {load.goodput_rps or 0:.2f} good requests a second, "
            f"{load.num_good} of {load.num_answers + load.num_failures}"
        )
    if load.probe is not None:
        yield f"probes ({_label(load)}): {load.probe.count}, ms: {latency_text(load.probe)}"
    for reason, count in sorted(load.errors.items()):
        yield f"failed ({_label(load)}): {counted(count, 'request')}: {reason}"


def _capacity(rps: float | None) -> str:
    return "below the lowest rate" if rps is None else f"{rps:.2f} requests a second"


def _compared_object(load: "ComparedLoad") -> dict[str, Any]:
    return {
        "loop": load.first.loop,
        "concurrency": load.first.concurrency,
        "request_rate": _rate(load.first),
        "servers": {
            each.server: [as_object(_LOAD, measured.figures) for measured in each.rounds]
            for each in load.servers
        },
        "ratios": load.ratios,
    }


def _comparison_text(found: "Comparison", voids: Sequence[str]) -> Text:
    from cadenza.bench.compare import ServerRounds

    def value(metric: str) -> Column:
        def read(each: ServerRounds) -> float | None:
            mean = each.mean(metric)
            return mean if mean is None or metric == "output_tok_s" else 1000 * mean

        return Column(None, _COMPARED[metric], read, show="{:.4g}".format)

    for name, model in found.models.items():
        yield f"{name}: {model} at {found.urls[name]}"
    first = next(iter(found.models))
    for load in found.loads:
        rounds = counted(len(load.servers[0].rounds), "round")
        yield f"{_label(load.first)} ({load.first.loop} loop), geometric means of {rounds}:"
        yield as_table((Column("server", "server"), *map(value, _COMPARED)), load.servers)
        for other in load.servers[1:]:
            ratios = [each for each in load.ratios if each.server == other.server]
            yield f"{other.server} over {first}:"
            yield as_table(_RATIO, ratios)
    yield (
        "ratio: of these means, with the 95 % interval of rounds drawn again, and the extremes of "
        "the rounds"
    )
    for server, load in found.measured:
        for line in _load_lines(load):
            if line.startswith("failed"):
                yield f"{server}: {line}"
    yield from (f"void: {each}" for each in voids)


def _interval(ratio: Any) -> str:
    return f"{ratio.low:.3f} to {ratio.high:.3f}"


def _extremes(ratio: Any) -> str:
    return f"{min(ratio.rounds):.3f} to {max(ratio.rounds):.3f}" if ratio.rounds else NOTHING


_RATIO: Columns = (
    Column(None, "measured", lambda ratio: _COMPARED[ratio.metric].removesuffix(" ms")),
    Column("mean", "ratio", show="{:.3f}".format),
    Column(None, "95 %", _interval),
    Column(None, "rounds", _extremes),
)


def _check_plot(folder: Path | None) -> None:
    if folder is not None:
        from cadenza.bench.plots import require_plot_library

        require_plot_library()


def _plot(folder: Path, title: str, charts: Sequence["Chart"], facts: object) -> None:
    import sys

    from cadenza.bench.plots import write_plots

    page, *_ = write_plots(folder, title, charts, facts)
    print(f"plots: {page}", file=sys.stderr)
