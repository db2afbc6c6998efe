"""How flags are declared: through `with_flags` a subcommand takes a group of them as a dataclass of
`flag` fields. Invariant: a flag that nothing gives (command line, environment, file) leaves its
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
from typing import Annotated, Any, TypeVar, cast, get_args, get_origin, get_type_hints

import typer

from cadenza.backends import BACKENDS, resolve_backend
from cadenza.cli.config_file import MODEL_WORD, ConfigFile, config_parameter
from cadenza.cli.config_file import NAME as CONFIG_FILE
from cadenza.cli.words import only_model
from cadenza.config import EngineConfig, MaxItlMs, refuse_fp8_kv
from cadenza.errors import ConfigError
from cadenza.option import Flag, words_of
from cadenza.server_link import CACERT_HELP

Result = TypeVar("Result")
Value = TypeVar("Value")

ENVIRONMENT_PREFIX = "CADENZA_"
# Variables that are read elsewhere than by a flag, and what each sets.
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

# What Kubernetes sets for a service called cadenza, after the prefix.
KUBERNETES = re.compile(r"SERVICE_(HOST|PORT)(_.+)?|PORT(_\d+_.+)?")

# Of a misspelt variable to the one that was meant; others may belong to other programs.
MIN_LIKENESS = 0.7


def parsed(read: Callable[[str], Value], what: str) -> Callable[[str], Value]:
    """A flag's parser, whose error says that the text is `what`."""

    def parse(text: str) -> Value:
        try:
            return read(text)
        except (OSError, ValueError, RecursionError):
            raise typer.BadParameter(f"{text!r} is {what}") from None

    return parse


def _or_auto(kind: Callable[[str], Value]) -> Callable[[str], Value | None]:
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
    number = whole_or_auto(text)
    return Chosen.AT_LOAD_TIME if number is None else number


def _low_and_high(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    return int(low), int(high or low)


# The parsers of fields that hold several values, and how these are written; words have commas.
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
            _low_and_high, "neither a whole number nor two with a colon between, such as 16:512"
        ),
        "N|LOW:HIGH",
    ),
}


def _words(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


_MODEL_HELP = "A model's folder, GGUF file or hub id (default: the bundled model)."
# A parameter of this type is given as a word or by --model (`with_flags`).
ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help=_MODEL_HELP)]
ModelFlag = Annotated[str | None, typer.Option("--model", metavar="MODEL", help=_MODEL_HELP)]
ApiKeyFlag = Annotated[
    str | None,
    typer.Option(
        metavar="KEY",
        envvar=f"{ENVIRONMENT_PREFIX}API_KEY",
        show_envvar=False,
        help="The server's API key.",
    ),
]
CaCertFlag = Annotated[str | None, typer.Option("--cacert", metavar="FILE", help=CACERT_HELP)]
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


EngineFlags = EngineConfig  # each field is a flag


def misspelt_variables(command: object, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that nothing reads, each with the known one that its name resembles. `command`: the
    parser of all commands."""
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
    """Of a command and its subcommands, but of those that are made when they are asked for."""
    own = {each.envvar for each in command.params if isinstance(each.envvar, str)}
    made: dict[str, Any] = vars(cast(object, command)).get("commands") or {}
    return frozenset(own).union(*map(variables_of, made.values()))


def with_flags(command: Callable[..., Result]) -> Callable[..., Result]:
    """`command` with each dataclass parameter replaced by one flag for each field, and a
    `ModelArgument` by a word and --model. Of a flag in two groups (`--seed`) the first one's
    description counts, and both get its value. Raises ConfigError, as the dataclass does."""
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
    """The dataclass, and a table of typer's options; None for another type."""
    is_annotated = get_origin(annotation) is Annotated
    kind, *extra = get_args(annotation) if is_annotated else (annotation,)
    if not isinstance(kind, type) or not is_dataclass(kind):
        return None
    return kind, cast("Mapping[str, Any]", extra[0] if extra else {})


def flags_of(group: type, table: Mapping[str, Any]) -> list[inspect.Parameter]:
    """The fields with a `Flag`, and those described for typer itself."""
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
    """From the parsed flags, of which those that were not given are None. Raises ConfigError where
    a flag with choices has none of them."""
    names = [field.name for field in fields(group) if field.name in given]
    values = {name: _resolved(given[name]) for name in names if given[name] not in (None, [])}
    if group is EngineConfig:
        refuse_fp8_kv(values.get("kv_cache_dtype"))
    for name, hint in get_type_hints(group).items():
        allowed = words_of(hint)
        if allowed and name in values and values[name] not in allowed:
            raise ConfigError(
                f"--{name.replace('_', '-')} {values[name]!r} is not one of {', '.join(allowed)}"
            )
    if group is EngineConfig:
        resolve_backend(values.get("backend", "auto"))
    return group(**values)


def _resolved(value: Any) -> Any:
    return None if value is Chosen.AT_LOAD_TIME else value


def _annotation(field: "dataclasses.Field[Any]", hint: Any, described: Flag) -> Any:
    """Every flag is optional."""
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
    if words_of(hint):
        settings.setdefault("metavar", "|".join(words_of(hint)))
    if "option" in field.metadata:
        settings = {**_number_settings(field, kind), **settings}
    elif settings.get("parser") is whole_or_auto:
        settings["metavar"] = "N|auto" if field.default is None else "N"
    option = typer.Option(
        *(described.names or (name,)),
        *described.aliases,
        envvar=ENVIRONMENT_PREFIX + field.name.upper() if described.has_variable else None,
        show_envvar=False,
        help=_with_default(described, settings, field.default),
        **settings,
    )
    return Annotated[list[str] | None if list[str] in kinds else kind | None, option]


def _number_settings(field: "dataclasses.Field[Any]", kind: type) -> Mapping[str, Any]:
    if field.name == "backend":
        return {"metavar": "|".join(("auto", *BACKENDS))}
    if field.type == MaxItlMs:
        return {"parser": milliseconds}
    is_optional = NoneType in get_args(field.type)
    if kind is float:
        return {"parser": share_or_auto} if is_optional else {}
    if kind is not int:
        return {}
    has_other_default = is_optional and field.default is not None
    parser = whole_or_chosen if has_other_default else whole_or_auto
    return {"parser": parser, "metavar": "N|auto" if is_optional else "N"}


def _with_default(described: Flag, settings: Mapping[str, Any], default: object) -> str:
    if default is MISSING or default is False or "(default: " in described.help:
        return described.help
    if default is None:
        is_auto = settings.get("parser") is whole_or_auto
        return f"{described.help} (default: auto)" if is_auto else described.help
    return f"{described.help} (default: {'on' if default is True else default})"
