"""`cadenza bench …`: measures this machine, an engine on it, and how fast it starts.

Owns the flags of its subcommands and what they print; what is measured is `bench`'s. Invariant:
with --json exactly one object goes to stdout, and signs of life go to stderr.
"""

import json
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cadenza.cli.options import JsonFlag, with_flags
from cadenza.config import EngineConfig
from cadenza.errors import ConfigError

if TYPE_CHECKING:
    from cadenza.bench.checkpoints import OnProgress
    from cadenza.checkpoint.dtypes import WeightDType

MAX_SEED = (1 << 63) - 1

Model = Annotated[str | None, typer.Argument(help="The model's folder (default: the bundled one).")]
Shape = Annotated[
    str,
    typer.Option(
        metavar="NAME|FILE", help="A shape by its name, such as smollm2-135m, or a config.json."
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadFlags:
    """What `throughput` plays."""

    shape: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Measure random weights of this shape (smollm2-135m, llama-3.2-1b, qwen3-0.6b, "
            "or a config.json) instead of a model; they are made once and kept in the cache.",
        ),
    ] = None
    input_len: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 128
    output_len: Annotated[int, typer.Option(help="Tokens of each answer, 2 or more.")] = 64
    concurrency: Annotated[
        str, typer.Option(metavar="N,N…", help="Requests at the same time, one result for each.")
    ] = "1,4,8,32,64"
    repeats: Annotated[int, typer.Option(help="Runs of each kind; the medians are shown.")] = 5
    profile: Annotated[
        bool,
        typer.Option("--profile", help="Also show the time and the bytes of each operation."),
    ] = False
    sampling: Annotated[
        Literal["none", "one", "all"],
        typer.Option(help="Decoding rows sampled with top-p and penalties; the rest are greedy."),
    ] = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFlags:
    """What `serve` sends to a server."""

    model_name: Annotated[
        str | None,
        typer.Option("--model", help="The model's name there (default: the first it lists)."),
    ] = None
    concurrency: Annotated[
        str, typer.Option(metavar="N,N…", help="Clients at the same time, one load for each.")
    ] = "1,8,32"
    num_requests: Annotated[
        int | None,
        typer.Option(
            help="Requests of each load (default: six for each client, at least 12; 192 at a rate)."
        ),
    ] = None
    request_rate: Annotated[
        float | None,
        typer.Option(
            help="Arrivals a second, at random intervals, in place of clients that wait for their "
            "answers."
        ),
    ] = None
    input_len: Annotated[str, typer.Option(metavar="N|LOW:HIGH", help="Tokens of each prompt.")] = (
        "16:512"
    )
    output_len: Annotated[
        str, typer.Option(metavar="N|LOW:HIGH", help="Tokens of each answer.")
    ] = "16:128"
    vocab_size: Annotated[int, typer.Option(help="Prompts are of random token ids below.")] = 1000
    load_seed: Annotated[int, typer.Option("--seed", help="Seed of the load.")] = 0
    respect_eos: Annotated[
        bool,
        typer.Option("--respect-eos", help="Let answers end early; else ignore_eos is sent along."),
    ] = False
    api_key: Annotated[
        str | None,
        typer.Option(envvar="CADENZA_API_KEY", show_envvar=False, help="Sent as a bearer token."),
    ] = None


def make_checkpoint(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new or empty folder.")],
    shape: Shape,
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
    from cadenza.cli.words import bytes_text

    if dtype is not None and dtype not in WEIGHT_DTYPES:
        raise ConfigError(f"--dtype {dtype!r} is not one of {', '.join(WEIGHT_DTYPES)}")
    if not 0 <= seed <= MAX_SEED:
        raise ConfigError(f"--seed {seed} must be a whole number from 0 to {MAX_SEED}")
    config = named_shape(shape)
    weights = RandomWeights(shape=config, dtype=dtype or config.dtype, seed=seed)
    with _written_bytes() as on_progress:
        make_checkpoint(weights, out, on_progress)
    print(f"{out}: {bytes_text(weights.num_bytes)} as {weights.dtype}, seed {seed}")


def throughput(
    flags: WorkloadFlags,
    config: EngineConfig,
    model: Model = None,
    json_output: JsonFlag = False,
) -> None:
    """Measure decode and prefill tokens per second, and their share of what the machine allows.

    Prompts are random and all different, answers greedy, and the end of a sequence is ignored.
    --max-num-seqs is raised to the largest concurrency where it is below.
    """
    from cadenza.bench.throughput import Workload, as_json, measure_throughput
    from cadenza.cli.bench_tables import print_throughput

    workload = Workload(
        input_len=flags.input_len,
        output_len=flags.output_len,
        concurrency=_whole_numbers(flags.concurrency),
        repeats=flags.repeats,
        sampling=flags.sampling,
        profile=flags.profile,
    )
    chosen = _model_or_shape(model, flags.shape)
    with _progress() as report:
        found = measure_throughput(chosen, config, workload, report)
    if json_output:
        print(json.dumps(as_json(found), allow_nan=False))
    else:
        print_throughput(found)


def serve(
    url: Annotated[str, typer.Argument(metavar="URL", help="Such as http://127.0.0.1:8000.")],
    flags: LoadFlags,
    json_output: JsonFlag = False,
) -> int:
    """Load a server that speaks the OpenAI API with streamed completions, and time them.

    Exits with 1 when a request failed.
    """
    from cadenza.bench.serve import ServeOptions, as_json, measure_serving
    from cadenza.cli.bench_tables import print_serving

    options = ServeOptions(
        url=url,
        model=flags.model_name,
        api_key=flags.api_key,
        concurrency=_whole_numbers(flags.concurrency),
        num_requests=flags.num_requests,
        request_rate=flags.request_rate,
        prompt_lens=_bounds("input-len", flags.input_len),
        output_lens=_bounds("output-len", flags.output_len),
        vocab_size=flags.vocab_size,
        seed=flags.load_seed,
        ignore_eos=not flags.respect_eos,
    )
    with _progress() as report:
        found = measure_serving(options, report)
    if json_output:
        print(json.dumps(as_json(found, options), allow_nan=False))
    else:
        print_serving(found)
    return 1 if found.num_failures else 0


def roofline(json_output: JsonFlag = False) -> None:
    """Measure how fast this machine reads memory and multiplies, with all threads."""
    from cadenza.backends import find_backend
    from cadenza.bench.machine import describe_machine
    from cadenza.bench.roofline import RooflineProbe
    from cadenza.cli.bench_tables import print_roofline

    instruments = find_backend("auto").open_instruments()
    dtypes: tuple[WeightDType, ...] = (
        ("float32",) if instruments is None else ("bfloat16", "float32")
    )
    found = [RooflineProbe(instruments, dtype).measure() for dtype in dtypes]
    machine = describe_machine(instruments)
    if not json_output:
        print_roofline(machine, found)
        return
    best: dict[str, Any] = {
        "read_gb_s": max(each.read_gb_s for each in found),
        "gflop_s": found[0].gflop_s,
        "gflop_s_by_dtype": {each.dtype: each.gflop_s for each in found},
        "method": found[0].method,
    }
    print(json.dumps({"machine": machine, "roofline": best}, allow_nan=False))


def startup(
    config: EngineConfig,
    model: Model = None,
    repeats: Annotated[int, typer.Option(help="Starts with each kind of cache.")] = 5,
    json_output: JsonFlag = False,
) -> None:
    """Measure the time from process start to the first token, with cold and with warm caches."""
    from cadenza.backends import find_backend
    from cadenza.bench.machine import describe_machine
    from cadenza.bench.startup import as_json, measure_startup
    from cadenza.cli.bench_tables import print_startup

    with _progress() as report:
        found = measure_startup(model, config, repeats=repeats, report=report)
    if json_output:
        machine = describe_machine(find_backend(config.backend).open_instruments())
        print(json.dumps({"machine": machine, "results": as_json(found)}, allow_nan=False))
    else:
        print_startup(found)


def load(
    config: EngineConfig,
    model: Model = None,
    shape: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="Random weights of this shape instead of a model."),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Loads that are timed.")] = 7,
    json_output: JsonFlag = False,
) -> None:
    """Measure how fast weights are loaded, beside the page cache's own speed, and the memory."""
    from cadenza.backends import find_backend
    from cadenza.bench.load import as_json, measure_load
    from cadenza.bench.machine import describe_machine
    from cadenza.cli.bench_tables import print_load

    chosen = _model_or_shape(model, shape)
    with _progress() as report:
        found = measure_load(chosen, config, repeats=repeats, report=report)
    machine = describe_machine(find_backend(config.backend).open_instruments())
    if json_output:
        print(json.dumps({"machine": machine, "results": as_json(found)}, allow_nan=False))
    else:
        print_load(machine, found)


def build_bench(epilog: str) -> typer.Typer:
    """The `bench` command with its subcommands."""
    app = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        no_args_is_help=True,
        help="Measure this machine and an engine on it.",
    )
    commands: tuple[Callable[..., object], ...] = (
        throughput,
        serve,
        roofline,
        startup,
        load,
        make_checkpoint,
    )
    for command in commands:
        name = command.__name__.replace("_", "-")
        app.command(name, epilog=epilog)(with_flags(command))
    return app


def _model_or_shape(model: str | None, shape: str | None) -> str | Path | None:
    """The model, or the cached random checkpoint of the shape, made now if need be."""
    if shape is None:
        return model
    if model is not None:
        raise ConfigError(f"both a model ({model}) and --shape {shape} were given; give one")
    from cadenza.bench.checkpoints import cached_checkpoint
    from cadenza.loading.build import cache_folder

    with _written_bytes() as on_progress:
        folder = cached_checkpoint(shape, cache_folder(), on_progress)
    typer.echo(f"random weights of {shape}: {folder}", err=True)
    return folder


def _whole_numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"--concurrency {text!r} must be whole numbers with commas between: 1,4,8"
        ) from None


def _bounds(flag: str, text: str) -> tuple[int, int]:
    try:
        low, _, high = text.partition(":")
        return int(low), int(high or low)
    except ValueError:
        raise ConfigError(
            f"--{flag} {text!r} must be a whole number, or two with a colon between: 16:512"
        ) from None


@contextmanager
def _progress() -> Generator[Callable[[str], None]]:
    """What is being measured: a live line on a terminal, plain lines on stderr elsewhere."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda line: typer.echo(line, err=True)
        return
    with console.status("starting") as status:
        yield status.update


@contextmanager
def _written_bytes() -> Generator["OnProgress"]:
    """A bar on a terminal, a line for each tenth elsewhere; nothing before the first byte."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _tenths()
        return
    columns = ("writing", BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("writing", total=None)
        yield lambda written, total: bar.update(task, completed=written, total=total)


def _tenths() -> "OnProgress":
    shown = 0

    def report(written: int, total: int) -> None:
        nonlocal shown
        tenth = 10 * written // max(1, total)
        if tenth > shown:
            shown = tenth
            typer.echo(f"written: {10 * tenth} %", err=True)

    return report
