"""The flags that several subcommands share, each declared once.

Owns names, aliases, help and environment variables of the flags, and `with_flags`, through which a
subcommand takes whole groups of them as one value: `EngineConfig`, or a dataclass of flags. Knows
no command. Invariant: every field of `EngineConfig` is a flag with its own name, and what is not
given on the command line or in the environment keeps `EngineConfig`'s default.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import wraps
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import typer

from cadenza.backends import BACKENDS, resolve_backend
from cadenza.config import EngineConfig

Result = TypeVar("Result")

ENVIRONMENT_PREFIX = "CADENZA_"
VARIABLES_WITHOUT_FLAG = frozenset(
    f"{ENVIRONMENT_PREFIX}{name}"
    for name in ("CACHE_DIR", "CPU_ISA", "NUM_THREADS", "REQUIRE_NATIVE", "TRACEBACK")
)
"""Variables that are read elsewhere than by a flag."""

LEAST_LIKENESS = 0.7
"""Of a misspelt variable to the one that was meant; others may be somebody else's."""

ModelFlag = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="MODEL", help="A model's folder or hub id (default: the bundled one)."
    ),
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """What people read about a flag, and its other names."""

    help: str
    aliases: tuple[str, ...] = ()
    metavar: str | None = None


ENGINE_FLAGS: Mapping[str, Flag] = {
    "backend": Flag(help="What computes.", metavar="|".join(("auto", *BACKENDS))),
    "device": Flag(help="Where it computes.", metavar="auto|cpu|cuda[:n]|tpu[:n]"),
    "ops": Flag(help="Which implementations of the model's operations."),
    "revision": Flag(
        help="Branch, tag or commit of a hub model; every file is taken of that one commit.",
        metavar="NAME",
    ),
    "dtype": Flag(help="Type of weights and KV."),
    "max_model_len": Flag(
        help="Most tokens of a request, prompt and answer together; auto fits the memory.",
        aliases=("--ctx-size", "-c", "--context-length"),
    ),
    "max_num_seqs": Flag(
        help="Requests that run at the same time: the rows of the batch.",
        aliases=(
            "--parallel",
            "-np",
            "--max-running-requests",
            "--decode-concurrency",
            "--max-batch-size",
        ),
    ),
    "max_num_batched_tokens": Flag(
        help="Tokens computed in one step.", aliases=("--prefill-step-size",)
    ),
    "kv_cache_memory_bytes": Flag(help="Memory for KV pages."),
    "num_pages": Flag(help="KV pages, in place of --kv-cache-memory-bytes."),
    "kv_layout": Flag(help="Pages, or one block for each row."),
    "page_size": Flag(help="Tokens of a KV page, a multiple of 16."),
    "enable_prefix_caching": Flag(help="Reuse the KV of prompts that begin alike."),
    "scheduler": Flag(help="Launch a step before the last one is read, or not."),
    "max_num_queued_reqs": Flag(help="Requests that may wait."),
    "max_num_queued_tokens": Flag(
        help="Prompt tokens that may wait; auto is a full context for each row."
    ),
    "max_consecutive_step_errors": Flag(
        help="Failed steps in a row after which a server's engine is started anew."
    ),
    "seed": Flag(help="Seed of the requests that have none of their own."),
    "generation_config": Flag(
        help="Sampling that is not asked for is as generation_config.json recommends, or not."
    ),
}


def misspelt_variables(command: object, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that nothing reads and whose names are close to one of ours, with that one.

    Args:
        command: the parser of all commands, which knows the variable of each flag.
    """
    known = VARIABLES_WITHOUT_FLAG | variables_of(command)
    parts = [name.removeprefix(ENVIRONMENT_PREFIX) for name in known]
    found: dict[str, str] = {}
    for name in sorted(environment):
        part = name.upper().removeprefix(ENVIRONMENT_PREFIX)
        if name in known or part == name.upper():
            continue
        for meant in get_close_matches(part, parts, n=1, cutoff=LEAST_LIKENESS):
            found[name] = ENVIRONMENT_PREFIX + meant
    return found


def variables_of(command: Any) -> frozenset[str]:
    """The environment variables of a command's flags and of those of its subcommands."""
    own = {each.envvar for each in command.params if isinstance(each.envvar, str)}
    return frozenset(own).union(*map(variables_of, getattr(command, "commands", {}).values()))


def whole_or_auto(text: str) -> int | None:
    """A whole number, or "auto": choose for me."""
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither a whole number nor auto") from None


def with_flags(command: Callable[..., Result]) -> Callable[..., Result]:
    """`command` with each parameter that is a dataclass replaced by one flag for each field.

    Raises what the dataclass raises when its values cannot work (`ConfigError`).
    """
    own = inspect.signature(command, eval_str=True).parameters
    groups = {name: kind for name, each in own.items() if (kind := _group(each)) is not None}
    flags: dict[str, inspect.Parameter] = {}
    for name, parameter in own.items():
        group = groups.get(name)
        for flag in [parameter] if group is None else flags_of(group):
            if group is not EngineConfig or flag.name not in flags:
                flags[flag.name] = flag.replace(kind=inspect.Parameter.KEYWORD_ONLY)

    @wraps(command)
    def run(**given: Any) -> Result:
        taken = {name: build(group, given) for name, group in groups.items()}
        plain = {name: given[name] for name in own if name not in groups}
        return command(**plain, **taken)

    vars(run)["__signature__"] = inspect.Signature(list(flags.values()))
    run.__annotations__ = {name: flag.annotation for name, flag in flags.items()}
    return run


def _group(parameter: inspect.Parameter) -> type | None:
    kind = parameter.annotation
    return kind if isinstance(kind, type) and is_dataclass(kind) else None


def flags_of(group: type) -> list[inspect.Parameter]:
    """The flags that a dataclass stands for."""
    if group is EngineConfig:
        return [_engine_flag(name) for name in (field.name for field in fields(EngineConfig))]
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]


def build(group: type, given: Mapping[str, Any]) -> Any:
    """The group's value out of the parsed flags; an engine flag that is None was not given."""
    values = {field.name: given[field.name] for field in fields(group)}
    if group is EngineConfig:
        values = {name: value for name, value in values.items() if value is not None}
        resolve_backend(values.get("backend", "auto"))
    return group(**values)


def _engine_flag(name: str) -> inspect.Parameter:
    described = ENGINE_FLAGS.get(name, Flag(help=""))
    kind = get_type_hints(EngineConfig)[name]
    default = next(field.default for field in fields(EngineConfig) if field.name == name)
    long_name = "--" + name.replace("_", "-")
    names = (long_name, *described.aliases)
    parser: Callable[[str], int | None] | None = None
    metavar = described.metavar
    if kind is bool:
        kind, names = bool | None, (f"{long_name}/--no-{long_name[2:]}",)
        shown = "on" if default else "off"
    elif kind is int or int in get_args(kind):
        shown = "auto" if default is None else str(default)
        metavar, parser, kind = "N" if default is not None else "N|auto", whole_or_auto, int | None
    else:
        metavar = metavar or "|".join(map(str, get_args(kind)))
        kind, shown = str | None, "main" if name == "revision" else str(default)
    option = typer.Option(
        *names,
        envvar=ENVIRONMENT_PREFIX + name.upper(),
        show_envvar=False,
        help=f"{described.help} (default: {shown})".strip(),
        metavar=metavar,
        parser=parser,
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]
    )
