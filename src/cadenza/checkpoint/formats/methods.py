"""The methods of quantisation by name, the settings that name them, and why others are refused."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from cadenza.checkpoint.formats.at_load import with_weights_at_load
from cadenza.checkpoint.formats.awq import read_awq
from cadenza.checkpoint.formats.compressed_tensors import read_compressed_tensors
from cadenza.checkpoint.formats.float8 import read_float8
from cadenza.checkpoint.formats.gptq import read_gptq
from cadenza.checkpoint.formats.mlx import read_mlx
from cadenza.checkpoint.formats.mxfp4 import MXFP4_METHOD
from cadenza.checkpoint.formats.scheme import QuantisationScheme
from cadenza.errors import CheckpointError
from cadenza.json_object import JsonObject, shorten
from cadenza.models.declaration import declare
from cadenza.models.model_config import ModelConfig
from cadenza.weights.stored_tensor import StoredScheme, StoredWeight
from cadenza.weights.tensor_spec import TensorKind, TensorSpec
from cadenza.weights.weights import Weights

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
