"""Reads exported weights, and owns the names that tensors have in the exported file."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from training.model import ModelShape, Weights

MODULES = {
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
    "input_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}


def load_exported(folder: Path, shape: ModelShape) -> Weights:
    """The exported weights, converted back to the layout that `forward` takes."""
    tensors = load_file(folder / "model.safetensors")

    def tensor(name: str) -> np.ndarray:
        return tensors[f"model.{name}.weight"].astype(np.float32).T

    layers = {
        name: jnp.stack(
            [tensor(f"layers.{index}.{module}") for index in range(shape.num_hidden_layers)]
        )
        for name, module in MODULES.items()
    }
    embed = jnp.asarray(tensor("embed_tokens").T)
    return {"embed": embed, "layers": layers, "norm": jnp.asarray(tensor("norm"))}
