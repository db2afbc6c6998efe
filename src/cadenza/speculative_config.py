"""`SpeculativeConfig`, the value of --speculative-config: which drafts a server verifies, under
vLLM's names, and what a request may choose. Invariant: every instance is within bounds."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from operator import index
from typing import Any, Literal, cast, get_args

from cadenza.errors import ConfigError, must_be, show

SpeculativeMethod = Literal["ngram", "draft_model", "quantised", "mtp"]
_OLD_METHODS = {"mimo_mtp": "mtp"}  # older names in vLLM of methods

DraftQuantization = Literal["none", "int8", "int4"]

# A request's choice: True with drafts, False without, a number of drafts in a step at most, None as
# the engine is configured.
Speculative = bool | int | None

MAX_SPECULATIVE_TOKENS = 16
MAX_LOOKUP_TOKENS = 64

_FLAG = "--speculative-config"
_RANGES: Mapping[str, tuple[int, int]] = {
    "num_speculative_tokens": (1, MAX_SPECULATIVE_TOKENS),
    "prompt_lookup_max": (1, MAX_LOOKUP_TOKENS),
    "prompt_lookup_min": (1, MAX_LOOKUP_TOKENS),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How drafts are made. Raises ConfigError: a value is outside its bounds."""

    # "ngram": what followed a stream's newest tokens where they occurred before in it;
    # "draft_model": tokens of another, smaller model of the same vocabulary; "quantised":
    # tokens of a copy of the model with coarser weights; "mtp": tokens of the model's own MTP
    # layer.
    method: SpeculativeMethod
    num_speculative_tokens: int = 5  # drafts of a stream in a step, at most
    # The draft model, as models are named; only for "draft_model", where None is the one that
    # the package has for the bundled model.
    model: str | None = None
    # How the draft model's weights are quantised while they are loaded; None is "none", and
    # "int4" for "quantised". An instance always has it set, and a method without a draft model
    # has "none".
    quantization: DraftQuantization | None = None
    # Tokens by which an earlier position of the stream is compared, at most.
    prompt_lookup_max: int = 5
    prompt_lookup_min: int = 2  # tokens that must be equal there, at least

    def __post_init__(self) -> None:
        if self.method not in get_args(SpeculativeMethod):
            raise ConfigError(
                f"{_FLAG}: the method {show(self.method)} is not one of "
                f"{', '.join(get_args(SpeculativeMethod))}"
            )
        self._check_model()
        for name in ("method", "model", "quantization"):
            given = getattr(self, name)
            # Of a subclass of str only the text can go to another process.
            object.__setattr__(self, name, None if given is None else str.__str__(given))
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise ConfigError(
                    f"{_FLAG}: {name} {show(value)} must be a whole number from {low} to {high}"
                )
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"{_FLAG}: prompt_lookup_min {self.prompt_lookup_min} is above prompt_lookup_max "
                f"{self.prompt_lookup_max}; raise the second or lower the first"
            )

    def _check_model(self) -> None:
        name: object = self.model
        is_name = isinstance(name, str) and name and name.isprintable()
        if self.method == "draft_model" and name is not None and not is_name:
            raise ConfigError(
                f"{_FLAG}: the model {show(name)} must be a folder, a GGUF file or a hub model as "
                f'owner/model, as in {{"method": "draft_model", "model": "small-model"}}'
            )
        if self.method != "draft_model" and name is not None:
            raise ConfigError(f"{_FLAG}: a model is only for the method draft_model; leave it out")
        chosen: object = self.quantization
        if chosen is None:
            default = "int4" if self.method == "quantised" else "none"
            object.__setattr__(self, "quantization", default)
        elif self.method in ("ngram", "mtp") and chosen != "none":
            raise ConfigError(
                f"{_FLAG}: the quantization {show(chosen)} is for the methods draft_model and "
                f"quantised; leave it out with {self.method}"
            )
        elif chosen not in get_args(DraftQuantization):
            raise ConfigError(
                f"{_FLAG}: the quantization {show(chosen)} must be none, int8 or int4, and is that "
                f"of a draft model"
            )
        if self.method == "quantised" and self.quantization == "none":
            raise ConfigError(
                f"{_FLAG}: the method quantised needs the quantization int8 or int4; with none the "
                f"draft would be the model itself"
            )

    @property
    def has_model(self) -> bool:
        """An MTP layer is one."""
        return self.method != "ngram"


def parse_speculative_config(value: object) -> SpeculativeConfig:
    """From a JSON object, as text or parsed. Raises ConfigError."""
    if isinstance(value, SpeculativeConfig):
        return value
    known = [field.name for field in fields(SpeculativeConfig)]
    options = options_of(_FLAG, value, known, _EXAMPLE)
    if "method" not in options:
        raise ConfigError(f"{_FLAG} names no method; {_EXAMPLE}")
    method = options["method"]
    old = _OLD_METHODS.get(method) if isinstance(method, str) else None
    chosen: dict[str, Any] = {**options, "method": old or method}
    return SpeculativeConfig(**chosen)


def options_of(flag: str, value: object, known: Sequence[str], example: str) -> Mapping[str, Any]:
    """The members of a JSON object, as text or parsed. Raises ConfigError if it is none, or has
    others than `known`."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"{flag} {show(value)} is not JSON: {error}; {example}") from None
    if not isinstance(value, Mapping):
        raise ConfigError(f"{flag} {show(value)} is not a JSON object; {example}")
    options = cast(Mapping[str, Any], value)
    unknown = sorted(str(name) for name in options if name not in known)
    if unknown:
        raise ConfigError(
            f"{flag}: there is no option {', '.join(unknown)}; there are {', '.join(known)}"
        )
    return options


def as_speculative(value: object) -> Speculative:
    """May be given as {"num_speculative_tokens": N}. Raises InvalidRequestError."""
    if value is None or isinstance(value, bool):
        return value
    number = value
    if isinstance(value, Mapping):
        members = cast(Mapping[object, object], value)
        number = members.get("num_speculative_tokens") if len(members) == 1 else None
    is_whole = isinstance(number, Integral) and not isinstance(number, bool)
    if is_whole and 1 <= cast(int, number) <= MAX_SPECULATIVE_TOKENS:
        return index(cast(int, number))
    form = '{"num_speculative_tokens": N}'
    wanted = f"true, false or {form} with N from 1 to {MAX_SPECULATIVE_TOKENS}"
    raise must_be("speculative", cast(object, value), wanted)


_EXAMPLE = 'write for example {"method": "ngram", "num_speculative_tokens": 5}'
