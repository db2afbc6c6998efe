"""What a benchmark found, as one value: `Result` prints as text or as JSON, and is drawn.

Invariant: with --json exactly one object goes to stdout; where its charts are is said on stderr.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cadenza.cli.report import Columns, Text, as_object, as_table, show_result

if TYPE_CHECKING:
    from rich.table import Table as RichTable

Machine = Mapping[str, object]
"""Of `bench.machine.describe_machine`."""

ChartKind = Literal["line", "bar", "timeline"]
ChartPoint = Sequence[float | str]

PlotFlag = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Also draw the figures: PNGs, and index.html with all of them, in this folder.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The values of one label. `points`: (x, y) of a line; (name or number, y) of bars; (row,
    start, first token, end) of a timeline, in seconds."""

    label: str
    points: Sequence[ChartPoint]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One picture. `name` is its file's, and different from that of the other charts."""

    name: str
    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    kind: ChartKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of one kind, with their columns."""

    columns: Columns
    rows: Sequence[object]

    @property
    def objects(self) -> list[dict[str, Any]]:
        return [as_object(self.columns, each) for each in self.rows]

    @property
    def table(self) -> "RichTable":
        return as_table(self.columns, self.rows)


def _no_charts() -> Sequence[Chart]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a benchmark found. `facts`: the members of the JSON object beside those of `rows`;
    `text`: what people read, made when it is printed; `title`: of the page of `charts`, made when
    they are drawn."""

    facts: Mapping[str, object]
    rows: Mapping[str, Rows] = field(default_factory=dict[str, Rows])
    text: Text = ()
    title: str = ""
    charts: Callable[[], Sequence[Chart]] = _no_charts
    exit_code: int = 0

    @property
    def object(self) -> dict[str, Any]:
        return {**self.facts, **{name: each.objects for name, each in self.rows.items()}}

    def show(self, *, as_json: bool, plot: Path | None = None) -> int:
        """Prints it, draws it into the folder if one is given, and returns the exit code. Raises
        OSError where the folder cannot be written to."""
        show_result(self.object, self.text, as_json=as_json)
        if plot is not None:
            from cadenza_bench.plots import write_plots

            page, *_ = write_plots(plot, self.title, self.charts(), self.object)
            print(f"plots: {page}", file=sys.stderr)
        return self.exit_code


def check_plot(folder: Path | None) -> None:
    """Raises ConfigError, before a long measurement, where charts cannot be drawn."""
    if folder is not None:
        from cadenza_bench.plots import require_plot_library

        require_plot_library()


def machine_text(machine: Machine) -> str:
    native = f"{machine['isa']}, {machine['threads']} threads" if machine["isa"] else "no kernels"
    cores, load = machine["cores"], machine["load_average"]
    return f"machine: {machine['cpu']}, {cores} cores, {native}; load {load}"
