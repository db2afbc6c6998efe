"""`SamplingDefaults`: values of fields that a request does not set, from a checkpoint's
recommendations, and their description. Invariant: a default never makes a valid request invalid."""

from collections.abc import Mapping
from operator import index
from typing import Any, Literal, cast

from cadenza.checkpoint.generation_defaults import ASSUMED_OF_GGUF, GenerationDefaults
from cadenza.errors import InvalidRequestError, show
from cadenza.option import is_integer
from cadenza.request import DEFAULTS, PARAMETERS, SamplingParams

FIELD_NAMES = tuple(PARAMETERS)

_RECOMMENDABLE = {
    name: each.recommended for name, each in PARAMETERS.items() if each.recommended is not None
}
"""Maps sampling parameters to fields of `GenerationDefaults`."""

DESCRIBED = tuple(name for name in _RECOMMENDABLE if not name.endswith("_tokens"))
"""Those that are no lengths."""

SamplingSource = Literal["model", "llama.cpp", "neutral"]
"""The checkpoint's recommendations; what llama.cpp assumes for fields that a GGUF file leaves open;
or no change to the distribution."""


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
        """`SamplingParams` with the `given` fields; the others have their default values. `room`:
        tokens left in the context; limits a recommended `max_tokens`. Raises InvalidRequestError:
        an unknown field, or a value out of bounds."""
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
