"""How flags are declared, and those that several subcommands share.

Through `with_flags` a subcommand takes a group of flags as one value: a dataclass whose fields are
flags, each described by a `Flag` where it is declared (`config.flag`) or in a table beside it:
`Annotated[EngineConfig, ENGINE_FLAGS]`. Names, types, defaults, choices and, of tuples, the way
they are written follow from the field. A command with the engine's flags has `--config`. Invariant:
a flag that is given neither on the command line nor in the environment nor in the file leaves its
field's default.
"""

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from functools import wraps
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

import typer

from cadenza.backends import BACKENDS, resolve_backend
from cadenza.cli.config_file import MODEL_WORD, ConfigFile, config_parameter
from cadenza.cli.config_file import NAME as CONFIG_FILE
from cadenza.cli.model_words import only_model
from cadenza.config import EngineConfig, Flag, refuse_fp8_kv
from cadenza.errors import ConfigError

Result = TypeVar("Result")
Value = TypeVar("Value")

ENVIRONMENT_PREFIX = "CADENZA_"
VARIABLES_WITHOUT_FLAG: Mapping[str, str] = {
    f"{ENVIRONMENT_PREFIX}{name}": what
    for name, what in {
        "CACHE_DIR": "The folder of compiled programs, prepared weights, digests and speeds.",
        "CUDA": "1 while the package is installed: the kernels for NVIDIA GPUs are compiled with "
        "nvcc, without which it is an error.",
        "CPU_ISA": "The instruction set of the native kernels: amx, avx512_bf16, avx512, "
        "avx2, neon_bf16, neon or scalar (default: the fastest that the CPU has).",
        "CPU_INTEGER_ISA": "That of products with quantised weights and of attention over KV in "
        "int8: amx, avx512_vnni, avx_vnni, avx2, neon_dotprod, neon or scalar (default: the best "
        "that is not wider than CADENZA_CPU_ISA).",
        "NUM_THREADS": "Threads that compute (default: the cores that the process may use).",
        "REQUIRE_NATIVE": "1 while the package is installed: it is an error if no native "
        "kernels can be built.",
        "TILE_ROWS": "From how many rows products with quantised weights use the tiles of amx: a "
        "number or never (default: measured at the start; the answers are the same).",
        "TRACEBACK": "1 shows the Python traceback of an error.",
    }.items()
}
"""Variables that are read elsewhere than by a flag, and what each sets."""

KUBERNETES = re.compile(r"SERVICE_(HOST|PORT)(_.+)?|PORT(_\d+_.+)?")
"""What Kubernetes sets for a service called cadenza, after the prefix."""

MIN_LIKENESS = 0.7
"""Of a misspelt variable to the one that was meant; others may belong to other programs."""


def parsed(read: Callable[[str], Value], what: str) -> Callable[[str], Value]:
    """A flag's parser. A text that `read` cannot read is an error, which says that it is `what`."""

    def parse(text: str) -> Value:
        try:
            return read(text)
        except (OSError, ValueError, RecursionError):
            raise typer.BadParameter(f"{text!r} is {what}") from None

    return parse


def _or_auto(kind: Callable[[str], Value]) -> Callable[[str], Value | None]:
    """Reads a number; None for "auto"."""
    return lambda text: None if text == "auto" else kind(text)


whole_or_auto = parsed(_or_auto(int), "neither a whole number nor auto")
share_or_auto = parsed(_or_auto(float), "neither a number nor auto")
milliseconds = parsed(
    lambda text: text if text in ("auto", "none") else float(text),
    "neither a number, auto nor none",
)


class Chosen(Enum):
    """The value of "auto" for a flag whose default is a number: the field's value is then None."""

    AT_LOAD_TIME = "auto"


def whole_or_chosen(text: str) -> int | Chosen:
    """A whole number; `Chosen.AT_LOAD_TIME` for "auto"."""
    number = whole_or_auto(text)
    return Chosen.AT_LOAD_TIME if number is None else number


def _low_and_high(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    return int(low), int(high or low)


_TUPLES: Mapping[object, tuple[Callable[[str], object], str]] = {
    tuple[int, ...]: (
        parsed(
            lambda text: tuple(int(part) for part in text.split(",")),
            "not whole numbers with commas between, such as 1,4,8",
        ),
        "N,N…",
    ),
    tuple[float, ...]: (
        parsed(
            lambda text: tuple(float(part) for part in text.split(",")),
            "not numbers with commas between, such as 5.4,0.25,0.1,0.00002",
        ),
        "N,N…",
    ),
    tuple[int, int]: (
        parsed(
            _low_and_high,
            "neither a whole number nor two with a colon between, such as 16:512",
        ),
        "N|LOW:HIGH",
    ),
}
"""The parsers of fields that hold several values, and how these are written; words have commas."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


_MODEL_HELP = "A model's folder, GGUF file or hub id (default: the bundled model)."
ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help=_MODEL_HELP)]
"""A parameter of this type is given as a word or by --model (`with_flags`)."""
ModelFlag = Annotated[str | None, typer.Option("--model", metavar="MODEL", help=_MODEL_HELP)]
ModelAndOut = Annotated[
    list[str],
    typer.Argument(
        metavar="[MODEL] OUT",
        help="A model's folder or hub id, with float weights, unless --model names it; a new or "
        "empty folder.",
    ),
]
SourceModelFlag = Annotated[
    str | None, typer.Option("--model", metavar="MODEL", help="The model, in place of a word.")
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def _engine(help: str, *aliases: str, **settings: Any) -> Flag:
    return Flag(help=help, aliases=aliases, has_variable=True, settings=settings)


def _number(help: str, *aliases: str) -> Flag:
    return _engine(help, *aliases, parser=whole_or_auto)


ENGINE_FLAGS: Mapping[str, Flag] = {
    "backend": _engine("What computes.", metavar="|".join(("auto", *BACKENDS))),
    "device": _engine("Where it computes.", metavar="auto|cpu|cuda[:n]|metal|tpu[:n]"),
    "ops": _engine("The implementation of the model's operations."),
    "tensor_parallel_size": _number(
        "Devices of one kind that share the model: 1, 2, 4 or 8, with the same answers, bit for "
        "bit; auto: one, with the operations made for it.",
        *("-tp", "--tp-size"),
    ),
    "revision": _engine(
        "Branch, tag or commit of a hub model; all files are read at that one commit "
        "(default: main).",
        metavar="NAME",
    ),
    "dtype": _engine("Type of activations, and of KV and weights that are not quantised."),
    "quantization": _engine(
        "Quantise the weights while they are loaded; activations are then int8 in products."
    ),
    "weight_cache_bytes": _number(
        "Bytes on disk for weights that --quantization made, which later starts read; 0: none; "
        "auto: 16 GiB."
    ),
    "kv_cache_dtype": _engine(
        "Type of the KV cache: auto is that of the activations, int8 halves bfloat16's memory."
    ),
    "arithmetic": _engine(
        "fast takes the best instructions of this CPU; portable gives the same bits on every CPU, "
        "and takes longer where there are bf16 instructions, which round in another way."
    ),
    "max_model_len": _number(
        "Most tokens of a request, prompt and answer together; auto fits the memory.",
        *("--ctx-size", "-c", "--context-length"),
    ),
    "max_num_seqs": _engine(
        "Requests that run at the same time: the rows of the batch; auto: as many as the KV "
        "pool has room for at 1,024 tokens each, and at most as many as a step has tokens.",
        *("--parallel", "-np", "--max-running-requests", "--decode-concurrency"),
        "--max-batch-size",
        parser=whole_or_chosen,
        metavar="N|auto",
    ),
    "max_num_batched_tokens": _number("Tokens computed in one step.", "--prefill-step-size"),
    "kv_cache_memory_bytes": _number("Bytes of memory for KV pages."),
    "num_pages": _number("KV pages, in place of --kv-cache-memory-bytes."),
    "gpu_memory_utilization": _engine(
        "The share of a GPU's memory that the engine takes; auto: what the backend takes anyway, "
        "0.75 with xla (default: auto).",
        parser=share_or_auto,
        metavar="SHARE|auto",
    ),
    "scheduler_headroom_gb": _engine(
        "Memory that the engine leaves free, in GB, beside weights and KV.", metavar="GB"
    ),
    "kv_layout": _engine("KV in pages, or in one block for each row; auto: as the backend has it."),
    "page_size": _number("Tokens of a KV page, a multiple of 16."),
    "images": _engine("Take images, if the model sees; without, its tower takes no memory."),
    "mmproj": _engine(
        "A GGUF file with the model's image tower; by default the one beside a GGUF model whose "
        "name has mmproj.",
        metavar="FILE",
    ),
    "image_cache_bytes": _engine(
        "Bytes for embeddings of images on the device, which are kept until others need the room.",
        parser=whole_or_auto,
    ),
    "image_max_tokens": _engine(
        "The most tokens of an image whose size decides their number; larger ones are reduced.",
        parser=whole_or_auto,
    ),
    "enable_prefix_caching": _engine("Reuse the KV of prompts that begin alike."),
    "prefix_cache_memory_share": _engine(
        "The most of the KV pages that may hold prefixes for reuse, in use or not.", metavar="SHARE"
    ),
    "max_state_snapshots": _number(
        "Of a model with recurrent state, slots for states of prompts that begin alike, beside two "
        "for each row, as far as they fit a quarter of the memory that is left; auto: one for each "
        "row, at least 16."
    ),
    "state_snapshot_interval": _number(
        "Tokens of a prompt between two such states, beside those at its end and where it parts "
        "from earlier ones; a prompt has few: a long one has them further apart."
    ),
    "prefix_cache_disk": _engine(
        "Store the KV of prompts in this folder too, from where later starts and other servers "
        "take it.",
        metavar="DIR",
    ),
    "prefix_cache_disk_bytes": _number("Bytes that the folder may take; auto: 8 GiB."),
    "scheduler": _engine("Whether a step is launched before the previous one is read."),
    "max_num_queued_reqs": _number("Requests that may wait."),
    "max_num_queued_tokens": _number(
        "Prompt tokens that may wait; auto is a full context for each row."
    ),
    "max_consecutive_step_errors": _number(
        "Failed steps in a row after which a server restarts its engine."
    ),
    "max_itl_ms": _engine(
        "Most milliseconds of a step, and so between two tokens of a stream while prompts are "
        "computed; auto: in a server twice a decode step of all rows, at least 50.",
        parser=milliseconds,
        metavar="MS|auto|none",
    ),
    "batching": _engine(
        "static starts no request before all of the batch have ended, for comparison."
    ),
    "scheduling_policy": _engine(
        "Which waiting request starts next: the first to come, the one with the fewest uncached "
        "tokens, or the one with the smallest priority.",
        "--scheduler-policy",
    ),
    "starvation_guard": _engine(
        "Seconds of waiting after which shortest_first takes a request first, and which count as "
        "one step of priority.",
        metavar="SECONDS",
    ),
    "admission": _engine(
        "How much of its remaining output a request must find room for before it starts: all of "
        "it, half or none. Less preempts more."
    ),
    "seed": _number("Seed of requests that set none."),
    "speculative_config": _engine(
        "Verify several tokens of a stream in one step: a JSON object with vLLM's names, such as "
        '{"method": "ngram", "num_speculative_tokens": 5}, or none (default: none).',
        metavar="JSON|none",
    ),
    "spec_prefill": _engine(
        "Of prompts of at least `threshold` tokens compute only the chunks that a draft model "
        "finds important, an approximation: a JSON object such as "
        '{"model": "small-model", "keep": 0.3, "threshold": 8192}, or none (default: none).',
        metavar="JSON|none",
    ),
    "chat_template": _engine(
        "The chat template, as a file or its text, in place of the model's own, or none.",
        metavar="FILE|TEXT|none",
    ),
    "generation_config": _engine(
        "Whether the model's generation_config.json or GGUF metadata sets the sampling that is not "
        "given; what a GGUF file leaves open is as in llama.cpp (temperature 0.8, top-k 40, top-p "
        "0.95, min-p 0.05). none: temperature 1, no cuts."
    ),
}
EngineFlags = Annotated[EngineConfig, ENGINE_FLAGS]


def misspelt_variables(command: object, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that nothing reads, each with the known variable that its name resembles.

    Args:
        command: the parser of all commands, which knows the variable of each flag.
    """
    known = VARIABLES_WITHOUT_FLAG.keys() | variables_of(command)
    parts = [name.removeprefix(ENVIRONMENT_PREFIX) for name in known]
    found: dict[str, str] = {}
    for name in sorted(environment):
        part = name.upper().removeprefix(ENVIRONMENT_PREFIX)
        if name in known or part == name.upper() or KUBERNETES.fullmatch(part):
            continue
        for meant in get_close_matches(part, parts, n=1, cutoff=MIN_LIKENESS):
            found[name] = ENVIRONMENT_PREFIX + meant
    return found


def variables_of(command: Any) -> frozenset[str]:
    """The environment variables of the flags of a command and of its subcommands."""
    own = {each.envvar for each in command.params if isinstance(each.envvar, str)}
    return frozenset(own).union(*map(variables_of, getattr(command, "commands", {}).values()))


def with_flags(command: Callable[..., Result]) -> Callable[..., Result]:
    """`command` with each parameter that is a dataclass replaced by one flag for each field, and
    one that is a `ModelArgument` by a word and --model.

    Where two groups have a flag in common (`--seed`), the first one describes it and both get its
    value. Raises what the dataclass raises when its values cannot work (`ConfigError`).
    """
    own = inspect.signature(command, eval_str=True).parameters
    groups = {
        name: group
        for name, parameter in own.items()
        if (group := _group(parameter.annotation)) is not None
    }
    models = [name for name, each in own.items() if each.annotation == ModelArgument]
    flags: dict[str, inspect.Parameter] = {}
    for name, parameter in own.items():
        parts = flags_of(*groups[name]) if name in groups else [parameter]
        for each in _model_flags(parameter) if name in models else parts:
            flags.setdefault(each.name, each.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    if any(group is EngineConfig for group, _ in groups.values()):
        flags[CONFIG_FILE] = config_parameter(flags, f"{ENVIRONMENT_PREFIX}CONFIG")

    @wraps(command)
    def run(**given: Any) -> Result:
        file: ConfigFile | None = given.pop(CONFIG_FILE, None)
        if file is not None:
            given = file.beside(given)
        try:
            taken = {name: build(group, given) for name, (group, _) in groups.items()}
        except ConfigError as error:
            raise error if file is None else file.explained(error) from error
        plain = {name: given[name] for name in own if name not in groups}
        plain |= {name: only_model(given[MODEL_WORD], given[name]) for name in models}
        return command(**plain, **taken)

    vars(run)["__signature__"] = inspect.Signature(list(flags.values()))
    run.__annotations__ = {name: each.annotation for name, each in flags.items()}
    return run


def _model_flags(parameter: inspect.Parameter) -> list[inspect.Parameter]:
    word = parameter.replace(name=MODEL_WORD, default=None)
    return [word, parameter.replace(annotation=ModelFlag, default=None)]


def _group(annotation: object) -> tuple[type, Mapping[str, Any]] | None:
    """The dataclass that stands for a group of flags, and their table; None for another type."""
    is_annotated = get_origin(annotation) is Annotated
    kind, *extra = get_args(annotation) if is_annotated else (annotation,)
    if not isinstance(kind, type) or not is_dataclass(kind):
        return None
    return kind, cast("Mapping[str, Any]", extra[0] if extra else {})


def flags_of(group: type, table: Mapping[str, Any]) -> list[inspect.Parameter]:
    """The flags of a dataclass: the fields with a `Flag`, and those described for typer itself."""
    hints = get_type_hints(group, include_extras=True)
    found: list[inspect.Parameter] = []
    for field in fields(group):
        hint = hints[field.name]
        described = field.metadata.get("flag", table.get(field.name))
        default = None
        if isinstance(described, Flag):
            hint = _annotation(field, hint, described)
        else:
            hint = hint if described is None else Annotated[hint, described]
            default = inspect.Parameter.empty if field.default is MISSING else field.default
        if get_origin(hint) is not Annotated:
            continue
        keyword = inspect.Parameter.KEYWORD_ONLY
        found.append(inspect.Parameter(field.name, keyword, default=default, annotation=hint))
    return found


def build(group: type, given: Mapping[str, Any]) -> Any:
    """The group's value from the parsed flags, of which those that were not given are None.

    Raises ConfigError where a flag with choices has none of them.
    """
    names = [field.name for field in fields(group) if field.name in given]
    values = {name: _resolved(given[name]) for name in names if given[name] not in (None, [])}
    if group is EngineConfig:
        refuse_fp8_kv(values.get("kv_cache_dtype"))
    for name, hint in get_type_hints(group).items():
        allowed = _choices(hint)
        if allowed and name in values and values[name] not in allowed:
            raise ConfigError(
                f"--{name.replace('_', '-')} {values[name]!r} is not one of {', '.join(allowed)}"
            )
    if group is EngineConfig:
        resolve_backend(values.get("backend", "auto"))
    return group(**values)


def _resolved(value: Any) -> Any:
    return None if value is Chosen.AT_LOAD_TIME else value


def _choices(hint: object) -> tuple[str, ...]:
    """The values of a Literal, also of one that may be None; not of several in one flag."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    if get_origin(hint) is tuple:
        return ()
    for each in get_args(hint):
        if get_origin(each) is Literal:
            return get_args(each)
    return ()


def _annotation(field: "dataclasses.Field[Any]", hint: Any, described: Flag) -> Any:
    """The type and the option by which typer parses a flag; every flag is optional."""
    kinds = {hint, *get_args(hint)} - {NoneType}
    kind = next((each for each in (bool, int, float) if each in kinds), str)
    name = "--" + field.name.replace("_", "-")
    if kind is bool and field.default is not False:
        name = f"{name}/--no-{name[2:]}"
    settings: dict[str, Any] = dict(described.settings)
    for each in (hint, *get_args(hint)):
        if get_origin(each) is tuple and "parser" not in settings:
            parser, metavar = _TUPLES.get(each, (_words, "NAME,NAME…"))
            settings = {"metavar": metavar, **settings, "parser": parser}
    if _choices(hint):
        settings.setdefault("metavar", "|".join(_choices(hint)))
    if settings.get("parser") is whole_or_auto:
        settings["metavar"] = "N|auto" if field.default is None else "N"
    option = typer.Option(
        *(described.names or (name,)),
        *described.aliases,
        envvar=ENVIRONMENT_PREFIX + field.name.upper() if described.has_variable else None,
        show_envvar=False,
        help=_with_default(described, field.default),
        **settings,
    )
    return Annotated[list[str] | None if list[str] in kinds else kind | None, option]


def _with_default(described: Flag, default: object) -> str:
    """The flag's help, with its default if it has one."""
    if default is MISSING or default is False or "(default: " in described.help:
        return described.help
    if default is None:
        is_auto = described.settings.get("parser") is whole_or_auto
        return f"{described.help} (default: auto)" if is_auto else described.help
    return f"{described.help} (default: {'on' if default is True else default})"
