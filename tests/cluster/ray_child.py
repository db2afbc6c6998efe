"""Plays streams through a Ray application whose engines are killed meanwhile; prints what it found.

Run as a script, with the numbers of streams and kills: Ray is for a process of its own.
"""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from typing import Any

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
os.environ.setdefault("RAY_raylet_start_wait_time_s", "240")

import httpx
import ray
from ray import serve

from cadenza.serve_app import app

REPLICAS = 3
ENGINE_ACTORS = "ray::ServeReplica:default:Engine"
WITHIN_S = 300.0
MAX_TOKENS = 160


def main(num_streams: int, num_kills: int, port: int) -> None:
    ray.init(
        num_cpus=4, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    flags = {"replicas": REPLICAS, "max_num_seqs": 32, "disable_log_requests": True}
    serve.run(app({**flags, "engine_resources": {"num_cpus": 0.5}}))
    try:
        found = asyncio.run(play(f"http://127.0.0.1:{port}", num_streams, num_kills))
    finally:
        serve.shutdown()
        ray.shutdown()
    print(json.dumps(found))


async def play(url: str, num_streams: int, num_kills: int) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=url, timeout=WITHIN_S, trust_env=False) as client:
        await ready(client, 1)
        alone = await asyncio.gather(*(stream(client, index) for index in range(num_streams)))
        await ready(client, REPLICAS)
        killing = asyncio.create_task(kill(client, num_kills))
        num_played, differing, failed = 0, 0, 0
        while not killing.done():
            found = await asyncio.gather(*(stream(client, index) for index in range(num_streams)))
            num_played += len(found)
            failed += sum(each is None for each in found)
            differing += sum(
                each is not None and each != own for each, own in zip(found, alone, strict=True)
            )
        await killing
        metrics = (await client.get("/metrics")).text
    resumed = [
        line for line in metrics.splitlines() if line.startswith("cadenza:requests_resumed_t")
    ]
    return {
        "played": num_played,
        "failed": failed,
        "differing": differing,
        "resumed": float(resumed[0].rsplit(" ", 1)[1]),
    }


async def stream(client: httpx.AsyncClient, index: int) -> str | None:
    """A streamed answer; None where it failed."""
    body = {
        "prompt": f"Story {index}: once upon a time",
        "max_tokens": MAX_TOKENS,
        "temperature": 0.8,
        "seed": index,
        "ignore_eos": True,
        "stream": True,
    }
    text, is_whole = "", False
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                is_whole = is_whole or line == "data: [DONE]"
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
    except (httpx.HTTPError, KeyError):
        return None
    return text if is_whole and answer.status_code == 200 else None


async def kill(client: httpx.AsyncClient, count: int) -> None:
    """One engine after another, each while at least one other is there."""
    generator = random.Random(count)
    for _ in range(count):
        await ready(client, 2)
        command = ["pgrep", "-f", ENGINE_ACTORS]
        listed = subprocess.run(command, capture_output=True, text=True, check=True)
        os.kill(generator.choice([int(pid) for pid in listed.stdout.split()]), signal.SIGKILL)
        await asyncio.sleep(generator.uniform(0.5, 2.0))


async def ready(client: httpx.AsyncClient, count: int) -> None:
    end_s = time.monotonic() + WITHIN_S
    while time.monotonic() < end_s:
        try:
            text = (await client.get("/metrics")).text
        except httpx.HTTPError:
            text = ""
        for line in text.splitlines():
            is_ready = line.startswith("cadenza:replicas") and 'state="ready"' in line
            if is_ready and float(line.rsplit(" ", 1)[1]) >= count:
                return
        await asyncio.sleep(0.2)
    raise TimeoutError(f"{count} replicas are not ready")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
