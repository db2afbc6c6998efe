"""`cadenza serve --handover` under load: servers follow each other at one address.

One handover by day is in `test_serve_lifecycle.py`. Clients that open a connection for each
request, clients that keep theirs, streams and probes go on all the time. No connection is refused,
no answer is cut, and every answer has the text that it always has; only streams of a server whose
drain time is short may end with its clean error.
"""

import asyncio
import json
import random
import ssl
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from cadenza.server.lifecycle.handover import is_supported
from tests.e2e.figures import Figures
from tests.ports import kept_port
from tests.server.serve_process import ServeProcess, serve_process

pytestmark = pytest.mark.skipif(not is_supported(), reason="handing over needs Linux")

CERTIFICATE = Path(__file__).parents[1] / "server" / "localhost.pem"
FLAGS = ("--max-num-seqs", "16", "--max-model-len", "512", "--disable-log-requests")
LONG_DRAIN_S, SHORT_DRAIN_S = 600.0, 0.3
WAIT_S = 300.0
NUM_SOAK_TURNS = 20
PLACES = ("port", "tls", "path")

KINDS = ("stream",) * 6 + ("kept",) * 4 + ("fresh",) * 2 + ("probe",)
PROMPTS = ("The capital of France is", "12 + 30 =", "Once upon a time", "The dog")


def body_of(index: int) -> dict[str, Any]:
    return {
        "prompt": PROMPTS[index % len(PROMPTS)],
        "max_tokens": (10, 60, 400)[index % 3],
        "temperature": 0.0 if index % 2 else 1.0,
        "seed": index,
        "ignore_eos": True,
    }


BODIES = [body_of(index) for index in range(12)]


@dataclass(frozen=True, slots=True)
class Place:
    """An address, for a server's flags and for clients."""

    flags: tuple[object, ...]
    uds: str | None = None
    trusted: ssl.SSLContext | None = None

    def client(self) -> httpx.AsyncClient:
        transport = httpx.AsyncHTTPTransport(verify=self.trusted or False, uds=self.uds)
        scheme = "http" if self.trusted is None else "https"
        port = next((flag for flag in self.flags if isinstance(flag, int)), 80)
        url = f"{scheme}://127.0.0.1:{port}"
        return httpx.AsyncClient(transport=transport, base_url=url, timeout=WAIT_S)


@contextmanager
def place_of(kind: str, folder: Path) -> Generator[Place]:
    if kind == "path":
        path = folder / "cadenza.sock"
        yield Place(("--uds", path), uds=str(path))
        return
    with kept_port() as port:
        if kind == "port":
            yield Place(("--port", port))
            return
        tls = ("--ssl-certfile", CERTIFICATE, "--ssl-keyfile", CERTIFICATE)
        trusted = ssl.create_default_context(cafile=CERTIFICATE)
        yield Place(("--port", port, *tls), trusted=trusted)


@dataclass(slots=True, eq=False)
class Ledger:
    """What became of each request."""

    expected: list[str] = field(default_factory=list)
    # Of each server, by the name of its model.
    num_answers: Counter[str] = field(default_factory=Counter)
    # Clean errors, by code: of streams that began, and of calls that did not.
    errors: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


class Load:
    """Clients on a thread of their own, from `start` until `stop`."""

    def __init__(self, place: Place, kinds: Sequence[str]) -> None:
        self.ledger = Ledger()
        self._place = place
        self._kinds = kinds
        self._is_over = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def start(self) -> None:
        self.ledger.expected = asyncio.run(self._ask_all())
        self._thread.start()

    def stop(self) -> None:
        self._is_over = True
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    async def _ask_all(self) -> list[str]:
        async with self._place.client() as client:
            answers = [await client.post("/v1/completions", json=body) for body in BODIES]
        return [answer.json()["choices"][0]["text"] for answer in answers]

    async def _run(self) -> None:
        playing = (self._play(kind, random.Random(i)) for i, kind in enumerate(self._kinds))
        await asyncio.gather(*playing)

    async def _play(self, kind: str, rng: random.Random) -> None:
        async with self._place.client() as kept:
            while not self._is_over:
                try:
                    if kind in {"kept", "stream"}:
                        await self._ask(kind, kept, rng)
                    else:
                        async with self._place.client() as fresh:
                            await self._ask(kind, fresh, rng)
                except (httpx.TransportError, AssertionError) as error:
                    self.ledger.failures.append(f"{kind}: {error!r}")
                await asyncio.sleep(rng.choice([0.0, 0.01, 0.1, 0.5]))

    async def _ask(self, kind: str, client: httpx.AsyncClient, rng: random.Random) -> None:
        if kind == "probe":
            answer = await client.get("/ready")
            assert answer.status_code == 200, answer.text
            return
        index = rng.randrange(len(BODIES))
        if kind == "stream":
            await self._read_stream(client, index)
            return
        answer = await client.post("/v1/completions", json=BODIES[index])
        found = answer.json()
        if answer.status_code != 200:
            self.ledger.errors[found["error"]["code"]] += 1
            return
        assert found["choices"][0]["text"] == self.ledger.expected[index]
        self.ledger.num_answers[found["model"]] += 1

    async def _read_stream(self, client: httpx.AsyncClient, index: int) -> None:
        """It is whole, or ends with one error that says so, after the beginning of its text."""
        body = {**BODIES[index], "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                self.ledger.errors[json.loads(await response.aread())["error"]["code"]] += 1
                return
            lines = [line async for line in response.aiter_lines() if line.startswith("data: ")]
        frames = [line.removeprefix("data: ") for line in lines]
        assert frames[-1] == "[DONE]"
        events = [json.loads(frame) for frame in frames[:-1]]
        error = events.pop()["error"] if "error" in events[-1] else None
        text = "".join(event["choices"][0]["text"] for event in events)
        if error is None:
            assert text == self.ledger.expected[index]
            self.ledger.num_answers[events[0]["model"]] += 1
        else:
            assert self.ledger.expected[index].startswith(text)
            self.ledger.errors[error["code"]] += 1


class Line:
    """Servers that follow each other at a place; each one's model has the server's own name."""

    def __init__(self, place: Place, stack: ExitStack) -> None:
        self._place = place
        self._stack = stack
        self.servers: list[ServeProcess] = []

    def start(self, *flags: object, drain_s: float) -> ServeProcess:
        name = f"server-{len(self.servers)}"
        common = (*FLAGS, "--served-model-name", name, "--shutdown-timeout", drain_s)
        serving = self._stack.enter_context(serve_process(*common, *self._place.flags, *flags))
        self.servers.append(serving)
        return serving

    @property
    def running(self) -> list[ServeProcess]:
        return [each for each in self.servers if each.process.poll() is None]

    def follow(self, count: int, figures: Figures, drain_s: float) -> None:
        """So many servers start at once; one after the other takes over, and all but one end."""
        new = [self.start("--handover", drain_s=drain_s) for _ in range(count)]
        for serving in new:
            serving.wait_for(lambda serving=serving: "ready at " in serving.log, WAIT_S)
        start_s = time.monotonic()
        while len(self.running) > 1:
            assert time.monotonic() < start_s + WAIT_S, "the old server does not end"
            time.sleep(0.02)
        figures.note("the old server has ended", time.monotonic() - start_s, 60.0)
        ended = [each for each in self.servers if each not in self.running]
        assert all(each.wait() == 0 for each in ended), [each.log for each in ended]


def hand_over_again_and_again(kind: str, folder: Path, turns: int) -> None:
    """Only while a server with a short drain time leaves are there errors, and only clean ones."""
    figures, drain_s = Figures(), LONG_DRAIN_S
    with ExitStack() as stack:
        place = stack.enter_context(place_of(kind, folder))
        line, load = Line(place, stack), Load(place, KINDS)
        first = line.start(drain_s=drain_s)
        first.wait_for(lambda: "engine ready" in first.log, WAIT_S)
        load.start()
        stack.callback(load.stop)
        for turn in range(turns):
            leaving_s, drain_s = drain_s, SHORT_DRAIN_S if turn % 2 == 0 else LONG_DRAIN_S
            is_double, num_errors = turn % 5 == 4, load.ledger.errors.total()
            line.follow(2 if is_double else 1, figures, drain_s)
            assert load.ledger.failures == []
            if SHORT_DRAIN_S not in ({leaving_s, drain_s} if is_double else {leaving_s}):
                assert load.ledger.errors.total() == num_errors, load.ledger.errors
        load.stop()
        check(load.ledger)
        (last,) = line.running
        last.terminate()
        assert last.wait() == 0
    assert list(folder.iterdir()) == []
    num_answers, num_errors = load.ledger.num_answers.total(), load.ledger.errors.total()
    print(f"\n{len(line.servers) - 1} handovers: {num_answers} whole answers, {num_errors} ended")
    figures.tell(f"handover over a {kind}")


def check(ledger: Ledger) -> None:
    assert ledger.failures == []
    assert ledger.errors.keys() <= {"draining"}
    assert len(ledger.num_answers) > 1


@pytest.mark.soak
def test_a_lost_request_would_be_seen(tmp_path: Path) -> None:
    """Nobody listens any more."""
    with place_of("port", tmp_path) as place, ExitStack() as stack:
        line, load = Line(place, stack), Load(place, KINDS)
        only = line.start(drain_s=LONG_DRAIN_S)
        only.wait_for(lambda: "engine ready" in only.log, WAIT_S)
        load.start()
        only.process.kill()
        only.wait()
        load.stop()
        with pytest.raises(AssertionError):
            check(load.ledger)


@pytest.mark.soak
@pytest.mark.parametrize("kind", PLACES)
def test_servers_follow_each_other_again_and_again(kind: str, tmp_path: Path) -> None:
    hand_over_again_and_again(kind, tmp_path, NUM_SOAK_TURNS)


@pytest.fixture(scope="module")
def serving() -> Iterator[tuple[ServeProcess, int]]:
    """Started where nobody serves."""
    flags = (*FLAGS, "--handover", "--port")
    with kept_port() as port, serve_process(*flags, port) as serving:
        serving.wait_for(lambda: "engine ready" in serving.log)
        yield serving, port


@pytest.mark.soak
def test_a_server_that_cannot_load_leaves_the_old_one_serving(
    serving: tuple[ServeProcess, int],
) -> None:
    old, port = serving
    flags = ("--port", port, "--handover", "--kv-cache-memory-bytes", 1 << 50)
    with serve_process(*FLAGS, *flags) as new:
        assert new.wait() == 2, new.log
        assert "kv-cache-memory-bytes" in new.log
    assert old.status("/ready") == 200
    assert "has taken over" not in old.log


@pytest.mark.soak
def test_a_server_that_is_stopped_while_it_loads_leaves_the_old_one_serving(
    serving: tuple[ServeProcess, int],
) -> None:
    old, port = serving
    with serve_process(*FLAGS, "--port", port, "--handover") as new:
        new.wait_for(lambda: "loading: libraries" in new.log)
        new.terminate()
        assert new.wait() == 0, new.log
        assert "to take over from process" in new.log
    assert old.status("/ready") == 200
    assert "has taken over" not in old.log


@pytest.mark.soak
def test_where_nobody_serves_a_handover_is_a_start(serving: tuple[ServeProcess, int]) -> None:
    started, port = serving
    assert started.url.endswith(f":{port}")
    assert "there is no server to take over from" in started.log
