"""The methods of quantisation by name, and the settings that name them.

Owns which methods are read and why others are refused.
"""

from collections.abc import Callable

from cadenza.checkpoint.declaration import TensorKind, declare
from cadenza.checkpoint.formats.compressed_tensors import read_compressed_tensors
from cadenza.checkpoint.formats.scheme import QuantisationScheme
from cadenza.checkpoint.json_object import JsonObject, shorten
from cadenza.checkpoint.model_config import ModelConfig
from cadenza.checkpoint.stored_weight import StoredScheme, StoredWeight
from cadenza.checkpoint.weights import Weights
from cadenza.errors import CheckpointError

SETTINGS = ("quantization_config", "compression_config")
"""The settings of config.json that `read_scheme` reads; the latter is the former's old name."""

_METHODS: dict[str, Callable[[JsonObject], QuantisationScheme]] = {
    "compressed-tensors": read_compressed_tensors,
}

_UNQUANTISED = "use the unquantised checkpoint with --quantization int8 or int4"
_AT_LOAD = f"it quantises at load with another library; {_UNQUANTISED}"
_REFUSED: dict[str, str] = {
    **dict.fromkeys(("bitsandbytes", "quanto", "eetq", "torchao", "hqq", "higgs"), _AT_LOAD),
}
"""Methods that are refused with a reason of their own."""

_QUANTISED_KINDS: frozenset[TensorKind] = frozenset({"embedding", "head", "linear", "router"})


def read_scheme(config: JsonObject) -> QuantisationScheme | None:
    """The scheme of a config.json; None if nothing is quantised.

    Raises CheckpointError for a method or setting that is not supported.
    """
    raw = next((config.child(key) for key in SETTINGS if config.get(key) not in (None, {})), None)
    if raw is None:
        return None
    method = raw.text("quant_method")
    if method not in _METHODS:
        remedy = _REFUSED.get(method or "", f"supported are {', '.join(_METHODS)}; {_UNQUANTISED}")
        raise CheckpointError(
            f"{raw.where}: quant_method {shorten(method)} is not supported; {remedy}"
        )
    return _METHODS[method](raw)


def apply_scheme(scheme: QuantisationScheme, config: ModelConfig, weights: Weights) -> Weights:
    """`weights` with the quantised weights under their declared names; others are unchanged.

    Raises CheckpointError if their tensors are missing, or are not what the scheme requires.
    """
    found: dict[str, StoredWeight] = {}
    for spec in declare(config):
        if spec.kind in _QUANTISED_KINDS:
            stored = scheme.find(spec, weights)
            if stored is not None:
                found[spec.name] = stored
    stated = StoredScheme(name=scheme.name, activations=scheme.activations)
    return weights.with_quantised(stated, found)
