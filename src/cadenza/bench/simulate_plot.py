"""The picture of a simulation: latencies, goodput, preemptions and fairness of each policy.

Owns the panels. matplotlib is optional and imported here only.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cadenza.bench.serve_figures import Spread
from cadenza.bench.simulate import PolicyFigures, Simulated
from cadenza.errors import ConfigError

FORMATS = (".png", ".svg", ".pdf")
BAR_WIDTH = 0.4

_SPREADS: dict[str, Callable[[PolicyFigures], Spread | None]] = {
    "time to first token": lambda found: found.ttft,
    "inter-token latency": lambda found: found.itl,
    "waiting": lambda found: found.waiting,
}
_NUMBERS: dict[str, Callable[[PolicyFigures], float]] = {
    "goodput (share of all requests)": lambda found: found.good_share,
    "preemptions": lambda found: found.num_preemptions,
    "fairness (Jain's index)": lambda found: found.fairness,
}


def check_plot(path: Path) -> None:
    """Raises ConfigError if no picture can be written there."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"--plot {path} must end in {', '.join(FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: the folder {path.parent} does not exist; make it")
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib; run `pip install matplotlib`")


def plot_simulation(found: Simulated, path: Path) -> None:
    """Writes the picture: a panel for each figure, with bars for each policy."""
    # Imported by name, because type checkers know it only where it is installed.
    figure: Any = import_module("matplotlib.figure").Figure(figsize=(11, 6), layout="constrained")
    panels = figure.subplots(2, 3)
    for panel, (title, spread_of) in zip(panels[0], _SPREADS.items(), strict=True):
        _draw_spreads(panel, title, [spread_of(each) for each in found.results])
    for panel, (title, number_of) in zip(panels[1], _NUMBERS.items(), strict=True):
        bars = panel.bar(range(len(found.results)), [number_of(each) for each in found.results])
        panel.bar_label(bars, fmt="{:.4g}", fontsize=8)
        panel.set_title(title)
        panel.margins(y=0.15)
    for panel in panels.flat:
        names = [each.policy for each in found.results]
        panel.set_xticks(range(len(names)), names)
        panel.set_xlim(-0.75, len(names) - 0.25)
        panel.grid(visible=True, axis="y", alpha=0.3)
        panel.set_axisbelow(True)
    figure.suptitle(_title(found))
    figure.savefig(path, dpi=120)


def _draw_spreads(panel: Any, title: str, spreads: list[Spread | None]) -> None:
    """The p50 and the p99, on a logarithmic scale where all are above 0."""
    p50_ms = [0.0 if each is None else 1000 * each.p50_s for each in spreads]
    p99_ms = [0.0 if each is None else 1000 * each.p99_s for each in spreads]
    for label, values, shift in (("p50", p50_ms, -0.5), ("p99", p99_ms, 0.5)):
        places = [place + shift * BAR_WIDTH for place in range(len(values))]
        bars = panel.bar(places, values, BAR_WIDTH, label=label)
        panel.bar_label(bars, fmt=_milliseconds, fontsize=8)
    if min(p50_ms) > 0:
        panel.set_yscale("log")
    panel.margins(y=0.25)
    panel.set_title(title)
    panel.set_ylabel("ms")
    panel.legend(loc="upper left", ncols=2, fontsize=8)


def _milliseconds(ms: float) -> str:
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"


def _title(found: Simulated) -> str:
    first = found.results[0]
    count, rows = first.num_answers + first.num_rejected, found.server.limits.max_num_seqs
    return f"simulated: {count:,} requests, {rows:,} rows"
