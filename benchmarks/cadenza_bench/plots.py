"""Charts: one PNG for each, and a page with all of them as inline SVGs, their numbers in tables,
and no request to anywhere. Invariants: series differ by shape as well as by colour, so that they
can be told apart in grey; the same charts give the same bytes. matplotlib is imported when charts
are drawn."""

import html
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

from cadenza.bench.serve_figures import LoadFigures, Outcome, ServeFigures, Spread
from cadenza.cli.report import Chart, ChartPoint, Series
from cadenza.errors import ConfigError

# matplotlib's own annotations leave most argument types open, which strict checks refuse.
Axes = Any
Figure = Any

PAGE = "index.html"
DATA = "data.json"

# Okabe and Ito's colours, in an order in which neighbours differ in lightness, too.
COLOURS = ("#0072B2", "#E69F00", "#000000", "#56B4E9", "#D55E00", "#CC79A7", "#009E73")
_MARKERS = "osD^vPX*"
_DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
_HATCHES = ("", "///", "...", "xxx", "\\\\\\", "+++")
_WAITING = "#C8C8C8"
_BAR_WIDTH = 0.8
_WIDTH, _HEIGHT = 8.0, 4.5
_TIMELINE_HEIGHT, _MAX_HEIGHT = 3.2, 40.0
_STYLE = {
    "font.size": 10,
    "svg.fonttype": "none",
    "svg.hashsalt": "cadenza",
    "text.parse_math": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


def require_plot_library(find: Callable[[str], object] = find_spec) -> None:
    """Raises ConfigError when matplotlib is not installed; for use before a long measurement."""
    if find("matplotlib") is None:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed; run `pip install matplotlib`, "
            "or leave --plot out"
        )


def write_plots(folder: Path, title: str, charts: Sequence[Chart], data: object) -> list[Path]:
    """Writes NAME.png of each chart, `index.html` with all of them, and `data.json` of `data`,
    whose dataclasses are objects; the folder is made if it is absent, and files of these names are
    replaced. Returns what was written, the page first. Raises ConfigError where matplotlib is not
    installed, OSError where it cannot write there."""
    require_plot_library()
    assert len({chart.name for chart in charts}) == len(charts), "two charts of one name"
    rc_context: Any = import_module("matplotlib").rc_context
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / PAGE, folder / DATA]
    sections: list[str] = []
    with rc_context(_STYLE):
        for chart in charts:
            figure = _figure(chart)
            written.append(folder / f"{chart.name}.png")
            figure.savefig(written[-1], dpi=150, metadata={"Software": None})
            sections.append(_section(chart, _inline_svg(figure, chart)))
    text = json.dumps(data, indent=1, allow_nan=False, default=asdict)
    written[1].write_text(f"{text}\n", encoding="utf-8")
    written[0].write_text(_page(title, sections), encoding="utf-8")
    return written


def _figure(chart: Chart) -> Figure:
    if chart.kind == "timeline":
        return _timeline(chart)
    figure = _new_figure(_HEIGHT)
    axes = figure.subplots()
    draw = _draw_lines if chart.kind == "line" else _draw_bars
    draw(axes, chart.series)
    axes.set_title(chart.title)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    return figure


def _new_figure(height: float) -> Figure:
    """In inches. Made without pyplot, so that no display is looked for: PNGs are drawn by Agg."""
    figure: Any = import_module("matplotlib.figure").Figure
    return figure(figsize=(_WIDTH, height), layout="constrained")


def _draw_lines(axes: Axes, series: Sequence[Series]) -> None:
    handles: list[Any] = []
    for index, each in enumerate(series):
        xs = [float(point[0]) for point in each.points]
        ys = [float(point[1]) for point in each.points]
        look: dict[str, Any] = {
            "color": COLOURS[index % len(COLOURS)],
            "marker": _MARKERS[index % len(_MARKERS)],
            "linestyle": _DASHES[index % len(_DASHES)],
        }
        handles += axes.plot(xs, ys, **look)
    axes.legend(handles, [each.label for each in series], frameon=False)


def _draw_bars(axes: Axes, series: Sequence[Series]) -> None:
    names = list(dict.fromkeys(point[0] for each in series for point in each.points))
    places = {name: place for place, name in enumerate(names)}
    width = _BAR_WIDTH / max(1, len(series))
    handles: list[Any] = []
    for index, each in enumerate(series):
        shift = (index - (len(series) - 1) / 2) * width
        bars = axes.bar(
            [places[point[0]] + shift for point in each.points],
            [float(point[1]) for point in each.points],
            width,
            color=COLOURS[index % len(COLOURS)],
            hatch=_HATCHES[index % len(_HATCHES)],
            edgecolor="white",
        )
        axes.bar_label(bars, fmt="{:.3g}", fontsize=8)
        handles.append(bars)
    axes.set_xticks(range(len(names)), [_text(name) for name in names])
    axes.margins(y=0.1)
    axes.legend(handles, [each.label for each in series], frameon=False)


def _timeline(chart: Chart) -> Figure:
    """A panel for each series over one axis of time; a bar is thin while waiting, then thick."""
    patch: Any = import_module("matplotlib.patches").Patch
    count = max(1, len(chart.series))
    figure = _new_figure(min(_MAX_HEIGHT, _TIMELINE_HEIGHT * count + 0.8))
    panels = figure.subplots(count, 1, sharex=True, squeeze=False)[:, 0]
    for index, (panel, each) in enumerate(zip(panels, chart.series, strict=False)):
        colour = COLOURS[index % len(COLOURS)]
        _draw_requests(panel, each.points, colour)
        panel.set_title(each.label, loc="left", fontsize=10)
        panel.set_ylabel(chart.y_label)
        looks = [patch(color=_WAITING), patch(color=colour)]
        where: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1, 1)}
        panel.legend(looks, ["waiting", "answering"], frameon=False, ncols=2, **where)
    ends = [float(point[3]) for each in chart.series for point in each.points]
    panels[-1].set_xlim(0, max(ends, default=1.0))  # of all panels, which share their axis
    panels[-1].set_xlabel(chart.x_label)
    figure.suptitle(chart.title)
    return figure


def _draw_requests(panel: Axes, points: Sequence[ChartPoint], colour: str) -> None:
    rows: list[tuple[float, ...]] = [tuple(map(float, point)) for point in points]
    at = [row for row, *_ in rows]
    starts, firsts, ends = ([each[place] for each in rows] for place in (1, 2, 3))
    waits = [first - start for start, first in zip(starts, firsts, strict=True)]
    answers = [end - first for first, end in zip(firsts, ends, strict=True)]
    panel.barh(at, waits, left=starts, height=0.3, color=_WAITING)
    panel.barh(at, answers, left=firsts, height=0.8, color=colour)
    panel.margins(y=0.02)
    panel.invert_yaxis()


def _inline_svg(figure: Figure, chart: Chart) -> str:
    """The SVG element. Its identifiers begin with the chart's name, as a page's must differ."""
    drawn = StringIO()
    figure.savefig(drawn, format="svg", metadata=_NO_METADATA)
    svg = drawn.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{chart.name}-", svg)
    label = html.escape(chart.title)
    return svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


def _section(chart: Chart, svg: str) -> str:
    title = html.escape(chart.title)
    return (
        f"<section>\n<h2>{title}</h2>\n<figure>{svg}</figure>\n"
        f"<details><summary>The numbers</summary>\n{_table(chart)}</details>\n</section>\n"
    )


def _table(chart: Chart) -> str:
    if chart.kind == "timeline":
        head = ["series", "row", "start, s", "first token, s", "end, s"]
    else:
        head = ["series", chart.x_label, chart.y_label]
    rows = [(each.label, *point) for each in chart.series for point in each.points]
    lines = [_table_row("th", head), *(_table_row("td", row) for row in rows)]
    return f"<table>\n{''.join(lines)}</table>\n"


def _table_row(tag: str, cells: Sequence[float | str]) -> str:
    shown = "".join(f"<{tag}>{html.escape(_text(each))}</{tag}>" for each in cells)
    return f"<tr>{shown}</tr>\n"


def _text(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"


def _page(title: str, sections: Sequence[str]) -> str:
    heading = html.escape(title)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{heading}</title>
<style>
:root {{ color-scheme: light dark; font: 1rem/1.5 system-ui, sans-serif; }}
body {{ max-width: 60rem; margin: 0 auto; padding: 1rem; }}
figure {{ margin: 0; background: white; overflow-x: auto; }}
svg {{ max-width: 100%; height: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ border-bottom: 1px solid #8888; padding: .1rem .6rem; text-align: right; }}
th:first-child, td:first-child {{ text-align: left; }}
</style>
</head>
<body>
<h1>{heading}</h1>
<p>All values are in <a href="{DATA}">{DATA}</a>.</p>
{"".join(sections)}</body>
</html>
"""


MAX_ROWS = 400  # of a timeline, which shows the first requests

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
