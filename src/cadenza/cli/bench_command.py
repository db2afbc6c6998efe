"""What the commands of `cadenza bench` have in common: --quick, and the model or its shape."""

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from cadenza.cli.options import with_flags
from cadenza.cli.status import status_line
from cadenza.errors import ConfigError

ShapeFlag = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE",
        help="Random weights of this shape in place of a model: smollm2-135m, llama-3.2-1b, "
        "qwen3-0.6b, another name, or a config.json. They are written once and cached.",
    ),
]


def model_or_shape(model: str | None, shape: str | None) -> str | Path | None:
    """The model, or the cached random checkpoint of the shape, written now if need be."""
    if shape is None:
        return model
    if model is not None:
        raise ConfigError(f"both a model ({model}) and --shape {shape} were given; give one")
    from cadenza.bench.checkpoints import cached_checkpoint
    from cadenza.loading.planned_engine import cache_folder

    with status_line("opening random weights") as report:
        return cached_checkpoint(shape, cache_folder(), report)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchCommand:
    """A command, and what --quick stands for: as flags, and as parameters; without, it has none."""

    call: Callable[..., object]
    quick_flags: str = ""
    quick: Mapping[str, object] = field(default_factory=dict[str, object])

    @property
    def flagged(self) -> Callable[..., object]:
        flagged = with_flags(self.call)
        return _with_quick(self, flagged) if self.quick else flagged


def _with_quick(command: BenchCommand, flagged: Callable[..., object]) -> Callable[..., object]:
    """Its defaults are below the command's flags, variables and file."""

    def fill(context: typer.Context, is_quick: bool) -> bool:
        if is_quick:
            context.default_map = {**command.quick, **(context.default_map or {})}
        return is_quick

    option = typer.Option(
        "--quick",
        is_eager=True,
        callback=fill,
        help=f"Rough figures, within half a minute on most machines: {command.quick_flags}, where "
        f"they are not given.",
    )

    @wraps(flagged)
    def run(*, quick: bool, **given: Any) -> object:
        result = flagged(**given)
        if quick:
            print("(--quick: few and short runs; without it, medians of more)", file=sys.stderr)
        return result

    signature = inspect.signature(flagged)
    added = inspect.Parameter(
        "quick", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, option]
    )
    parameters = [*signature.parameters.values(), added]
    vars(run)["__signature__"] = signature.replace(parameters=parameters)
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run
