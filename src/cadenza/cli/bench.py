"""`cadenza bench …`: measures this machine, an engine on it, and how fast it starts.

Owns the flags of its subcommands; what is measured is `bench`'s, what is printed `bench_report`'s.
Invariant: with --json exactly one object goes to stdout, and progress to stderr.
"""

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from cadenza.bench.batching_plan import BatchingOptions
from cadenza.bench.spec_prefill_options import SpecPrefillOptions
from cadenza.bench.traffic import TrafficOptions
from cadenza.bench.workloads import Workload, check_whole
from cadenza.cli.bench_serve import bench_compare, bench_serve
from cadenza.cli.options import EngineFlags, JsonFlag, ModelArgument, with_flags
from cadenza.cli.status import progress_bar, status_line
from cadenza.config import MAX_SEED, EngineConfig
from cadenza.errors import ConfigError
from cadenza.spec_prefill_config import SpecPrefillConfig

if TYPE_CHECKING:
    from cadenza.checkpoint.dtypes import WeightDType

Result = TypeVar("Result")

ShapeFlag = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE",
        help="Random weights of this shape in place of a model: smollm2-135m, llama-3.2-1b, "
        "qwen3-0.6b, another name, or a config.json. They are written once and cached.",
    ),
]


def bench_throughput(
    workload: Workload,
    config: EngineFlags,
    model: ModelArgument = None,
    shape: ShapeFlag = None,
    json: JsonFlag = False,
) -> None:
    """Measure decode and prefill tokens per second, and their share of what the machine allows.

    Prompts are random and all different, answers greedy, and the end of a sequence is ignored.
    --max-num-seqs is raised to the largest concurrency where it is below. Rows are printed as they
    become known.
    """
    from cadenza.bench.throughput import ThroughputWatch, measure_throughput
    from cadenza.cli.bench_report import throughput_facts, throughput_text, throughput_watch
    from cadenza.cli.report import show_result

    chosen = _model_or_shape(model, shape)
    with status_line("starting") as status:
        watch = ThroughputWatch(report=status) if json else throughput_watch(status)
        found = measure_throughput(chosen, config, workload, watch)
    show_result(throughput_facts(found), throughput_text(found), as_json=json)


def bench_batching(
    options: BatchingOptions,
    config: EngineFlags,
    model: ModelArgument = None,
    shape: ShapeFlag = None,
    json: JsonFlag = False,
) -> int:
    """Compare continuous batching with other ways to batch, on the same engine and requests.

    static: a batch starts when all of the last one have ended; rows that have finished leave, and
    tokens stream. static-whole: all answers of a batch come when it ends. padded: finished rows go
    on until the longest of their batch has ended. sequential: one request at a time. Exits with 1
    when two runs differ in a token.
    """
    from cadenza.bench.batching import measure_batching
    from cadenza.bench.plots import require_plot_library, write_plots
    from cadenza.cli.batching_report import (
        batching_charts,
        batching_exit_code,
        batching_facts,
        print_batching,
    )

    if options.plot is not None:
        require_plot_library()
    chosen = _model_or_shape(model, shape)
    with status_line("starting") as report:
        found = measure_batching(chosen, config, options, report)
    print_batching(found, as_json=json)
    if options.plot is not None:
        title = f"Batching: {found.workload['model']}"
        write_plots(Path(options.plot), title, batching_charts(found), batching_facts(found))
    return batching_exit_code(found, options)


def bench_spec_prefill(
    options: SpecPrefillOptions,
    config: EngineFlags,
    model: ModelArgument = None,
    shape: ShapeFlag = None,
    json: JsonFlag = False,
) -> None:
    """Measure what sparse prefill gains and costs: first tokens, right answers, likeness.

    The draft model is that of --spec-prefill, by default the package's for the bundled model.
    Beside it chunks are kept at random, at both ends, and by BM25.
    """
    from cadenza.bench.plots import require_plot_library, write_plots
    from cadenza.bench.spec_prefill import measure_spec_prefill
    from cadenza.cli.spec_prefill_report import (
        print_spec_prefill,
        spec_prefill_charts,
        spec_prefill_facts,
    )

    if options.plot is not None:
        require_plot_library()
    chosen, own = _model_or_shape(model, shape), config.sparse_prompts or SpecPrefillConfig()
    draft = _model_or_shape(own.model, options.draft_shape)
    if draft is not None:
        config = replace(config, spec_prefill=replace(own, model=str(draft)))
    with status_line("starting") as report:
        found = measure_spec_prefill(chosen, config, options, report)
    print_spec_prefill(found, as_json=json)
    if options.plot is not None:
        title = f"Sparse prefill: {found.workload['model']}"
        facts = spec_prefill_facts(found)
        write_plots(Path(options.plot), title, spec_prefill_charts(found), facts)


def bench_roofline(json: JsonFlag = False) -> None:
    """Measure how fast this machine reads memory and multiplies, with all threads."""
    from cadenza.backends import find_backend
    from cadenza.bench.machine import RooflineProbe, describe_machine
    from cadenza.cli.bench_report import print_roofline

    instruments = find_backend("auto").open_instruments()
    dtypes: tuple[WeightDType, ...] = ("bfloat16", "float32")
    found = [
        RooflineProbe(instruments, dtype).measure()
        for dtype in (dtypes if instruments is not None else dtypes[1:])
    ]
    print_roofline(describe_machine(instruments), found, as_json=json)


def bench_startup(
    config: EngineFlags,
    model: ModelArgument = None,
    repeats: Annotated[int, typer.Option(help="Starts with each kind of cache.")] = 5,
    json: JsonFlag = False,
) -> None:
    """Measure the time from process start to the first token, with cold and with warm caches."""
    from cadenza.bench.startup import measure_startup
    from cadenza.cli.bench_report import print_startup

    with status_line("starting") as report:
        found = measure_startup(model, config, repeats=repeats, report=report)
    print_startup(_machine(config), found, as_json=json)


def bench_load(
    config: EngineFlags,
    model: ModelArgument = None,
    shape: ShapeFlag = None,
    repeats: Annotated[int, typer.Option(help="Loads that are timed.")] = 7,
    json: JsonFlag = False,
) -> None:
    """Measure how fast weights are loaded, beside the page cache's own speed, and the memory."""
    from cadenza.bench.load import measure_load
    from cadenza.cli.bench_report import print_load

    chosen = _model_or_shape(model, shape)
    with status_line("starting") as report:
        found = measure_load(chosen, config, repeats=repeats, report=report)
    print_load(_machine(config), found, as_json=json)


def bench_simulate(
    options: TrafficOptions,
    config: EngineFlags,
    model: ModelArgument = None,
    shape: ShapeFlag = None,
    json: JsonFlag = False,
) -> None:
    """Simulate a server's waiting times under each policy, with the engine's own scheduler.

    Nothing is computed: the clock moves by the predicted time of each step.
    """
    from cadenza.bench.simulate import given_server, measure_server, simulate_all
    from cadenza.cli.bench_report import print_simulation

    if options.step_cost is not None and (model is not None or shape is not None):
        raise ConfigError("both --step-cost and a model were given; give one")
    if config.prefix_cache_disk is not None:
        raise ConfigError("--prefix-cache-disk: a simulation stores no pages; leave it out")
    chosen = _model_or_shape(model, shape)
    with status_line("measuring steps"):
        if options.step_cost is None:
            server = measure_server(chosen, config)
        else:
            server = given_server(options.step_cost, config)
    with progress_bar("simulating") as on_progress:
        found = simulate_all(server, options, on_progress)
    print_simulation(found, options, as_json=json)


def bench_make_checkpoint(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new or empty folder.")],
    shape: Annotated[str, typer.Option(metavar="NAME|FILE", help="A shape, or a config.json.")],
    dtype: Annotated[
        str | None,
        typer.Option(metavar="bfloat16|float16|float32", help="Type (default: the shape's own)."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
) -> None:
    """Write random weights of a shape, in Hugging Face's layout."""
    from cadenza.bench.checkpoints import RandomWeights, make_checkpoint
    from cadenza.checkpoint import named_shape
    from cadenza.checkpoint.dtypes import WEIGHT_DTYPES
    from cadenza.cli.report import bytes_text

    if dtype is not None and dtype not in WEIGHT_DTYPES:
        raise ConfigError(f"--dtype {dtype!r} is not one of {', '.join(WEIGHT_DTYPES)}")
    check_whole("seed", seed, 0, MAX_SEED)
    config = named_shape(shape)
    weights = RandomWeights(shape=config, dtype=dtype or config.dtype, seed=seed)
    with status_line("writing random weights") as report:
        make_checkpoint(weights, out, report)
    print(f"{out}: {bytes_text(weights.num_bytes)} as {weights.dtype}, seed {seed}")


_COMMANDS: Mapping[str, Callable[..., object]] = {
    "throughput": bench_throughput,
    "serve": bench_serve,
    "batching": bench_batching,
    "compare": bench_compare,
    "spec-prefill": bench_spec_prefill,
    "roofline": bench_roofline,
    "startup": bench_startup,
    "load": bench_load,
    "simulate": bench_simulate,
    "make-checkpoint": bench_make_checkpoint,
}


QUICK: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "throughput": (
        "--concurrency 1,8 --output-len 32 --repeats 1",
        {"concurrency": "1,8", "output_len": 32, "repeats": 1},
    ),
    "serve": (
        "--concurrency 1,8 --num-requests 12 --output-len 16:32",
        {"concurrency": "1,8", "num_requests": 12, "output_lens": "16:32"},
    ),
    "batching": (
        "--max-num-seqs 4 --num-requests 12 --output-len 8:64 --repeats 1",
        {"max_num_seqs": 4, "num_requests": 12, "output_lens": "8:64", "repeats": 1},
    ),
    "compare": (
        "--concurrency 1,8 --num-requests 12 --output-len 16:32 --rounds 2",
        {"concurrency": "1,8", "num_requests": 12, "output_lens": "16:32", "rounds": 2},
    ),
    "spec-prefill": (
        "--keep 0.3 --samples 4 --repeats 1",
        {"keep": "0.3", "samples": 4, "repeats": 1},
    ),
    "startup": ("--repeats 1", {"repeats": 1}),
    "load": ("--repeats 2", {"repeats": 2}),
}
"""What --quick stands for: as flags, and as parameters."""


def build_bench(epilog: str) -> typer.Typer:
    """The `bench` command with its subcommands."""
    app = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        no_args_is_help=True,
        help="Measure this machine and an engine on it.",
    )
    for name, command in _COMMANDS.items():
        flagged = with_flags(command)
        app.command(name, epilog=epilog)(_with_quick(name, flagged) if name in QUICK else flagged)
    return app


def _with_quick(name: str, command: Callable[..., Result]) -> Callable[..., Result]:
    """The command with --quick: other defaults, below its flags, variables and file."""
    flags, values = QUICK[name]

    def fill(context: typer.Context, is_quick: bool) -> bool:
        if is_quick:
            context.default_map = {**values, **(context.default_map or {})}
        return is_quick

    option = typer.Option(
        "--quick",
        is_eager=True,
        callback=fill,
        help=f"Rough figures, within half a minute on most machines: {flags}, where they are not "
        f"given.",
    )

    @wraps(command)
    def run(*, quick: bool, **given: Any) -> Result:
        result = command(**given)
        if quick:
            print("(--quick: few and short runs; without it, medians of more)", file=sys.stderr)
        return result

    signature = inspect.signature(command)
    added = inspect.Parameter(
        "quick",
        inspect.Parameter.KEYWORD_ONLY,
        default=False,
        annotation=Annotated[bool, option],
    )
    parameters = [*signature.parameters.values(), added]
    vars(run)["__signature__"] = signature.replace(parameters=parameters)
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _machine(config: EngineConfig) -> dict[str, object]:
    from cadenza.backends import find_backend
    from cadenza.bench.machine import describe_machine

    return describe_machine(find_backend(config.backend).open_instruments())


def _model_or_shape(model: str | None, shape: str | None) -> str | Path | None:
    """The model, or the cached random checkpoint of the shape, written now if need be."""
    if shape is None:
        return model
    if model is not None:
        raise ConfigError(f"both a model ({model}) and --shape {shape} were given; give one")
    from cadenza.bench.checkpoints import cached_checkpoint
    from cadenza.loading.planned_engine import cache_folder

    with status_line("opening random weights") as report:
        return cached_checkpoint(shape, cache_folder(), report)
