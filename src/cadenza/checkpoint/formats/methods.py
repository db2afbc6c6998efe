"""The methods of quantisation by name: `read_scheme`, `apply_scheme`. Weights that `cadenza
quantize` leaves as floats in the file are quantised at load, as a setting says that other readers
ignore."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from cadenza.checkpoint.formats.compressed_tensors import read_compressed_tensors
from cadenza.checkpoint.formats.float8 import read_float8
from cadenza.checkpoint.formats.gptq import read_awq, read_gptq
from cadenza.checkpoint.formats.grouped import MXFP4_METHOD
from cadenza.checkpoint.formats.mlx import read_mlx
from cadenza.checkpoint.formats.scheme import QuantisationScheme
from cadenza.checkpoint.tensor_formats import needs_8_bits
from cadenza.config import Quantization
from cadenza.errors import CheckpointError
from cadenza.json_object import JsonObject, shorten
from cadenza.models.declaration import declare
from cadenza.models.model_config import ModelConfig
from cadenza.weights.quantised_weight import QuantisedWeight, quantise_int8
from cadenza.weights.stored_tensor import AnyArray, StoredScheme, StoredWeight
from cadenza.weights.tensor_spec import TensorKind, TensorSpec
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


MLX_SETTING = "quantization"
# MLX writes the first two, with the same content; the last is an old name of the second
SETTINGS = (MLX_SETTING, "quantization_config", "compression_config")

_METHODS: dict[str, Callable[[JsonObject], QuantisationScheme]] = {
    "compressed-tensors": read_compressed_tensors,
    "awq": read_awq,
    "gptq": read_gptq,
    "fp8": read_float8,
    "mxfp4": lambda _: MXFP4_METHOD,
}

_UNQUANTISED = "use the unquantised checkpoint with --quantization int8 or int4"
_AT_LOAD = f"it quantises at load with another library; {_UNQUANTISED}"
# methods that are refused with a reason of their own
_REFUSED: dict[str, str] = {
    **dict.fromkeys(("bitsandbytes", "quanto", "eetq", "torchao", "hqq", "higgs"), _AT_LOAD),
    **dict.fromkeys(
        ("aqlm", "quip", "vptq", "spqr", "bitnet", "marlin", "exl2"),
        f"its codes have no affine values; {_UNQUANTISED}, or one in AWQ, GPTQ or GGUF",
    ),
}

_QUANTISED_KINDS: frozenset[TensorKind] = frozenset({"embedding", "head", "linear", "router"})


def read_scheme(config: JsonObject) -> QuantisationScheme | None:
    """The scheme of a config.json; None if nothing is quantised. Raises CheckpointError for a
    method or setting that is not supported."""
    key = next((key for key in SETTINGS if config.get(key) not in (None, {})), None)
    raw = None if key is None else config.child(key)
    if raw is None:
        return None
    method = raw.text("quant_method")
    if key == MLX_SETTING and method is None:
        return read_mlx(raw)
    if method not in _METHODS:
        remedy = _REFUSED.get(method or "", f"supported are {', '.join(_METHODS)}; {_UNQUANTISED}")
        raise CheckpointError(
            f"{raw.where}: quant_method {shorten(method)} is not supported; {remedy}"
        )
    return with_weights_at_load(config, _METHODS[method](raw))


def apply_scheme(scheme: QuantisationScheme, config: ModelConfig, weights: Weights) -> Weights:
    """`weights` with the quantised weights under their declared names; others are unchanged. Raises
    CheckpointError if their tensors are missing, or are not what the scheme requires."""
    found: dict[str, StoredWeight] = {}
    for spec in declare(config):
        if spec.kind in _QUANTISED_KINDS:
            stored = scheme.find(spec, weights)
            if stored is not None:
                _check_once(spec, stored, weights)
                found[spec.name] = stored if spec.kind != "router" else _as_floats(stored)
    stated = StoredScheme(name=scheme.name, activations=scheme.activations)
    return weights.with_quantised(stated, found)


def _check_once(spec: TensorSpec, stored: StoredWeight, weights: Weights) -> None:
    if spec.name in weights and all(part.name != spec.name for part in stored.parts):
        raise CheckpointError(
            f"the weights contain {spec.name} twice: as floats and in {stored.parts[0].name}; "
            f"remove one of the two"
        )


def _as_floats(stored: StoredWeight) -> StoredWeight:
    """The same weight, loaded as floats: a router is small, and its errors choose experts."""
    return replace(stored, format=None, load=lambda: np.asarray(stored.load()))
