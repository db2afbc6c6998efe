"""`cadenza top`: the connection, the keys, and one screen or one line of a server's events.
Invariants: the terminal's settings are as before, however the command ends; a screen fits it;
without a terminal there is at most one line a second of the server's time."""

import json
import os
import queue
import select
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TextIO

import httpx
from rich.console import Group, RenderableType
from rich.text import Text

from cadenza.errors import CadenzaError
from cadenza.server_link import ServerLink

Sort = Literal["start", "tokens", "left"]
SORTS: tuple[Sort, ...] = ("start", "tokens", "left")
_SORT_WORDS = {"start": "as started", "tokens": "most tokens", "left": "prompt left"}

ENGINE_WORDS: Mapping[str, str] = {
    "lost": "the engine was lost; another one is being started",
    "unloaded": "the model is not loaded; a request for it loads it",
    "loading": "the model is being loaded",
}

# Of why a row waits; another reason is its own word.
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

NUM_RATES = 600  # events whose rates are kept: a minute's
_WIDE = 72  # columns from which on a row has all its numbers
_MOST_BAR = 40
_FRAME_LINES = 6
_STYLES = {"prompt": "yellow", "decode": "cyan", "waiting": "dim"}
_LEVELS = "▁▂▃▄▅▆▇█"


@dataclass(slots=True, eq=False)
class TopState:
    """`trouble` is what is wrong with the connection."""

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
    """One that is not known is itself."""
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
    """The newest at the right."""
    rates = [*state.rates][-max(1, width - len("tok/s ")) :]
    most = max(rates, default=0.0)
    if not most:
        return Text("tok/s ", "dim")
    levels = (_LEVELS[round(rate / most * (len(_LEVELS) - 1))] for rate in rates)
    return Text("tok/s ", "dim").append("".join(levels), "green")


def _row(row: Mapping[str, Any], longest: int, width: int) -> Text:
    """A prompt's bar is its computed part, with what the cache had; another's its length beside the
    longest row's."""
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


PATH = "/debug/batch/stream"
SILENCE_S = 60.0  # a server sends a comment at least each `--sse-keep-alive-interval` seconds
RETRY_S = 1.0
POLL_S = 0.05
LINE_EVERY_MS = 1000
MAX_UNREAD = 64

TopEvent = tuple[str, dict[str, Any]]
TROUBLE = "trouble"  # the name of an event of this module: the connection is gone, and why


class TopError(CadenzaError):
    """A server that cannot be watched."""


def client_of(link: ServerLink, model: str | None) -> httpx.Client:
    """Raises ConfigError."""
    query = {} if model is None else {"model": model}
    return link.client(timeout=httpx.Timeout(10.0, read=SILENCE_S), params=query)


def read_events(link: ServerLink, client: httpx.Client) -> Generator[TopEvent]:
    """Until the server ends the connection. Raises TopError."""
    try:
        with client.stream("GET", PATH) as response:
            if response.status_code != httpx.codes.OK:
                response.read()
                raise TopError(f"{_refusal(response)}{link.way}")
            yield from parse_events(response.iter_lines())
    except httpx.TransportError as error:
        raise TopError(link.explain(error)) from error


def parse_events(lines: Iterable[str]) -> Iterator[TopEvent]:
    name = ""
    for each in lines:
        if each.startswith("event: "):
            name = each.removeprefix("event: ")
        elif each.startswith("data: "):
            yield name, json.loads(each.removeprefix("data: "))


def print_lines(state: TopState, events: Iterable[TopEvent], output: TextIO) -> None:
    """Returns when the events end."""
    due_ms = 0.0
    for name, data in events:
        state.take(name, data)
        if name == "engine":
            print(engine_words(state.engine), file=output, flush=True)
        elif name == "step" and data["t"] >= due_ms:
            print(line(state), file=output, flush=True)
            due_ms = data["t"] + LINE_EVERY_MS


def show_screens(
    state: TopState, connect: Callable[[], Iterator[TopEvent]], keyboard: TextIO
) -> None:
    """Until q is pressed; a lost connection is made anew. Raises TopError where the first one
    cannot be made."""
    from rich.console import Console
    from rich.live import Live

    console, first = Console(), connect()
    hello = next(first, None)
    if hello is None:
        raise TopError("the server has ended the stream; is it shutting down?")
    state.take(*hello)
    unread: queue.Queue[TopEvent] = queue.Queue(MAX_UNREAD)
    is_over = threading.Event()
    reader = threading.Thread(
        target=follow, args=(first, connect, unread, is_over), name="cadenza-top", daemon=True
    )
    with (
        one_key_at_a_time(keyboard),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        reader.start()
        try:
            while not advance(state, unread, pressed(keyboard)):
                live.update(screen(state, *console.size), refresh=True)
        finally:
            is_over.set()


def advance(state: TopState, unread: "queue.Queue[TopEvent]", keys: str) -> bool:
    """Takes the keys and what has come; whether it ends."""
    for key in keys:
        if key in ("q", "\x03", "\x04"):
            return True
        state.press(key)
    with suppress(queue.Empty):
        name, data = unread.get(timeout=POLL_S)
        while True:
            if name == TROUBLE:
                state.trouble = str(data["why"])
            elif not state.is_paused:
                state.take(name, data)
            name, data = unread.get_nowait()
    return False


def follow(
    events: Iterator[TopEvent],
    connect: Callable[[], Iterator[TopEvent]],
    unread: "queue.Queue[TopEvent]",
    is_over: threading.Event,
) -> None:
    while not is_over.is_set():
        why = "the server has ended the stream"
        try:
            for each in events:
                put(unread, each)
                if is_over.is_set():
                    return
        except TopError as error:
            why = str(error)
        put(unread, (TROUBLE, {"why": f"{why}; trying again"}))
        is_over.wait(RETRY_S)
        events = connect()


def put(unread: "queue.Queue[TopEvent]", event: TopEvent) -> None:
    """Where too much is unread, the oldest is skipped."""
    while True:
        try:
            unread.put_nowait(event)
            return
        except queue.Full:
            with suppress(queue.Empty):
                unread.get_nowait()


@contextmanager
def one_key_at_a_time(keyboard: TextIO) -> Generator[None]:
    try:
        import termios
        import tty
    except ImportError:  # Windows
        yield
        return
    before = termios.tcgetattr(keyboard)
    try:
        tty.setcbreak(keyboard)
        yield
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def pressed(keyboard: TextIO) -> str:
    if not select.select([keyboard], [], [], 0)[0]:
        return ""
    return os.read(keyboard.fileno(), 64).decode(errors="ignore")


def _refusal(response: httpx.Response) -> str:
    if response.status_code == httpx.codes.UNAUTHORIZED:
        return "the server wants its API key; give it with --api-key or in CADENZA_API_KEY"
    try:
        said = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        said = "it is no cadenza server, or an older one without " + PATH
    return f"the server refuses ({response.status_code}): {said}"
