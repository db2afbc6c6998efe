"""Weights that `cadenza quantize` leaves as floats in the file and that are quantised at load.

Owns the setting of config.json that says so. Other readers ignore it and use the floats.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cadenza.checkpoint.declaration import TensorSpec
from cadenza.checkpoint.formats.scheme import QuantisationScheme
from cadenza.checkpoint.json_object import JsonObject
from cadenza.checkpoint.quantised_weight import QuantisedWeight, quantise_int8
from cadenza.checkpoint.stored_weight import StoredWeight
from cadenza.checkpoint.weight_format import INT8
from cadenza.checkpoint.weights import Weights

SETTING = "cadenza_quantization"
_KINDS = ("embedding", "head")
_STORED: Mapping[str, object] = dict.fromkeys(_KINDS, "int8")
_ROWS = 256
"""Rows that are quantised together: few enough for their float32 copies to stay in the cache."""


def format_at_load() -> dict[str, object]:
    """The setting that `with_weights_at_load` follows."""
    return {SETTING: dict(_STORED)}


@dataclass(frozen=True, slots=True)
class WithWeightsAtLoad:
    """A `QuantisationScheme` whose embedding and head are quantised to int8 at load."""

    stored: QuantisationScheme

    @property
    def name(self) -> str:
        return f"{self.stored.name}, embedding and head int8 at load"

    @property
    def activations(self) -> str | None:
        return self.stored.activations

    def find(self, spec: TensorSpec, weights: Weights) -> StoredWeight | None:
        if spec.kind not in _KINDS or spec.name not in weights:
            return self.stored.find(spec, weights)
        entry = weights.entry(spec.name)
        return StoredWeight(
            shape=entry.shape,
            stored_type=entry.stored_type,
            format=INT8,
            parts=(entry,),
            load=lambda: _quantised(weights, spec),
        )


def with_weights_at_load(config: JsonObject, stored: QuantisationScheme) -> QuantisationScheme:
    """The scheme, with the setting of a config.json. Raises `CheckpointError`."""
    found = config.get(SETTING)
    if found is None:
        return stored
    if found != _STORED:
        raise config.wrong(SETTING, f"{dict(_STORED)}, or absent")
    return WithWeightsAtLoad(stored)


def _quantised(weights: Weights, spec: TensorSpec) -> QuantisedWeight:
    view = weights.array(spec.name)
    parts = [quantise_int8(view[at : at + _ROWS]) for at in range(0, len(view), _ROWS)]
    return QuantisedWeight(
        np.concatenate([part.codes for part in parts]),
        np.concatenate([part.scales for part in parts]).astype(np.float16, copy=False),
    )
