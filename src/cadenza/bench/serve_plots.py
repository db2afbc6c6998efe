"""The charts of served loads: latency, throughput, and a timeline with a row for each request."""

from collections.abc import Mapping, Sequence

from cadenza.bench.compare import Comparison
from cadenza.bench.plots import Chart, ChartPoint, Series
from cadenza.bench.serve_figures import LoadFigures, Outcome, ServeFigures, Spread

MAX_ROWS = 400
"""Of a timeline, which shows the first requests."""

_LATENCIES = {"ttft": "Time to first token", "tpot": "Time per output token"}


def load_place(load: LoadFigures) -> float:
    """Where a load stands on the axis: its rate, or its number of clients."""
    return float(load.concurrency or 0) if load.arrivals is None else load.arrivals.rate


def serving_charts(found: ServeFigures) -> list[Chart]:
    """Of one server; an open loop by its rate, a closed one by its clients."""
    charts: list[Chart] = []
    for loop, x_label in (("open", "requests a second"), ("closed", "clients")):
        loads = [each for each in found.loads if each.loop == loop]
        if loads:
            charts += [_latency_chart(loop, x_label, {"": loads}, name) for name in _LATENCIES]
            charts.append(_throughput_chart(loop, x_label, {"output": loads}))
    busiest = max(range(len(found.loads)), key=lambda at: found.loads[at].output_tok_s)
    label = load_label(found.loads[busiest])
    charts.append(_timeline("Requests", {label: found.timelines[busiest]}))
    return charts


def comparison_charts(found: Comparison) -> list[Chart]:
    """Of several servers: the first round's requests, and the means of all rounds."""
    loop = found.loads[0].first.loop
    x_label = "clients" if loop == "closed" else "requests a second"
    names = list(found.models)
    rounds = {
        name: [
            measured.figures
            for load in found.loads
            for each in load.servers
            if each.server == name
            for measured in each.rounds
        ]
        for name in names
    }
    charts = [_latency_chart(loop, x_label, rounds, name) for name in _LATENCIES]
    charts.append(_throughput_chart(loop, x_label, rounds))
    last = found.loads[-1]
    timelines = {each.server: each.rounds[0].outcomes for each in last.servers}
    charts.append(_timeline(f"Requests, {load_label(last.first)}", timelines))
    return charts


def load_label(load: LoadFigures) -> str:
    """Say 8 clients, 2.5/s, or 1 to 8/s."""
    if load.arrivals is None:
        return f"{load.concurrency} client{'' if load.concurrency == 1 else 's'}"
    start, end = load.arrivals.rate, load.arrivals.end_rate
    return f"{start:.3g}/s" if end is None else f"{start:.3g} to {end:.3g}/s"


def _latency_chart(
    loop: str, x_label: str, loads: Mapping[str, Sequence[LoadFigures]], name: str
) -> Chart:
    series = [
        Series(label=f"{server} {what}".strip(), points=_means(each, name, what))
        for server, each in loads.items()
        for what in ("p50", "p99")
    ]
    return Chart(
        name=f"{name}-{loop}",
        title=f"{_LATENCIES[name]} ({loop} loop)",
        x_label=x_label,
        y_label=f"{name.upper()}, ms",
        series=series,
        kind="line",
    )


def _throughput_chart(loop: str, x_label: str, loads: Mapping[str, Sequence[LoadFigures]]) -> Chart:
    series = [
        Series(
            label=server,
            points=_by_place([(load_place(load), load.output_tok_s) for load in each]),
        )
        for server, each in loads.items()
    ]
    return Chart(
        name=f"throughput-{loop}",
        title=f"Throughput ({loop} loop)",
        x_label=x_label,
        y_label="output tokens a second",
        series=series,
        kind="line",
    )


def _means(loads: Sequence[LoadFigures], name: str, what: str) -> list[ChartPoint]:
    found: list[tuple[float, float]] = []
    for load in loads:
        spread: Spread | None = getattr(load, name)
        if spread is not None:
            found.append((load_place(load), 1000 * getattr(spread, f"{what}_s")))
    return _by_place(found)


def _by_place(values: Sequence[tuple[float, float]]) -> list[ChartPoint]:
    """The mean of the values at each place, in order."""
    places: dict[float, list[float]] = {}
    for place, value in values:
        places.setdefault(place, []).append(value)
    return [(place, sum(each) / len(each)) for place, each in sorted(places.items())]


def _timeline(title: str, outcomes: Mapping[str, Sequence[Outcome]]) -> Chart:
    series = [Series(label=name, points=_rows(each)) for name, each in outcomes.items()]
    return Chart(
        name="timeline",
        title=title,
        x_label="seconds",
        y_label="request",
        series=series,
        kind="timeline",
    )


def _rows(outcomes: Sequence[Outcome]) -> list[ChartPoint]:
    """In the order of their start; a request without content waits until its end."""
    ordered = sorted(outcomes, key=lambda each: each.start_s)[:MAX_ROWS]
    zero_s = ordered[0].start_s
    rows: list[ChartPoint] = []
    for row, each in enumerate(ordered):
        content_s = getattr(each, "content_s", ())
        first_s = content_s[0] if content_s else each.end_s
        rows.append((row, each.start_s - zero_s, first_s - zero_s, each.end_s - zero_s))
    return rows
