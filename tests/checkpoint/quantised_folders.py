"""Folders with quantised weights, written from random codes: `write_quantised`.

Each method's own writer is in its test; third-party writers made the fixtures.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.models.config_json import CONFIG_FILE
from cadenza.models.declaration import declare
from cadenza.weights.tensor_spec import TensorSpec
from cadenza.weights.weights import Weights, open_weights
from tests.checkpoint.config_writer import write_random_checkpoint
from tests.checkpoint.files import write_tensors

Store = Callable[[TensorSpec, np.ndarray], Mapping[str, np.ndarray] | None]
"""The tensors of a module by suffix; None if its weight is not quantised."""


def write_quantised(
    folder: Path, shape: str, settings: Mapping[str, Any], store: Store, *, seed: int = 0
) -> Path:
    """A random checkpoint of `shape` whose weights `store` has quantised."""
    plain = folder / "plain"
    config = named_shape(shape)
    write_random_checkpoint(config, plain, seed=seed, dtype="float32")
    weights: Weights = open_weights(plain)
    tensors: dict[str, np.ndarray] = {}
    for spec in declare(config):
        stored = store(spec, weights[spec.name]) if len(spec.shape) == 2 else None
        if stored is None:
            tensors[spec.name] = weights[spec.name]
        else:
            module = spec.name.removesuffix(".weight")
            tensors |= {f"{module}.{suffix}": array for suffix, array in stored.items()}
    quantised = folder / "quantised"
    quantised.mkdir()
    write_tensors(quantised / "model.safetensors", tensors)
    settings = json.loads((plain / CONFIG_FILE).read_text()) | dict(settings)
    (quantised / CONFIG_FILE).write_text(json.dumps(settings))
    return quantised


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Unsigned codes [..., n] in words of 32 bits, lowest bits first, padded with zeros."""
    per_word = 32 // bits
    padding = [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % per_word)]
    wide = np.pad(codes.astype(np.uint64), padding).reshape(*codes.shape[:-1], -1, per_word)
    shifts = np.arange(per_word, dtype=np.uint64) * np.uint64(bits)
    return np.sum(wide << shifts, axis=-1).astype(np.uint32).view(np.int32)
