"""How results are written, as text or as JSON: a benchmark's as one `Result`, a table by its
`Column`s; a key's ending is the value's unit. Invariants: text that a model or a file wrote cannot
move the cursor, change colours or ring the bell; with --json one object goes to stdout, without
numbers that are not finite."""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import floor, log10
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from cadenza.cli.options import JsonFlag

if TYPE_CHECKING:
    from rich.table import Table
    from rich.table import Table as RichTable

    from cadenza.bench.serve_figures import Spread


Text = Iterable["str | Table"]

NOTHING = "–"
MAX_TABLE_WIDTH = 1000
LEAST_WIDTH = 8  # of a column whose values are not known when its heading is written

_CONTROLS = dict.fromkeys((*range(32), *range(127, 160)), "\N{REPLACEMENT CHARACTER}")
_KEPT = {ord("\n"): "\n", ord("\t"): "    "}
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
_UNIT = 1024


@dataclass(frozen=True, slots=True)
class Column:
    """`key`: in the JSON object, `heading`: in the table (None: left out of it); `read`: a path of
    attributes (`key` by default) or a function; `show`: the text of a value, by default from the
    key; `absent`: of None; `footer`: below the table's column."""

    key: str | None
    heading: str | None = None
    read: str | Callable[[Any], object] | None = None
    show: Callable[[Any], str] | None = None
    absent: str = NOTHING
    footer: str = ""

    def value(self, result: object) -> Any:
        read = self.read or self.key or ""
        return attrgetter(read)(result) if isinstance(read, str) else read(result)

    def text(self, result: object) -> str:
        value = self.value(result)
        if value is None:
            return self.absent
        return value_text(self.key or "", value) if self.show is None else self.show(value)


Columns = Sequence[Column]


def keys(*names: str) -> list[Column]:
    """Attributes that are in the JSON object only."""
    return [Column(name) for name in names]


def as_object(columns: Columns, result: object) -> dict[str, Any]:
    return {each.key: each.value(result) for each in columns if each.key is not None}


def json_line(found: object) -> str:
    """Dataclasses are objects."""
    return json.dumps(found, allow_nan=False, default=asdict)


def picked(result: object, *names: str) -> dict[str, Any]:
    return as_object(keys(*names), result)


def show_result(facts: object, text: "Iterable[str | Table]", *, as_json: bool) -> None:
    """The text is made only where it is printed."""
    if as_json:
        print(json_line(facts))
        return
    for each in text:
        if isinstance(each, str):
            print(each)
        else:
            print_table(each)


def as_table(columns: Columns, results: Iterable[object]) -> "Table":
    """The first column is aligned left, the others right."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    shown = [each for each in columns if each.heading is not None]
    has_footer = any(each.footer for each in shown)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_footer=has_footer, footer_style="bold")
    for index, each in enumerate(shown):
        justify = "right" if index else "left"
        table.add_column(each.heading or "", each.footer, justify=justify, no_wrap=True)
    for result in results:
        table.add_row(*(each.text(result) for each in shown))
    return table


class RowLines:
    """Of a table whose rows become known one by one: its columns have fixed widths."""

    def __init__(self, columns: Columns) -> None:
        self._columns = [each for each in columns if each.heading is not None]
        self._widths = [max(LEAST_WIDTH, len(each.heading or "")) for each in self._columns]

    @property
    def head(self) -> str:
        return self._line([each.heading or "" for each in self._columns])

    def row(self, result: object) -> str:
        return self._line([each.text(result) for each in self._columns])

    def _line(self, cells: Sequence[str]) -> str:
        first, *others = zip(cells, self._widths, strict=True)
        right = [f"{cell:>{width}}" for cell, width in others]
        return "  ".join([f"{first[0]:<{first[1]}}", *right]).rstrip()


def print_table(table: "Table") -> None:
    """In its full width, also where the terminal is narrower, or there is none."""
    from rich.console import Console

    needed = Console(width=MAX_TABLE_WIDTH).measure(table).maximum
    Console(width=max(needed, Console().width)).print(table)


def section_text(title: str, facts: Mapping[str, Any], width: int = 0) -> str:
    """Keys take at least `width` characters."""
    width = max([width, *map(len, facts)])
    lines = (f"  {key:<{width}}  {value_text(key, value)}" for key, value in facts.items())
    return "\n".join([title, *lines])


def sections_text(facts: Mapping[str, Mapping[str, Any]]) -> str:
    """`section_text` of each section that has facts, their values in one column."""
    shown = {title: section for title, section in facts.items() if section}
    width = max(len(key) for section in shown.values() for key in section)
    return "\n\n".join(section_text(title, section, width) for title, section in shown.items())


def value_text(key: str, value: Any) -> str:
    """In the form of its unit, which is the key's ending."""
    match value:
        case None:
            return NOTHING
        case bool():
            return "yes" if value else "no"
        case str():
            return harmless(value)
        case Mapping():
            pairs = cast(Mapping[str, object], value).items()
            return ", ".join(f"{name}: {value_text('', each)}" for name, each in pairs) or NOTHING
        case list() | tuple():
            each = cast(Sequence[object], value)
            return ", ".join(value_text(key, one) for one in each) or NOTHING
        case _:
            return _number_text(key, value)


def _number_text(key: str, value: float) -> str:
    for ending, form in (
        ("_gb_s", "{:.3g} GB/s"),
        ("tok_s", "{:.0f}"),
        ("_us_per_token", "{:.0f}"),
        ("ms", "{:.3f}"),
        ("_s", "{:.2f} s"),
    ):
        if key.endswith(ending):
            return form.format(value)
    if "_bytes" in key:
        return bytes_text(int(value))
    if "share_of" in key:
        return f"{value:.0%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def harmless(text: str) -> str:
    return text.replace("\r\n", "\n").translate(_CONTROLS | _KEPT)


def on_one_line(text: str) -> str:
    return harmless(" ".join(text.split()))


def clipped(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def bytes_text(count: int) -> str:
    """Say 12.5 MiB."""
    amount, unit = float(count), 0
    while amount >= _UNIT and unit < len(_UNITS) - 1:
        amount, unit = amount / _UNIT, unit + 1
    return f"{amount:.1f} {_UNITS[unit]}" if unit else f"{count} bytes"


def magnitude_text(count: int) -> str:
    """Say 3.4 M, 1.2 B."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.1f} {letter}"
    return str(count)


def digits_text(value: float) -> str:
    """With four digits, so that a ratio of two such values is that of the values."""
    return f"{value:.{max(0, 3 - floor(log10(abs(value))))}f}" if value else "0"


def seconds_text(seconds: float | None) -> str:
    return NOTHING if seconds is None else f"{seconds:.3f} s"


def rate_text(per_s: float | None) -> str:
    return NOTHING if per_s is None else f"{per_s:.1f}"


def counted(count: int, noun: str) -> str:
    """Say 1 prompt, 2 prompts."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def latency_text(spread: "Spread") -> str:
    """p50 and p99, in milliseconds."""
    both = (1000 * spread.p50_s, 1000 * spread.p99_s)
    return " ".join(f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" for ms in both)


Machine = Mapping[str, object]  # of `bench.machine.describe_machine`

ChartKind = Literal["line", "bar", "timeline"]
ChartPoint = Sequence[float | str]


def _can_draw(folder: Path | None) -> Path | None:
    """The folder. Raises ConfigError, before a long measurement, where charts cannot be drawn."""
    if folder is not None:
        from cadenza_bench.plots import require_plot_library

        require_plot_library()
    return folder


PlotFlag = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        callback=_can_draw,
        help="Also draw the figures: PNGs, and index.html with all of them, in this folder.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """How a result is shown."""

    plot: PlotFlag = None
    json: JsonFlag = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The values of one label. `points`: (x, y) of a line; (name or number, y) of bars; (row,
    start, first token, end) of a timeline, in seconds."""

    label: str
    points: Sequence[ChartPoint]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """`name` is its file's, and differs from that of the other charts."""

    name: str
    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    kind: ChartKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """With their columns."""

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
    """`facts`: members of the JSON object beside those of `rows`; `text`: what people read;
    `title`: of the page of `charts`. Text and charts are made when they are shown."""

    facts: Mapping[str, object]
    rows: Mapping[str, Rows] = field(default_factory=dict[str, Rows])
    text: Text = ()
    title: str = ""
    charts: Callable[[], Sequence[Chart]] = _no_charts
    exit_code: int = 0

    @property
    def object(self) -> dict[str, Any]:
        return {**self.facts, **{name: each.objects for name, each in self.rows.items()}}

    def show(self, shown: "Shown") -> int:
        """Returns the exit code. Raises OSError where the folder `plot` cannot be written to."""
        show_result(self.object, self.text, as_json=shown.json)
        if shown.plot is not None:
            from cadenza_bench.plots import write_plots

            page, *_ = write_plots(shown.plot, self.title, self.charts(), self.object)
            print(f"plots: {page}", file=sys.stderr)
        return self.exit_code


def machine_text(machine: Machine) -> str:
    native = f"{machine['isa']}, {machine['threads']} threads" if machine["isa"] else "no kernels"
    cores, load = machine["cores"], machine["load_average"]
    return f"machine: {machine['cpu']}, {cores} cores, {native}; load {load}"
