"""How well replicas keep the prefixes of 64 conversations, and what that does to first tokens.

    python benchmarks/routing.py [--replicas 4] [--step-cost 5,0.25,0.1,0.0001] [--real]

Simulates the conversations with Cadenza's router, an ideal split, and other rules, over the same
engines (`sessions`); the rates of hits are compared with those of one replica. With `--real` they
also run on `cadenza serve --replicas` of the bundled model, and on one.
"""

import argparse
import asyncio
import json
import re
import time
from collections.abc import Callable
from dataclasses import replace

import httpx

from cadenza import EngineConfig
from cadenza.cluster.router import Router
from cadenza_bench.simulate.device import SimulatedServer, given_server
from serving import serving
from sessions import (
    FewestOpen,
    Found,
    IdealSplit,
    InTurns,
    RayPrefixRule,
    Session,
    Talk,
    sessions_of,
    simulate_sessions,
)

WITHIN_S = 300.0
ANSWER_S = 60.0


def rules_of(talk: Talk) -> dict[str, Callable[[], Router | None]]:
    return {
        "Cadenza": lambda: None,
        "ideal split": lambda: IdealSplit(talk),
        "Ray's prefix rule": lambda: RayPrefixRule(float("inf")),
        "the same, threshold 10": lambda: RayPrefixRule(10),
        "fewest open": FewestOpen,
        "in turns": InTurns,
    }


def show_simulated(server: SimulatedServer, talk: Talk, num_replicas: int) -> None:
    one = simulate_sessions(server, talk, 1, None)
    ideal = simulate_sessions(server, talk, num_replicas, IdealSplit(talk))
    print(f"{'simulated':24}{'hit rate':>10}{'of one':>9}{'p50':>10}{'p99':>10}{'of ideal':>10}")
    for name, make in rules_of(talk).items():
        found = simulate_sessions(server, talk, num_replicas, make())
        show(name, found, one, found.quantile_s(0.99) / ideal.quantile_s(0.99))


def show(name: str, found: Found, one: Found, of_ideal: float | None) -> None:
    last = "" if of_ideal is None else f"{of_ideal:10.2f}"
    p50, p99 = (1000 * found.quantile_s(share) for share in (0.5, 0.99))
    rates = f"{found.hit_rate:10.3f}{found.hit_rate / one.hit_rate:9.3f}"
    print(f"{name:24}{rates}{p50:7.0f} ms{p99:7.0f} ms{last}", flush=True)


async def play(url: str, num_replicas: int, talk: Talk) -> Found:
    """The sessions against a server, once all its replicas are ready."""
    limits = httpx.Limits(max_connections=talk.num_sessions + 1)
    async with httpx.AsyncClient(
        base_url=url, timeout=WITHIN_S, trust_env=False, limits=limits
    ) as client:
        await wait_ready(client, num_replicas)
        start_s = time.monotonic()
        turns = [talk_of(client, each, start_s) for each in sessions_of(talk)]
        answers = [answer for each in await asyncio.gather(*turns) for answer in each]
    num_asked = sum(num_prompt for _, num_prompt, _ in answers)
    num_cached = sum(num_cached for _, _, num_cached in answers)
    return Found(ttfts_s=sorted(each[0] for each in answers), hit_rate=num_cached / num_asked)


async def wait_ready(client: httpx.AsyncClient, count: int) -> None:
    end_s = time.monotonic() + WITHIN_S
    while time.monotonic() < end_s:
        text = (await client.get("/metrics")).text
        found = re.search(r'^cadenza:replicas\{.*state="ready".*\} (\S+)$', text, re.MULTILINE)
        if count == 1 or (found is not None and float(found.group(1)) >= count):
            return
        await asyncio.sleep(0.2)
    raise SystemExit(f"{count} replicas are not ready")


async def talk_of(
    client: httpx.AsyncClient, session: Session, start_s: float
) -> list[tuple[float, int, int]]:
    """Of each turn: seconds to the first token, tokens of the prompt, those found cached."""
    await asyncio.sleep(max(0.0, start_s + session.at_s - time.monotonic()))
    found: list[tuple[float, int, int]] = []
    while True:
        found.append(await ask(client, session))
        pause_s = session.pause_s
        if not session.next_turn():
            return found
        await asyncio.sleep(pause_s)


async def ask(client: httpx.AsyncClient, session: Session) -> tuple[float, int, int]:
    body = {
        "prompt": session.prompt,
        "max_tokens": session.max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    sent_s, first_s, usage = time.monotonic(), None, {}
    answer: list[int] = []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            first_s = first_s or time.monotonic()
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                answer += choice.get("token_ids") or []
    assert first_s is not None, "an answer has tokens"
    session.prompt = [*session.prompt, *answer]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return first_s - sent_s, usage["prompt_tokens"], cached


def show_real(talk: Talk, num_replicas: int) -> None:
    print(f"{'bundled model':24}{'hit rate':>10}{'of one':>9}{'p50':>10}{'p99':>10}")
    flags = ("--disable-log-requests", "--max-num-seqs")
    found: dict[int, Found] = {}
    for count in (1, num_replicas):
        rows = talk.num_sessions // count
        with serving(None, *flags, str(rows), "--replicas", str(count)) as url:
            found[count] = asyncio.run(play(url, count, talk))
        show(f"{count} replicas", found[count], found[1], None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--step-cost", default="5,0.25,0.1,0.0001")
    parser.add_argument("--mean-pause-s", type=float, default=4.0)
    parser.add_argument("--systems", type=int, default=4, help="system prompts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--real", action="store_true")
    asked = parser.parse_args()
    talk = Talk(num_systems=asked.systems, mean_pause_s=asked.mean_pause_s, seed=asked.seed)
    costs = tuple(map(float, asked.step_cost.split(",")))
    config = EngineConfig(max_num_seqs=32, max_model_len=2048, num_pages=2048)
    show_simulated(given_server(costs, config), talk, asked.replicas)
    if asked.real:
        show_real(replace(talk, mean_pause_s=1.0), asked.replicas)


if __name__ == "__main__":
    main()
