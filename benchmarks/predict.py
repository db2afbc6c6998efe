"""How well `bench simulate` predicts a real server: TTFT and ITL of the same requests.

    python benchmarks/predict.py [--shape smollm2-135m] [--request-rate 10] [--num-requests 2000]

Starts `cadenza serve` for the bundled model or random weights of a shape. Before and behind the run
that is predicted come calibration loads with requests of their own: closed loops of 1 to 32
clients, which say how long a token takes with so many open requests (HTTP, the host's work and the
client included, since all share the machine), in what chunks tokens come, and how these times
scatter. The run is Poisson traffic; the same requests are simulated with what the loads said
(`client_times`). Nothing is fitted on the run that is predicted. `kernels` is the
simulation with the costs that the engine measures at its start.
"""

import argparse
import random
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path

from cadenza import EngineConfig, Finished, Request, SamplingParams, Token
from cadenza.batch.step_cost import StepLoad
from cadenza.bench.checkpoints import cached_checkpoint
from cadenza.bench.serve import measure_serving
from cadenza.bench.serve_figures import LoadFigures, Outcome, Spread, spread_of
from cadenza.bench.serve_options import LoadOptions, ServerAddress
from cadenza.loading.build import cache_folder
from cadenza_bench.simulate.device import (
    SimulatedClock,
    SimulatedReplica,
    SimulatedServer,
    SimulatedSteps,
    make_simulated_core,
    measure_server,
)
from cadenza_bench.simulate.record import SimulationRecord
from cadenza_bench.simulate.run import play_traffic
from cadenza_bench.simulate.traffic import VOCAB_SIZE, TrafficArrival, TrafficOptions
from client_times import (
    ClientLoad,
    ClientTimes,
    StepTimes,
    TokenTime,
    client_load,
    steady,
)
from serving import serving

SHORT, LONG = 16, 200
"""Prompt tokens of the calibration; both fit one step."""
CLIENTS = (1, 2, 4, 8, 16, 32)
OUTPUT_LENS = (16, 64)
ROUNDS = 2
"""Of the calibration, before the run that is predicted, and as many behind it: the machine's speed
may change in between."""
LEAST_REQUESTS = 16
REQUESTS_PER_CLIENT = 4
SIMULATED_FIRSTS = 20
CALIBRATION_SEED = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What the loads said: steps' times, and what a first token takes beyond the simulation."""

    loads: Sequence[ClientLoad]
    steps: StepTimes
    delays_s: Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Of all requests of a run."""

    ttft: Spread
    itl: Spread


def calibrate(
    rounds: Sequence[Sequence[Sequence[Outcome]]], server: SimulatedServer
) -> Calibration:
    """From rounds of closed loops."""
    outcomes = [
        [each for answers in load for each in answers] for load in zip(*rounds, strict=True)
    ]
    *shorts, long = outcomes
    loads = [client_load(count, each) for count, each in zip(CLIENTS, shorts, strict=True)]
    first_s = statistics.median(loads[0].firsts_s)
    long_s = statistics.median(client_load(1, long).firsts_s)
    token_ms = max(0.0, 1000 * (long_s - first_s) / (LONG - SHORT))
    steps = StepTimes(loads, token_ms)
    delays_s: list[list[float]] = []
    for load in loads:
        simulated_s = _simulated_first_s(server, steps, load.num_clients)
        delays_s.append([first_s - simulated_s for first_s in load.firsts_s])
    return Calibration(loads=loads, steps=steps, delays_s=delays_s)


def measure_rounds(url: str, seeds: Sequence[int]) -> list[list[Sequence[Outcome]]]:
    """Closed loops of `CLIENTS` with short prompts, and one client with long ones."""
    return [_measure_round(url, seed) for seed in seeds]


def _measure_round(url: str, seed: int) -> list[Sequence[Outcome]]:
    """Requests of each number of clients with short prompts, then of one with long ones."""
    return [
        _measure_load(url, prompt_len, clients, seed)
        for prompt_len, clients in (*((SHORT, each) for each in CLIENTS), (LONG, 1))
    ]


def _measure_load(url: str, prompt_len: int, clients: int, seed: int) -> Sequence[Outcome]:
    options = LoadOptions(
        concurrency=(clients,),
        num_requests=max(LEAST_REQUESTS, REQUESTS_PER_CLIENT * clients),
        prompt_lens=(prompt_len, prompt_len),
        output_lens=OUTPUT_LENS,
        time_tokens=True,
        seed=CALIBRATION_SEED + 1000 * seed + prompt_len + clients,
    )
    (outcomes,) = measure_serving(ServerAddress(url=url), options, lambda _: None).timelines
    return steady(outcomes, clients)


def _simulated_first_s(server: SimulatedServer, steps: StepTimes, clients: int) -> float:
    """The mean time to the first token of the same closed loop, simulated."""
    clock = SimulatedClock()
    predicted = _simulated_steps(server, steps, clock, lambda: clients)
    core = make_simulated_core(server, "fcfs", clock, predicted)
    rng, arrived_s, firsts_s = random.Random(clients), {}, []

    def submit() -> None:
        count = rng.randint(*OUTPUT_LENS)
        prompt = tuple(rng.choices(range(1, VOCAB_SIZE), k=SHORT))
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        arrived_s[core.submit(Request(prompt_token_ids=prompt, params=params))] = clock.now_s

    for _ in range(clients):
        submit()
    while len(firsts_s) < SIMULATED_FIRSTS * clients:
        for event in core.step():
            if isinstance(event, Token) and not event.index:
                firsts_s.append(clock.now_s - arrived_s.pop(event.request_id))
            elif isinstance(event, Finished):
                submit()
    return statistics.fmean(firsts_s[clients:])


def _simulated_steps(
    server: SimulatedServer, steps: StepTimes, clock: SimulatedClock, num_open: Callable[[], int]
) -> SimulatedSteps:
    """Steps that take as long as the loads say for the requests that clients have open."""

    def predict_ms(load: StepLoad) -> float:
        return steps.predict_ms(num_open(), load.num_tokens - load.num_logits)

    return SimulatedSteps(server.limits, predict_ms, clock)


@dataclass(slots=True, eq=False)
class _Asked:
    """A request of the client: when it was sent, and its tokens so far."""

    sent_s: float
    tokens: list[TokenTime] = field(default_factory=list[TokenTime])


def predict(server: SimulatedServer, options: LoadOptions, found: Calibration) -> Latencies:
    """Simulates the requests that `bench serve` sends with these options, as its client sees them.

    Each is open from its arrival, and reaches the engine after a delay that the loads saw.
    """
    clock, seen = SimulatedClock(), ClientTimes(found.loads, found.delays_s, CALIBRATION_SEED)
    on_way: list[tuple[float, int, TrafficArrival]] = []
    is_open: dict[int, _Asked] = {}
    ended: list[_Asked] = []

    def num_open() -> int:
        return len(on_way) + len(is_open)

    steps = _simulated_steps(server, found.steps, clock, num_open)
    core = make_simulated_core(server, "fcfs", clock, steps)
    coming = deque(_arrivals(options))
    while coming or on_way or not core.is_idle:
        if core.is_idle:
            due = [each[0].after_s for each in (coming,) if each] + [each[0] for each in on_way[:1]]
            clock.now_s = max(clock.now_s, min(due))
        while coming and coming[0].after_s <= clock.now_s:
            arrival = coming.popleft()
            ready_s = arrival.after_s + seen.delay_s(num_open() + 1)
            heappush(on_way, (ready_s, len(coming), arrival))
        while on_way and on_way[0][0] <= clock.now_s:
            _, _, arrival = heappop(on_way)
            is_open[core.submit(_request_of(arrival))] = _Asked(arrival.after_s)
        for event in core.step():
            if isinstance(event, Token):
                is_open[event.request_id].tokens.append(TokenTime(clock.now_s, num_open()))
            elif isinstance(event, Finished):
                ended.append(is_open.pop(event.request_id))
    ttft = spread_of([each.tokens[0].at_s - each.sent_s for each in ended])
    itl = spread_of([gap_s for each in ended for gap_s in seen.gaps_s(each.tokens)])
    assert ttft is not None
    assert itl is not None
    return Latencies(ttft=ttft, itl=itl)


def _request_of(arrival: TrafficArrival) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=arrival.max_tokens, ignore_eos=True)
    return Request(prompt_token_ids=arrival.prompt_token_ids, params=params)


def predict_kernels(server: SimulatedServer, options: LoadOptions) -> Latencies:
    """With the costs that the engine has measured, and nothing of HTTP or clients."""
    clock, record = SimulatedClock(), SimulationRecord(TrafficOptions())
    core = make_simulated_core(server, "fcfs", clock)
    for _ in play_traffic([SimulatedReplica(core, clock)], _arrivals(options), "fcfs", record):
        pass
    ttft = spread_of([ttft_s for each in record.tenants.values() for ttft_s in each.ttfts_s])
    itl = record.gaps.spread()
    assert ttft is not None
    assert itl is not None
    return Latencies(ttft=ttft, itl=itl)


def _arrivals(options: LoadOptions) -> Iterator[TrafficArrival]:
    (load,) = options.loads(options.source())
    for each in load.requests:
        yield TrafficArrival(
            after_s=each.after_s,
            tenant=0,
            prompt_token_ids=each.prompt_token_ids,
            max_tokens=each.max_tokens,
            priority=0,
        )


def show_calibration(found: Calibration) -> None:
    for load, delays_s in zip(found.loads, found.delays_s, strict=True):
        tokens = statistics.fmean(chunk.num_tokens for chunk in load.chunks)
        print(
            f"{load.num_clients:4} clients: {1000 * load.step_s:7.2f} ms a token, {tokens:.2f} "
            f"tokens a chunk, first token {1000 * statistics.fmean(delays_s):6.2f} ms later than "
            f"simulated",
            flush=True,
        )


def show(load: LoadFigures, kernels: Latencies, predicted: Latencies) -> None:
    assert load.ttft is not None
    assert load.itl is not None
    failed = load.errors or "none"
    print(f"{load.num_answers} answers, {load.output_tok_s:.0f} tok/s, failed: {failed}")
    num_chunks = load.itl.count + load.num_answers
    print(f"chunks of an answer's token: {num_chunks / load.num_output_tokens:.2f}")
    print(f"{'':10}{'measured':>10}{'predicted':>10}{'ratio':>7}{'kernels':>10}{'ratio':>7}")
    for name in ("ttft", "itl"):
        real: Spread = getattr(load, name)
        for quantile in ("p50_s", "p99_s"):
            values = [getattr(each, quantile) for each in (real, getattr(predicted, name))]
            values.append(getattr(getattr(kernels, name), quantile))
            measured, *others = (1000 * value for value in values)
            columns = "".join(f"{ms:10.2f}{ms / measured:7.2f}" for ms in others)
            print(f"{name} {quantile[:3]:5} {measured:9.2f} {columns}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default=None)
    parser.add_argument("--request-rate", type=float, default=10.0)
    parser.add_argument("--num-requests", type=int, default=2000)
    parser.add_argument("--max-model-len", type=int, default=512)
    arguments = parser.parse_args()
    folder: Path | None = None
    if arguments.shape is not None:
        folder = cached_checkpoint(arguments.shape, cache_folder(), lambda _: None)
    kernels = measure_server(folder, EngineConfig(max_model_len=arguments.max_model_len))
    flags = ("--disable-log-requests", "--max-model-len", str(arguments.max_model_len))
    with serving(folder, *flags) as url:
        rounds = measure_rounds(url, range(ROUNDS))
        options = LoadOptions(
            request_rate=(arguments.request_rate,),
            num_requests=arguments.num_requests,
            prompt_lens=(16, 256),
            output_lens=(16, 64),
            time_tokens=True,
        )
        load = measure_serving(ServerAddress(url=url), options, lambda _: None).loads[0]
        rounds += measure_rounds(url, range(ROUNDS, 2 * ROUNDS))
    found = calibrate(rounds, kernels)
    show_calibration(found)
    show(load, predict_kernels(kernels, options), predict(kernels, options, found))


if __name__ == "__main__":
    main()
