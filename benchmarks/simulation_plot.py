"""Draws a simulation: latencies, goodput, preemptions and fairness of each policy.

    cadenza bench simulate … --json | python benchmarks/simulation_plot.py figures.png

Needs matplotlib.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BAR_WIDTH = 0.4
SPREADS = {"time to first token": "ttft", "inter-token latency": "itl", "waiting": "waiting"}
NUMBERS = {
    "goodput (share of all requests)": "good_share",
    "preemptions": "num_preemptions",
    "fairness (Jain's index)": "fairness",
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draws what `bench simulate --json` prints.")
    parser.add_argument("out", type=Path, help="A .png, .svg or .pdf file.")
    plot(json.load(sys.stdin), parser.parse_args(arguments).out)


def plot(found: dict[str, Any], path: Path) -> None:
    """Writes the picture: a panel for each figure, with bars for each policy."""
    from matplotlib.figure import Figure

    results = found["results"]
    names = [each["policy"] for each in results]
    figure = Figure(figsize=(11, 6), layout="constrained")
    panels: Any = figure.subplots(2, 3)
    for panel, (title, key) in zip(panels[0], SPREADS.items(), strict=True):
        draw_spreads(panel, title, [each[key] for each in results])
    for panel, (title, key) in zip(panels[1], NUMBERS.items(), strict=True):
        bars = panel.bar(range(len(results)), [each[key] for each in results])
        panel.bar_label(bars, fmt="{:.4g}", fontsize=8)
        panel.set_title(title)
        panel.margins(y=0.15)
    for panel in panels.flat:
        panel.set_xticks(range(len(names)), names)
        panel.set_xlim(-0.75, len(names) - 0.25)
        panel.grid(visible=True, axis="y", alpha=0.3)
        panel.set_axisbelow(True)
    count = results[0]["num_answers"] + results[0]["num_rejected"]
    rows = found["server"]["limits"]["max_num_seqs"]
    figure.suptitle(f"simulated: {count:,} requests, {rows:,} rows")
    figure.savefig(path, dpi=120)


def draw_spreads(panel: Any, title: str, spreads: list[dict[str, float] | None]) -> None:
    """The p50 and the p99, on a logarithmic scale where all are above 0."""
    for name, shift in (("p50", -0.5), ("p99", 0.5)):
        values = [0.0 if each is None else 1000 * each[f"{name}_s"] for each in spreads]
        places = [place + shift * BAR_WIDTH for place in range(len(values))]
        bars = panel.bar(places, values, BAR_WIDTH, label=name)
        panel.bar_label(bars, fmt=milliseconds, fontsize=8)
    if all(each is not None and each["p50_s"] > 0 for each in spreads):
        panel.set_yscale("log")
    panel.margins(y=0.25)
    panel.set_title(title)
    panel.set_ylabel("ms")
    panel.legend(loc="upper left", ncols=2, fontsize=8)


def milliseconds(ms: float) -> str:
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"


if __name__ == "__main__":
    main()
