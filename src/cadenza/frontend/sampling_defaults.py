"""What a checkpoint says of itself: `SamplingDefaults`, values of sampling fields that a request
does not set, and `ModelFacts`, for clients. Invariant: a default never makes a valid request
invalid."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from operator import index
from typing import Any, Literal, cast

from cadenza.checkpoint.folder import Checkpoint
from cadenza.checkpoint.generation_defaults import ASSUMED_OF_GGUF, GenerationDefaults
from cadenza.errors import InvalidRequestError, show
from cadenza.models.declaration import count_parameters
from cadenza.option import is_integer
from cadenza.request import DEFAULTS, PARAMETERS, SamplingParams

FIELD_NAMES = tuple(PARAMETERS)
_RECOMMENDABLE = {  # fields of `GenerationDefaults`
    name: each.recommended for name, each in PARAMETERS.items() if each.recommended is not None
}

DESCRIBED = tuple(name for name in _RECOMMENDABLE if not name.endswith("_tokens"))

# "llama.cpp": what it assumes for fields that a GGUF file leaves open; "neutral": no change.
SamplingSource = Literal["model", "llama.cpp", "neutral"]


class SamplingDefaults:
    """A checkpoint's recommended values; otherwise the defaults of `SamplingParams`."""

    def __init__(self, recommended: GenerationDefaults | None = None) -> None:
        self._values: dict[str, int | float] = {
            name: value
            for name, key in _RECOMMENDABLE.items()
            if (value := getattr(recommended, key, None)) is not None
        }
        self._assumed = () if recommended is None else recommended.assumed

    @property
    def source(self) -> SamplingSource:
        if self._assumed:
            return "llama.cpp"
        return "model" if self._values.keys() & set(DESCRIBED) else "neutral"

    @property
    def described(self) -> dict[str, int | float]:
        """How tokens are drawn for a request that sets nothing."""
        own: dict[str, int | float] = {name: DEFAULTS[name] for name in DESCRIBED}
        return {name: self._values.get(name, value) for name, value in own.items()}

    @property
    def sentence(self) -> str:
        """What is drawn with, and why, for a person."""
        if self.source == "neutral":
            return f"temperature {DEFAULTS['temperature']:g}, no cuts"
        values = self._values
        shown = ", ".join(f"{name} {values[name]:g}" for name in DESCRIBED if name in values)
        if not self._assumed:
            return f"{shown} (as the model recommends)"
        is_all = self._assumed == tuple(ASSUMED_OF_GGUF)
        those = "" if is_all else f"{', '.join(self._assumed)} "
        return f"{shown} ({those}as in llama.cpp: the file recommends none)"

    def complete(self, given: Mapping[str, object], *, room: int | None = None) -> SamplingParams:
        """`SamplingParams` with the `given` fields and the defaults of others; `room`, the tokens
        left in the context, bounds a recommended `max_tokens`. Raises InvalidRequestError: an
        unknown field, or a value out of bounds."""
        unknown = [name for name in given if name not in (*FIELD_NAMES, "structured_outputs")]
        if unknown:
            raise InvalidRequestError(
                f"there is no sampling option {', '.join(map(show, unknown))}; there are "
                f"{', '.join(FIELD_NAMES)}",
                param=unknown[0] if isinstance(unknown[0], str) else "params",
            )
        values: dict[str, Any] = {**self._values, **given}
        self._fit_lengths(values, given, room)
        return SamplingParams(**values)

    def _fit_lengths(
        self, values: dict[str, Any], given: Mapping[str, object], room: int | None
    ) -> None:
        longest, shortest = self._values.get("max_tokens"), self._values.get("min_tokens")
        if longest is not None and "max_tokens" not in given:
            asked = given.get("min_tokens")
            least = index(cast(int, asked)) if is_integer(asked) else 1
            values["max_tokens"] = max(least, int(longest if room is None else min(longest, room)))
        most = values.get("max_tokens", DEFAULTS["max_tokens"])
        if shortest is not None and "min_tokens" not in given and is_integer(most):
            values["min_tokens"] = min(int(shortest), most)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model as it is stored."""

    name: str  # of its folder or file, or of its repository on a hub
    family: str
    format: Literal["safetensors", "gguf"]
    digest: str
    num_parameters: int | None  # None for models that only a backend can read, as `num_bytes`
    num_bytes: int | None
    stored_type: str  # of most bytes of the weights, such as bfloat16 or Q4_K
    hidden_size: int | None
    num_layers: int | None
    vocab_size: int
    max_position_embeddings: int
    can_generate: bool


def facts_of(checkpoint: Checkpoint) -> ModelFacts:
    outline = checkpoint.outline
    config = checkpoint.config if checkpoint.is_known else None
    return ModelFacts(
        name=_name_of(checkpoint),
        family=outline.family,
        format=checkpoint.format,
        digest=checkpoint.digest,
        num_parameters=None if config is None else count_parameters(config),
        num_bytes=checkpoint.num_weight_bytes if checkpoint.is_known else None,
        stored_type=_stored_type(checkpoint) if checkpoint.is_known else outline.dtype,
        hidden_size=None if config is None else config.hidden_size,
        num_layers=None if config is None else config.num_layers,
        vocab_size=outline.vocab_size,
        max_position_embeddings=outline.max_position_embeddings,
        can_generate=checkpoint.can_generate,
    )


def _stored_type(checkpoint: Checkpoint) -> str:
    weights, num_bytes = checkpoint.weights, Counter[str]()
    for name in weights:
        num_bytes[weights.stored_type(name)] += weights.num_bytes(name)
    ((found, _),) = num_bytes.most_common(1)
    return found


def _name_of(checkpoint: Checkpoint) -> str:
    folder = checkpoint.folder
    is_snapshot = folder.parent.name == "snapshots"
    name = folder.parent.parent.name if is_snapshot else folder.name
    return name.removeprefix("models--").replace("--", "/") if is_snapshot else name
