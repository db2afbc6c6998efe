"""CPU time of a token from an engine to a client's socket, on Ray Serve and without, in one run.

    python benchmarks/ray_token_cost.py [--streams 32] [--max-tokens 400]

Streams of the bundled model to clients on this machine (`pip install '.[ray]'`; 1.6 GB). Each
figure is CPU time of the named processes over a token, by the kernel's counts; those of clients and
of the engine's own process are in none of them. Three paths, one after another:

- `cadenza serve`: its front end, without Ray
- HAProxy and a bare ingress, whose chunks come from a timer: what Ray takes at least
- `cadenza.serve_app` on Ray: HAProxy, front end, and the engine's host, which is the hop
"""

import argparse
import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
os.environ.setdefault("RAY_raylet_start_wait_time_s", "240")
os.environ["RAY_SERVE_ENABLE_HA_PROXY"] = "1"
os.environ["RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"] = "1"

import httpx
import ray
from ray import serve
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from cadenza.serve_app import app

HAPROXY, BARE = "haproxy-serve", "ray::ServeReplica:bare:Bare"
FRONT, HOST = "ray::ServeReplica:cadenza:Ingress", "ray::ServeReplica:cadenza:Engine"
TOKENS_A_SECOND = 40
CHUNK = b'data: {"choices":[{"index":0,"text":" token","finish_reason":null}]}\n\n'
TICKS = os.sysconf("SC_CLK_TCK")
WITHIN_S = 300.0


async def chunks(count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        await asyncio.sleep(1 / TOKENS_A_SECOND)
        yield CHUNK
    yield b"data: [DONE]\n\n"


async def answer(request: Request) -> StreamingResponse:
    count = int((await request.json())["max_tokens"])
    return StreamingResponse(chunks(count), media_type="text/event-stream")


@serve.deployment(max_ongoing_requests=1000)
@serve.ingress(Starlette(routes=[Route("/v1/completions", answer, methods=["POST"])]))
class Bare:
    """An ingress that does nothing else."""


def pids_of(command: str) -> list[int]:
    """Of processes whose command line has this in it."""
    found: list[int] = []
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if command.encode() in (each / "cmdline").read_bytes():
                found.append(int(each.name))
    return found


def cpu_s(pids: Sequence[int]) -> float:
    total = 0.0
    for pid in pids:
        with open(f"/proc/{pid}/stat") as file:
            counts = file.read().rpartition(")")[2].split()
        total += (int(counts[11]) + int(counts[12])) / TICKS
    return total


async def stream(client: httpx.AsyncClient, url: str, seed: int, max_tokens: int) -> None:
    body = {
        "prompt": "Once upon a time",
        "max_tokens": max_tokens,
        "seed": seed,
        "ignore_eos": True,
        "stream": True,
    }
    async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        assert answer.status_code == httpx.codes.OK, await answer.aread()
        async for _ in answer.aiter_raw():
            pass


async def play(url: str, num_streams: int, max_tokens: int) -> float:
    """The seconds that the streams take."""
    start_s = time.perf_counter()
    async with (
        httpx.AsyncClient(timeout=WITHIN_S, trust_env=False) as client,
        asyncio.TaskGroup() as group,
    ):
        for seed in range(num_streams):
            group.create_task(stream(client, url, seed, max_tokens))
    return time.perf_counter() - start_s


def measured(url: str, parts: dict[str, list[int]], load: tuple[int, int]) -> dict[str, float]:
    """Microseconds of CPU a token, by the part of the path."""
    asyncio.run(play(url, load[0], 16))
    before = {name: cpu_s(pids) for name, pids in parts.items()}
    seconds = asyncio.run(play(url, *load))
    count = load[0] * load[1]
    found = {name: 1e6 * (cpu_s(pids) - before[name]) / count for name, pids in parts.items()}
    told = ", ".join(f"{name} {cost:.1f}" for name, cost in found.items())
    print(f"  {told} us a token; {count / seconds:.0f} tok/s", flush=True)
    return found


def wait_for(look: Callable[[], object]) -> None:
    end_s = time.monotonic() + WITHIN_S
    while not look():
        assert time.monotonic() < end_s
        time.sleep(0.2)


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", trust_env=False).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@contextmanager
def served(num_rows: int) -> Iterator[tuple[str, int]]:
    """`cadenza serve`, and the id of its front end's process."""
    port = free_port()
    flags = ["--port", str(port), "--max-num-seqs", str(num_rows), "--disable-log-requests"]
    code = "from cadenza.cli import main; main()"
    command = [sys.executable, "-c", code, "serve", *flags, "--log-level", "warning"]
    with subprocess.Popen(command) as server:
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: is_ready(url))
        yield url, server.pid
        server.send_signal(signal.SIGTERM)


@contextmanager
def on_ray(num_rows: int) -> Iterator[str]:
    before, port = set(pids_of(HAPROXY)), free_port()
    ray.init(
        num_cpus=4, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    url = f"http://127.0.0.1:{port}"
    flags: dict[str, Any] = {"max_num_seqs": num_rows, "disable_log_requests": True}
    flags["engine_resources"] = {"num_cpus": 0.5}
    try:
        serve.run(app(flags), name="cadenza", route_prefix="/")
        serve.run(cast(Any, Bare).bind(), name="bare", route_prefix="/bare")
        wait_for(lambda: is_ready(url))
        yield url
        serve.shutdown()
    finally:
        ray.shutdown()
        for each in set(pids_of(HAPROXY)) - before:
            os.kill(each, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=400)
    arguments = parser.parse_args()
    load = arguments.streams, arguments.max_tokens
    print("cadenza serve, without Ray")
    with served(arguments.streams) as (url, pid):
        front = measured(url, {"front": [pid]}, load)["front"]
    with on_ray(arguments.streams) as url:
        proxies = pids_of(HAPROXY)
        print("HAProxy and a bare ingress")
        bare = measured(f"{url}/bare", {"HAProxy": proxies, "ingress": pids_of(BARE)}, load)
        print("cadenza.serve_app")
        parts = {"HAProxy": proxies, "front": pids_of(FRONT), "host": pids_of(HOST)}
        whole = measured(url, parts, load)
    least, found = sum(bare.values()), sum(whole.values())
    print(
        f"together {found:.1f} us a token; HAProxy and a bare ingress {least:.1f}, the front end "
        f"{front:.1f}, the hop {whole['host']:.1f}: at most {105 + front + 10:.1f} is the bar: "
        f"{'kept' if found <= 105 + front + 10 else 'missed'}"
    )


if __name__ == "__main__":
    main()
