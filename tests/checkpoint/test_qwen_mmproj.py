"""Towers of the Qwen models in GGUF files: the folder's settings and bits, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cadenza.checkpoint.folder import Checkpoint
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.errors import CheckpointError
from cadenza.models.declaration import declare
from cadenza.models.model_config import ModelConfig
from cadenza.models.towers.reader import VisionOptions
from cadenza.vision.tower_config import VisionConfig
from tests.checkpoint.config_writer import write_random_checkpoint
from tests.checkpoint.gguf_models import Arrays
from tests.checkpoint.mmproj_files import floats, same_models, write_text, write_tower

TOKENS = {7: "<|image_pad|>"}
MODELS = {
    "tiny-qwen3-vl": ("qwen3vl", "qwen3vl_merger"),
    "tiny-qwen3.5-vl": ("qwen35", "qwen3vl_merger"),
    "tiny-qwen2.5-vl": ("qwen2vl", "qwen2.5vl_merger"),
}
"""The architecture and the type of projector of each shape."""

LAYER_NAMES = {
    "norm1": "ln1",
    "norm2": "ln2",
    "attn.qkv": "attn_qkv",
    "attn.proj": "attn_out",
    "mlp.linear_fc1": "ffn_up",
    "mlp.linear_fc2": "ffn_down",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OTHER_NAMES = {
    "pos_embed": "v.position_embd",
    "merger.norm": "v.post_ln",
    "merger.ln_q": "v.post_ln",
    "merger.linear_fc1": "mm.0",
    "merger.linear_fc2": "mm.2",
    "merger.mlp.0": "mm.0",
    "merger.mlp.2": "mm.2",
    "patch_embed.proj": "v.patch_embd",
}


def vision_of(model: Checkpoint) -> VisionConfig:
    assert model.config.vision is not None
    return model.config.vision


def tower_tensors(model: Checkpoint) -> Arrays:
    """By the names that llama.cpp's converter gives; it stores the two times of patches apart."""
    tower = vision_of(model).tower
    found: Arrays = {}
    for spec in declare(model.config):
        if not spec.name.startswith("model.visual."):
            continue
        name, _, suffix = spec.name.removeprefix("model.visual.").rpartition(".")
        array = floats(model, spec.name)
        if name == "patch_embed.proj" and suffix == "weight":
            found["v.patch_embd.weight"] = array[:, :, 0]
            found["v.patch_embd.weight.1"] = array[:, :, 1]
            continue
        if name.startswith("blocks."):
            _, index, inner = name.split(".", 2)
            found[f"v.blk.{index}.{LAYER_NAMES[inner]}.{suffix}"] = array
        elif name.startswith("deepstack_merger_list."):
            _, index, inner = name.split(".")
            layer = tower.deepstack_layers[int(index)]
            found[f"v.deepstack.{layer}.{inner.removeprefix('linear_')}.{suffix}"] = array
        else:
            found[f"{OTHER_NAMES[name]}.{suffix}"] = array
    return found


def metadata(model: Checkpoint, projector: str) -> dict[str, Any]:
    vision = vision_of(model)
    tower, text = vision.tower, model.config
    values: dict[str, Any] = {
        "clip.has_vision_encoder": True,
        "clip.projector_type": projector,
        "clip.use_gelu": projector == "qwen3vl_merger",
        "clip.vision.image_size": 24,
        "clip.vision.patch_size": tower.patch_size,
        "clip.vision.embedding_length": tower.hidden_size,
        "clip.vision.feed_forward_length": tower.intermediate_size,
        "clip.vision.block_count": tower.num_layers,
        "clip.vision.attention.head_count": tower.num_heads,
        "clip.vision.attention.layer_norm_epsilon": text.rms_norm_eps,
        "clip.vision.projection_dim": text.hidden_size,
        "clip.vision.image_mean": [0.5, 0.5, 0.5],
        "clip.vision.image_std": [0.5, 0.5, 0.5],
        "clip.vision.image_min_pixels": 256,
        "clip.vision.image_max_pixels": 8192,
    }
    if projector == "qwen3vl_merger":
        values["clip.vision.spatial_merge_size"] = tower.merge
        flags = [index in tower.deepstack_layers for index in range(tower.num_layers)]
        values["clip.vision.is_deepstack_layers"] = flags
    else:
        values["clip.vision.n_wa_pattern"] = 2
    return values


@pytest.fixture(scope="module", params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(name: str, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("seeing") / name
    write_random_checkpoint(shape_of(name), folder, seed=0, dtype="float32")
    return open_checkpoint(folder)


def shape_of(name: str) -> ModelConfig:
    """With windows of 112 pixels, which the files take as given."""
    config = named_shape(name)
    if config.vision is None or config.vision.tower.windows is None:
        return config
    tower = config.vision.tower
    windows = replace(config.vision.tower.windows, side=112 // (tower.patch_size * tower.merge))
    return replace(config, vision=replace(config.vision, tower=replace(tower, windows=windows)))


def convert(model: Checkpoint, name: str, folder: Path, **changes: Any) -> Path:
    """A folder with both files; `changes` of the tower's metadata."""
    architecture, projector = MODELS[name]
    write_text(model, architecture, folder / "model-F32.gguf", TOKENS)
    values = metadata(model, projector) | {f"clip.vision.{k}": v for k, v in changes.items()}
    write_tower(model, folder / "mmproj-F32.gguf", values, tensors=tower_tensors(model))
    return folder


def test_a_tower_in_a_file_is_that_of_the_folder_to_the_bit(
    model: Checkpoint, name: str, tmp_path: Path
):
    converted = convert(model, name, tmp_path)
    same_models(converted, model.folder)
    assert open_checkpoint(converted).config.rope.axes == model.config.rope.axes


def test_without_bounds_of_pixels_a_file_has_the_published_ones(tmp_path: Path):
    folder = tmp_path / "folder"
    write_random_checkpoint(named_shape("tiny-qwen3-vl"), folder, seed=0, dtype="float32")
    model = open_checkpoint(folder)
    tensors, values = tower_tensors(model), metadata(model, "qwen3vl_merger")
    for key in ("image_min_pixels", "image_max_pixels"):
        del values[f"clip.vision.{key}"]
    write_text(model, "qwen3vl", tmp_path / "model.gguf", TOKENS)
    write_tower(model, tmp_path / "mmproj.gguf", values, tensors=tensors)
    processor: Any = vision_of(open_checkpoint(tmp_path / "model.gguf")).processor
    assert (processor.min_pixels, processor.max_pixels) == (65_536, 16_777_216)


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ("v.patch_embd.weight.1", "a slice of the patches"),
        ("v.deepstack.1.fc2.bias", "lacks v.deep"),
    ],
)
def test_a_file_without_a_part_of_the_tower_is_refused(lost: str, said: str, tmp_path: Path):
    folder = tmp_path / "folder"
    write_random_checkpoint(named_shape("tiny-qwen3-vl"), folder, seed=0, dtype="float32")
    model = open_checkpoint(folder)
    tensors = tower_tensors(model)
    del tensors[lost]
    write_text(model, "qwen3vl", tmp_path / "model.gguf", TOKENS)
    tower = write_tower(
        model, tmp_path / "tower.gguf", metadata(model, "qwen3vl_merger"), tensors=tensors
    )
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(tmp_path / "model.gguf", vision=VisionOptions(projector=tower))


def test_a_patch_of_one_time_would_be_noticed(tmp_path: Path):
    """The negative control: the slices are not the same."""
    folder = tmp_path / "folder"
    write_random_checkpoint(named_shape("tiny-qwen3-vl"), folder, seed=0, dtype="float32")
    tensors = tower_tensors(open_checkpoint(folder))
    one, other = tensors["v.patch_embd.weight"], tensors["v.patch_embd.weight.1"]
    assert not np.array_equal(one, other)
