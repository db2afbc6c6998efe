"""What the methods share: `QuantisationScheme`, checked access to the tensors of a module,
`ModuleTensors` (N out, S stored groups of K), and `Target`, a name or pattern that chooses modules.
Checkpoints are not trusted: patterns have few repetitions and alternatives, and no repeated
group."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from cadenza.errors import CheckpointError
from cadenza.json_object import JsonObject, shorten
from cadenza.weights.stored_tensor import StoredTensor, StoredWeight
from cadenza.weights.tensor_spec import TensorSpec
from cadenza.weights.weight_format import GROUP, StoredDType
from cadenza.weights.weights import Weights

MAX_GROUP = 1 << 20
SCALE_DTYPES: tuple[StoredDType, ...] = ("float16", "bfloat16", "float32")


# how a weight is stored, None if it is not quantised; raises CheckpointError if its tensors are
# missing, or are not what the settings require
FindStored = Callable[[TensorSpec, Weights], StoredWeight | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisationScheme:
    """How a checkpoint is quantised, as `StoredScheme`, and how its weights are found."""

    name: str
    activations: str | None = None
    find: FindStored


@dataclass(frozen=True, slots=True)
class ModuleTensors:
    """The stored tensors of one module, such as `model.layers.0.mlp.up_proj`."""

    weights: Weights
    module: str

    @classmethod
    def of(cls, spec: TensorSpec, weights: Weights) -> "ModuleTensors":
        return cls(weights, spec.name.removesuffix(".weight"))

    def has(self, suffix: str) -> bool:
        return f"{self.module}.{suffix}" in self.weights

    def take(
        self, suffix: str, shapes: list[tuple[int, ...]], dtypes: tuple[StoredDType, ...]
    ) -> StoredTensor:
        """The tensor `suffix`, which has one of `shapes` and one of `dtypes`."""
        name = f"{self.module}.{suffix}"
        if name not in self.weights:
            raise CheckpointError(
                f"the weights lack {name}, which the quantisation of config.json requires; fetch "
                f"the checkpoint again or correct config.json"
            )
        entry = self.weights.entry(name)
        if entry.shape not in shapes:
            allowed = " or ".join(str(list(shape)) for shape in shapes)
            raise CheckpointError(
                f"tensor {name} has shape {list(entry.shape)}; the quantisation of config.json "
                f"requires {allowed}; correct config.json or fetch the checkpoint again"
            )
        if entry.dtype not in dtypes:
            raise CheckpointError(
                f"tensor {name} has the type {entry.dtype}; the quantisation of config.json "
                f"requires {' or '.join(dtypes)}; correct config.json or fetch the checkpoint again"
            )
        return entry

    def take_columns(
        self, codes: tuple[int, int], zeros: tuple[int, int], columns: int
    ) -> tuple[StoredTensor, StoredTensor, StoredTensor]:
        """`qweight` and `qzeros` [S, words] with these shapes, and `scales` [S, N], as AWQ and GPTQ
        store them. Raises `CheckpointError`."""
        return (
            self.take("qweight", [codes], ("int32",)),
            self.take("qzeros", [zeros], ("int32",)),
            self.take("scales", [(zeros[0], columns)], SCALE_DTYPES),
        )


def read_group_size(raw: JsonObject, key: str) -> int | None:
    """The inputs with one scale; None if -1 says all of them. Raises `CheckpointError`."""
    if raw.get(key) == -1:
        return None
    group = raw.integer(key, 1, MAX_GROUP)
    if group % GROUP:
        raise raw.wrong(key, f"-1 or a multiple of {GROUP}")
    return group


MAX_PATTERN = 1024
MAX_TARGETS = 4096
MAX_REPEATS = 4
MAX_GROUPS = 2
MAX_ALTERNATIVES = 64
PATTERN_PREFIX = "re:"

_LAZY_OR_ESCAPED = re.compile(r"\\.|\(\?:|(?<=[*+?}])\?")
_REPEATED_GROUP = re.compile(r"\)[*+?{]|\(\?")


@dataclass(frozen=True, slots=True)
class Target:
    """Chooses modules by their name, their class, or a pattern at the start of their name."""

    text: str
    pattern: re.Pattern[str] | None = None

    @classmethod
    def of(cls, value: object, where: str) -> "Target":
        """Reads a name, a class or "re:" with a pattern. Raises `CheckpointError`."""
        if not isinstance(value, str) or not value:
            raise CheckpointError(f"{where} has {shorten(value)}; it must have names or patterns")
        if not value.startswith(PATTERN_PREFIX):
            return cls(value)
        return cls(value, compile_pattern(value.removeprefix(PATTERN_PREFIX), where))

    def rank(self, module: str, kind: str) -> int | None:
        """How specific the match is: 0 for a name, 1 for a pattern, 2 for a class; else None."""
        if self.pattern is not None:
            return 1 if self.pattern.match(module) else None
        return 0 if self.text == module else 2 if self.text == kind else None


def compile_pattern(text: str, where: str) -> re.Pattern[str]:
    """A regular expression whose matching time is bounded. Raises `CheckpointError`."""
    plain = _LAZY_OR_ESCAPED.sub(lambda found: "(" if "(" in found[0] else "", text)
    is_bounded = (
        sum(map(plain.count, "*+?{")) <= MAX_REPEATS
        and plain.count("(") <= MAX_GROUPS
        and plain.count("|") < MAX_ALTERNATIVES
        and _REPEATED_GROUP.search(plain) is None
    )
    if len(text) > MAX_PATTERN or not is_bounded:
        raise CheckpointError(
            f"{where} has the pattern {shorten(text)}; allowed are at most {MAX_PATTERN} "
            f"characters, {MAX_REPEATS} repetitions, {MAX_GROUPS} groups and {MAX_ALTERNATIVES} "
            f"alternatives, and no repeated group; list the modules by name"
        )
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise CheckpointError(
            f"{where} has {shorten(text)}, which is not a regular expression; correct it"
        ) from error
