"""Compares servers under the same loads. Each round sends the same requests to every server, in one
order and then in the other (A B B A), so that a machine that becomes slower favours none. A ratio,
to the first server, is taken within a round; its interval is from rounds drawn again with
replacement."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from cadenza.bench import Clock, OnStatus
from cadenza.bench.serve import LoadedServer, MeasuredLoad, WatchedSelector, run_watched
from cadenza.bench.serve_figures import LoadFigures, Spread
from cadenza.bench.serve_options import LoadOptions, PlannedLoad
from cadenza.cli.bench_report import LOAD_COLUMNS, load_lines, rate_of, void_reasons
from cadenza.cli.report import (
    NOTHING,
    Chart,
    Column,
    Columns,
    Result,
    Text,
    as_object,
    as_table,
    counted,
)
from cadenza.errors import ConfigError
from cadenza_bench.compare.options import CompareOptions
from cadenza_bench.plots import loop_charts, timeline

NUM_RESAMPLES = 2000
INTERVAL = (2.5, 97.5)


def _p99(spread: Spread | None) -> float | None:
    return None if spread is None else spread.p99_s


def _mean(spread: Spread | None) -> float | None:
    return None if spread is None else spread.mean_s


# What is compared; of all but the first, less is better.
METRICS: Mapping[str, Callable[[LoadFigures], float | None]] = {
    "output_tok_s": lambda load: load.output_tok_s,
    "ttft_mean_s": lambda load: _mean(load.ttft),
    "ttft_p99_s": lambda load: _p99(load.ttft),
    "tpot_mean_s": lambda load: _mean(load.tpot),
    "itl_p99_s": lambda load: _p99(load.itl),
    "e2e_mean_s": lambda load: _mean(load.e2e),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A server's metric over the first server's: the geometric mean of the ratio of each of
    `rounds`; `low`, `high`: 95 % of the means of rounds drawn again."""

    server: str
    metric: str
    mean: float
    low: float
    high: float
    rounds: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRounds:
    """The rounds of one load on one server."""

    server: str
    rounds: tuple[MeasuredLoad, ...]

    def values(self, metric: str) -> list[float | None]:
        return [METRICS[metric](each.figures) for each in self.rounds]

    def mean(self, metric: str) -> float | None:
        """The geometric mean, so that `Ratio.mean` is the ratio of two of them."""
        values = [each for each in self.values(metric) if each]
        return statistics.geometric_mean(values) if values else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedLoad:
    """One load on all servers, the first of which is the reference."""

    servers: tuple[ServerRounds, ...]
    ratios: tuple[Ratio, ...]

    @property
    def first(self) -> LoadFigures:
        """For how the load was made, which is the same in all rounds."""
        return self.servers[0].rounds[0].figures


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The loads on servers; `models` by the servers' names."""

    models: Mapping[str, str]
    urls: Mapping[str, str]
    loads: tuple[ComparedLoad, ...]

    @property
    def measured(self) -> list[tuple[str, LoadFigures]]:
        return [
            (each.server, load.figures)
            for compared in self.loads
            for each in compared.servers
            for load in each.rounds
        ]


def compare_servers(
    compared: CompareOptions,
    options: LoadOptions,
    report: OnStatus,
    clock: Clock = time.perf_counter,
) -> Comparison:
    """Plays the rounds of each load on each server. Raises ServerError when one cannot be reached;
    ConfigError when a setting cannot work."""
    servers = compared.servers()
    if options.sweep is not None:
        raise ConfigError("--sweep finds the rates of one server; give --request-rate R,R…")
    source = options.source(as_text=True)
    warm_ups = options.warm_ups(source)
    # The same prompts in each round would be found in a prefix cache.
    loads = [list(options.loads(source, round_)) for round_ in range(compared.rounds)]

    async def measure(watch: WatchedSelector) -> Comparison:
        async with AsyncExitStack() as stack:
            opened = {
                name: await stack.enter_async_context(LoadedServer(address, options, watch, clock))
                for name, address in servers.items()
            }
            for name, server in opened.items():
                report(f"{name}: warming up")
                await server.warm_up(warm_ups)
            measured = [
                await _measure_load(opened, of_rounds, report)
                for of_rounds in zip(*loads, strict=True)
            ]
            return Comparison(
                models={name: server.model for name, server in opened.items()},
                urls={name: address.base_url for name, address in servers.items()},
                loads=tuple(_compared(each, options.seed) for each in measured),
            )

    return run_watched(measure)


async def _measure_load(
    servers: Mapping[str, LoadedServer], of_rounds: Sequence[PlannedLoad], report: OnStatus
) -> list[ServerRounds]:
    measured: dict[str, list[MeasuredLoad]] = {name: [] for name in servers}
    for round_, load in enumerate(of_rounds):
        order = list(servers)[:: -1 if round_ % 2 else 1]
        for name in order:
            where = f"{name}, round {round_ + 1} of {len(of_rounds)}"
            found = await servers[name].measure(
                load, lambda line, where=where: report(f"{where}: {line}")
            )
            measured[name].append(found)
    return [ServerRounds(server=name, rounds=tuple(each)) for name, each in measured.items()]


def _compared(servers: Sequence[ServerRounds], seed: int) -> ComparedLoad:
    reference, *others = servers
    ratios = [ratio_of(reference, other, metric, seed) for other in others for metric in METRICS]
    return ComparedLoad(
        servers=tuple(servers), ratios=tuple(each for each in ratios if each is not None)
    )


def ratio_of(first: ServerRounds, other: ServerRounds, metric: str, seed: int) -> Ratio | None:
    """None where a round has no value on both sides."""
    pairs = zip(first.values(metric), other.values(metric), strict=True)
    rounds = [b / a for a, b in pairs if a and b]
    if len(rounds) < len(first.rounds):
        return None
    logs = np.log(rounds)
    rng = np.random.default_rng(seed)
    drawn = rng.integers(len(logs), size=(NUM_RESAMPLES, len(logs)))
    low, high = np.percentile(np.exp(logs[drawn].mean(axis=1)), INTERVAL).tolist()
    return Ratio(
        server=other.server,
        metric=metric,
        mean=math.exp(logs.mean()),
        low=low,
        high=high,
        rounds=tuple(rounds),
    )


_COMPARED: Mapping[str, str] = {
    "output_tok_s": "tok/s",
    "ttft_mean_s": "TTFT ms",
    "ttft_p99_s": "TTFT p99",
    "tpot_mean_s": "TPOT ms",
    "itl_p99_s": "ITL p99",
    "e2e_mean_s": "E2E ms",
}


def comparison_result(found: Comparison, options: LoadOptions, rounds: int) -> Result:
    """The exit code is 1 where a request failed or a load is void."""
    voids = void_reasons(found.measured, options.max_client_share)
    facts = {
        "servers": {
            name: {"url": found.urls[name], "model": model} for name, model in found.models.items()
        },
        "workload": asdict(options),
        "rounds": rounds,
        "void": voids,
        "results": [_compared_object(each) for each in found.loads],
    }
    num_failures = sum(load.num_failures for _, load in found.measured)
    return Result(
        facts=facts,
        text=_comparison_text(found, voids),
        title=" and ".join(found.models),
        charts=lambda: comparison_charts(found),
        exit_code=1 if num_failures or voids else 0,
    )


def _compared_object(load: ComparedLoad) -> dict[str, Any]:
    return {
        "loop": load.first.loop,
        "concurrency": load.first.concurrency,
        "request_rate": rate_of(load.first),
        "servers": {
            each.server: [as_object(LOAD_COLUMNS, measured.figures) for measured in each.rounds]
            for each in load.servers
        },
        "ratios": load.ratios,
    }


def _comparison_text(found: Comparison, voids: Sequence[str]) -> Text:
    def value(metric: str) -> Column:
        def read(each: ServerRounds) -> float | None:
            mean = each.mean(metric)
            return mean if mean is None or metric == "output_tok_s" else 1000 * mean

        return Column(None, _COMPARED[metric], read, show="{:.4g}".format)

    for name, model in found.models.items():
        yield f"{name}: {model} at {found.urls[name]}"
    first = next(iter(found.models))
    for load in found.loads:
        rounds = counted(len(load.servers[0].rounds), "round")
        yield f"{load.first.label} ({load.first.loop} loop), geometric means of {rounds}:"
        yield as_table((Column("server", "server"), *map(value, _COMPARED)), load.servers)
        for other in load.servers[1:]:
            ratios = [each for each in load.ratios if each.server == other.server]
            yield f"{other.server} over {first}:"
            yield as_table(_RATIO, ratios)
    yield (
        "ratio: of these means, with the 95 % interval of rounds drawn again, and the extremes of "
        "the rounds"
    )
    for server, load in found.measured:
        for line in load_lines(load):
            if line.startswith("failed"):
                yield f"{server}: {line}"
    yield from (f"void: {each}" for each in voids)


def _interval(ratio: Any) -> str:
    return f"{ratio.low:.3f} to {ratio.high:.3f}"


def _extremes(ratio: Any) -> str:
    return f"{min(ratio.rounds):.3f} to {max(ratio.rounds):.3f}" if ratio.rounds else NOTHING


_RATIO: Columns = (
    Column(None, "measured", lambda ratio: _COMPARED[ratio.metric].removesuffix(" ms")),
    Column("mean", "ratio", show="{:.3f}".format),
    Column(None, "95 %", _interval),
    Column(None, "rounds", _extremes),
)


def comparison_charts(found: Comparison) -> list[Chart]:
    """The means of all rounds, and the first round's requests."""
    rounds = {
        name: [
            measured.figures
            for load in found.loads
            for each in load.servers
            if each.server == name
            for measured in each.rounds
        ]
        for name in found.models
    }
    last = found.loads[-1]
    timelines = {each.server: each.rounds[0].outcomes for each in last.servers}
    return [
        *loop_charts(found.loads[0].first.loop, rounds),
        timeline(f"Requests, {last.first.label}", timelines),
    ]
