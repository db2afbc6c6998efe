"""`SpecPrefillConfig`, the value of --spec-prefill: which prompts a server computes in part, and
how; `SpecPrefillChoice`: what a request says about its own prompt. Invariant: every instance is
within bounds."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, cast, get_args

from cadenza.errors import ConfigError, InvalidRequestError, must_be, show
from cadenza.sparse_prefill import LEAST_KEEP, MOST_KEEP, PromptSpan, When
from cadenza.speculative_config import DraftQuantization, options_of

MAX_THRESHOLD = 1 << 24
MAX_SPANS = 64
"""That a request may have kept."""

NO_MODEL = "none"

_FLAG = "--spec-prefill"
_EXAMPLE = 'write for example {"model": "small-model", "keep": 0.3}'


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecPrefillConfig:
    """How prompts are thinned out.

    Args:
        model: the draft model that scores prompts, as models are named; None is the one that the
            package has for the bundled model. "none": there is none, and only prompts are thinned
            out whose kept chunks are given, as a receipt gives them.
        quantization: how the draft model's weights are quantised while they are loaded.
        keep: the fraction of a prompt's chunks that is computed.
        threshold: shorter prompts are computed whole, in tokens.
        head: the first tokens of a conversation, its system texts and tools, that are always kept,
            at most.
        when: as in `SparsePrefill`; also "cold".
        allow_request: whether requests may choose for themselves; they may always choose none.
        force: thin out also where that is predicted to take longer than computing the whole.

    Raises:
        ConfigError: a value is outside its bounds.
    """

    model: str | None = None
    quantization: DraftQuantization = "none"
    keep: float = 0.3
    threshold: int = 8192
    head: int = 2048
    when: When = "always"
    allow_request: bool = True
    force: bool = False

    def __post_init__(self) -> None:
        name: object = self.model
        if name is not None and not (isinstance(name, str) and name and name.isprintable()):
            raise ConfigError(
                f"{_FLAG}: the model {show(name)} must be a folder, a GGUF file or a hub model as "
                f"owner/model; {_EXAMPLE}"
            )
        if not _is_fraction(self.keep):
            raise ConfigError(
                f"{_FLAG}: keep {show(self.keep)} must be a number from {LEAST_KEEP} to "
                f"{MOST_KEEP:g}"
            )
        object.__setattr__(self, "keep", float(self.keep))
        for key in ("threshold", "head"):
            value = getattr(self, key)
            if type(value) is not int or not 0 <= value <= MAX_THRESHOLD:
                raise ConfigError(
                    f"{_FLAG}: {key} {show(value)} must be a whole number from 0 to {MAX_THRESHOLD}"
                )
        for key in ("allow_request", "force"):
            if not isinstance(getattr(self, key), bool):
                raise ConfigError(
                    f"{_FLAG}: {key} {show(getattr(self, key))} must be true or false"
                )
        for key, known in (("when", get_args(When)), ("quantization", get_args(DraftQuantization))):
            if getattr(self, key) not in known:
                raise ConfigError(
                    f"{_FLAG}: {key} {show(getattr(self, key))} is not one of {', '.join(known)}"
                )
        for key in ("model", "when", "quantization"):
            given = getattr(self, key)
            # Of a subclass of str only the text can go to another process.
            object.__setattr__(self, key, None if given is None else str.__str__(given))

    @property
    def has_model(self) -> bool:
        return self.model != NO_MODEL


def parse_spec_prefill(value: object) -> SpecPrefillConfig:
    """A config from a JSON object, as text or parsed. Raises ConfigError."""
    if isinstance(value, SpecPrefillConfig):
        return value
    known = [field.name for field in fields(SpecPrefillConfig)]
    return SpecPrefillConfig(**options_of(_FLAG, value, known, _EXAMPLE))


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecPrefillChoice:
    """What a request says about its own prompt; what is None is as the server is configured.

    Args:
        keep, threshold, when: as in `SpecPrefillConfig`.
        spans: tokens [start, stop) of the prompt that are kept whatever they score.

    Raises:
        InvalidRequestError: a value has the wrong type or is out of bounds.
    """

    keep: float | None = None
    threshold: int | None = None
    when: When | None = None
    spans: tuple[PromptSpan, ...] = ()

    def __post_init__(self) -> None:
        if self.keep is not None:
            if not _is_fraction(self.keep):
                wanted = f"a number from {LEAST_KEEP} to {MOST_KEEP:g}"
                raise _wrong("keep", self.keep, wanted)
            object.__setattr__(self, "keep", float(self.keep))
        if self.threshold is not None and not _is_whole(self.threshold, MAX_THRESHOLD):
            wanted = f"a whole number from 0 to {MAX_THRESHOLD}"
            raise _wrong("threshold", self.threshold, wanted)
        if self.when is not None and self.when not in get_args(When):
            raise _wrong("when", self.when, f"one of {', '.join(get_args(When))}")
        object.__setattr__(self, "spans", _as_spans(self.spans))


SpecPrefill = bool | SpecPrefillChoice | None
"""A request's choice: True and an object ask for it, False for the whole prompt, None leaves it to
the server."""


def as_spec_prefill(value: object) -> SpecPrefill:
    """A request's choice, which may be a mapping. Raises InvalidRequestError."""
    if value is None or isinstance(value, bool | SpecPrefillChoice):
        return value
    known = [field.name for field in fields(SpecPrefillChoice)]
    if not isinstance(value, Mapping) or not set(cast(Mapping[Any, Any], value)) <= {*known}:
        wanted = f"true, false or an object with some of {', '.join(known)}"
        raise must_be("spec_prefill", cast(object, value), wanted)
    return SpecPrefillChoice(**cast(Mapping[str, Any], value))


def _wrong(name: str, given: object, wanted: str) -> InvalidRequestError:
    found = must_be(f"spec_prefill.{name}", given, wanted)
    return InvalidRequestError(str(found), param="spec_prefill")


def _is_fraction(value: object) -> bool:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return is_number and LEAST_KEEP <= cast(float, value) <= MOST_KEEP


def _is_whole(value: object, most: int) -> bool:
    return type(value) is int and 0 <= value <= most


def _as_spans(given: object) -> tuple[PromptSpan, ...]:
    entries = cast(list[object], given) if isinstance(given, tuple | list) else [None]
    found = tuple(span for each in entries if (span := _as_span(each)) is not None)
    if len(found) < len(entries) or len(found) > MAX_SPANS:
        wanted = f"a list of at most {MAX_SPANS} spans [start, stop) of tokens, none of them empty"
        raise _wrong("spans", cast(object, given), wanted)
    return found


def _as_span(given: object) -> PromptSpan | None:
    ends = cast(list[int], given) if isinstance(given, tuple | list) else []
    is_span = len(ends) == 2 and all(_is_whole(end, 1 << 31) for end in ends) and ends[0] < ends[1]
    return PromptSpan(ends[0], ends[1]) if is_span else None
