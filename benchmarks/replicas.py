"""What replicas on one core each do: tokens a second, the front end's work, and a prediction.

    python benchmarks/replicas.py throughput [--shape smollm2-135m] [--repeats 3]
    python benchmarks/replicas.py predict [--shape smollm2-135m] [--request-rate 3]

`throughput`: two engines side by side without HTTP or a group, one core each; the same two as a
group; `cadenza serve` over two, and over one with both cores. The client and the front end run on
the same cores. `predict`: `bench simulate` of two replicas beside the same requests in real time,
with step costs that two engines learn from other requests at the same time, one core each.
"""

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import httpx

from cadenza import LLM, EngineConfig, Finished, Request, SamplingParams, Token
from cadenza.batch.step_cost import StepCost, derive_bound_ms
from cadenza.bench.checkpoints import cached_checkpoint
from cadenza.cli.served_models import replica_places
from cadenza.cluster.cores import own_cpus
from cadenza.cluster.engine_group import EngineGroup
from cadenza.config import EngineLimits
from cadenza.engine.front import EngineFront
from cadenza.engine.process.child_process import ChildProcess
from cadenza.engine.process.process_link import ProcessLink, ProcessOptions, pinned
from cadenza.events import Event
from cadenza.frontend.loaded_model import load_model
from cadenza.loading.build import cache_folder
from cadenza_bench.simulate.device import SimulatedServer
from cadenza_bench.simulate.run import simulate
from cadenza_bench.simulate.traffic import TrafficArrival, TrafficOptions
from serving import serving

ROWS, NUM_REQUESTS, PROMPT_LEN, OUTPUT_LEN = 8, 64, 32, 64
READY_S, RUN_S = 300.0, 600.0
CALIBRATION_S = 15.0
CALIBRATION_ITL_MS = 200.0


def config_of(num_rows: int = ROWS) -> EngineConfig:
    return EngineConfig(max_num_seqs=num_rows, max_model_len=512, max_num_queued_reqs=1000)


def requests_of(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(range(300, 1000), k=PROMPT_LEN) for _ in range(count)]


def params_of(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)


@dataclass(slots=True, eq=False)
class Played:
    """When each request of a group was sent, had its first token, and ended."""

    sent_s: dict[int, float] = field(default_factory=dict[int, float])
    firsts_s: dict[int, float] = field(default_factory=dict[int, float])
    num_tokens: int = 0
    num_ended: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    def take(self, events: list[Event]) -> None:
        now_s = time.monotonic()
        with self.changed:
            for each in events:
                if isinstance(each, Token):
                    self.num_tokens += 1
                    self.firsts_s.setdefault(each.request_id, now_s)
                elif isinstance(each, Finished):
                    assert each.error is None, each.error
                    self.num_ended += 1
            self.changed.notify_all()

    def wait(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.num_ended >= count, RUN_S)

    def ttfts_s(self) -> list[float]:
        return sorted(self.firsts_s[each] - sent_s for each, sent_s in self.sent_s.items())


@contextmanager
def group_of(
    model: Path, config: EngineConfig, num_replicas: int
) -> Iterator[tuple[EngineGroup, Played]]:
    """Engine processes on parts of the CPUs, all ready."""
    secret, places = os.urandom(32), replica_places("cpu", num_replicas, ChildProcess)

    def make(place: int, limits: EngineLimits | None, ids: Iterator[int]) -> EngineFront:
        own = config if limits is None else pinned(config, limits)
        options = ProcessOptions(open_child=places[place].open_child, prefix_secret=secret)
        return EngineFront(ProcessLink(model, own, options), ids, config.seed)

    group, played = EngineGroup(make, num_replicas, secret), Played()
    thread = threading.Thread(target=group.serve, args=(played.take,))
    thread.start()
    try:
        end_s = time.monotonic() + READY_S
        while group.status().replicas != ("ready",) * num_replicas:
            assert time.monotonic() < end_s, group.status()
            time.sleep(0.1)
        yield group, played
    finally:
        group.shutdown()
        thread.join()


def side_by_side_tok_s(model: Path, seed: int) -> float:
    """Two engines in processes of their own, one core each, which begin at the same time."""
    sides = [start_child("side", model, cpu, seed + at) for at, cpu in enumerate(own_cpus()[:2])]
    for each in sides:
        said(each, "ready")
    for each in sides:
        tell(each)
    spans = [json.loads(said(each, "{")) for each in sides]
    seconds = max(each["end_s"] for each in spans) - min(each["start_s"] for each in spans)
    return NUM_REQUESTS * OUTPUT_LEN / seconds


def start_child(task: str, model: Path, cpu: int, seed: int) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, task, str(model), "--cpu", str(cpu), "--seed", str(seed)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def said(child: subprocess.Popen[str], begin: str) -> str:
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith(begin):
            return line
    raise SystemExit("an engine beside has failed")


def tell(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.write("go\n")
    child.stdin.flush()


def run_side(model: Path, seed: int) -> None:
    prompts = requests_of(NUM_REQUESTS // 2, seed)
    with LLM(model, max_num_seqs=ROWS, max_model_len=512) as llm:
        llm.generate(prompts[:1], params_of(4))
        print("ready", flush=True)
        sys.stdin.readline()
        start_s = time.monotonic()
        llm.generate(prompts, params_of(OUTPUT_LEN))
        print(json.dumps({"start_s": start_s, "end_s": time.monotonic()}), flush=True)


def group_tok_s(model: Path, num_replicas: int, seed: int) -> float:
    with group_of(model, config_of(2 * ROWS // num_replicas), num_replicas) as (group, played):
        submit = [
            Request(prompt_token_ids=tuple(each), params=params_of(OUTPUT_LEN))
            for each in requests_of(NUM_REQUESTS, seed)
        ]
        start_s = time.monotonic()
        for each in submit:
            group.submit(each)
        played.wait(NUM_REQUESTS)
        return played.num_tokens / (time.monotonic() - start_s)


def served_tok_s(model: Path, num_replicas: int, seed: int) -> tuple[float, float]:
    """Tokens a second, and the front end's microseconds of CPU for each."""
    flags = ["--disable-log-requests", "--replicas", str(num_replicas), "--max-model-len", "512"]
    flags += ["--max-num-seqs", str(2 * ROWS // num_replicas), "--max-num-queued-reqs", "1000"]
    with serving(model, *flags) as url:
        return asyncio.run(load_server(url, num_replicas, seed))


async def load_server(url: str, num_replicas: int, seed: int) -> tuple[float, float]:
    limits = httpx.Limits(max_connections=NUM_REQUESTS + 1)
    async with httpx.AsyncClient(
        base_url=url, timeout=RUN_S, trust_env=False, limits=limits
    ) as client:
        while (await counted(client, "cadenza:replicas", 'state="ready"')) not in (
            None if num_replicas == 1 else num_replicas,
        ):
            await asyncio.sleep(0.2)
        before_s = await counted(client, "process_cpu_seconds_total")
        start_s = time.monotonic()
        await asyncio.gather(*(stream(client, each) for each in requests_of(NUM_REQUESTS, seed)))
        seconds = time.monotonic() - start_s
        used_s = (await counted(client, "process_cpu_seconds_total") or 0) - (before_s or 0)
    num_tokens = NUM_REQUESTS * OUTPUT_LEN
    return num_tokens / seconds, 1e6 * used_s / num_tokens


async def counted(client: httpx.AsyncClient, name: str, label: str = "") -> float | None:
    text = (await client.get("/metrics")).text
    lines = re.findall(rf"^{name}(?:\{{.*{label}.*\}})? (\S+)$", text, re.MULTILINE)
    return float(lines[0]) if lines else None


async def stream(client: httpx.AsyncClient, prompt: Sequence[int]) -> None:
    body = {
        "prompt": prompt,
        "max_tokens": OUTPUT_LEN,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
    }
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for _ in answer.aiter_raw():
            pass
        assert answer.status_code == 200


def throughput(model: Path, repeats: int) -> None:
    found: dict[str, list[float]] = {}
    for seed in range(repeats):
        beside = side_by_side_tok_s(model, seed)
        grouped = group_tok_s(model, 2, seed)
        served, front_us = served_tok_s(model, 2, seed)
        alone, one_us = served_tok_s(model, 1, seed)
        figures = {
            "side by side, tok/s": beside,
            "a group of two, share of it": grouped / beside,
            "served over two, share of it": served / beside,
            "served over two, share of served over one": served / alone,
            "front end of two, us a token": front_us,
            "front end of one, us a token": one_us,
        }
        for name, value in figures.items():
            found.setdefault(name, []).append(value)
        print(json.dumps({name: round(value, 3) for name, value in figures.items()}), flush=True)
    for name, values in found.items():
        print(f"{name:44}{statistics.median(values):9.3f}")


def traffic_of(request_rate: float, num_requests: int, seed: int) -> TrafficOptions:
    return TrafficOptions(
        replicas=2,
        num_requests=num_requests,
        request_rate=request_rate,
        prompt_lens=(16, 128),
        output_lens=(16, 48),
        num_prefixes=8,
        prefix_len=128,
        seed=seed,
    )


def calibrate(model: Path, request_rate: float, seed: int) -> None:
    """Plays half the rate in real time on one engine; prints what its steps were learned to
    cost."""
    loaded = load_model(model, replace(config_of(), max_itl_ms=CALIBRATION_ITL_MS))
    core = loaded.core
    arrivals = traffic_of(request_rate / 2, 10_000, seed).traffic(core.limits.max_model_len)
    print("ready", flush=True)
    sys.stdin.readline()
    start_s, coming = time.monotonic(), next(arrivals)
    while time.monotonic() < start_s + CALIBRATION_S:
        while coming.after_s <= time.monotonic() - start_s:
            core.submit(request_of(coming))
            coming = next(arrivals)
        if core.is_idle:
            time.sleep(0.001)
        else:
            core.step()
    bound = core.scheduler.step_bound
    assert bound is not None, "a number bounds the steps"
    cost = bound.cost
    print(json.dumps([cost.fixed_ms, cost.token_ms, cost.logit_ms, cost.key_ms]), flush=True)
    loaded.close()


def request_of(arrival: TrafficArrival) -> Request:
    params = params_of(arrival.max_tokens)
    return Request(prompt_token_ids=arrival.prompt_token_ids, params=params)


def learned_cost(model: Path) -> StepCost:
    """Of two engines at the same time, one core each."""
    sides = [start_child("calibrate", model, cpu, 100 + cpu) for cpu in own_cpus()[:2]]
    for each in sides:
        said(each, "ready")
    for each in sides:
        tell(each)
    parts = [json.loads(said(each, "[")) for each in sides]
    names = ("fixed_ms", "token_ms", "logit_ms", "key_ms")
    mean = [statistics.fmean(values) for values in zip(*parts, strict=True)]
    return StepCost(**dict(zip(names, mean, strict=True)))


def predict(model: Path, request_rate: float, num_requests: int) -> None:
    options = traffic_of(request_rate, num_requests, 1)
    before = learned_cost(model)
    with group_of(model, config_of(), 2) as (group, played):
        check = group.replicas[0].front.status().request_check
        assert check is not None, "it is ready"
        limits, start_s = check.limits, time.monotonic()
        for each in islice(options.traffic(limits.max_model_len), num_requests):
            time.sleep(max(0.0, start_s + each.after_s - time.monotonic()))
            sent_s = time.monotonic()
            played.sent_s[group.submit(request_of(each))] = sent_s
        played.wait(num_requests)
        time.sleep(1.0)
        stats = group.stats()
    assert stats is not None, "it is ready"
    cost = mean_cost(before, learned_cost(model))
    bound_ms = derive_bound_ms(cost, limits.max_num_seqs, limits.max_model_len)
    server = SimulatedServer(limits=limits, cost=cost, max_itl_ms=bound_ms)
    found = simulate(server, options, "fcfs")
    assert found.ttft is not None, "requests were answered"
    print(f"costs learned beside each other: {cost}")
    print(f"{'':12}{'real':>9}{'simulated':>11}{'ratio':>7}")
    ttfts_s = played.ttfts_s()
    hit_rate = stats.numbers["prefix_cache_hits"] / stats.numbers["prefix_cache_queries"]
    rows = {
        "ttft p50 ms": (1000 * statistics.median(ttfts_s), 1000 * found.ttft.p50_s),
        "ttft p99 ms": (1000 * ttfts_s[int(0.99 * len(ttfts_s))], 1000 * found.ttft.p99_s),
        "hit rate": (hit_rate, found.cached_share),
    }
    for name, (real, simulated) in rows.items():
        print(f"{name:12}{real:9.2f}{simulated:11.2f}{simulated / real:7.2f}")


def mean_cost(one: StepCost, other: StepCost) -> StepCost:
    names = ("fixed_ms", "token_ms", "logit_ms", "key_ms")
    return StepCost(**{name: (getattr(one, name) + getattr(other, name)) / 2 for name in names})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=("throughput", "predict", "side", "calibrate"))
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--request-rate", type=float, default=3.0)
    parser.add_argument("--num-requests", type=int, default=300)
    parser.add_argument("--cpu", type=int)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    if asked.cpu is not None:
        os.sched_setaffinity(0, {asked.cpu})
    model: Path = asked.model or cached_checkpoint(asked.shape, cache_folder(), lambda _: None)
    if asked.task == "throughput":
        throughput(model, asked.repeats)
    elif asked.task == "predict":
        predict(model, asked.request_rate, asked.num_requests)
    elif asked.task == "side":
        run_side(model, asked.seed)
    else:
        calibrate(model, asked.request_rate, asked.seed)


if __name__ == "__main__":
    main()
