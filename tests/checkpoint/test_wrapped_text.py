"""Text models within models that have towers: settings, names of tensors, what is left out."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.errors import CheckpointError
from cadenza.json_object import JsonObject
from cadenza.models.wrapped_text import unwrap_config
from cadenza.weights.safetensors_file import SINGLE_FILE
from tests.checkpoint.config_writer import write_random_checkpoint

SHAPE = "tiny-qwen3.5"


def write_wrapped(folder: Path, prefix: str = "model.language_model.", **outer: Any) -> None:
    """The tiny shape as it lies in a checkpoint with a tower for images."""
    write_random_checkpoint(named_shape(SHAPE), folder, seed=2, dtype="float32")
    tensors = {
        f"{prefix}{name.removeprefix('model.')}" if name.startswith("model.") else name: tensor
        for name, tensor in load_file(folder / SINGLE_FILE).items()
    }
    tensors["model.visual.blocks.0.attn.qkv.weight"] = np.zeros((3, 2), np.float32)
    save_file(tensors, folder / SINGLE_FILE)
    inner = json.loads((folder / "config.json").read_text())
    values = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "vision_config": {"depth": 1},
        "image_token_id": 7,
        "tie_word_embeddings": inner["tie_word_embeddings"],
        "text_config": {key: inner[key] for key in inner if key != "architectures"},
        **outer,
    }
    (folder / "config.json").write_text(json.dumps(values))


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_the_text_model_is_read_and_the_towers_are_left_out(tmp_path: Path, prefix: str):
    plain, wrapped = tmp_path / "plain", tmp_path / "wrapped"
    write_random_checkpoint(named_shape(SHAPE), plain, seed=2, dtype="float32")
    write_wrapped(wrapped, prefix)
    ours, theirs = open_checkpoint(wrapped), open_checkpoint(plain)
    assert ours.config == theirs.config
    assert set(ours.weights) == set(theirs.weights)
    assert all(np.array_equal(ours.weights[name], theirs.weights[name]) for name in theirs.weights)


@pytest.mark.parametrize("text_type", ["mistral", "ministral3"])
def test_mistral_3_has_text_models_of_two_types(text_type: str):
    inner = {"model_type": text_type, "hidden_size": 8}
    raw = JsonObject(
        {"model_type": "mistral3", "vision_config": {}, "text_config": inner}, "config.json"
    )
    found = unwrap_config(raw)
    assert (found.text("model_type"), found.get("hidden_size")) == (text_type, 8)
    assert not found.has("vision_config")


def test_settings_that_stand_outside_hold_for_the_text_model():
    raw = JsonObject(
        {
            "model_type": "qwen3_5",
            "tie_word_embeddings": True,
            "eos_token_id": 5,
            "quantization_config": {"modules_to_not_convert": ["model.language_model.layers.0"]},
            "text_config": {"tie_word_embeddings": False, "eos_token_id": 3, "hidden_size": 8},
        },
        "config.json",
    )
    assert dict(unwrap_config(raw).values) == {
        "model_type": "qwen3_5_text",
        "tie_word_embeddings": True,
        "eos_token_id": 3,
        "hidden_size": 8,
        "quantization_config": {"modules_to_not_convert": ["model.layers.0"]},
    }


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "qwen3_5"}, "has text_config, which is absent"),
        (
            {"model_type": "qwen3_5", "text_config": {"model_type": "llama"}},
            "within qwen3_5 supported is qwen3_5_text",
        ),
    ],
)
def test_a_wrapper_without_its_text_model_is_refused(values: dict[str, Any], message: str):
    with pytest.raises(CheckpointError, match=message):
        unwrap_config(JsonObject(values, "config.json"))
