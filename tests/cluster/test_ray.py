"""Streams through Ray Serve outlive the engines and nodes that they run in.

On a Ray cluster of three nodes on this machine, which takes 1.6 GB. `CADENZA_RAY_KILLS` and
`CADENZA_RAY_STREAMS` make the run smaller.
"""

import asyncio
import importlib.util
import os
import random
from typing import Any

import httpx
import pytest

from tests.cluster.ray_app import WITHIN_S, RayApp, stream

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install '.[ray]'"
    ),
]

NUM_STREAMS = int(os.environ.get("CADENZA_RAY_STREAMS", "64"))
NUM_KILLS = int(os.environ.get("CADENZA_RAY_KILLS", "50"))
REPLICAS = 3
COMMANDS = ("engine", "engine", "process", "process", "node")


async def play(ray_app: RayApp) -> dict[str, Any]:
    """Plays the streams again and again until the last kill is over."""
    limits = httpx.Limits(max_connections=None)
    client = httpx.AsyncClient(
        base_url=ray_app.url, timeout=WITHIN_S, trust_env=False, limits=limits
    )
    async with client:
        ray_app.wait_ready(1)
        alone = await asyncio.gather(*(stream(client, each) for each in range(NUM_STREAMS)))
        assert not any(each.startswith("error") for each in alone), alone
        killing = asyncio.create_task(asyncio.to_thread(kill, ray_app))
        found: dict[str, Any] = {"played": 0, "errors": [], "differing": []}
        while not killing.done():
            playing = (stream(client, each) for each in range(NUM_STREAMS))
            for index, each in enumerate(await asyncio.gather(*playing)):
                found["played"] += 1
                if each.startswith("error"):
                    found["errors"].append((index, each))
                elif each != alone[index]:
                    found["differing"].append((index, each))
        return {**found, "kills": await killing}


def kill(ray_app: RayApp) -> dict[str, int]:
    """One after another, each while at least two engines serve."""
    generator = random.Random(NUM_KILLS)
    counts: dict[str, int] = dict.fromkeys(COMMANDS, 0)
    for turn in range(NUM_KILLS):
        ray_app.wait_ready(2)
        command = COMMANDS[turn % len(COMMANDS)]
        ray_app.obey(command)
        counts[command] += 1
        asyncio.run(asyncio.sleep(generator.uniform(0.5, 2.0)))
    return counts


@pytest.mark.parametrize("fronts", [1, 2])
def test_no_client_sees_that_engines_and_nodes_are_killed(fronts: int) -> None:
    ray_app = RayApp(replicas=REPLICAS, max_num_seqs=32, fronts=fronts)
    try:
        found = asyncio.run(play(ray_app))
        resumed = ray_app.metric("cadenza:requests_resumed_t")
    finally:
        ray_app.close()
    print(found, resumed)
    assert found["errors"] == found["differing"] == []
    assert found["played"] >= NUM_STREAMS
    assert resumed > 0
