"""The charts of served loads: latency, throughput, and a timeline with a row for each request."""

from collections.abc import Mapping, Sequence

from cadenza.bench.serve_figures import LoadFigures, Outcome, ServeFigures, Spread
from cadenza.cli.result import Chart, ChartPoint, Series

MAX_ROWS = 400
"""Of a timeline, which shows the first requests."""

_X_LABELS = {"open": "requests a second", "closed": "clients"}
_LATENCIES = {"ttft": "Time to first token", "tpot": "Time per output token"}


def load_place(load: LoadFigures) -> float:
    """Where a load stands on the axis: its rate, or its number of clients."""
    return float(load.concurrency or 0) if load.arrivals is None else load.arrivals.rate


def serving_charts(found: ServeFigures) -> list[Chart]:
    """Of one server; an open loop by its rate, a closed one by its clients."""
    charts: list[Chart] = []
    for loop in _X_LABELS:
        loads = [each for each in found.loads if each.loop == loop]
        if loads:
            charts += loop_charts(loop, {"": loads})
    busiest = max(range(len(found.loads)), key=lambda at: found.loads[at].output_tok_s)
    label = found.loads[busiest].label
    charts.append(timeline("Requests", {label: found.timelines[busiest]}))
    return charts


def loop_charts(loop: str, loads: Mapping[str, Sequence[LoadFigures]]) -> list[Chart]:
    x_label = _X_LABELS[loop]
    charts = [_latency_chart(loop, x_label, loads, name) for name in _LATENCIES]
    return [*charts, _throughput_chart(loop, x_label, loads)]


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
            label=server or "output",
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


def timeline(title: str, outcomes: Mapping[str, Sequence[Outcome]]) -> Chart:
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
    ordered = sorted(outcomes, key=lambda each: each.start_s)[:MAX_ROWS]
    zero_s = ordered[0].start_s
    rows: list[ChartPoint] = []
    for row, each in enumerate(ordered):
        content_s = getattr(each, "content_s", ())
        first_s = content_s[0] if content_s else each.end_s
        rows.append((row, each.start_s - zero_s, first_s - zero_s, each.end_s - zero_s))
    return rows
