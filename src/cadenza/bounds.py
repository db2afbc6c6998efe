"""Bounded values of requests: what a client may give in place of a number, a list or token ids.
Invariant: a value that is returned is a plain Python one, finite and within its bounds."""

import re
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from numbers import Real
from operator import index
from typing import Any, cast

from cadenza.errors import InvalidRequestError, must_be, show
from cadenza.option import is_integer

_SURROGATE = re.compile("[\ud800-\udfff]")  # lone surrogates, which UTF-8 cannot encode


@dataclass(frozen=True, slots=True)
class NumberBound:
    """In [`low`, `high`]."""

    low: float
    high: float
    is_integer: bool = False


@dataclass(frozen=True, slots=True)
class ListBound:
    """At most `max_items` entries: strings of 1 to `max_chars` characters, or token ids if None."""

    max_items: int
    max_chars: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParameter:
    """What is declared of a sampling parameter beside its type and default."""

    help: str  # for the API's description and the command line
    within: NumberBound | ListBound | None = None  # its bounds; None: those of its type
    renamed: tuple[str, ...] = ()  # what the bodies of some dialects call it
    also: tuple[str, ...] = ()  # what other engines call it
    # The key of generation_config.json by which a model recommends a value.
    recommended: str | None = None


def parameter(
    default: Any,
    help: str,
    within: tuple[float, float] | ListBound | None = None,
    *,
    recommended: str | None = None,
    **names: str,
) -> Any:
    """A dataclass field that is a sampling parameter; names are one text, bounds of a number two,
    whole if it is."""
    is_pair = isinstance(within, tuple)
    bound = NumberBound(*within, is_integer=isinstance(within[0], int)) if is_pair else within
    lists = {kind: tuple(text.split()) for kind, text in names.items()}
    declared = SamplingParameter(help=help, within=bound, recommended=recommended, **lists)
    return field(default=default, metadata={"parameter": declared})


MAX_BIASES = 300
BIAS = NumberBound(-100.0, 100.0)


def as_token_ids(name: str, value: object) -> tuple[int, ...]:
    """The integers of a sequence or a one-dimensional array. Raises InvalidRequestError with the
    `param` `name`."""
    entries = sequence_of(value)
    if entries is None:
        raise must_be(name, value, "token ids")
    if set(map(type, entries)) <= {int}:
        return tuple(cast(SequenceOf[int], entries))
    for entry in entries:
        if not is_integer(entry):
            raise InvalidRequestError(
                f"{name} holds {show(entry)}; token ids are whole numbers", param=name
            )
    return tuple(index(cast(int, entry)) for entry in entries)


def sequence_of(value: object) -> SequenceOf[object] | None:
    """The entries of a sequence or an array; None for strings, bytes and other types."""
    if isinstance(value, tuple | list):
        return cast(SequenceOf[object], value)
    # Array types, without importing numpy here.
    as_list = None if isinstance(value, type) else getattr(value, "tolist", None)
    entries: object = as_list() if callable(as_list) else value
    is_text = isinstance(value, memoryview) or isinstance(entries, str | bytes | bytearray)
    is_sequence = isinstance(entries, SequenceOf) and not is_text
    return cast(SequenceOf[object], entries) if is_sequence else None


def as_number(name: str, value: object, bound: NumberBound) -> int | float:
    """Raises InvalidRequestError, as those below."""
    is_number = is_integer(value) or (isinstance(value, Real) and not bound.is_integer)
    # The comparison is false for NaN and works for integers of any size.
    if is_number and not isinstance(value, bool) and bound.low <= cast(float, value) <= bound.high:
        return index(cast(int, value)) if is_integer(value) else float(cast(float, value))
    wanted = f"a number from {bound.low:g} to {bound.high:g}"
    if bound.is_integer:
        wanted = f"a whole number from {int(bound.low)} to {int(bound.high)}"
    raise must_be(name, value, wanted)


def as_tuple(name: str, value: object, bound: ListBound) -> tuple[Any, ...]:
    """The entries of a list; one text stands for a list of stop strings."""
    if isinstance(value, str) and name == "stop":
        value = (value,)
    if bound.max_chars is None:
        entries = as_token_ids(name, value)
    else:
        entries = _as_strings(name, value, bound.max_chars)
    if len(entries) > bound.max_items:
        raise InvalidRequestError(
            f"{name} has {len(entries)} entries; at most {bound.max_items} are allowed", param=name
        )
    return entries


def as_biases(value: object) -> tuple[tuple[int, float], ...]:
    """(token id, bias) pairs in ascending order of id; the last bias of a repeated id wins."""
    is_mapping = isinstance(value, Mapping)
    given = cast(Mapping[object, object], value).items() if is_mapping else sequence_of(value)
    try:
        biases = dict(cast(SequenceOf[tuple[int, float]], given))
    except (TypeError, ValueError):
        raise must_be("logit_bias", value, "a bias for each token id") from None
    if len(biases) > MAX_BIASES:
        raise InvalidRequestError(
            f"logit_bias has {len(biases)} entries; at most {MAX_BIASES} are allowed",
            param="logit_bias",
        )
    ids = as_token_ids("logit_bias", tuple(biases))
    numbers = [as_number("logit_bias", bias, BIAS) for bias in biases.values()]
    return tuple(sorted(cast(list[tuple[int, float]], [*zip(ids, numbers, strict=True)])))


def _as_strings(name: str, texts: object, max_chars: int) -> tuple[str, ...]:
    if not isinstance(texts, tuple | list):
        raise must_be(name, texts, "a list of texts")
    for text in cast(SequenceOf[object], texts):
        if not isinstance(text, str) or not 0 < len(text) <= max_chars or _SURROGATE.search(text):
            raise InvalidRequestError(
                f"{name} holds {show(text)}; each entry is a text of 1 to {max_chars} whole "
                f"characters",
                param=name,
            )
    return tuple(str.__str__(text) for text in cast(SequenceOf[str], texts))
