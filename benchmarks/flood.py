"""What a flood does on a real server: to another tenant's time to the first token, or to all.

    python benchmarks/flood.py [--shape smollm2-135m] [--request-rate 0.4] [--num-requests 50]
    python benchmarks/flood.py --overload 3 [--crowd 1000]

The first starts `cadenza serve` with two API keys, for random weights of a shape or for the bundled
model. The polite tenant sends its requests at a rate: alone, and beside one that sends 20 times as
many; so `--rounds` times. Prints the p50 and p99 of the polite tenant's time to the first token,
what was refused, and the medians of the ratios. Both clients run on the server's machine.

The second has a crowd ask at once, each of which should be answered; then as many clients as keep
the rows busy, which shows the server's capacity; then, for as long, so many times as many requests
a second come, with a `--queue-timeout` of 5 s. Prints the tokens of whole answers as a share of the
capacity (goodput), and how soon the others were refused. The clients have a process of their own.
"""

import argparse
import asyncio
import gc
import json
import random
import re
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from urllib.parse import urlsplit

from cadenza.bench.checkpoints import cached_checkpoint
from cadenza.bench.serve import measure_serving
from cadenza.bench.serve_figures import LoadFigures, Spread
from cadenza.bench.serve_options import LoadOptions, ServerAddress
from cadenza.config import DEFAULT_MAX_NUM_SEQS
from cadenza.loading.build import cache_folder
from serving import COMMAND, serving

KEYS = POLITE_KEY, FLOOD_KEY = "polite-tenant", "flooding-tenant"
TIMES = 20
FILL_S = 15.0
MAX_MODEL_LEN = 2048

PER_ROW = 4
"""Clients of the run that shows the capacity."""
QUEUE_S, RUN_S = 5.0, 30.0
OK = 200


@contextmanager
def serving_both(folder: Path | None) -> Generator[str]:
    """Starts a server for both tenants and yields its URL."""
    with tempfile.NamedTemporaryFile("w") as keys:
        keys.write("\n".join(KEYS))
        keys.flush()
        flags = ["--disable-log-requests", "--api-key-file", keys.name]
        with serving(folder, *flags, "--max-model-len", str(MAX_MODEL_LEN)) as url:
            yield url


@contextmanager
def flooding(url: str, request_rate: float, seed: int) -> Generator[None]:
    """Sends requests of the flooding tenant until the block ends; the first ones fill the rows."""
    options = ["--request-rate", str(request_rate), "--num-requests", "100000"]
    options += ["--api-key", FLOOD_KEY, "--seed", str(seed)]
    client = subprocess.Popen(
        [*COMMAND, "bench", "serve", url, *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        client.wait(timeout=FILL_S)
        raise SystemExit("the flood ended; run `cadenza bench serve` by hand")
    except subprocess.TimeoutExpired:
        yield
    finally:
        client.kill()
        client.wait()


def polite(url: str, request_rate: float, num_requests: int, seed: int) -> LoadFigures:
    address = ServerAddress(url=url, api_key=POLITE_KEY)
    options = LoadOptions(request_rate=(request_rate,), num_requests=num_requests, seed=seed)
    return measure_serving(address, options, lambda _: None).loads[0]


def show(name: str, figures: LoadFigures) -> Spread:
    ttft = figures.ttft
    assert ttft is not None, f"no request was answered: {figures.errors}"
    print(
        f"{name:6} {figures.num_answers:4} answers, p50 {ttft.p50_s * 1e3:6.0f} ms, "
        f"p99 {ttft.p99_s * 1e3:6.0f} ms, not answered: {figures.errors or 'none'}",
        flush=True,
    )
    return ttft


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """`num_tokens`: generated."""

    status: int
    seconds: float
    ended_s: float
    num_tokens: int = 0


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Clients:
    """Send requests over connections that stay open, as many as there are requests at once."""

    def __init__(self, url: str) -> None:
        found = urlsplit(url)
        self._host, self._port = found.hostname, found.port
        self._idle: list[Connection] = []

    async def ask(self, rng: random.Random) -> Reply:
        """A chat of a length of its own."""
        body = {
            "messages": [{"role": "user", "content": f"Tell me story {rng.randrange(10**6)}."}],
            "max_tokens": rng.randint(20, 100),
            "ignore_eos": True,
        }
        raw = json.dumps(body).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
            f"content-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
        )
        start_s = time.monotonic()
        reader, writer = await self._connection()
        writer.write(head.encode() + raw)
        answer = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"\r\ncontent-length: (\d+)", answer)
        assert length is not None, answer
        found = json.loads(await reader.readexactly(int(length.group(1))))
        self._idle.append((reader, writer))
        ended_s, status = time.monotonic(), int(answer.split(None, 2)[1])
        return Reply(
            status=status,
            seconds=ended_s - start_s,
            ended_s=ended_s,
            num_tokens=found["usage"]["completion_tokens"] if status == OK else 0,
        )

    async def _connection(self) -> Connection:
        if self._idle:
            return self._idle.pop()
        return await asyncio.open_connection(self._host, self._port)

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


def tok_s(replies: Sequence[Reply], from_s: float, until_s: float) -> float:
    """Of the answers that ended in the time."""
    ended = [each for each in replies if from_s <= each.ended_s < until_s]
    return sum(each.num_tokens for each in ended) / (until_s - from_s)


async def kept_busy(url: str, num_clients: int) -> list[Reply]:
    """Clients that ask one request after the other."""
    clients, end_s = Clients(url), time.monotonic() + RUN_S

    async def client(seed: int) -> list[Reply]:
        rng, found = random.Random(seed), list[Reply]()
        while time.monotonic() < end_s:
            found.append(await clients.ask(rng))
        return found

    found = await asyncio.gather(*map(client, range(num_clients)))
    clients.close()
    return list(chain.from_iterable(found))


async def at_rate(url: str, request_rate: float) -> list[Reply]:
    """Requests that come at random times, whatever becomes of them."""
    clients, rng = Clients(url), random.Random(0)
    asked: list[asyncio.Task[Reply]] = []
    next_s = time.monotonic()
    end_s = next_s + RUN_S
    while (next_s := next_s + rng.expovariate(request_rate)) < end_s:
        await asyncio.sleep(max(0.0, next_s - time.monotonic()))
        asked.append(asyncio.create_task(clients.ask(random.Random(len(asked)))))
    found = await asyncio.gather(*asked)
    clients.close()
    return list(found)


async def crowd(url: str, num_clients: int) -> list[Reply]:
    """One request of each, at once."""
    clients = Clients(url)
    found = await asyncio.gather(*(clients.ask(random.Random(seed)) for seed in range(num_clients)))
    clients.close()
    return list(found)


def show_replies(name: str, replies: Sequence[Reply]) -> None:
    for status, count in sorted(Counter(each.status for each in replies).items()):
        times = sorted(each.seconds for each in replies if each.status == status)
        p50, p99 = times[count // 2], times[min(count - 1, int(0.99 * count))]
        print(f"{name:9} {status}: {count:6}, p50 {p50:8.3f} s, p99 {p99:8.3f} s", flush=True)


def overload(folder: Path | None, times: float, num_clients: int) -> None:
    gc.disable()  # the clients' pauses are not the server's
    flags = ["--disable-log-requests", "--max-model-len", str(MAX_MODEL_LEN)]
    with serving(folder, *flags) as url:
        show_replies("crowd", asyncio.run(crowd(url, num_clients)))
    with serving(folder, *flags, "--queue-timeout", str(QUEUE_S)) as url:
        start_s = time.monotonic()
        busy = asyncio.run(kept_busy(url, PER_ROW * DEFAULT_MAX_NUM_SEQS))
        capacity = tok_s(busy, start_s, start_s + RUN_S)
        show_replies("capacity", busy)
        request_rate = times * len(busy) / RUN_S
        start_s = time.monotonic()
        flooded = asyncio.run(at_rate(url, request_rate))
        show_replies("overload", flooded)
        useful = tok_s(flooded, start_s, start_s + RUN_S)
    print(
        f"{request_rate:.0f} requests a second, {times:g} times the capacity of {capacity:.0f} "
        f"tok/s: {useful:.0f} tok/s of whole answers, goodput {useful / capacity:.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default=None)
    parser.add_argument("--request-rate", type=float, default=0.4)
    parser.add_argument("--num-requests", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--overload", type=float, default=None)
    parser.add_argument("--crowd", type=int, default=1000)
    arguments = parser.parse_args()
    folder = None
    if arguments.shape is not None:
        folder = cached_checkpoint(arguments.shape, cache_folder(), lambda _: None)
    if arguments.overload is not None:
        overload(folder, arguments.overload, arguments.crowd)
        return
    rate, count = arguments.request_rate, arguments.num_requests
    ratios: list[tuple[float, float]] = []
    for seed in range(arguments.rounds):
        with serving_both(folder) as url:
            alone = show("alone", polite(url, rate, count, seed))
            with flooding(url, TIMES * rate, seed + 1000):
                beside = show("flood", polite(url, rate, count, seed))
        ratios.append((beside.p50_s / alone.p50_s, beside.p99_s / alone.p99_s))
    p50, p99 = (statistics.median(each) for each in zip(*ratios, strict=True))
    print(f"beside the flood, times as long as alone: p50 {p50:.2f}, p99 {p99:.2f}")


if __name__ == "__main__":
    main()
