"""The commands of the laboratory: their flags, and the order of measuring and showing. Nothing
heavy is imported before a body runs.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated

import typer

from cadenza.bench.serve_options import LoadOptions
from cadenza.cli.bench_command import BenchCommand, ShapeFlag, model_or_shape
from cadenza.cli.options import EngineFlags, JsonFlag, ModelArgument
from cadenza.cli.report import Shown
from cadenza.cli.status import progress_bar, status_line
from cadenza.config import EngineConfig
from cadenza.errors import ConfigError
from cadenza.sparse_prefill import SpecPrefillConfig
from cadenza_bench.batching.plan import BatchingOptions
from cadenza_bench.compare.options import CompareOptions
from cadenza_bench.simulate.traffic import TrafficOptions
from cadenza_bench.spec_prefill.options import SpecPrefillOptions


def bench_batching(
    options: BatchingOptions,
    config: EngineFlags,
    model: ModelArgument = None,
    shape: ShapeFlag = None,
    *,
    shown: Shown,
) -> int:
    """Compare continuous batching with other ways to batch, on the same engine and requests.

    static: a batch starts when all of the last one have ended; rows that have finished leave, and
    tokens stream. static-whole: all answers of a batch come when it ends. padded: finished rows go
    on until the longest of their batch has ended. sequential: one request at a time. Exits with 1
    when two runs differ in a token.
    """
    from cadenza_bench.batching.report import batching_result
    from cadenza_bench.batching.rounds import measure_batching

    chosen = model_or_shape(model, shape)
    with status_line("starting") as report:
        found = measure_batching(chosen, config, options, report)
    return batching_result(found, options).show(shown)


def bench_compare(compared: CompareOptions, options: LoadOptions, shown: Shown) -> int:
    """Load servers in alternating rounds with the same requests, and compare their answers' times.

    Any server with the OpenAI API will do. Exits with 1 when a request failed, or a load is void.
    """
    from cadenza_bench.compare.rounds import compare_servers, comparison_result

    with status_line("starting") as report:
        found = compare_servers(compared, options, report)
    return comparison_result(found, options, compared.rounds).show(shown)


def bench_spec_prefill(
    options: SpecPrefillOptions,
    config: EngineFlags,
    model: ModelArgument = None,
    shape: ShapeFlag = None,
    *,
    shown: Shown,
) -> int:
    """Measure what sparse prefill gains and costs: first tokens, right answers, likeness.

    The draft model is that of --spec-prefill, by default the package's for the bundled model.
    Beside it chunks are kept at random, at both ends, and by BM25.
    """
    from cadenza_bench.spec_prefill.measure import measure_spec_prefill
    from cadenza_bench.spec_prefill.report import spec_prefill_result

    chosen, own = model_or_shape(model, shape), config.sparse_prompts or SpecPrefillConfig()
    draft = model_or_shape(own.model, options.draft_shape)
    if draft is not None:
        config = replace(config, spec_prefill=replace(own, model=str(draft)))
    with status_line("starting") as report:
        found = measure_spec_prefill(chosen, config, options, report)
    return spec_prefill_result(found).show(shown)


def bench_startup(
    config: EngineFlags,
    model: ModelArgument = None,
    repeats: Annotated[int, typer.Option(help="Starts with each kind of cache.")] = 5,
    json: JsonFlag = False,
) -> int:
    """Measure the time from process start to the first token, with cold and with warm caches."""
    from cadenza_bench.startup import measure_startup, startup_result

    with status_line("starting") as report:
        found = measure_startup(model, config, repeats=repeats, report=report)
    return startup_result(_machine(config), found).show(Shown(json=json))


def bench_load(
    config: EngineFlags,
    model: ModelArgument = None,
    shape: ShapeFlag = None,
    repeats: Annotated[int, typer.Option(help="Loads that are timed.")] = 7,
    json: JsonFlag = False,
) -> int:
    """Measure how fast weights are loaded, beside the page cache's own speed, and the memory."""
    from cadenza_bench.load import load_result, measure_load

    chosen = model_or_shape(model, shape)
    with status_line("starting") as report:
        found = measure_load(chosen, config, repeats=repeats, report=report)
    return load_result(_machine(config), found).show(Shown(json=json))


def bench_simulate(
    options: TrafficOptions,
    config: EngineFlags,
    model: ModelArgument = None,
    shape: ShapeFlag = None,
    json: JsonFlag = False,
) -> int:
    """Simulate a server's waiting times under each policy, with the engine's own scheduler.

    Nothing is computed: the clock moves by the predicted time of each step.
    """
    from cadenza_bench.simulate.device import given_server, measure_server
    from cadenza_bench.simulate.run import simulate_all, simulation_result

    if options.step_cost is not None and (model is not None or shape is not None):
        raise ConfigError("both --step-cost and a model were given; give one")
    if config.prefix_cache_disk is not None:
        raise ConfigError("--prefix-cache-disk: a simulation stores no pages; leave it out")
    chosen = model_or_shape(model, shape)
    with status_line("measuring steps"):
        if options.step_cost is None:
            server = measure_server(chosen, config)
        else:
            server = given_server(options.step_cost, config)
    with progress_bar("simulating") as on_progress:
        found = simulate_all(server, options, on_progress)
    return simulation_result(found, options).show(Shown(json=json))


def _machine(config: EngineConfig) -> dict[str, object]:
    from cadenza.backends import find_backend
    from cadenza.bench.machine import describe_machine

    return describe_machine(find_backend(config.backend).open_instruments())


# By the name of the subcommand.
COMMANDS: Mapping[str, BenchCommand] = {
    "batching": BenchCommand(
        call=bench_batching,
        quick_flags="--max-num-seqs 4 --num-requests 12 --output-len 8:64 --repeats 1",
        quick={"max_num_seqs": 4, "num_requests": 12, "output_lens": "8:64", "repeats": 1},
    ),
    "compare": BenchCommand(
        call=bench_compare,
        quick_flags="--concurrency 1,8 --num-requests 12 --output-len 16:32 --rounds 2",
        quick={"concurrency": "1,8", "num_requests": 12, "output_lens": "16:32", "rounds": 2},
    ),
    "spec-prefill": BenchCommand(
        call=bench_spec_prefill,
        quick_flags="--keep 0.3 --samples 4 --repeats 1",
        quick={"keep": "0.3", "samples": 4, "repeats": 1},
    ),
    "startup": BenchCommand(call=bench_startup, quick_flags="--repeats 1", quick={"repeats": 1}),
    "load": BenchCommand(call=bench_load, quick_flags="--repeats 2", quick={"repeats": 2}),
    "simulate": BenchCommand(call=bench_simulate),
}
