"""`cadenza top`: its screen at 40 and 100 columns, its lines, its keys; a server that refuses."""

import io
import json
import os
import pty
import queue
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rich.console import Console

from cadenza.cli import main
from cadenza.cli.top_view import (
    MAX_UNREAD,
    TROUBLE,
    WAIT_WORDS,
    TopError,
    TopEvent,
    TopState,
    advance,
    client_of,
    follow,
    line,
    one_key_at_a_time,
    pressed,
    print_lines,
    put,
    read_events,
    screen,
)
from cadenza.engine.step_watch import WAIT_REASONS
from cadenza.server_link import ServerLink

HELLO = {"v": 1, "rows": 16, "pages": 100, "page_size": 16, "model": "a model"}
KEY = "a-key-of-top"


def row(label: int, kind: str, computed: int, total: int, **more: int) -> dict[str, Any]:
    zeros = {"cached": 0, "new": 0, "drafts": 0, "preempted": 0}
    return {"id": label, "kind": kind, "computed": computed, "total": total, **zeros, **more}


ROWS = [
    row(1, "decode", 30, 31, new=4, drafts=2, preempted=1),
    row(2, "prompt", 50, 100, cached=20),
    row(3, "decode", 199, 200, new=5),
    row(4, "waiting", 0, 8) | {"waits_for": "image"},
]


def step(t: int = 1500, **changes: Any) -> dict[str, Any]:
    pages = {"live": 25, "cached": 50, "free": 25}
    return {
        "t": t,
        "tokens": 70,
        "steps": 4,
        "waiting": 1,
        "running": 3,
        "pages": pages,
        "tok_s": 1234.5,
        "gap_ms": 20.25,
        "rows": ROWS,
        "others": None,
        **changes,
    }


def state_of(*events: TopEvent) -> TopState:
    state = TopState("http://x:1")
    for name, data in [("hello", HELLO), *events]:
        state.take(name, data)
    return state


def shown(state: TopState, width: int, height: int = 24) -> list[str]:
    console = Console(width=width, height=height, file=io.StringIO(), color_system=None)
    console.print(screen(state, width, height))
    assert isinstance(console.file, io.StringIO)
    return [each.rstrip() for each in console.file.getvalue().splitlines()]


def test_a_wide_screen_has_rows_with_their_numbers_pages_queue_and_speed() -> None:
    lines = shown(state_of(("step", step())), 100)
    assert lines[0] == "cadenza top a model http://x:1"
    assert lines[1] == (
        "3/16 rows  1 waiting  1,234.5 tok/s  gap 20.2 ms  2 of 9 tokens drafted  1 preempted"
    )
    assert lines[2] == f"pages {'█' * 8}{'▒' * 17}{'·' * 8} 25 live  50 cached  25 free"
    assert lines[3] == "tok/s █"
    assert lines[4] == f"   1 decode  {'█' * 6}{'·' * 34} 30/31  +4  drafts 2  preempted 1"
    assert lines[5] == f"   2 prompt  {'▒' * 8}{'█' * 12}{'·' * 20} 50/100  +0  cached 20"
    assert lines[6] == f"   3 decode  {'█' * 39}· 199/200  +5"
    assert lines[7] == f"   4 waiting {'·' * 40} 0/8  for an image  +0"
    assert lines[8:] == ["q quit  p pause  s as started"]


def test_every_reason_to_wait_has_words() -> None:
    assert {*WAIT_WORDS} == {*WAIT_REASONS} - {"pages"}
    lines = shown(
        state_of(("step", step(rows=[row(1, "waiting", 0, 8) | {"waits_for": "new"}]))), 100
    )
    assert lines[4].endswith("0/8  for new  +0"), "a newer server's"


def test_a_narrow_screen_has_bars_and_progress_and_fits() -> None:
    lines = shown(state_of(("step", step())), 40)
    assert all(len(each) <= 40 for each in lines)
    assert lines[5] == f"   2 prompt  {'▒' * 2}{'█' * 3}{'·' * 6} 50/100"
    assert lines[-1] == "q quit  p pause  s as started"


@pytest.mark.parametrize("height", [3, 8, 12])
def test_a_screen_is_no_higher_than_the_terminal_and_tells_what_it_leaves_out(height: int) -> None:
    many = [row(label, "decode", 3, 4) for label in range(100)]
    lines = shown(state_of(("step", step(rows=many))), 60, height)
    assert len(lines) <= height
    assert lines[-1].startswith("q quit")
    if height == 12:
        assert "… 95 more rows" in lines


def test_rows_of_other_keys_and_a_lost_engine_are_told() -> None:
    state = state_of(("step", step(others={"rows": 7, "total": 1200})))
    assert "7 rows of other keys: 1,200 tokens" in shown(state, 100)
    state.take("engine", {"state": "lost"})
    assert shown(state, 100)[1].startswith("the engine was lost")
    for told, words in (
        ("unloaded", "the model is not loaded; "),
        ("loading", "the model is being"),
    ):
        state.take("engine", {"state": told})
        assert shown(state, 100)[1].startswith(words)
    state.take("step", step())
    assert shown(state, 100)[1].startswith("3/16 rows")


def test_before_the_first_step_there_is_a_screen() -> None:
    assert shown(state_of(), 40)[1] == "nothing has been computed yet"


def test_s_changes_the_order_and_p_the_word() -> None:
    state = state_of(("step", step()))
    orders: list[list[int]] = []
    for _ in range(3):
        orders.append([each["id"] for each in state.rows])
        state.press("s")
    assert orders == [[1, 2, 3, 4], [3, 2, 1, 4], [2, 4, 1, 3]]
    assert state.sort == "start"
    state.press("p")
    assert "p go on" in shown(state, 60)[-1]
    state.press("x")
    assert state.is_paused


def test_lines_come_at_most_once_a_second_of_the_servers_time() -> None:
    events: list[TopEvent] = [("hello", HELLO)]
    events += [("step", step(t=t)) for t in range(500, 3000, 100)]
    events.append(("engine", {"state": "lost"}))
    output = io.StringIO()
    print_lines(TopState("x"), events, output)
    lines = output.getvalue().splitlines()
    assert [each.split()[0] for each in lines] == ["0.5", "1.5", "2.5", "the"]
    assert lines[0] == line(state_of(("step", step(t=500))))
    assert lines[0] == (
        "0.5 s  rows 3/16  waiting 1  prompts 1  1,234.5 tok/s  gap 20.2 ms  "
        "pages 25 live, 50 cached, 25 free"
    )


def test_a_paused_picture_stands_still_and_q_ends_it() -> None:
    state, unread = state_of(), queue.Queue[TopEvent]()
    unread.put(("step", step(t=1)))
    assert not advance(state, unread, "")
    unread.put(("step", step(t=2)))
    assert not advance(state, unread, "p")
    assert state.step["t"] == 1
    unread.put((TROUBLE, {"why": "gone"}))
    assert not advance(state, unread, "p")
    assert shown(state, 40)[1] == "gone"
    assert advance(state, unread, "sq")


def test_a_lost_connection_is_told_and_made_anew() -> None:
    unread, is_over = queue.Queue[TopEvent](), threading.Event()

    def again() -> Iterator[TopEvent]:
        yield "step", step()
        is_over.set()
        yield "step", step()

    def refused() -> Iterator[TopEvent]:
        raise TopError("no answer")
        yield

    class Now(threading.Event):
        """Waits for nothing."""

        def wait(self, timeout: float | None = None) -> bool:
            return self.is_set()

    is_over = Now()
    follow(refused(), again, unread, is_over)
    found = [unread.get_nowait() for _ in range(unread.qsize())]
    assert [name for name, _ in found] == [TROUBLE, "step", "step"]
    assert found[0][1]["why"] == "no answer; trying again"


def test_what_is_unread_is_bounded_and_the_oldest_is_skipped() -> None:
    unread = queue.Queue[TopEvent](MAX_UNREAD)
    for t in range(MAX_UNREAD + 3):
        put(unread, ("step", {"t": t}))
    assert unread.get_nowait()[1]["t"] == 3


def test_keys_are_read_one_at_a_time_and_the_terminal_is_left_as_it_was() -> None:
    import termios

    own, other = pty.openpty()
    with os.fdopen(own, "wb", buffering=0) as typed, os.fdopen(other) as keyboard:
        before = termios.tcgetattr(keyboard)
        with one_key_at_a_time(keyboard):
            assert termios.tcgetattr(keyboard) != before
            assert pressed(keyboard) == ""
            typed.write(b"s")
            assert pressed(keyboard) == "s"
        assert termios.tcgetattr(keyboard) == before


class Scripted(BaseHTTPRequestHandler):
    """Sends a few events, then ends."""

    protocol_version = "HTTP/1.0"

    def do_GET(self) -> None:
        if self.headers["authorization"] != f"Bearer {KEY}":
            self.send_response(401)
            self.end_headers()
            return
        is_stream = self.path.startswith("/debug/batch/stream")
        self.send_response(200 if is_stream else 404)
        self.end_headers()
        for name, data in (("hello", HELLO), ("step", step(t=700)), ("step", step(t=800))):
            self.wfile.write(f": hm\n\nevent: {name}\ndata: {json.dumps(data)}\n\n".encode())

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Scripted) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_without_a_terminal_it_prints_lines(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", url, "--api-key", KEY]) == 0
    assert capsys.readouterr().out.splitlines() == [line(state_of(("step", step(t=700))))]


@pytest.mark.parametrize(
    ("arguments", "words"), [([], "--api-key"), (["--api-key", KEY, "--model", "x"], None)]
)
def test_a_missing_key_is_an_error_that_says_how_to_give_it(
    url: str, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str | None
) -> None:
    code = main(["top", url, *arguments])
    assert code == (0 if words is None else 1)
    if words is not None:
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "code", "words"),
    [
        ("http://127.0.0.1:9", 1, "does not answer: the connection is refused"),
        ("nowhere", 2, "is no URL"),
        ("http://x:port", 2, "is no URL"),
    ],
)
def test_an_address_without_a_server_is_an_error(
    capsys: pytest.CaptureFixture[str], wrong: str, code: int, words: str
) -> None:
    assert main(["top", wrong]) == code
    assert words in capsys.readouterr().err


def test_a_query_names_the_model(url: str) -> None:
    link = ServerLink(url=url, api_key=KEY)
    with client_of(link, "x y") as client:
        assert client.build_request("GET", "/a").url.query == b"model=x+y"
        assert [name for name, _ in read_events(link, client)] == ["hello", "step", "step"]
