"""Streams through Ray Serve outlive the engines and nodes that they run in.

On a Ray cluster of three nodes on this machine, which takes 1.6 GB. `CADENZA_RAY_KILLS` and
`CADENZA_RAY_STREAMS` make the run smaller. A run that was interrupted goes on with the kills that
are left, by pytest's cache; one that failed begins anew.
"""

import asyncio
import importlib.util
import itertools
import os
import random
import time
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


async def play(ray_app: RayApp, tally: "Tally") -> dict[str, Any]:
    """Plays the streams again and again until the last kill is over."""
    limits = httpx.Limits(max_connections=None)
    client = httpx.AsyncClient(
        base_url=ray_app.url, timeout=WITHIN_S, trust_env=False, limits=limits
    )
    async with client:
        ray_app.wait_ready(1)
        alone = await asyncio.gather(*(stream(client, each) for each in range(NUM_STREAMS)))
        assert not any(each.startswith("error") for each in alone), alone
        killing = asyncio.create_task(asyncio.to_thread(kill, ray_app, tally))
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


class Tally:
    """The kills that earlier runs have survived, kept under a name."""

    def __init__(self, cache: pytest.Cache, name: str) -> None:
        self._cache, self._name = cache, name

    @property
    def count(self) -> int:
        return self._cache.get(self._name, 0)

    def set(self, count: int) -> None:
        self._cache.set(self._name, count)


def kill(ray_app: RayApp, tally: Tally) -> dict[str, int]:
    """One after another, each while at least two engines serve."""
    counts: dict[str, int] = dict.fromkeys(COMMANDS, 0)
    generator = random.Random(NUM_KILLS)
    for turn in range(tally.count, NUM_KILLS):
        ray_app.wait_ready(2)
        command = COMMANDS[turn % len(COMMANDS)]
        ray_app.obey(command)
        counts[command] += 1
        asyncio.run(asyncio.sleep(generator.uniform(0.5, 2.0)))
        tally.set(turn + 1)
    return counts


@pytest.mark.parametrize("fronts", [1, 2])
def test_no_client_sees_that_engines_and_nodes_are_killed(
    fronts: int, pytestconfig: pytest.Config
) -> None:
    assert pytestconfig.cache is not None
    tally = Tally(pytestconfig.cache, f"cadenza/ray-kills-{fronts}-{NUM_STREAMS}-{NUM_KILLS}")
    ray_app = RayApp(replicas=REPLICAS, max_num_seqs=32, fronts=fronts)
    try:
        found = asyncio.run(play(ray_app, tally))
        resumed = ray_app.metric("cadenza:requests_resumed_t")
    finally:
        ray_app.close()
    print(found, resumed)
    tally.set(0)
    assert found["errors"] == found["differing"] == []
    assert found["played"] >= NUM_STREAMS
    assert resumed > 0


async def flood(ray_app: RayApp, turn: int) -> None:
    """Prompts that have nothing in common, and one token each."""
    async with httpx.AsyncClient(base_url=ray_app.url, timeout=WITHIN_S, trust_env=False) as client:
        for each in await asyncio.gather(
            *(
                client.post(
                    "/v1/completions",
                    json={"prompt": f"{turn}-{index} " + "the fox " * 400, "max_tokens": 1},
                )
                for index in range(48)
            )
        ):
            assert each.status_code in (httpx.codes.OK, httpx.codes.TOO_MANY_REQUESTS), each.text


async def streams_of(ray_app: RayApp, count: int) -> list[str]:
    async with httpx.AsyncClient(base_url=ray_app.url, timeout=WITHIN_S, trust_env=False) as client:
        return await asyncio.gather(*(stream(client, each) for each in range(count)))


def test_engines_come_for_prompts_that_wait_and_go_when_it_is_quiet_under_running_streams() -> None:
    scaling = {"min_replicas": 1, "ttft_goal_s": 0.2, "quiet_s": 10}
    ray_app = RayApp(replicas=2, max_num_seqs=8, autoscaling=scaling)
    try:
        ray_app.wait_ready(1)
        assert ray_app.obey("count") == "1"
        alone = asyncio.run(streams_of(ray_app, 8))
        end_s = time.monotonic() + WITHIN_S
        for turn in itertools.count():
            asyncio.run(flood(ray_app, turn))
            if ray_app.num_ready() == 2:
                break
            assert time.monotonic() < end_s, "no engine was added"
        num_seen = 0
        while ray_app.obey("count") != "1":
            assert asyncio.run(streams_of(ray_app, 8)) == alone
            num_seen += 1
            assert time.monotonic() < end_s + WITHIN_S, "no engine was taken away"
        assert num_seen
    finally:
        ray_app.close()
