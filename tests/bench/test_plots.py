"""Charts of a benchmark: the files, that the page needs nothing else, and what each chart shows."""

import json
import re
from dataclasses import dataclass
from html.parser import HTMLParser
from itertools import combinations, pairwise
from pathlib import Path

import pytest

from cadenza.cli.report import Chart, Series
from cadenza.errors import ConfigError
from cadenza_bench.plots import COLOURS, require_plot_library, write_plots

PNG = b"\x89PNG\r\n\x1a\n"
CHARTS = (
    Chart(
        name="latency",
        title="Latency & rate <of> $x$",
        x_label="requests/s",
        y_label="TTFT, ms",
        series=(
            Series(label="one", points=((1, 20.0), (2, 31.25))),
            Series(label="_two", points=((1, 40.5), (2, 62.0))),
        ),
        kind="line",
    ),
    Chart(
        name="throughput",
        title="Throughput",
        x_label="clients",
        y_label="tok/s",
        series=(
            Series(label="one", points=(("1", 10.0), ("8", 55.0))),
            Series(label="two", points=(("8", 44.0),)),
        ),
        kind="bar",
    ),
    Chart(
        name="timeline",
        title="Requests",
        x_label="s",
        y_label="request",
        series=(
            Series(label="continuous", points=((0, 0.0, 0.5, 2.0), (1, 0.25, 0.75, 1.5))),
            Series(label="static", points=((0, 0.0, 0.5, 2.0), (1, 0.25, 2.5, 3.5))),
        ),
        kind="timeline",
    ),
)


@dataclass(frozen=True)
class Result:
    tok_s: float


class Page(HTMLParser):
    """What the page names from outside itself, its identifiers, cells and drawings."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.ids: list[str] = []
        self.cells: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in {"src", "href", "xlink:href", "data", "action"} and tag != "use":
                self.loaded.append(value or "")
            if name == "id":
                self.ids.append(value or "")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "td" and data.strip():
            self.cells.append(data)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plots") / "made" / "here"
    written = write_plots(folder, "Bench <1>", CHARTS, {"results": [Result(tok_s=5.0)]})
    assert [path.relative_to(folder).name for path in written] == [
        "index.html",
        "data.json",
        "latency.png",
        "throughput.png",
        "timeline.png",
    ]
    return folder


def test_each_chart_is_a_picture_and_the_data_lies_beside_it(folder: Path):
    for chart in CHARTS:
        assert (folder / f"{chart.name}.png").read_bytes().startswith(PNG)
    assert json.loads((folder / "data.json").read_text()) == {"results": [{"tok_s": 5.0}]}


def test_the_page_loads_nothing_and_no_identifier_occurs_twice(folder: Path):
    text = (folder / "index.html").read_text()
    page = Page(text)
    assert page.loaded == ["data.json"]
    assert "default-src 'none'" in text
    assert page.tags.count("svg") == page.tags.count("table") == len(CHARTS)
    assert "script" not in page.tags
    assert len(set(page.ids)) == len(page.ids) > 0
    named = set(re.findall(r'(?:url\(|href=")#([^)"]+)', text))
    assert named
    assert named <= set(page.ids)


def test_titles_and_labels_are_text_and_every_number_is_in_a_table(folder: Path):
    text = (folder / "index.html").read_text()
    assert "<title>Bench &lt;1&gt;</title>" in text
    # In the heading, in the picture's label and in the picture.
    assert text.count("Latency &amp; rate &lt;of&gt; $x$") == 3
    rows = [row for chart in CHARTS for each in chart.series for row in each.points]
    numbers = [
        f"{value:.6g}" if isinstance(value, float) else str(value) for row in rows for value in row
    ]
    labels = {each.label for chart in CHARTS for each in chart.series}
    assert [cell for cell in Page(text).cells if cell not in labels] == numbers
    for label in labels:
        assert f">{label}</text>" in text


def test_the_axis_of_a_timeline_reaches_the_last_end_of_all_its_panels(folder: Path):
    text = (folder / "index.html").read_text()
    _, _, timeline = text.partition('aria-label="Requests"')
    ticks = re.findall(r"<text[^>]*>([0-9.]+)</text>", timeline.partition("</svg>")[0])
    assert "3.5" in ticks


def test_the_same_charts_give_the_same_bytes(folder: Path, tmp_path: Path):
    for path in write_plots(tmp_path, "Bench <1>", CHARTS, {"results": [Result(tok_s=5.0)]}):
        assert path.read_bytes() == (folder / path.name).read_bytes(), path.name


def test_neighbouring_colours_differ_in_grey():
    def lightness(colour: str) -> float:
        red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
        return 0.299 * red + 0.587 * green + 0.114 * blue

    for first, second in combinations(COLOURS[:3], 2):
        assert abs(lightness(first) - lightness(second)) > 0.25
    for first, second in pairwise(COLOURS):
        assert abs(lightness(first) - lightness(second)) > 0.1


def test_an_absent_library_is_named():
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        require_plot_library(lambda name: None)
    require_plot_library()
