"""The connection, the keys and the loop of `cadenza top`. Invariants: the terminal's settings are
as before, however the command ends; without a terminal there is at most one line a second of the
server's time.
"""

import json
import os
import queue
import select
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

import httpx

from cadenza.cli.top_view import TopState, engine_words, line, screen
from cadenza.errors import CadenzaError
from cadenza.server_link import ServerLink

PATH = "/debug/batch/stream"
SILENCE_S = 60.0
"""A server sends a comment at least each `--sse-keep-alive-interval` seconds."""
RETRY_S = 1.0
POLL_S = 0.05
LINE_EVERY_MS = 1000
MAX_UNREAD = 64

TopEvent = tuple[str, dict[str, Any]]
TROUBLE = "trouble"
"""The name of an event of this module: the connection is gone, and why."""


class TopError(CadenzaError):
    """A server that cannot be watched."""


def client_of(link: ServerLink, model: str | None) -> httpx.Client:
    """Raises ConfigError."""
    query = {} if model is None else {"model": model}
    return link.client(timeout=httpx.Timeout(10.0, read=SILENCE_S), params=query)


def read_events(link: ServerLink, client: httpx.Client) -> Generator[TopEvent]:
    """The events of one connection, until the server ends it. Raises TopError."""
    try:
        with client.stream("GET", PATH) as response:
            if response.status_code != httpx.codes.OK:
                response.read()
                raise TopError(f"{_refusal(response)}{link.way}")
            yield from parse_events(response.iter_lines())
    except httpx.TransportError as error:
        raise TopError(link.explain(error)) from error


def parse_events(lines: Iterable[str]) -> Iterator[TopEvent]:
    """The names and data of server-sent events."""
    name = ""
    for each in lines:
        if each.startswith("event: "):
            name = each.removeprefix("event: ")
        elif each.startswith("data: "):
            yield name, json.loads(each.removeprefix("data: "))


def print_lines(state: TopState, events: Iterable[TopEvent], output: TextIO) -> None:
    """A line each `LINE_EVERY_MS` in which something was computed; returns when the events end."""
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
    """Screens until q is pressed; a connection that is lost is made anew. Raises TopError where the
    first one cannot be made."""
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
    """Takes the keys and what has come; waits a little where there is nothing. Whether it ends."""
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
    """Passes events on, and connects again where they end, until it is over."""
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
    """Keys can be read as they are pressed, and are not shown."""
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
