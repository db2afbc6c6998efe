"""How an option is declared: one dataclass field with its default, bounds, help and other names.
Checks, the command line, environment variables, the config file and docs/flags.md follow from
it."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from operator import index
from pathlib import Path
from types import NoneType
from typing import Any, Literal, cast, get_args, get_origin

from cadenza.errors import ConfigError, show

Read = Callable[[str, object], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """What does not follow from the field that a flag sets."""

    help: str
    names: tuple[str, ...] = ()  # in place of the field's own name
    aliases: tuple[str, ...] = ()  # further names
    # Can also be set by an environment variable, whose name has the prefix.
    has_variable: bool = False
    # Keyword arguments of `typer.Option`, say `metavar` or `parser`.
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    """Which values an option has: inclusive bounds of a number, its unit in messages if it need not
    be whole, and what checks and reads a value by the flag's name, in place of its type's rules."""

    low: float = 0
    high: float = 0
    unit: str = "a number"
    read: Read | None = None


def flag(default: Any, help: str, *names: str, has_variable: bool = False, **settings: Any) -> Any:
    """A dataclass field that is a flag; the arguments are `Flag`'s."""
    described = Flag(help=help, names=names, has_variable=has_variable, settings=settings)
    return dataclasses.field(default=default, metadata={"flag": described})


def option(
    default: Any,
    help: str,
    *aliases: str,
    within: tuple[float, float] = (0, 0),
    unit: str = "a number",
    read: Read | None = None,
    **settings: Any,
) -> Any:
    """A dataclass field that is an option of the engine: a flag with a variable, and its values;
    `within` are inclusive bounds."""
    described = Flag(help=help, aliases=aliases, has_variable=True, settings=settings)
    values = _Option(low=within[0], high=within[1], unit=unit, read=read)
    return dataclasses.field(default=default, metadata={"flag": described, "option": values})


def checked(field: "dataclasses.Field[Any]", value: object) -> object:
    """The value of an option, by its type and declaration; "auto" is None for a number that may be
    None, the default for another whole number. Raises ConfigError, which names the flag."""
    declared: _Option = field.metadata["option"]
    name = field.name.replace("_", "-")
    kinds = {field.type, *get_args(field.type)}
    if value is None and NoneType in kinds:
        return None
    if declared.read is not None:
        return declared.read(name, value)
    words = words_of(field.type)
    if words:
        return _as_choice(name, value, words)
    if bool in kinds:
        if not isinstance(value, bool):
            raise ConfigError(f"--{name} {show(value)} must be true or false")
        return value
    takes_auto = NoneType in kinds or int in kinds
    if takes_auto and isinstance(value, str) and value == "auto":
        value = None if NoneType in kinds else field.default
    if value is None and NoneType in kinds:
        return None
    if int in kinds:
        return _as_integer(name, value, int(declared.low), int(declared.high))
    return _as_number(name, value, declared)


def text(
    wanted: str, is_valid: Callable[[str], object] = str.isprintable, *, takes_path: bool = False
) -> Callable[[str, object], str]:
    """What reads an option that is a text; `wanted` ends the message on one that is not valid."""

    def read(name: str, value: object) -> str:
        given = str(value) if takes_path and isinstance(value, Path) else value
        if isinstance(given, str) and is_valid(given):
            return str.__str__(given)
        raise ConfigError(f"--{name} {show(given)} {wanted}")

    return read


def is_path_or_text(given: str) -> bool:
    is_encodable = not any("\ud800" <= each <= "\udfff" for each in given)
    return bool(given.strip()) and "\0" not in given and is_encodable


def is_folder_name(given: str) -> bool:
    return bool(given) and given.isprintable()


def words_of(kind: object) -> tuple[str, ...]:
    if get_origin(kind) is Literal:
        return get_args(kind)
    if get_origin(kind) is tuple:
        return ()
    for each in get_args(kind):
        if get_origin(each) is Literal:
            return get_args(each)
    return ()


def is_integer(value: object) -> bool:
    """Python's or numpy's; no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _as_choice(flag: str, value: object, allowed: tuple[str, ...]) -> str:
    if isinstance(value, str) and value in allowed:
        return str.__str__(value)
    raise ConfigError(f"--{flag} {show(value)} is not one of {', '.join(allowed)}")


def _as_integer(flag: str, value: object, low: int, high: int) -> int:
    if not is_integer(value) or not low <= cast(int, value) <= high:
        raise ConfigError(f"--{flag} {show(value)} must be a whole number from {low} to {high}")
    return index(cast(int, value))


def _as_number(flag: str, value: object, declared: _Option) -> float:
    low, high = declared.low, declared.high
    if is_number(value) and low <= cast(float, value) <= high:
        return float(cast(float, value))
    raise ConfigError(f"--{flag} {show(value)} must be {declared.unit} from {low:g} to {high:g}")
