"""`cadenza bench …`: `throughput`, `roofline` and `make-checkpoint`, and the list of all
subcommands; those of a laboratory are of the package `cadenza_bench`, which is loaded when one of
them is asked for.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from typer.core import TyperGroup
from typer.main import get_command

from cadenza.bench.workloads import Workload, check_whole
from cadenza.cli.bench_command import BenchCommand, ShapeFlag, model_or_shape
from cadenza.cli.options import EngineFlags, JsonFlag, ModelArgument
from cadenza.cli.report import Shown, bytes_text
from cadenza.cli.status import status_line
from cadenza.config import MAX_SEED
from cadenza.errors import ConfigError

if TYPE_CHECKING:
    from cadenza.weights.weight_format import WeightDType

# In the order of the help.
NAMES = (
    *("throughput", "serve", "batching", "compare", "spec-prefill", "roofline", "startup"),
    *("load", "simulate", "make-checkpoint"),
)


def bench_throughput(
    workload: Workload,
    config: EngineFlags,
    model: ModelArgument = None,
    shape: ShapeFlag = None,
    json: JsonFlag = False,
) -> int:
    """Measure decode and prefill tokens per second, and their share of what the machine allows.

    Prompts are random and all different, answers greedy, and the end of a sequence is ignored.
    --max-num-seqs is raised to the largest concurrency where it is below. Rows are printed as they
    become known.
    """
    from cadenza.bench.throughput import ThroughputWatch, measure_throughput
    from cadenza.cli.bench_report import throughput_result, throughput_watch

    chosen = model_or_shape(model, shape)
    with status_line("starting") as status:
        watch = ThroughputWatch(report=status) if json else throughput_watch(status)
        found = measure_throughput(chosen, config, workload, watch)
    return throughput_result(found).show(Shown(json=json))


def bench_roofline(json: JsonFlag = False) -> int:
    """Measure how fast this machine reads memory and multiplies, with all threads."""
    from cadenza.backends import find_backend
    from cadenza.bench.machine import RooflineProbe, describe_machine
    from cadenza.cli.bench_report import roofline_result

    instruments = find_backend("auto").open_instruments()
    dtypes: tuple[WeightDType, ...] = ("bfloat16", "float32")
    found = [
        RooflineProbe(instruments, dtype).measure()
        for dtype in (dtypes if instruments is not None else dtypes[1:])
    ]
    return roofline_result(describe_machine(instruments), found).show(Shown(json=json))


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
    from cadenza.bench.checkpoints import make_checkpoint, random_weights
    from cadenza.weights.weight_format import WEIGHT_DTYPES

    if dtype is not None and dtype not in WEIGHT_DTYPES:
        raise ConfigError(f"--dtype {dtype!r} is not one of {', '.join(WEIGHT_DTYPES)}")
    check_whole("seed", seed, 0, MAX_SEED)
    weights = random_weights(shape, dtype, seed)
    with status_line("writing random weights") as report:
        make_checkpoint(weights, out, report)
    print(f"{out}: {bytes_text(weights.num_bytes)} as {weights.dtype}, seed {seed}")


def commands() -> Mapping[str, BenchCommand]:
    """By name; without the laboratory's where that is not installed."""
    from cadenza.cli.bench_report import bench_serve

    found = {
        "throughput": BenchCommand(
            call=bench_throughput,
            quick_flags="--concurrency 1,8 --output-len 32 --repeats 1",
            quick={"concurrency": "1,8", "output_len": 32, "repeats": 1},
        ),
        "serve": BenchCommand(
            call=bench_serve,
            quick_flags="--concurrency 1,8 --num-requests 12 --output-len 16:32",
            quick={"concurrency": "1,8", "num_requests": 12, "output_lens": "16:32"},
        ),
        "roofline": BenchCommand(call=bench_roofline),
        "make-checkpoint": BenchCommand(call=bench_make_checkpoint),
        **_laboratory(),
    }
    return {name: found[name] for name in NAMES if name in found}


def _laboratory() -> Mapping[str, BenchCommand]:
    try:
        from cadenza_bench.commands import COMMANDS
    except ModuleNotFoundError as error:
        if error.name != "cadenza_bench":
            raise
        return {}
    return COMMANDS


class BenchGroup(TyperGroup):
    """Makes the subcommands when one of them or their list is asked for. No other command reads
    their flags. Invariant: each variable of theirs is one of `serve`, too."""

    epilog_of_commands = ""

    @property
    def commands(self) -> Any:
        if self._made is None:
            app = typer.Typer(add_completion=False, rich_markup_mode=None)
            for name, command in commands().items():
                app.command(name, epilog=self.epilog_of_commands)(command.flagged)
            self._made = cast(TyperGroup, get_command(app)).commands
        return self._made

    @commands.setter
    def commands(self, _: object) -> None:
        """Typer gives a new group the commands that were added to it: none."""
        self._made = None

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in NAMES and cmd_name not in self.commands:
            raise ConfigError(
                f"`cadenza bench {cmd_name}` is of the package cadenza_bench, which is not "
                f"installed: install Cadenza again (pip install .), or put the folder `benchmarks` "
                f"of its sources on PYTHONPATH"
            )
        return super().get_command(ctx, cmd_name)


def build_bench(epilog: str) -> typer.Typer:
    class Group(BenchGroup):
        epilog_of_commands = epilog

    return typer.Typer(
        cls=Group,
        add_completion=False,
        rich_markup_mode=None,
        no_args_is_help=True,
        help="Measure this machine and an engine on it.",
    )
