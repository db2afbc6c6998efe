"""The tensors of the exported model that sees: their names, and both ways between them and weights.

Names and layouts are those of `SmolVLMForConditionalGeneration`.
"""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import load_file

from training.exported import MODULES
from training.model import ModelShape, Weights
from training.vision.shape import PATCH, TowerShape

TEXT, TOWER = "model.text_model", "model.vision_model"
CONNECTOR = "model.connector.modality_projection.proj.weight"
TEXT_MODULES = {name: module for name, module in MODULES.items() if "_norm" not in module}
TOWER_MODULES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.out_proj",
    "fc1": "mlp.fc1",
    "fc2": "mlp.fc2",
}
TOWER_NORMS = {"norm1": "layer_norm1", "norm2": "layer_norm2"}


def named_tensors(weights: Weights, text: ModelShape, tower: TowerShape) -> dict[str, np.ndarray]:
    """All tensors in bfloat16; what is for training only is left out."""
    found = _text_tensors(weights["text"], text) | _tower_tensors(weights["tower"], tower)
    found[CONNECTOR] = weights["connector_proj"].T
    return {
        name: np.ascontiguousarray(np.asarray(tensor).astype(ml_dtypes.bfloat16))
        for name, tensor in found.items()
    }


def _text_tensors(weights: Weights, shape: ModelShape) -> dict[str, Any]:
    found = {
        f"{TEXT}.embed_tokens.weight": weights["embed"],
        f"{TEXT}.norm.weight": weights["norm"],
    }
    for index in range(shape.num_hidden_layers):
        for name, module in TEXT_MODULES.items():
            tensor = weights["layers"][name][index].T
            found[f"{TEXT}.layers.{index}.{module}.weight"] = tensor
    return found


def _tower_tensors(weights: Weights, shape: TowerShape) -> dict[str, Any]:
    embed = shape.hidden_size
    found = {
        f"{TOWER}.embeddings.patch_embedding.weight": weights["patch"].T.reshape(
            embed, 3, PATCH, PATCH
        ),
        f"{TOWER}.embeddings.patch_embedding.bias": weights["patch_bias"],
        f"{TOWER}.embeddings.position_embedding.weight": weights["positions"],
        f"{TOWER}.post_layernorm.weight": weights["norm"],
        f"{TOWER}.post_layernorm.bias": weights["norm_bias"],
    }
    layers = weights["layers"]
    for index in range(shape.num_hidden_layers):
        prefix = f"{TOWER}.encoder.layers.{index}"
        for name, module in TOWER_MODULES.items():
            found[f"{prefix}.{module}.weight"] = layers[f"{name}_proj"][index].T
            found[f"{prefix}.{module}.bias"] = layers[f"{name}_bias"][index]
        for name, module in TOWER_NORMS.items():
            found[f"{prefix}.{module}.weight"] = layers[name][index]
            found[f"{prefix}.{module}.bias"] = layers[f"{name}_bias"][index]
    return found


def load_seeing(folder: Path, text: ModelShape, tower: TowerShape) -> Weights:
    """The exported weights in the layout of `training.vision.model`."""
    tensors = {
        name: tensor.astype(np.float32)
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    return {
        "text": _load_text(tensors, text),
        "tower": _load_tower(tensors, tower),
        "connector_proj": jnp.asarray(tensors[CONNECTOR].T),
    }


def _load_text(tensors: dict[str, np.ndarray], shape: ModelShape) -> Weights:
    layers = range(shape.num_hidden_layers)
    return {
        "embed": jnp.asarray(tensors[f"{TEXT}.embed_tokens.weight"]),
        "norm": jnp.asarray(tensors[f"{TEXT}.norm.weight"]),
        "layers": {
            name: jnp.stack([tensors[f"{TEXT}.layers.{i}.{module}.weight"].T for i in layers])
            for name, module in TEXT_MODULES.items()
        },
    }


def _load_tower(tensors: dict[str, np.ndarray], shape: TowerShape) -> Weights:
    def stacked(module: str) -> Any:
        names = [f"{TOWER}.encoder.layers.{i}.{module}" for i in range(shape.num_hidden_layers)]
        return jnp.stack([tensors[name].T for name in names])

    layers: Weights = {}
    for name, module in TOWER_MODULES.items():
        layers[f"{name}_proj"] = stacked(f"{module}.weight")
        layers[f"{name}_bias"] = stacked(f"{module}.bias")
    for name, module in TOWER_NORMS.items():
        layers[name] = stacked(f"{module}.weight")
        layers[f"{name}_bias"] = stacked(f"{module}.bias")
    patch = tensors[f"{TOWER}.embeddings.patch_embedding.weight"]
    return {
        "patch": jnp.asarray(patch.reshape(shape.hidden_size, -1).T),
        "patch_bias": jnp.asarray(tensors[f"{TOWER}.embeddings.patch_embedding.bias"]),
        "positions": jnp.asarray(tensors[f"{TOWER}.embeddings.position_embedding.weight"]),
        "norm": jnp.asarray(tensors[f"{TOWER}.post_layernorm.weight"]),
        "norm_bias": jnp.asarray(tensors[f"{TOWER}.post_layernorm.bias"]),
        "layers": layers,
    }
