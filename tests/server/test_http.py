"""HTTP/1.1 as raw bytes: offers to upgrade, framing of bodies and answers, invalid requests."""

import asyncio
import json
import logging
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from cadenza.server.http.exchange import SLICE_BYTES, Exchange
from cadenza.server.http.exchange import Response as Answer
from cadenza.server.http.listening import Connections
from cadenza.server.http.protocol import BoundedProtocol, bounded_protocol
from cadenza.server.limits import BodyBudget, ServerLimits
from cadenza.server.metrics import ServedCounts
from tests.server.harness import RunningServer, Serve

BODY = b'{"prompt": "the fox", "max_tokens": 2}'
STREAM = b'{"prompt": "the fox", "max_tokens": 2, "stream": true}'
SPELT = b"POST /smuggled HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
"""A body that is a request, word for word."""
LAST = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
CHUNKED = "transfer-encoding: chunked"
H2C = (
    "connection: Upgrade, HTTP2-Settings",
    "upgrade: h2c",
    "http2-settings: AAMAAABkAAQCAAAAAAIAAAAA",
)
NUM_TURNS = 30
"""Of the event loop: more than three requests need that are there from the start."""
WEBSOCKET = (
    "connection: Upgrade",
    "upgrade: websocket",
    "sec-websocket-version: 13",
    "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==",
)


def request(
    body: bytes, *headers: str, line: str = "POST /v1/completions HTTP/1.1", host: str = "host: x"
) -> bytes:
    """As it is written, with a length where no other framing is among the headers."""
    head = [line, host, "content-type: application/json", *headers]
    if not any(re.match("content-length|transfer-encoding", header) for header in headers):
        head.append(f"content-length: {len(body)}")
    return "\r\n".join(line for line in head if line).encode() + b"\r\n\r\n" + body


def chunked(*parts: bytes, trailers: bytes = b"") -> bytes:
    chunks = [b"%x\r\n%s\r\n" % (len(part), part) for part in parts]
    return b"".join(chunks) + b"0\r\n" + trailers + b"\r\n"


def answers(raw: bytes) -> list[int]:
    """The status of each answer."""
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", raw)]


@dataclass(slots=True, eq=False)
class Recorder:
    """An application that reads each request to its end, and a transport that keeps the answers."""

    requests: list[tuple[str, bytes, bytes]] = field(default_factory=list)
    written: bytearray = field(default_factory=bytearray)
    is_closed: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, has_more = b"", True
        while has_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, has_more = body + message["body"], message["more_body"]
        names = b" ".join(name for name, _ in scope["headers"])
        self.requests.append((scope["path"], body, names))
        headers = [(b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def can_write_eof(self) -> bool:
        return False

    def get_extra_info(self, name: str) -> None:
        return None

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


async def feed(recorder: Recorder, parts: Iterator[bytes]) -> None:
    """What a connection makes of bytes that come in these parts."""
    config = uvicorn.Config(recorder, ws="none", lifespan="off", log_config=None)  # pyright: ignore[reportArgumentType]
    state = ServerState()
    open_connections = Connections(8, ServedCounts(), time.monotonic)
    connection: Any = bounded_protocol(ServerLimits(), open_connections)
    protocol: BoundedProtocol = connection(config, state, {})
    protocol.connection_made(recorder)  # pyright: ignore[reportArgumentType]
    for part in parts:
        protocol.data_received(part)
    for _ in range(NUM_TURNS):
        await asyncio.sleep(0)
    protocol.connection_lost(None)
    if state.tasks:
        await asyncio.wait(state.tasks)


def received(*parts: bytes) -> Recorder:
    recorder = Recorder()
    asyncio.run(feed(recorder, iter(parts)))
    return recorder


@pytest.mark.parametrize("upgrade", [H2C, pytest.param(WEBSOCKET, marks=pytest.mark.soak)])
@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_an_offer_to_upgrade_is_ignored_and_the_body_kept_however_it_comes(
    upgrade: tuple[str, ...], framing: str
) -> None:
    """Each split in two, and byte by byte; a second offer and a plain request follow."""
    if framing == "length":
        first = request(SPELT, *upgrade, line="POST /first HTTP/1.1")
    else:
        first = request(
            chunked(SPELT[:9], SPELT[9:]), CHUNKED, *upgrade, line="POST /first HTTP/1.1"
        )
    second = request(b"two", *upgrade, line="POST /second HTTP/1.1")
    whole = first + second + LAST
    for parts in (
        *((whole[:place], whole[place:]) for place in range(len(whole))),
        tuple(bytes([byte]) for byte in whole),
    ):
        found = received(*parts)
        assert [(path, body) for path, body, _ in found.requests] == [
            ("/first", SPELT),
            ("/second", b"two"),
            ("/version", b""),
        ]
        assert answers(found.written) == [200, 200, 200]


@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_a_completion_with_an_offer_to_upgrade_is_answered_and_the_next_request_too(
    scripted: RunningServer, caplog: pytest.LogCaptureFixture, framing: str
) -> None:
    with caplog.at_level(logging.WARNING):
        plain = request(BODY, *H2C)
        sent = plain if framing == "length" else request(chunked(BODY), CHUNKED, *H2C)
        raw = scripted.raw(sent + LAST)
    assert answers(raw) == [200, 200]
    assert b'"text":"the quick"' in raw
    assert not caplog.records


@pytest.mark.parametrize(("path", "status"), [("/v1/completions", 405), ("/ws", 404)])
def test_a_websocket_is_answered_as_a_plain_get_and_no_package_is_advertised(
    scripted: RunningServer, caplog: pytest.LogCaptureFixture, path: str, status: int
) -> None:
    with caplog.at_level(logging.WARNING):
        raw = scripted.raw(request(b"", *WEBSOCKET, line=f"GET {path} HTTP/1.1") + LAST)
    assert answers(raw) == [status, 200]
    assert not caplog.records


def test_trailers_are_no_headers() -> None:
    """Even where they are read before the application begins."""
    sent = request(chunked(BODY, trailers=b"authorization: Bearer key\r\n"), CHUNKED)
    ((_, body, names),) = received(sent).requests
    assert body == BODY
    assert names == b"host content-type transfer-encoding"


def test_trailers_without_end_are_refused() -> None:
    begun = request(b"1\r\nx\r\n0\r\nx-long: ", CHUNKED)
    sent = [b"y" * 1000] * 100
    found = received(begun, *sent)
    assert answers(found.written) == [400]
    assert b"headers_too_large" in found.written
    assert answers(received(begun, *sent[:5], b"\r\n\r\n").written) == [200]


@pytest.mark.parametrize("coding", ["gzip", "br", "identity, gzip", "GZIP"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_a_compressed_body_is_a_415_that_says_what_is_read(
    scripted: RunningServer, path: str, coding: str
) -> None:
    answer = scripted.post(path, {"prompt": "the fox"}, headers={"content-encoding": coding})
    assert answer.status_code == 415
    error = answer.json()["error"]
    assert error["code"] == "unsupported_media_type"
    assert f"content-encoding is '{coding.lower()}'" in error["message"]
    assert "plain JSON" in error["message"]
    assert answer.headers["accept-encoding"] == "identity"


def test_an_identity_coding_changes_nothing(scripted: RunningServer) -> None:
    body = json.loads(BODY)
    answer = scripted.post("/v1/completions", body, headers={"content-encoding": "identity"})
    assert answer.status_code == 200


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_answer_to_http_1_0_is_not_chunked_and_ends_with_its_connection(
    scripted: RunningServer, is_stream: bool
) -> None:
    line = "POST /v1/completions HTTP/1.0"
    head, _, body = scripted.raw(
        request(STREAM if is_stream else BODY, "connection: keep-alive", line=line)
    ).partition(b"\r\n\r\n")
    assert answers(head) == [200]
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    if is_stream:
        assert body.startswith(b"data: {")
        assert body.endswith(b"data: [DONE]\n\n")
    else:
        assert f"content-length: {len(body)}".encode() in head
        assert json.loads(body)["object"] == "text_completion"


def test_errors_reach_http_1_0_too(scripted: RunningServer) -> None:
    raw = scripted.raw(request(b"{", line="POST /v1/completions HTTP/1.0"))
    assert answers(raw) == [400]
    assert b"transfer-encoding" not in raw


@pytest.mark.parametrize(
    ("version", "statuses"), [("1.1", [100, 200]), ("1.0", [200])], ids=["1.1", "1.0"]
)
def test_only_http_1_1_is_told_to_go_on(
    scripted: RunningServer, version: str, statuses: list[int]
) -> None:
    line = f"POST /v1/completions HTTP/{version}"
    raw = scripted.raw(request(BODY, "expect: 100-continue", "connection: close", line=line))
    assert answers(raw) == statuses


def test_a_body_that_is_refused_by_its_length_is_not_asked_for(serve: Serve) -> None:
    limits = ServerLimits(max_body_bytes=1000)
    server = serve(limits=limits)
    raw = server.raw(request(b"", "expect: 100-continue", "content-length: 2000"))
    assert answers(raw) == [413]


AMBIGUOUS = {
    "both framings": request(chunked(BODY), "content-length: 5", CHUNKED),
    "both framings, length last": request(chunked(BODY), CHUNKED, "content-length: 5"),
    "chunked is not the last coding": request(
        chunked(BODY), "transfer-encoding: chunked, identity"
    ),
    "identity as transfer coding": request(chunked(BODY), "transfer-encoding: identity"),
    "chunked twice": request(chunked(BODY), "transfer-encoding: chunked, chunked"),
    "chunked in two headers": request(chunked(BODY), CHUNKED, CHUNKED),
    "another word than chunked": request(chunked(BODY), "transfer-encoding: xchunked"),
    "a space before the colon": request(chunked(BODY), "transfer-encoding : chunked"),
    "a folded header": request(BODY, "x-a: b\r\n c", f"content-length: {len(BODY)}"),
    "a folded framing": request(chunked(BODY), "transfer-encoding:\r\n chunked"),
    "a list of lengths": request(BODY, f"content-length: {len(BODY)}, {len(BODY)}"),
    "two lengths": request(BODY, f"content-length: {len(BODY)}", "content-length: 3"),
    "the same length twice": request(BODY, *[f"content-length: {len(BODY)}"] * 2),
    "a signed length": request(BODY, f"content-length: +{len(BODY)}"),
    "a negative length": request(BODY, "content-length: -1"),
    "a length beyond 64 bits": request(BODY, "content-length: 99999999999999999999999"),
    "line feeds alone": request(BODY).replace(b"\r\n", b"\n"),
    "a carriage return in a header": request(BODY, "x-a: b\rc"),
    "a chunk that ends late": request(b"1\r\nxyz\r\n0\r\n\r\n", CHUNKED),
    "no host": request(BODY, host=""),
    "two hosts": request(BODY, "host: y"),
    "HTTP/0.9": request(BODY, line="POST /v1/completions HTTP/0.9"),
    "HTTP/2.0": request(BODY, line="POST /v1/completions HTTP/2.0"),
    "HTTP/2's preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
}


@pytest.mark.parametrize("sent", AMBIGUOUS.values(), ids=AMBIGUOUS)
@pytest.mark.parametrize("upgrade", ["", "connection: upgrade\r\nupgrade: h2c\r\n"])
def test_a_request_whose_end_is_not_certain_is_a_400_and_the_connections_last(
    sent: bytes, upgrade: str
) -> None:
    """An offer to upgrade does not change what is certain."""
    if upgrade:
        sent = sent.replace(b"content-type", upgrade.encode() + b"content-type", 1)
    found = received(sent + LAST)
    assert answers(found.written) == [400]
    assert b'"code":"invalid_http"' in found.written
    assert b"connection: close" in found.written
    assert "/version" not in [path for path, _, _ in found.requests]


def test_a_transfer_coding_that_is_not_undone_is_a_415(scripted: RunningServer) -> None:
    raw = scripted.raw(request(chunked(BODY), "transfer-encoding: gzip, chunked") + LAST)
    assert answers(raw) == [415, 200]
    assert b"transfer-encoding is 'gzip, chunked'" in raw


@pytest.mark.parametrize("target", ["x:443", "/live", "http://x/live"])
def test_a_tunnel_is_a_405_and_what_follows_is_not_read(target: str) -> None:
    found = received(request(b"", line=f"CONNECT {target} HTTP/1.1") + LAST)
    assert answers(found.written) == [405]
    assert b"allow: GET, POST" in found.written
    assert b"connection: close" in found.written
    assert not found.requests


def test_an_absolute_target_is_its_path(scripted: RunningServer) -> None:
    raw = scripted.raw(
        request(BODY, line="POST http://other.example/v1/completions HTTP/1.1") + LAST
    )
    assert answers(raw) == [200, 200]


@pytest.mark.parametrize("way", ["whole", "stream"])
@pytest.mark.parametrize("num_bytes", [0, SLICE_BYTES, 3 * SLICE_BYTES + 7])
def test_an_answer_is_sent_in_slices_one_after_the_other(way: str, num_bytes: int) -> None:
    """Each begins the time for a slow reader anew."""
    body = bytes(place % 251 for place in range(num_bytes))
    sent: list[Any] = []
    busy = 0

    async def send(message: Any) -> None:
        nonlocal busy
        busy += 1
        assert busy == 1
        await asyncio.sleep(0)
        sent.append(message)
        busy -= 1

    async def receive() -> Any:
        raise AssertionError("nothing is read")

    exchange = Exchange(
        scope={},
        receive=receive,
        send=send,
        limits=ServerLimits(),
        bodies=BodyBudget(1, lambda: None),
        request_id="x",
        tenant="",
    )
    is_whole = way == "whole"
    asyncio.run(exchange.answer(Answer(body=body)) if is_whole else exchange.stream(body))
    bodies = [each for each in sent if each["type"] == "http.response.body"]
    assert b"".join(each["body"] for each in bodies) == body
    assert max(len(each["body"]) for each in bodies) <= SLICE_BYTES
    assert len(bodies) == max(1, -(-num_bytes // SLICE_BYTES))
    assert [each["more_body"] for each in bodies] == [True] * (len(bodies) - 1) + [not is_whole]
