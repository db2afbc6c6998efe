"""What a long prompt does to running streams: the worst gap between two of their chunks, and how
long a short prompt behind the long one waits.

    python benchmarks/long_prompts.py [--shape smollm2-135m] [--quantization int8]
        [--tokens 2000,7900] [--streams 8]
    python benchmarks/long_prompts.py --url http://127.0.0.1:8000

Starts `cadenza serve` for random weights of a shape; with `--url` a running server is asked, any of
`/v1/completions` that streams and takes prompts as token ids: Cadenza, vLLM, llama-server. While so
many streams run, a prompt of each length is sent and, as long as it is being computed, prompts of
100 tokens, one after the other. The table has, by length: the worst gap of any stream and the 99th
percentile of gaps, until a second after the long prompt's first token; the time to the first token
of the long prompt, alone on the server beforehand and beside the streams; and that of the short
ones, medians of several alone, beside the streams, and behind the long one (also the longest of
these). Of Cadenza it also prints the bound of a step (`--max-itl-ms`), the lowest and the highest
that it stated meanwhile, and the worst gap as a multiple of the bound that it stated at that time.
Client and server share the machine.
"""

import argparse
import asyncio
import random
import re
import time
from collections.abc import AsyncGenerator
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import httpx

from cadenza.bench.checkpoints import cached_checkpoint
from cadenza.loading.build import cache_folder
from serving import serving

TIMEOUT_S = 600
SHORT = 100
NUM_SHORT = 5
BEHIND_S = 0.05
PAUSE_S = 0.2
"""Between two short prompts; up to this much more at random, so that they come at any time of a
step."""
AFTER_S = 1.0
WATCH_S = 0.5
NUM_IDS = 20_000


@dataclass(slots=True)
class Stream:
    """One running stream: when its chunks came."""

    times_s: list[float] = field(default_factory=list[float])

    def gaps(self, start_s: float, end_s: float) -> list[tuple[float, float]]:
        """Seconds between two chunks and when the second came, of those that came in this time."""
        pairs = zip(self.times_s, self.times_s[1:], strict=False)
        return [(b - a, b) for a, b in pairs if start_s <= b <= end_s]


@dataclass(slots=True)
class Bounds:
    """The bounds of a step that Cadenza stated, and when; none of other servers."""

    stated: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])

    def at(self, time_s: float) -> float:
        """The one that was stated last before a time, or else the first."""
        before = [bound_s for at_s, bound_s in self.stated if at_s <= time_s]
        return before[-1] if before else self.stated[0][1]

    def cells(self, gaps: list[tuple[float, float]]) -> str:
        """Lowest and highest bound, and the worst gap as a multiple of its own."""
        if not self.stated:
            return "      -"
        bounds_s = [bound_s for _, bound_s in self.stated]
        worst = max(gap_s / self.at(at_s) for gap_s, at_s in gaps)
        low, high = 1000 * min(bounds_s), 1000 * max(bounds_s)
        return f"{low:5.0f}..{high:.0f}{worst:7.2f}"


class Server:
    """A server under test."""

    def __init__(self, url: str, client: httpx.AsyncClient, num_ids: int = NUM_IDS) -> None:
        self._url = url
        self._num_ids = num_ids
        self._client = client
        self._rng = random.Random(7)
        self._model: str | None = None

    async def chunks(
        self, num_tokens: int, max_tokens: int, **fields: Any
    ) -> AsyncGenerator[float]:
        """The times of the chunks of an answer to a random prompt; `fields` of the body besides."""
        if self._model is None:
            listed = (await self._client.get(f"{self._url}/v1/models")).json()
            self._model = listed["data"][0]["id"]
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": [self._rng.randrange(100, self._num_ids) for _ in range(num_tokens)],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "return_token_ids": True,  # Cadenza and vLLM then send tokens without text, too
            **fields,
        }
        async with self._client.stream("POST", f"{self._url}/v1/completions", json=body) as answer:
            if answer.status_code != httpx.codes.OK:
                raise SystemExit(f"{answer.status_code}: {(await answer.aread()).decode()}")
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    yield time.perf_counter()

    async def ttft_s(self, num_tokens: int, **fields: Any) -> float:
        start_s = time.perf_counter()
        times_s = [each async for each in self.chunks(num_tokens, 1, **fields)]
        return times_s[0] - start_s

    async def short_ttfts_s(self, beside: asyncio.Task[float] | None = None) -> list[float]:
        """Of short prompts, one after the other; the first, and further ones until a task ends."""
        times_s: list[float] = []
        while len(times_s) < NUM_SHORT and not (times_s and beside is not None and beside.done()):
            times_s.append(await self.ttft_s(SHORT))
            await asyncio.sleep(PAUSE_S * self._rng.uniform(1, 2))
        return times_s

    @asynccontextmanager
    async def running(self, count: int, max_tokens: int) -> AsyncGenerator[list[Stream]]:
        """Streams that go on until the block ends, each with a few chunks at its start."""
        streams = [Stream() for _ in range(count)]
        tasks = [asyncio.create_task(self._follow(each, max_tokens)) for each in streams]
        while min(len(each.times_s) for each in streams) < 8:
            await asyncio.sleep(0.01)
        try:
            yield streams
            if any(task.done() for task in tasks):
                raise SystemExit(
                    "a stream ended before the prompt was computed; give a larger context"
                )
        finally:
            for task in tasks:
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks)

    async def _follow(self, stream: Stream, max_tokens: int) -> None:
        async for time_s in self.chunks(16, max_tokens):
            stream.times_s.append(time_s)

    @asynccontextmanager
    async def bounds(self) -> AsyncGenerator[Bounds]:
        """What Cadenza states until the block ends."""
        bounds = Bounds()
        task = asyncio.create_task(self._watch(bounds))
        try:
            yield bounds
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _watch(self, bounds: Bounds) -> None:
        while True:
            text = (await self._client.get(f"{self._url}/metrics")).text
            found = re.search(r"^cadenza:max_itl_seconds\S* (\S+)", text, re.MULTILINE)
            if found is None:
                return
            bounds.stated.append((time.perf_counter(), float(found[1])))
            await asyncio.sleep(WATCH_S)


async def measure(server: Server, num_tokens: int, options: argparse.Namespace) -> str:
    """One line of the table."""
    await server.ttft_s(SHORT)
    short_alone_s, long_alone_s = await server.short_ttfts_s(), await server.ttft_s(num_tokens)
    async with server.running(options.streams, options.max_tokens) as streams:
        before_s = time.perf_counter()
        await asyncio.sleep(AFTER_S)
        short_beside_s = await server.short_ttfts_s()
        await asyncio.sleep(AFTER_S)
        start_s = time.perf_counter()
        async with server.bounds() as bounds:
            long = asyncio.create_task(server.ttft_s(num_tokens))
            await asyncio.sleep(BEHIND_S)
            short_s, long_s = await server.short_ttfts_s(long), await long
            await asyncio.sleep(AFTER_S)
        end_s = time.perf_counter()
    before, beside = (
        sorted(gap for each in streams for gap in each.gaps(*part))
        for part in ((before_s, start_s), (start_s, end_s))
    )
    gaps = before[-1][0], beside[len(beside) * 99 // 100][0], beside[-1][0]
    shorts_s = [median(each) for each in (short_alone_s, short_beside_s, short_s)]
    numbers = (*gaps, long_alone_s, long_s, *shorts_s, max(short_s))
    cells = "".join(f"{1000 * each:8.0f}" for each in numbers)
    return f"{num_tokens:7}{cells} {bounds.cells(beside)}"


async def measure_all(options: argparse.Namespace) -> None:
    limits = httpx.Limits(max_connections=options.streams + 4)
    async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits) as client:
        server = Server(options.url.rstrip("/"), client)
        print("        ----- gaps, ms -----   long, ms to 1st   ------ short, ms to 1st ------")
        names = (
            "before",
            "p99",
            "worst",
            "alone",
            "beside",
            "alone",
            "beside",
            "behind",
            "longest",
        )
        header = "".join(f"{name:>8}" for name in names)
        print(f" tokens{header}      bound  worst/bound", flush=True)
        for _ in range(options.rounds):
            for each in options.tokens.split(","):
                print(await measure(server, int(each), options), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Worst gaps of streams beside long prompts.")
    parser.add_argument("--url")
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--quantization", default="none", help="of the shape's weights")
    parser.add_argument("--tokens", default="2000,7900")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=4000, help="of each stream, at most")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    with ExitStack() as stack:
        if options.url is None:
            folder = cached_checkpoint(options.shape, cache_folder(), lambda _: None)
            flags = ("--disable-log-requests", "--quantization", options.quantization)
            options.url = stack.enter_context(serving(folder, *flags))
        asyncio.run(measure_all(options))


if __name__ == "__main__":
    main()
