"""Many at once on the real engine: overlap, long prompts, readers that do not read, clients that
leave, ten times too many."""

import asyncio
import os
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from cadenza import LLM, SamplingParams
from cadenza.bench.checkpoints import cached_checkpoint
from cadenza.config import EngineConfig
from cadenza.engine.front import EngineFront, InProcessLink
from cadenza.engine.timeouts import RequestTimeouts
from cadenza.frontend.loaded_model import load_model
from cadenza.loading.planned_engine import cache_folder
from cadenza.server.limits import ServerLimits
from tests.server.crowd import (
    Reply,
    ask,
    at_most,
    bystander,
    closing_get,
    closing_post,
    frame_gaps,
    leave_after,
    share,
)
from tests.server.harness import (
    TIMEOUT_S,
    InBackground,
    RunningServer,
    WatchedService,
    in_background,
    options,
    running_server,
    wait_until,
)
from tests.server.serve_process import ServeProcess, serve_process

PROMPTS = ["The capital of France is", "12 + 30 =", "Once upon a time", "The dog"]


def test_four_completions_overlap_and_are_what_each_is_alone(
    bundled: RunningServer, watched: WatchedService
) -> None:
    bodies = [
        {
            "prompt": prompt,
            "max_tokens": 100,
            "ignore_eos": True,
            "seed": 5,
            "return_token_ids": True,
        }
        for prompt in PROMPTS
    ]

    def ask(body: dict[str, Any]) -> Any:
        return bundled.post("/v1/completions", body).json()["choices"][0]["token_ids"]

    watched.gather(1)
    alone = [ask(body) for body in bodies]
    assert len({tuple(answer) for answer in alone}) == 4
    assert watched.most_running == 1
    watched.gather(4)
    together = in_background(lambda body=body: ask(body) for body in bodies)
    assert [each.result() for each in together] == alone
    assert watched.most_running == 4


@pytest.mark.soak
def test_evaluation_harnesses_get_the_log_probabilities_of_their_prompts(
    bundled: RunningServer,
) -> None:
    """Their request: several prompts of token ids, echoed with log probabilities, one new token."""
    prompts = [[7 + index * 3 for index in range(length)] for length in (2, 30, 150)]
    body = {"prompt": prompts, "echo": True, "logprobs": 2, "max_tokens": 1, "temperature": 0}
    choices = bundled.post("/v1/completions", body).json()["choices"]
    params = SamplingParams(prompt_logprobs=2, max_tokens=1, temperature=0)
    with LLM(max_num_seqs=4, max_model_len=256, max_num_batched_tokens=64) as llm:
        outputs = llm.generate(prompts, params)
    for choice, output, prompt in zip(choices, outputs, prompts, strict=True):
        told = choice["logprobs"]["token_logprobs"]
        assert output.prompt_logprobs is not None
        expected = [
            None if entry is None else entry[token_id].logprob
            for token_id, entry in zip(prompt, output.prompt_logprobs, strict=True)
        ]
        assert told[: len(prompt)] == pytest.approx(expected, abs=1e-6)
        assert len(told) == len(prompt) + len(output.outputs[0].token_ids)


def test_more_samples_than_rows_are_all_answered(bundled: RunningServer) -> None:
    body = {"prompt": "The dog", "n": 16, "max_tokens": 4, "ignore_eos": True}
    answer = bundled.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    assert [choice["index"] for choice in answer.json()["choices"]] == list(range(16))


def test_a_request_that_forbids_every_token_is_its_clients_fault(bundled: RunningServer) -> None:
    body = {"prompt": "x", "allowed_token_ids": [5]}
    body |= {"stop_token_ids": [5], "min_tokens": 2, "max_tokens": 4}
    answer = bundled.post("/v1/completions", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "allowed_token_ids"


@pytest.mark.soak
def test_sixty_four_streams_at_once_are_all_served(bundled: RunningServer) -> None:
    body = {"prompt": "Once", "max_tokens": 16, "ignore_eos": True, "temperature": 0}
    expected = bundled.post("/v1/completions", body).json()["choices"][0]["text"]

    def ask() -> str:
        events = bundled.events("/v1/completions", {**body, "stream": True})[:-1]
        return "".join(choice["text"] for event in events for choice in event["choices"])

    assert [each.result() for each in in_background([ask] * 64)] == [expected] * 64


def test_probes_answer_throughout_long_prefills(bundled: RunningServer) -> None:
    """Counted, not timed, so that a busy machine changes nothing: both sides are slower on it.

    One that waits for the prefill answers the first probe with it, and few more before its answer
    has been read.
    """
    prompts = [[first] * 2000 for first in range(7, 11)]
    body = {"prompt": prompts, "max_tokens": 1, "cache_salt": "prefill"}
    num_answered, is_over = 0, threading.Event()

    def ask() -> httpx.Response:
        try:
            return bundled.post("/v1/completions", body)
        finally:
            is_over.set()

    with bundled.client() as client:
        asking = InBackground(ask)
        while not is_over.is_set():
            assert client.get("/live").status_code == 200
            num_answered += 1
    assert asking.result().status_code == 200
    assert num_answered > 5


NUM_ROWS = 8
STREAM = {"prompt": "Once", "max_tokens": 200, "ignore_eos": True, "stream": True}


def show(text: str) -> None:
    print(f"{text} (load average {os.getloadavg()[0]:.1f})")


# --- readers that do not read ---------------------------------------------------------------------

SLOW = {**STREAM, "max_tokens": 40, "logprobs": 20}
"""More than the kernel takes that nobody reads."""
HELD_BYTES = 256 << 10
"""Of one reader, on both sides: a connection, 64 KiB of bytes, and its tokens as objects."""
NUM_BESIDE = 4
"""Streams that are read beside. They end at different times, so that never none is open."""


@contextmanager
def small_buffers(stall_s: float, num_queued: int) -> Generator[RunningServer]:
    """The bundled model behind sockets into which little fits."""
    config = EngineConfig(
        max_num_seqs=16, max_num_batched_tokens=64, max_num_queued_reqs=num_queued
    )
    loaded = load_model(None, config)
    engine = EngineFront(
        InProcessLink(loaded.core, RequestTimeouts(queue_s=3600.0, total_s=3600.0))
    )
    limits = ServerLimits(write_stall_s=stall_s)
    with running_server(engine, loaded.text, options(limits=limits), 4096) as server:
        yield server


def connect_slowly(server: RunningServer) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(closing_post("/v1/completions", SLOW))
    return connection


def rss_bytes() -> int:
    words = Path("/proc/self/statm").read_text().split()
    return int(words[1]) * os.sysconf("SC_PAGE_SIZE")


async def gaps_beside(server: RunningServer, is_over: Callable[[], bool]) -> list[float]:
    """Of a few streams that are read, again and again until it is over."""

    async def read() -> list[float]:
        gaps: list[float] = []
        while not gaps or not is_over():
            gaps += await frame_gaps(server.port, closing_post("/v1/completions", STREAM))
        return gaps

    return [
        gap for gaps in await asyncio.gather(*(read() for _ in range(NUM_BESIDE))) for gap in gaps
    ]


async def gaps_beside_who_read(server: RunningServer, num_readers: int) -> list[float]:
    request = closing_post("/v1/completions", SLOW)
    reading = asyncio.gather(*(ask(server.port, request) for _ in range(num_readers)))
    gaps = await gaps_beside(server, reading.done)
    assert [reply.status for reply in await reading] == [200] * num_readers
    return gaps


def play_slow_readers(num_readers: int, stall_s: float) -> float:
    """By how much the others' gaps grow; whoever does not read is dropped and holds nothing."""
    with small_buffers(stall_s, 2 * num_readers) as server:

        def is_idle() -> bool:
            return not server.service.num_open

        before = asyncio.run(gaps_beside_who_read(server, num_readers))
        held = rss_bytes()
        slow = [connect_slowly(server) for _ in range(num_readers)]
        wait_until(lambda: server.service.num_open, 10 * TIMEOUT_S)
        during = asyncio.run(gaps_beside(server, lambda: server.service.num_open <= NUM_BESIDE))
        grown = rss_bytes() - held
        wait_until(is_idle, 10 * TIMEOUT_S)
        wait_until(lambda: num_live_pages(server) == 0)
        ended = [is_cut_off(each) for each in slow]
        for each in slow:
            each.close()
    ratio = share(during, 0.99) / share(before, 0.99)
    show(
        f"{num_readers} slow readers: p99 gap of others {share(during, 0.99) * 1e3:.1f} ms, "
        f"{ratio:.2f} times that beside as many who read; {grown / 1e6:.1f} MB more held"
    )
    assert all(ended), f"{ended.count(False)} were not dropped"
    assert grown < num_readers * HELD_BYTES + (32 << 20)
    return ratio


def num_live_pages(server: RunningServer) -> int:
    stats = server.service.models.first.engine.stats()
    assert stats is not None
    return int(stats.by_label["pages"]["live"])


def is_cut_off(connection: socket.socket) -> bool:
    """Whether the server ended it before all was sent."""
    connection.settimeout(TIMEOUT_S)
    data = b""
    try:
        while part := connection.recv(1 << 16):
            data += part
    except ConnectionResetError:
        return True
    return not data.endswith(b"data: [DONE]\n\n")


@pytest.mark.soak
def test_a_thousand_slow_readers_are_dropped_and_hold_nothing() -> None:
    assert play_slow_readers(1000, 30.0) < 1.2


# --- clients that leave ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def serving() -> Iterator[ServeProcess]:
    with serve_process("--max-num-seqs", NUM_ROWS, "--max-model-len", 1024) as serving:
        serving.wait_ready()
        yield serving


def port_of(serving: ServeProcess) -> int:
    return int(serving.url.rpartition(":")[2])


def gauge(serving: ServeProcess, series: str) -> float:
    found = re.search(rf"^{re.escape(series)} (\S+)$", serving.get("/metrics").text, re.M)
    assert found is not None, series
    return float(found[1])


def is_at_rest(serving: ServeProcess) -> bool:
    live = gauge(serving, 'cadenza:pages{model_name="bundled",state="live"}')
    running = gauge(serving, 'cadenza:num_requests_running{model_name="bundled"}')
    waiting = gauge(serving, 'cadenza:num_requests_waiting{model_name="bundled"}')
    return not live + running + waiting


def play_leavers(serving: ServeProcess, num_each: int, seed: int) -> float:
    """Seconds until nothing was held, after the last one left."""
    port, source = port_of(serving), random.Random(seed)
    body = {**STREAM, "max_tokens": 24, "seed": 1}
    requests = [
        closing_post("/v1/completions", {**body, "stream": is_stream})
        for is_stream in (True, False)
    ]

    async def play() -> list[int]:
        lengths = []
        for request in requests:
            reply = await ask(port, request)
            assert reply.status == 200
            lengths.append(len(request) + len(reply.head) + 4 + len(reply.body))
        calls = [
            leave_after(port, requests[kind], source.randrange(1, lengths[kind]))
            for _ in range(num_each)
            for kind in (0, 1)
        ]
        return await at_most(NUM_ROWS * 4, calls)

    exchanged = asyncio.run(play())
    left_s = time.monotonic()
    serving.wait_for(lambda: is_at_rest(serving))
    seconds = time.monotonic() - left_s
    assert len(set(exchanged)) > num_each / 4, "they left at many places"
    answer = serving.post("/v1/completions", {**body, "stream": False})
    assert answer.status_code == 200
    show(f"{2 * num_each} clients left at a random byte: at rest {seconds:.2f} s after the last")
    return seconds


@pytest.mark.soak
def test_thousands_that_leave_anywhere_leave_nothing_behind(serving: ServeProcess) -> None:
    assert play_leavers(serving, 2000, seed=2) < 1.0


@pytest.mark.soak
def test_a_server_that_holds_something_is_not_at_rest(serving: ServeProcess) -> None:
    """So that the two tests above can fail."""
    with serving.streaming({**STREAM, "prompt": ["Once"] * 4, "max_tokens": 900, "n": 16}) as lines:
        next(lines)
        serving.wait_for(lambda: not is_at_rest(serving))
    serving.wait_for(lambda: is_at_rest(serving))


# --- ten times too many ---------------------------------------------------------------------------

NUM_TOKENS = 512
"""Of an answer; by day fewer."""
OVERLOAD = 10
NUM_ROOM = NUM_ROWS + 4 * NUM_ROWS
"""Requests that run or wait: the server's default queue."""


def work(num_tokens: int) -> bytes:
    body = {"prompt": "Once", "max_tokens": num_tokens, "ignore_eos": True}
    return closing_post("/v1/completions", body)


async def steady(port: int, seconds: float, num_tokens: int) -> float:
    """Tokens a second with clients enough for all rows, each asking again when it was answered."""
    start = time.monotonic()
    num_answered = 0

    async def client() -> None:
        nonlocal num_answered
        while time.monotonic() - start < seconds:
            reply = await ask(port, work(num_tokens))
            assert reply.status == 200
            num_answered += reply.json["usage"]["completion_tokens"]

    await asyncio.gather(*(client() for _ in range(3 * NUM_ROWS)))
    return num_answered / (time.monotonic() - start)


async def overload(port: int, request: bytes, rate: float, seconds: float) -> list[Reply]:
    """All replies to requests that come at this rate, however they are answered."""
    start = time.monotonic()
    asking: list[asyncio.Task[Reply]] = []
    for place in range(max(int(rate * seconds), 3 * NUM_ROOM)):
        # The first ones come at once: more than there is room for, whatever the rate is.
        due_s = max(0, place - 2 * NUM_ROOM) / rate
        await asyncio.sleep(start + due_s - time.monotonic())
        asking.append(asyncio.create_task(ask(port, request)))
    return await asyncio.gather(*asking)


async def ask_bystander(port: int, is_over: Callable[[], bool]) -> list[float]:
    times: list[float] = []
    while not is_over():
        times.append((await ask(port, closing_get("/"))).seconds)
        await asyncio.sleep(0.05)
    return times


async def overload_beside(
    port: int, request: bytes, rate: float, seconds: float
) -> tuple[list[Reply], list[float]]:
    """The replies, and how long a server with nothing to do took meanwhile."""
    with bystander() as other_port:
        flooding = asyncio.create_task(overload(port, request, rate, seconds))
        others = await ask_bystander(other_port, flooding.done)
        return await flooding, others


def play_overload(
    serving: ServeProcess, seconds: float, num_tokens: int = NUM_TOKENS
) -> dict[str, float]:
    port = port_of(serving)
    peak = asyncio.run(steady(port, seconds / 2, num_tokens))
    rate = OVERLOAD * peak / num_tokens
    start = time.monotonic()
    replies, others = asyncio.run(overload_beside(port, work(num_tokens), rate, seconds))
    answered_s = time.monotonic() - start
    serving.wait_for(lambda: is_at_rest(serving))
    rested_s = time.monotonic() - start
    served = [reply for reply in replies if reply.status == 200]
    refused = [reply for reply in replies if reply.status == 429]
    assert len(served) + len(refused) == len(replies), "nothing else is answered"
    assert served
    assert refused, "it was too little to be too much"
    assert {reply.header("retry-after") for reply in refused} == {"1"}
    num_served = sum(reply.json["usage"]["completion_tokens"] for reply in served)
    figures = {
        "goodput": num_served / answered_s / peak,
        "refused_p99_s": share([reply.seconds for reply in refused], 0.99),
        "bystander_p99_s": share(others, 0.99),
        "recovery_s": rested_s - seconds,
        "queue_s": 5 * NUM_ROWS * num_tokens / peak,
    }
    shown = ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
    show(
        f"{rate:.0f} requests/s, ten times the peak: {len(refused)} of {len(replies)} refused; "
        f"{shown}"
    )
    return figures


@pytest.fixture(scope="module")
def serving_a_real_shape() -> Generator[ServeProcess]:
    """Random weights. The bundled model takes a millisecond a step, which any client disturbs."""
    folder = cached_checkpoint("smollm2-135m", cache_folder())
    flags = ("--max-num-seqs", NUM_ROWS, "--max-model-len", 1024)
    with serve_process(folder, *flags, "--served-model-name", "bundled") as serving:
        serving.wait_ready()
        yield serving


@pytest.mark.soak
def test_a_minute_of_ten_times_too_much_costs_little(serving_a_real_shape: ServeProcess) -> None:
    """Where others use the machine, by what they cost a server with nothing to do."""
    figures = play_overload(serving_a_real_shape, 60.0)
    assert figures["goodput"] >= 0.9
    assert figures["refused_p99_s"] < 0.02 + figures["bystander_p99_s"]
    assert figures["recovery_s"] < max(10.0, 2 * figures["queue_s"])
