"""Weights that `cadenza quantize` leaves as floats in the file and that are quantised at load, as a
setting of config.json says. Other readers ignore it and use the floats."""

from dataclasses import replace

import numpy as np

from cadenza.checkpoint.formats.scheme import QuantisationScheme
from cadenza.checkpoint.tensor_formats import needs_8_bits
from cadenza.config import Quantization
from cadenza.json_object import JsonObject
from cadenza.weights.quantised_weight import QuantisedWeight, quantise_int8
from cadenza.weights.stored_tensor import AnyArray, StoredWeight
from cadenza.weights.tensor_spec import TensorSpec
from cadenza.weights.weight_format import INT8
from cadenza.weights.weights import Weights

SETTING = "cadenza_quantization"
_KINDS = ("embedding", "head")
_FIRST_LAYER = "first_layer"
_SCHEMES: tuple[Quantization, ...] = ("int8", "int4")
_ROWS = 256  # rows quantised together: few enough for their float32 copies to stay in the cache


def format_at_load(quantization: Quantization) -> dict[str, object]:
    """The setting that `with_weights_at_load` follows, of a folder in int8 or int4."""
    kinds = (*_KINDS, _FIRST_LAYER) if quantization == "int4" else _KINDS
    return {SETTING: dict.fromkeys(kinds, "int8")}


def is_float_until_load(spec: TensorSpec, quantization: Quantization) -> bool:
    """Whether such a folder has a weight as floats that are quantised at load."""
    return quantization == "int4" and spec.kind == "linear" and needs_8_bits(spec)


def with_weights_at_load(config: JsonObject, stored: QuantisationScheme) -> QuantisationScheme:
    """The scheme, with embedding and head quantised to int8 at load, and the linears of the first
    layer too if they are floats, as a setting of config.json says. Raises `CheckpointError`."""
    found = config.get(SETTING)
    if found is None:
        return stored
    settings = {quantization: format_at_load(quantization)[SETTING] for quantization in _SCHEMES}
    if found not in settings.values():
        raise config.wrong(SETTING, " or ".join(map(str, settings.values())) + ", or absent")
    has_first_layer = found == settings["int4"]

    def find(spec: TensorSpec, weights: Weights) -> StoredWeight | None:
        is_first = has_first_layer and is_float_until_load(spec, "int4")
        if not (is_first or spec.kind in _KINDS) or spec.name not in weights:
            return stored.find(spec, weights)
        entry = weights.entry(spec.name)
        return StoredWeight(
            shape=entry.shape,
            stored_type=entry.stored_type,
            format=INT8,
            parts=(entry,),
            load=lambda: _quantised(entry.array()),
        )

    quantised = "embedding, head and first layer" if has_first_layer else "embedding and head"
    return replace(stored, name=f"{stored.name}, {quantised} int8 at load", find=find)


def _quantised(view: AnyArray) -> QuantisedWeight:
    parts = [quantise_int8(view[at : at + _ROWS]) for at in range(0, len(view), _ROWS)]
    return QuantisedWeight(
        np.concatenate([part.codes for part in parts]),
        np.concatenate([part.scales for part in parts]).astype(np.float16, copy=False),
    )
