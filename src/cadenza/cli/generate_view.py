"""What `generate` prints: frames of the running batch on a terminal, then blocks of text, JSON
lines, a table. Invariants: a frame is never taller than the terminal, and two are at least
`FRAME_S` apart; every line of JSON is valid (a number that is not finite becomes null)."""

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.box import ROUNDED
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from cadenza.cli.batch_run import BatchRun, BatchStream, whole_text
from cadenza.cli.report import (
    Column,
    Columns,
    as_object,
    as_table,
    clipped,
    counted,
    harmless,
    json_line,
    keys,
    on_one_line,
    picked,
    rate_text,
    seconds_text,
)
from cadenza.outputs import CompletionOutput, Logprob

MAX_SHOWN_PROMPT = 200

_SUMMARY: Columns = (
    *keys("num_requests", "num_prompt_tokens", "num_cached_tokens"),
    Column("num_generated_tokens", read="num_tokens"),
    *keys("num_steps", "elapsed_s", "tokens_per_s"),
)


def block(stream: BatchStream, count: int) -> str:
    """A finished stream as plain text. One of several is headed by its number and prompt; one of a
    prompt's several samples also by the sample's number."""
    texts = [whole_text(completion).rstrip("\n") for completion in stream.completions]
    if count == len(texts) == 1:
        return f"{texts[0]}\n"
    shown = clipped(on_one_line(stream.shown), MAX_SHOWN_PROMPT)
    number = str(stream.index + 1)
    numbers = [number] if len(texts) == 1 else [f"{number}.{k}" for k in range(1, len(texts) + 1)]
    return "".join(
        f"[{each}] {shown}\n{text}\n\n" for each, text in zip(numbers, texts, strict=True)
    )


def failure(stream: BatchStream) -> str | None:
    errors = [each.error for each in stream.completions if each.finish_reason == "error"]
    return f"prompt {stream.index + 1} failed: {errors[0]}" if errors else None


def json_lines(run: BatchRun, facts: dict[str, Any]) -> list[str]:
    """One object for each sample in the prompts' order, then the summary with `facts`."""
    found = [
        _sample_object(stream, completion)
        for stream in run.streams
        for completion in stream.completions
    ]
    summary = {"object": "summary", **facts, **as_object(_SUMMARY, run)}
    return [json_line(each) for each in (*found, summary)]


def table(run: BatchRun) -> Table:
    first_s = min((s.ttft_s for s in run.streams if s.ttft_s is not None), default=None)
    columns = (
        Column(None, "#", lambda stream: stream.index + 1, footer="all"),
        Column(None, "row", "row"),
        Column(None, "prompt", "num_prompt_tokens", footer=str(run.num_prompt_tokens)),
        Column(None, "cached", "num_cached_tokens", footer=str(run.num_cached_tokens)),
        Column(None, "TTFT", "ttft_s", seconds_text, footer=seconds_text(first_s)),
        Column(None, "tokens", "num_tokens", footer=str(run.num_tokens)),
        Column(None, "tok/s", "tokens_per_s", rate_text, footer=rate_text(run.tokens_per_s)),
        Column(None, "finish", "finish_reasons"),
    )
    return as_table(columns, run.streams)


def closing_line(run: BatchRun) -> str:
    num_rows = len({stream.row for stream in run.streams})
    return (
        f"{counted(len(run.streams), 'prompt')} on {counted(num_rows, 'row')}, "
        f"{counted(run.num_steps, 'step')} in {run.elapsed_s:.2f} s"
    )


def _sample_object(stream: BatchStream, completion: CompletionOutput) -> dict[str, Any]:
    output, params = stream.output, stream.request.params
    assert output is not None, "a stream without output has no samples"
    described: dict[str, Any] = {
        "object": "request",
        "index": stream.index,
        "sample": completion.index,
        **picked(output, "prompt", "prompt_token_ids", "num_cached_tokens"),
        **picked(completion, "text", "token_ids", "finish_reason", "stop_reason"),
        "num_generated_tokens": completion.num_generated_tokens,
        **picked(stream, "ttft_s", "tokens_per_s"),
    }
    if params.logprobs is not None:
        described["cumulative_logprob"] = _finite(completion.cumulative_logprob)
        described["logprobs"] = _token_objects(completion.token_ids, completion.logprobs or ())
    if output.prompt_logprobs is not None and completion.index == 0:
        described["prompt_logprobs"] = _token_objects(
            output.prompt_token_ids, output.prompt_logprobs
        )
    if completion.error is not None:
        described["error"] = completion.error
    return described


def _token_objects(
    token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob] | None]
) -> list[dict[str, Any] | None]:
    """The chosen tokens with their likeliest alternatives; None for a prompt's first token."""

    def entry(token_id: int, found: dict[int, Logprob]) -> dict[str, Any]:
        logprob = found[token_id]
        return {
            "token_id": token_id,
            "token": logprob.decoded_token,
            "logprob": _finite(logprob.logprob),
            "rank": logprob.rank,
        }

    def entries(token_id: int, found: dict[int, Logprob]) -> dict[str, Any]:
        likeliest = sorted(found, key=lambda each: (-found[each].logprob, each))
        return {**entry(token_id, found), "top": [entry(each, found) for each in likeliest]}

    return [
        None if found is None else entries(token_id, found)
        for token_id, found in zip(token_ids, logprobs, strict=False)
    ]


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


FRAME_S = 0.08
PANEL_WIDTH = 38
MIN_TEXT_LINES = 2
BORDER = 2
STATUS_LINES = 2
MAX_ROW_MARKS = 32
TAIL = 4000  # characters at the end of an answer that are laid out for a frame

_STYLES = {
    "waiting": "dim",
    "reading": "yellow",
    "writing": "cyan",
    "preempted": "magenta",
    "done": "green",
    "failed": "red",
}


@contextmanager
def live_view(
    run: BatchRun, console: Console, clock: Callable[[], float]
) -> Generator["Frames", None, None]:
    """Shows the run until the end of the block, and then erases it."""
    live = Live(
        console=console, auto_refresh=False, transient=True, vertical_overflow="crop", screen=False
    )
    with live:
        yield Frames(run, live, clock)


@dataclass(slots=True, eq=False)
class Frames:
    """Draws a frame when one is due."""

    run: BatchRun
    live: Live
    clock: Callable[[], float]
    due_s: float = -math.inf

    def draw(self) -> None:
        now_s = self.clock()
        if now_s >= self.due_s:
            console = self.live.console
            self.live.update(frame(self.run, console), refresh=True)
            self.due_s = self.clock() + FRAME_S


def frame(run: BatchRun, console: Console) -> RenderableType:
    """Panels where they have room for some lines of text, else one line for each stream."""
    width, height = console.size.width, console.size.height - 1
    streams = run.streams
    num_columns = max(1, min(len(streams), width // PANEL_WIDTH))
    num_rows = -(-len(streams) // num_columns)
    lines = (height - STATUS_LINES) // num_rows - BORDER
    if lines >= MIN_TEXT_LINES:
        body = _panels(streams, console, num_columns, lines)
    else:
        body = _lines(streams, width, height - STATUS_LINES)
    return Group(body, Text(), _batch_status(run, width))


def _batch_status(run: BatchRun, width: int) -> Text:
    rows = {stream.row for stream in run.streams if stream.state in ("reading", "writing")}
    num_ended = sum(stream.state in ("done", "failed") for stream in run.streams)
    num_waiting = len(run.streams) - num_ended - len(rows)
    num_rows = run.core.limits.max_num_seqs
    line = Text(no_wrap=True, overflow="ellipsis")
    if num_rows <= MAX_ROW_MARKS:
        for row in range(num_rows):
            line.append("■" if row in rows else "·", "cyan" if row in rows else "dim")
        line.append(" ")
    line.append(f"{len(rows)}/{num_rows} rows", "bold")
    parts = (f"{num_waiting} waiting", f"{num_ended} done", f"step {run.num_steps}")
    speed = f"{rate_text(run.tokens_per_s)} tok/s"
    for part in (*parts, f"{run.num_tokens} tokens", speed):
        line.append(f"  {part}")
    line.truncate(width, overflow="ellipsis")
    return line


def print_result(run: BatchRun, console: Console) -> None:
    for stream in run.streams:
        console.print(Text(f"{stream.index + 1} ", "bold").append(harmless(stream.shown), "dim"))
        console.print(Text(harmless(stream.text).strip("\n")))
        console.print()
    console.print(table(run))
    console.print(closing_line(run))


def _panels(streams: list[BatchStream], console: Console, num_columns: int, lines: int) -> Table:
    """A grid; a row of it is as high as its longest text, up to `lines`."""
    grid = Table.grid(expand=True)
    for _ in range(num_columns):
        grid.add_column(ratio=1)
    width = console.size.width // num_columns - 4
    for start in range(0, len(streams), num_columns):
        in_row = streams[start : start + num_columns]
        texts = [_wrapped(stream, console, width, lines) for stream in in_row]
        height = max(MIN_TEXT_LINES, *map(len, texts))
        filled = [text + [Text()] * (height - len(text)) for text in texts]
        grid.add_row(*map(_panel, in_row, filled, [width] * len(in_row)))
    return grid


def _panel(stream: BatchStream, lines: list[Text], width: int) -> Panel:
    style = _STYLES[stream.state]
    number = f"{stream.index + 1} "
    prompt = Text(on_one_line(stream.shown), "bold not dim")
    prompt.truncate(width - len(number) - 2, overflow="ellipsis")
    return Panel(
        Text("\n").join(lines),
        box=ROUNDED,
        title=Text(number, style).append_text(prompt),
        title_align="left",
        subtitle=Text(_describe(stream), style),
        subtitle_align="right",
        border_style=style,
    )


def _wrapped(stream: BatchStream, console: Console, width: int, lines: int) -> list[Text]:
    text = Text(harmless(stream.text[-TAIL:].strip()))
    wrapped = list(text.wrap(console, max(1, width)))
    if len(wrapped) > lines:
        wrapped = wrapped[-lines:]
        wrapped[0] = Text("…") + wrapped[0][1:]
    return wrapped


def _describe(stream: BatchStream) -> str:
    if stream.state == "reading":
        size = stream.num_prompt_tokens
        return f"row {stream.row} · reading {min(stream.num_read, size)}/{size}"
    if stream.state == "writing":
        return f"row {stream.row} · {stream.num_tokens} tokens"
    if stream.state in ("done", "failed"):
        return f"{stream.state} · {stream.num_tokens} tokens"
    return stream.state


def _lines(streams: list[BatchStream], width: int, height: int) -> Table:
    """One line for each stream; where they are too many, those that run come first."""
    order = {"reading": 0, "writing": 0, "failed": 1, "preempted": 2, "waiting": 3, "done": 4}
    count = max(1, height if len(streams) <= height else height - 1)
    chosen = sorted(streams, key=lambda stream: order[stream.state])[:count]
    chosen.sort(key=lambda stream: stream.index)
    found = Table.grid(padding=(0, 2, 0, 0))
    found.add_column(justify="right", no_wrap=True)
    for _ in range(3):
        found.add_column(no_wrap=True)
    states = [_describe(stream) for stream in chosen]
    prompts = [on_one_line(stream.shown) for stream in chosen]
    room = width - len(str(len(streams))) - max(map(len, states)) - 3 * 2
    prompt_room = min(max(map(cell_len, prompts)), room // 3)
    for stream, state, prompt in zip(chosen, states, prompts, strict=True):
        style = _STYLES[stream.state]
        start = Text(prompt, "bold")
        start.truncate(prompt_room, overflow="ellipsis")
        end = _tail(stream.text, room - prompt_room)
        found.add_row(Text(str(stream.index + 1), style), Text(state, style), start, end)
    if len(chosen) < len(streams):
        found.add_row("", Text(f"… {len(streams) - len(chosen)} more", "dim"), "", "")
    return found


def _tail(text: str, room: int) -> Text:
    """The end of `text` in at most `room` cells of one line."""
    line = on_one_line(text[-TAIL:])
    while cell_len(line) > room and len(line) > 1:
        line = "…" + line[1 + max(1, (cell_len(line) - room) // 2) :]
    return Text(line)
