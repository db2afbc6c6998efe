"""Writes docs/benchmarks.md, README.md's table and its picture from docs/results/*.json.

    python -m tools.result_tables

A result file is one run: its workload, date, machine and conditions, the version and the command of
each engine, and its figures. A figure has a unit and, for each engine, one value for each of `at`
(the numbers of rows or clients). A value that was measured several times is a list: two are printed
as a range, three and more as their median. The picture needs matplotlib.
"""

import hashlib
import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
README = ROOT / "README.md"
PICTURE = ROOT / "docs" / "images" / "rows.svg"

PEOPLE_HEAD = """## What people run

Models of the sizes that people serve on a desktop, each engine on the same file, in turns; random
weights, with which these rates are those of trained ones. Decode is of all rows together; memory is
the largest resident size, with the pages of the file that are in it.
"""

MACHINES = (
    "Zen 5",
    "Zen 4",
    "Zen 3",
    "Zen 1",
    "Intel",
    "NVIDIA H100",
    "NVIDIA H200",
    "NVIDIA A100",
    "Simulated",
    "Any machine",
)
ENGINES = ("Cadenza", "vLLM", "llama.cpp", "OpenVINO")
PEOPLE_FIGURES = ("decode", "decode, share of the bound", "prefill", "memory")
COLOURS = {"Cadenza": "#c2410c", "vLLM": "#1d4ed8", "llama.cpp": "#15803d", "OpenVINO": "#7e22ce"}
README_RUN = "zen5-served-135m"
PICTURED = {
    "zen5-bf16-135m": "bfloat16",
    "zen5-q8-135m": "8 bits (Q8_0)",
    "zen5-served-135m": "bfloat16, served",
}
BEGIN = "<!-- figures: written by tools/result_tables.py -->"
END = "<!-- end of figures -->"
HEAD = """<!-- Written by tools/result_tables.py from docs/results. -->
# How fast

What was measured: one table for each kind of machine, other engines beside Cadenza where they were
run, from the files in [results](results). [how-measured.md](how-measured.md) says what each figure
means and how to repeat it. `1 / 4 / 8` are values at 1, 4 and 8 rows; `a–b` is the range of two or
more measurements; of three runs and more the median is shown, and every value is in the file. The
135M and 1B shapes are those of SmolLM2-135M and Llama-3.2-1B with random weights.

![Tokens a second by rows, beside other engines](images/rows.svg)
"""

Value = float | list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One thing that was measured; `values` has one entry of `at` each, or one without `at`."""

    what: str
    unit: str
    values: Mapping[str, list[Value]]
    at: tuple[str, ...] = ()
    of: str = ""

    @property
    def label(self) -> str:
        places = " / ".join(self.at)
        if self.of:
            places = f" at {places} {self.of}"
        elif self.at:
            places = f": {places}"
        return f"{self.what}, {self.unit}{places}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What computed, and the command that did."""

    version: str
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A result file."""

    name: str
    workload: str
    date: str
    machine: Mapping[str, Any]
    engines: Mapping[str, Engine]
    figures: tuple[Figure, ...]
    conditions: str = ""
    model: Mapping[str, Any] | None = None  # "name", "file" and "gb" of what people run
    report: Mapping[str, Any] | None = None  # what the command printed, for what figures leave out

    def figure(self, what: str) -> Figure:
        return next(each for each in self.figures if each.what == what)


def main() -> None:
    runs = read_runs(RESULTS)
    PAGE.write_text(page(runs), encoding="utf-8")
    README.write_text(with_table(README.read_text(encoding="utf-8"), runs), encoding="utf-8")
    draw(runs)
    print(*(path.relative_to(ROOT) for path in (PAGE, README, PICTURE)), sep="\n")


def read_runs(folder: Path) -> dict[str, Run]:
    """Raises ValueError for a file whose members or numbers of values are not those of a run."""
    return {path.stem: read_run(path) for path in sorted(folder.glob("*.json"))}


def read_run(path: Path) -> Run:
    found = json.loads(path.read_text(encoding="utf-8"))
    try:
        engines = {name: Engine(**each) for name, each in found.pop("engines").items()}
        figures = tuple(read_figure(**each) for each in found.pop("figures"))
        run = Run(name=path.stem, engines=engines, figures=figures, **found)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path.name}: {error}") from error
    if run.machine["kind"] not in MACHINES:
        raise ValueError(f"{path.name}: machine kind {run.machine['kind']!r} is not in {MACHINES}")
    for figure in run.figures:
        for engine, values in figure.values.items():
            if engine not in run.engines or engine not in ENGINES:
                raise ValueError(f"{path.name}: {engine} is not among the engines")
            if len(values) != max(1, len(figure.at)):
                raise ValueError(f"{path.name}: {figure.what}: {engine} has {len(values)} values")
    return run


def read_figure(*, at: Iterable[str] = (), **members: Any) -> Figure:
    return Figure(at=tuple(at), **members)


def page(runs: Mapping[str, Run]) -> str:
    parts = [HEAD]
    people = [run for run in runs.values() if run.model is not None]
    if people:
        parts.append(f"{PEOPLE_HEAD}\n{people_table(people)}")
    for kind in MACHINES:
        of_kind = [
            run for run in runs.values() if run.machine["kind"] == kind and run.model is None
        ]
        if of_kind:
            parts.append(f"## {kind}\n\n{figures_table(of_kind)}")
    rows = [row for run in runs.values() for row in command_rows(run)]
    head = ("run", "date", "machine and conditions", "engine", "command")
    parts.append(f"## Runs\n\n{table(head, rows)}")
    return "\n".join(parts)


def figures_table(runs: Iterable[Run]) -> str:
    """A row for each figure, a column for each engine that one of the runs has."""
    runs = sorted(runs, key=lambda run: (-len(run.engines), run.workload))
    engines = [name for name in ENGINES if any(name in run.engines for run in runs)]
    rows: list[tuple[str, ...]] = []
    for run in runs:
        for at, figure in enumerate(run.figures):
            first = f"**{run.workload}** ([{run.name}](results/{run.name}.json))" if not at else ""
            cells = [cell(figure.values.get(name, [])) for name in engines]
            rows.append((first, figure.label, *cells))
    return table(("workload", "measured", *engines), rows)


def people_table(runs: Sequence[Run]) -> str:
    """A row for each model's file and engine; all were measured at the same numbers of rows."""
    places = " / ".join(runs[0].figure("decode").at)
    rows: list[tuple[str, ...]] = []
    for run in sorted(runs, key=lambda run: (run.machine["kind"], run.model and run.model["gb"])):
        model = run.model or {}
        title = f"**{model['name']}**, {model['file']}, {number(model['gb'])} GB"
        for at, engine in enumerate(run.engines):
            values = [cell(run.figure(what).values.get(engine, [])) for what in PEOPLE_FIGURES]
            first = (f"{title} ([{run.name}](results/{run.name}.json))", run.machine["kind"])
            rows.append((*(("", "") if at else first), engine, *values))
    decode = f"decode, tok/s at {places} rows"
    head = ("model and file", "machine", "engine", decode, "of its bound, %")
    return table((*head, "prefill, tok/s", "memory, GB"), rows)


def command_rows(run: Run) -> Iterable[tuple[str, ...]]:
    machine = run.machine
    rates = [f"{name} {machine[name]}" for name in ("memory", "multiply") if name in machine]
    cores = "1 core" if machine["cores"] == 1 else f"{machine['cores']} cores"
    where = "; ".join([f"{cores} of an {machine['cpu']}", *rates])
    if machine["kind"].startswith("NVIDIA ") or machine["kind"] in ("Simulated", "Any machine"):
        where = machine["cpu"]
    about = "; ".join(filter(None, (where, run.conditions)))
    for at, (name, engine) in enumerate(run.engines.items()):
        first = (run.name, run.date, about) if not at else ("", "", "")
        yield (*first, f"{name} ({engine.version})", f"`{engine.command}`")


def cell(values: Iterable[Value]) -> str:
    return " / ".join(map(shown, values))


def shown(value: Value) -> str:
    if isinstance(value, list) and len(value) == 2:
        return "–".join(map(number, sorted(value)))
    return number(median(value))


def median(value: Value) -> float:
    return statistics.median(value) if isinstance(value, list) else value


def number(value: float) -> str:
    """With at most one decimal from 10 on, two below."""
    text = f"{value:,.1f}" if abs(value) >= 10 else f"{value:,.2f}"
    return text.rstrip("0").rstrip(".").replace("-", "−")


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    cells = [[each.replace("|", "\\|") for each in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def with_table(readme: str, runs: Mapping[str, Run]) -> str:
    """README.md with the table of one run between its marks."""
    before, _, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"README.md has no {BEGIN} followed by {END}")
    return f"{before}{BEGIN}\n{readme_table(runs[README_RUN])}{END}{after}"


def readme_table(run: Run) -> str:
    first = run.figures[0]
    rows = [
        (f"{figure.what}, {figure.unit}", engine, *map(shown, values))
        for figure in run.figures
        for engine, values in figure.values.items()
    ]
    return table(("", first.of, *first.at), rows)


def digest(runs: Mapping[str, Run]) -> str:
    """Of what the picture shows."""
    drawn = [(name, title, runs[name].figures[0].values) for name, title in PICTURED.items()]
    return hashlib.sha256(json.dumps(drawn, sort_keys=True).encode()).hexdigest()


def draw(runs: Mapping[str, Run]) -> None:
    """Tokens a second by rows, a panel for each run. The picture's description has the digest."""
    plt: Any
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        sys.exit("the picture needs matplotlib; run `pip install matplotlib`")
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "cadenza", "font.size": 9}
    figure, panels = plt.subplots(1, len(PICTURED), figsize=(10, 3.2), layout="constrained")
    for panel, (name, title) in zip(panels, PICTURED.items(), strict=True):
        drawn = runs[name].figures[0]
        places = range(len(drawn.at))
        for engine, values in drawn.values.items():
            heights = [median(each) for each in values]
            panel.plot(places, heights, "o-", color=COLOURS[engine], label=engine)
        panel.set_xticks(places, drawn.at)
        panel.set_xlabel(drawn.of)
        panel.set_title(title)
        panel.set_ylim(bottom=0)
        panel.grid(axis="y", alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False)
    panels[0].set_ylabel("tokens a second")
    figure.suptitle("135M shape on 2 cores of a Zen 5")
    PICTURE.parent.mkdir(exist_ok=True)
    metadata = {"Date": None, "Description": f"drawn from results {digest(runs)}"}
    figure.savefig(PICTURE, metadata=metadata)
    # Lines without trailing blanks, as files of the repository are.
    lines = PICTURE.read_text(encoding="utf-8").splitlines()
    PICTURE.write_text("".join(f"{line.rstrip()}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
