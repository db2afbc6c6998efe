"""The result of `cadenza bench compare`: each load on all servers, and their ratios."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from cadenza.bench.serve_options import LoadOptions
from cadenza.cli.bench_serve import LOAD_COLUMNS, load_lines, rate_of, void_reasons
from cadenza.cli.report import NOTHING, Column, Columns, Text, as_object, as_table, counted
from cadenza.cli.result import Chart, Result
from cadenza_bench.compare.rounds import ComparedLoad, Comparison, ServerRounds
from cadenza_bench.serve_plots import loop_charts, timeline

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
