"""Ministral 3 as it is published: float8 with one scale a linear, beside a tower, and static scales
of activations."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.weights.safetensors_file import NewTensor, Part, write_shards
from cadenza.weights.weight_format import FLOAT8
from cadenza.weights.weights import open_weights
from tests.checkpoint.config_writer import write_random_checkpoint

LAYER = "model.layers.1.mlp.up_proj"
SCALE = np.float32(0.25)


def write_published(folder: Path, plain: Path) -> None:
    """The tensors of `plain` under the names of the whole model, its linears in float8."""
    weights, parts = open_weights(plain), list[Part]()

    def add(name: str, array: np.ndarray, dtype: str) -> None:
        tensor = NewTensor(name=name, dtype=dtype, shape=array.shape)  # pyright: ignore[reportArgumentType]
        parts.append(Part(tensors=(tensor,), make=lambda: [array]))

    for name in weights:
        array = np.asarray(weights[name])
        own = name if name == "lm_head.weight" else f"model.language_model.{name[6:]}"
        if "_proj" not in name:
            add(own, array, "float32")
            continue
        module = own.removesuffix(".weight")
        add(own, (array / SCALE).astype(ml_dtypes.float8_e4m3fn), "float8_e4m3")
        add(f"{module}.weight_scale_inv", SCALE.reshape(()), "float32")
        add(f"{module}.activation_scale", np.float32(3.0).reshape(()), "float32")
    add("model.vision_tower.patch_conv.weight", np.zeros((2, 2), np.float32), "float32")
    folder.mkdir()
    write_shards(folder, parts)
    inner = json.loads((plain / "config.json").read_text())
    values = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "vision_config": {"model_type": "pixtral"},
        "tie_word_embeddings": inner["tie_word_embeddings"],
        "text_config": inner,
        "quantization_config": {
            "activation_scheme": "static",
            "dequantize": False,
            "modules_to_not_convert": ["model.vision_tower", "lm_head"],
            "quant_method": "fp8",
            "weight_block_size": None,
        },
    }
    (folder / "config.json").write_text(json.dumps(values))


def test_a_published_folder_is_read_from_its_float8_weights(tmp_path: Path):
    plain = tmp_path / "plain"
    write_random_checkpoint(named_shape("tiny-ministral3"), plain, seed=4, dtype="float32")
    write_published(tmp_path / "published", plain)
    found, original = open_checkpoint(tmp_path / "published"), open_checkpoint(plain)
    assert found.config == original.config
    assert set(found.weights) == set(original.weights)
    assert found.weights.format(f"{LAYER}.weight") == FLOAT8
    stored = np.asarray(original.weights[f"{LAYER}.weight"]) / SCALE
    expected = stored.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * SCALE
    assert np.array_equal(found.weights[f"{LAYER}.weight"].dequantised(), expected)
