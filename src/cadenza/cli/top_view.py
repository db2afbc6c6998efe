"""What `cadenza top` shows of a server's events: one screen, or one line.

Invariant: a screen has no more lines and columns than it was given.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.text import Text

Sort = Literal["start", "tokens", "left"]
SORTS: tuple[Sort, ...] = ("start", "tokens", "left")
_SORT_WORDS = {"start": "as started", "tokens": "most tokens", "left": "prompt left"}

ENGINE_WORDS: Mapping[str, str] = {
    "lost": "the engine was lost; another one is being started",
    "unloaded": "the model is not loaded; a request for it loads it",
    "loading": "the model is being loaded",
}

WAIT_WORDS: Mapping[str, str] = {
    "turn": "its turn",
    "row": "a row",
    "quota": "its key's share of pages",
    "step": "room in a step",
    "sample": "the prompt's first sample",
    "prefix": "a prefix that another computes",
    "disk": "pages from disk",
    "image": "an image",
    "scores": "its prompt's scores",
    "retry": "a failed step's requests",
}
"""Of why a row waits; another reason is its own word."""

NUM_RATES = 600
"""Events whose rates are kept: a minute's."""
_WIDE = 72
"""Columns from which on a row has all its numbers."""
_MOST_BAR = 40
_FRAME_LINES = 6
_STYLES = {"prompt": "yellow", "decode": "cyan", "waiting": "dim"}
_LEVELS = "▁▂▃▄▅▆▇█"


@dataclass(slots=True, eq=False)
class TopState:
    """What the events have said so far; `trouble` is what is wrong with the connection."""

    url: str
    hello: Mapping[str, Any] = field(default_factory=dict[str, Any])
    step: Mapping[str, Any] = field(default_factory=dict[str, Any])
    rates: deque[float] = field(default_factory=lambda: deque[float](maxlen=NUM_RATES))
    engine: str = "ready"
    trouble: str | None = None
    is_paused: bool = False
    sort: Sort = "start"

    def take(self, name: str, data: Mapping[str, Any]) -> None:
        self.trouble = None
        if name == "hello":
            self.hello, self.engine = data, "ready"
            self.rates.clear()
        elif name == "engine":
            self.engine = str(data["state"])
        elif name == "step":
            self.step, self.engine = data, "ready"
            self.rates.append(float(data["tok_s"]))

    def press(self, key: str) -> None:
        """p pauses the picture, s changes the rows' order."""
        if key == "p":
            self.is_paused = not self.is_paused
        elif key == "s":
            self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]

    @property
    def rows(self) -> list[Mapping[str, Any]]:
        found: list[Mapping[str, Any]] = [*self.step.get("rows", ())]
        if self.sort == "tokens":
            found.sort(key=lambda row: -row["total"])
        elif self.sort == "left":
            found.sort(key=lambda row: row["computed"] - row["total"])
        return found


def engine_words(state: str) -> str:
    """What the state of an `engine` event means; one that is not known is itself."""
    return ENGINE_WORDS.get(state, f"the engine is {state}")


def line(state: TopState) -> str:
    """The newest event, where there is no terminal."""
    step, pages = state.step, state.step["pages"]
    kinds = [row["kind"] for row in step["rows"]]
    return (
        f"{step['t'] / 1000:.1f} s  rows {step['running']}/{state.hello.get('rows', '?')}  "
        f"waiting {step['waiting']}  prompts {kinds.count('prompt')}  "
        f"{step['tok_s']:,.1f} tok/s  gap {step['gap_ms']:.1f} ms  "
        f"pages {pages['live']} live, {pages['cached']} cached, {pages['free']} free"
    )


def screen(state: TopState, width: int, height: int) -> RenderableType:
    lines = [_title(state), _status(state), _pages(state, width), _rates(state, width)]
    room = max(0, height - _FRAME_LINES)
    rows = state.rows
    shown = rows if len(rows) <= room else rows[: max(0, room - 1)]
    longest = max([row["total"] for row in rows], default=1)
    lines += [_row(row, longest, width) for row in shown]
    if len(shown) < len(rows):
        lines.append(Text(f"… {len(rows) - len(shown)} more rows", "dim"))
    others = state.step.get("others")
    if others is not None:
        lines.append(
            Text(f"{others['rows']} rows of other keys: {others['total']:,} tokens", "dim")
        )
    lines = lines[: max(1, height - 1)]
    lines.append(Text(f"q quit  p {_pause_word(state)}  s {_SORT_WORDS[state.sort]}", "reverse"))
    for each in lines:
        each.no_wrap = True
        each.truncate(width, overflow="ellipsis")
    return Group(*lines[:height])


def _title(state: TopState) -> Text:
    model = str(state.hello.get("model", ""))
    return Text.assemble(("cadenza top ", "bold"), (f"{model} ", "bold cyan"), (state.url, "dim"))


def _status(state: TopState) -> Text:
    if state.trouble is not None:
        return Text(state.trouble, "bold red")
    if state.engine != "ready":
        return Text(engine_words(state.engine), "bold red" if state.engine == "lost" else "dim")
    step = state.step
    if not step:
        return Text("nothing has been computed yet", "dim")
    running, waiting = step["running"], step["waiting"]
    parts = (f"{waiting} waiting", f"{step['tok_s']:,.1f} tok/s", f"gap {step['gap_ms']:.1f} ms")
    new = sum(row["new"] for row in step["rows"])
    drafts = sum(row["drafts"] for row in step["rows"])
    if drafts:
        parts += (f"{drafts} of {new} tokens drafted",)
    preempted = sum(row["preempted"] for row in step["rows"])
    if preempted:
        parts += (f"{preempted} preempted",)
    found = Text(f"{running}/{state.hello.get('rows', '?')} rows", "bold")
    return found.append("".join(f"  {part}" for part in parts), "not bold")


def _pages(state: TopState, width: int) -> Text:
    pages = state.step.get("pages")
    if pages is None:
        return Text()
    counts = [int(pages[name]) for name in ("live", "cached", "free")]
    cells = _shares(counts, min(_MOST_BAR, max(4, width // 3)))
    bar = Text("pages ")
    for count, char, style in zip(cells, "█▒·", ("cyan", "blue", "dim"), strict=True):
        bar.append(char * count, style)
    return bar.append(f" {counts[0]:,} live  {counts[1]:,} cached  {counts[2]:,} free")


def _shares(counts: Sequence[int], num_cells: int) -> list[int]:
    """Cells in proportion; what there is at all has one."""
    total = max(1, sum(counts))
    found = [max(1, num_cells * count // total) if count else 0 for count in counts]
    largest = found.index(max(found))
    found[largest] += num_cells - sum(found)
    return found


def _rates(state: TopState, width: int) -> Text:
    """Tokens a second of the last events, the newest at the right."""
    rates = [*state.rates][-max(1, width - len("tok/s ")) :]
    most = max(rates, default=0.0)
    if not most:
        return Text("tok/s ", "dim")
    levels = (_LEVELS[round(rate / most * (len(_LEVELS) - 1))] for rate in rates)
    return Text("tok/s ", "dim").append("".join(levels), "green")


def _row(row: Mapping[str, Any], longest: int, width: int) -> Text:
    """A prompt's bar is its computed part, with what the cache had; another one's is its length,
    beside the longest row's."""
    kind = str(row["kind"])
    computed, total, cached = (int(row[name]) for name in ("computed", "total", "cached"))
    numbers = f" {computed:,}/{total:,}"
    if row.get("waits_for"):
        numbers += f"  for {WAIT_WORDS.get(row['waits_for'], row['waits_for'])}"
    if width >= _WIDE:
        numbers += f"  +{row['new']}"
        numbers += f"  cached {cached:,}" if cached else ""
        numbers += f"  drafts {row['drafts']}" if row["drafts"] else ""
        numbers += f"  preempted {row['preempted']}" if row["preempted"] else ""
    head = f"{row['id']:>4} {kind:<7} "
    num_cells = max(4, min(_MOST_BAR, width - len(head) - 16))
    whole = total if kind == "prompt" else longest
    done = num_cells * min(computed, whole) // max(1, whole)
    from_cache = min(done, num_cells * cached // max(1, whole))
    bar = Text(head, _STYLES[kind])
    bar.append("▒" * from_cache, "blue").append("█" * (done - from_cache), _STYLES[kind])
    return bar.append("·" * (num_cells - done), "dim").append(numbers, "default")


def _pause_word(state: TopState) -> str:
    return "go on" if state.is_paused else "pause"
