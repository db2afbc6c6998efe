"""How well `bench simulate` predicts a real server: TTFT and ITL of the same requests.

    python benchmarks/predict.py [--shape smollm2-135m] [--request-rate 10] [--num-requests 2000]

Starts `cadenza serve` for the bundled model or random weights of a shape. First come three short
calibration loads with requests of their own, from which the costs of a step as clients see them
follow (HTTP, the host's work and the client included, since all share the machine). Then Poisson
traffic is sent, and the same requests are simulated with those costs. Nothing is fitted on the run
that is predicted. `kernels` is the simulation with the costs that the engine measures at its start.
"""

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from serving import serving

from cadenza import EngineConfig
from cadenza.bench.checkpoints import cached_checkpoint
from cadenza.bench.serve import measure_serving
from cadenza.bench.serve_figures import LoadFigures, Spread, spread_of
from cadenza.bench.simulate import (
    SimulatedClock,
    SimulatedServer,
    SimulationRecord,
    make_simulated_core,
    measure_server,
    play_traffic,
)
from cadenza.bench.traffic import TrafficArrival, TrafficOptions
from cadenza.bench.workloads import ServeOptions
from cadenza.core.step_cost import StepCost
from cadenza.loading.build import cache_folder

SHORT, LONG = 16, 200
"""Prompt tokens of the calibration; both fit one step."""
CLIENTS = 8
ROUNDS = 3
CALIBRATION_SEED = 1_000_000
LEAST_MS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Costs of a step as clients see them, and what the first token takes beyond its step."""

    cost: StepCost
    first_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Of all requests of a run."""

    ttft: Spread
    itl: Spread


def calibrate(url: str, key_ms: float) -> Calibration:
    """From three loads in turn: short and long prompts one by one, then several clients."""
    rounds = [
        [_medians_ms(url, *load, seed) for load in ((SHORT, 1), (LONG, 1), (SHORT, CLIENTS))]
        for seed in range(ROUNDS)
    ]
    short, long, several = (
        [statistics.median(values) for values in zip(*load, strict=True)]
        for load in zip(*rounds, strict=True)
    )
    token_ms = max(LEAST_MS, (long[0] - short[0]) / (LONG - SHORT))
    row_ms = max(0.0, (several[1] - short[1]) / (CLIENTS - 1))
    logit_ms = max(LEAST_MS, row_ms - token_ms)
    fixed_ms = max(LEAST_MS, short[1] - token_ms - logit_ms)
    cost = StepCost(fixed_ms=fixed_ms, token_ms=token_ms, logit_ms=logit_ms, key_ms=key_ms)
    first_ms = short[0] - fixed_ms - SHORT * token_ms - logit_ms
    return Calibration(cost=cost, first_s=max(0.0, first_ms) / 1000)


def _medians_ms(url: str, prompt_len: int, clients: int, seed: int) -> tuple[float, float]:
    """The median TTFT and ITL of a closed loop."""
    options = ServeOptions(
        url=url,
        concurrency=(clients,),
        num_requests=8 * clients,
        prompt_lens=(prompt_len, prompt_len),
        output_lens=(32, 32),
        time_tokens=True,
        seed=CALIBRATION_SEED + 1000 * seed + prompt_len + clients,
    )
    load = measure_serving(options, lambda _: None).loads[0]
    assert load.ttft is not None, load.errors
    assert load.itl is not None, load.errors
    return 1000 * load.ttft.p50_s, 1000 * load.itl.p50_s


def predict(server: SimulatedServer, options: ServeOptions, first_s: float) -> Latencies:
    """Simulates the requests that `bench serve` sends with these options."""
    clock, record = SimulatedClock(), SimulationRecord(TrafficOptions())
    core = make_simulated_core(server, "fcfs", clock)
    for _ in play_traffic(core, _arrivals(options), "fcfs", clock, record):
        pass
    ttft = spread_of(
        [first_s + ttft_s for each in record.tenants.values() for ttft_s in each.ttfts_s]
    )
    itl = record.gaps.spread()
    assert ttft is not None
    assert itl is not None
    return Latencies(ttft=ttft, itl=itl)


def _arrivals(options: ServeOptions) -> Iterator[TrafficArrival]:
    ((_, requests),) = options.loads()
    for each in requests:
        yield TrafficArrival(
            after_s=each.after_s,
            tenant=0,
            prompt_token_ids=each.prompt_token_ids,
            max_tokens=each.max_tokens,
            priority=0,
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
        found = calibrate(url, kernels.cost.key_ms)
        print(f"engine's costs: {kernels.cost}")
        print(
            f"calibrated:     {found.cost}, first token {1000 * found.first_s:.2f} ms", flush=True
        )
        options = ServeOptions(
            url=url,
            request_rate=arguments.request_rate,
            num_requests=arguments.num_requests,
            prompt_lens=(16, 256),
            output_lens=(16, 64),
            time_tokens=True,
        )
        load = measure_serving(options, lambda _: None).loads[0]
    seen = replace(kernels, cost=found.cost)
    show(load, predict(kernels, options, 0.0), predict(seen, options, found.first_s))


if __name__ == "__main__":
    main()
