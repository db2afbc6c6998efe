"""Towers of Gemma in GGUF files: the folder's settings and bits, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from cadenza.checkpoint.folder import Checkpoint
from cadenza.checkpoint.gguf.mmproj import open_projector
from cadenza.checkpoint.gguf.reader import open_gguf
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.errors import CheckpointError
from cadenza.models.declaration import declare
from cadenza.models.model_config import ModelConfig
from cadenza.models.towers.reader import VisionOptions
from cadenza.vision.tower_config import VisionConfig
from cadenza.vision.whole_images import Gemma4Images
from tests.checkpoint.config_writer import write_random_checkpoint
from tests.checkpoint.gguf_models import Arrays
from tests.checkpoint.mmproj_files import floats, write_tower

MODELS = {
    "tiny-gemma3-vl": ("gemma3", "<image_soft_token>"),
    "tiny-gemma4-vl": ("gemma4v", "<|image|>"),
    "tiny-gemma4-moe-vl": ("gemma4v", "<|image|>"),
    "tiny-gemma4-unified-vl": ("gemma4uv", "<|image|>"),
}
"""The type of projector, and the token of images."""

UNIFIED_NAMES = {
    "model.vision_embedder.patch_dense": "v.patch_embd",
    "model.vision_embedder.patch_ln1": "v.patch_norm.1",
    "model.vision_embedder.patch_ln2": "v.patch_norm.2",
    "model.vision_embedder.patch_ln3": "v.patch_norm.3",
    "model.vision_embedder.pos_embedding": "v.position_embd",
}
"""Those that gguf-py 0.19 does not have."""

SUFFIXES = (".weight", ".bias", ".input_max", ".input_min", ".output_max", ".output_min")


def with_published_budget(model: ModelConfig) -> ModelConfig:
    """Files do not say the budget of Gemma 4, so that it is the published one."""
    vision = model.vision
    assert vision is not None
    processor, table = vision.processor, vision.tower.table
    if not isinstance(processor, Gemma4Images) or table is None:
        return model
    tower = replace(vision.tower, table=replace(table, side=280 * vision.tower.merge))
    own = replace(processor, max_tokens=280)
    return replace(model, vision=replace(vision, tower=tower, processor=own, max_part_tokens=280))


def vision_of(model: Checkpoint) -> VisionConfig:
    assert model.config.vision is not None
    return model.config.vision


def tower_tensors(model: Checkpoint) -> Arrays:
    """As llama.cpp's converter names, turns and changes them."""
    vision = vision_of(model)
    text = {spec.name for spec in declare(replace(model.config, vision=None))}
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, max(1, vision.tower.num_layers))
    found: Arrays = {}
    for spec in declare(model.config):
        if spec.name in text:
            continue
        name, array = converted(spec.name, floats(model, spec.name), vision)
        stem, _, suffix = name.rpartition(".")
        mapped = table.get_name(name, try_suffixes=SUFFIXES)
        if stem in UNIFIED_NAMES:
            mapped = f"{UNIFIED_NAMES[stem]}.{suffix}"
        assert mapped is not None, name
        found[mapped] = array
    return found


def converted(name: str, array: np.ndarray, vision: VisionConfig) -> tuple[str, np.ndarray]:
    size = vision.tower.patch_size
    if "soft_emb_norm" in name:
        array = array + np.float32(1.0)
    name = name.replace("model.vision_tower.encoder.", "vision_model.model.")
    name = name.replace(".linear.weight", ".weight").replace(".pos_norm.", ".patch_ln3.")
    if name.endswith("position_embedding_table"):
        name += ".weight"
    elif name.endswith("pos_embedding"):
        name, array = f"{name}.weight", array.swapaxes(0, 1)
    elif name.endswith("patch_embedder.input_proj.weight"):
        array = array.reshape(len(array), size, size, 3).transpose(0, 3, 1, 2)
    elif "patch_dense.weight" in name or "patch_ln1" in name:
        rows = array.reshape(-1, size, size, 3).transpose(0, 3, 1, 2)
        array = rows.reshape(array.shape)
    return name, array.reshape(array.shape or (1,))


def metadata(model: Checkpoint, projector: str) -> dict[str, Any]:
    tower = vision_of(model).tower
    key = "clip.projector_type" if projector == "gemma3" else "clip.vision.projector_type"
    patch = tower.patch_size // 3 if projector == "gemma4uv" else tower.patch_size
    merge = {"gemma3": {"clip.vision.projector.scale_factor": tower.merge}}.get(projector, {})
    own = {"clip.use_gelu": True, "clip.vision.image_size": 56} if projector == "gemma3" else {}
    return {
        "clip.has_vision_encoder": True,
        key: projector,
        "clip.vision.image_size": 224,
        "clip.vision.patch_size": patch,
        "clip.vision.embedding_length": tower.hidden_size,
        "clip.vision.feed_forward_length": tower.intermediate_size,
        "clip.vision.block_count": tower.num_layers,
        "clip.vision.attention.head_count": tower.num_heads,
        "clip.vision.attention.layer_norm_epsilon": 1e-6,
        "clip.vision.projection_dim": model.config.hidden_size,
        "clip.vision.image_mean": [0.5, 0.5, 0.5],
        "clip.vision.image_std": [0.5, 0.5, 0.5],
        **merge,
        **own,
    }


def folder_of(shape: str, folder: Path) -> Checkpoint:
    config = with_published_budget(named_shape(shape))
    write_random_checkpoint(config, folder, seed=2, dtype="float32")
    return open_checkpoint(folder)


def tensors_in(
    model: Checkpoint, path: Path, shape: str, tensors: Arrays
) -> tuple[VisionConfig, Arrays]:
    """What is read of a file with these tensors, beside the text model of a folder."""
    projector, token = MODELS[shape]
    write_tower(model, path, metadata(model, projector), tensors=tensors)
    words = [token if index == 7 else f"<{index}>" for index in range(model.config.vocab_size)]
    text = replace(model.config, vision=None)
    vision, found = open_projector(open_gguf(path), text, words, VisionOptions())
    return vision, {name: np.asarray(each.load()) for name, each in found.items()}


@pytest.mark.parametrize("shape", MODELS)
def test_a_tower_in_a_file_is_that_of_the_folder_to_the_bit(shape: str, tmp_path: Path):
    model = folder_of(shape, tmp_path / "model")
    vision, found = tensors_in(model, tmp_path / "mmproj.gguf", shape, tower_tensors(model))
    assert vision == model.config.vision
    text = {spec.name for spec in declare(replace(model.config, vision=None))}
    own = [spec for spec in declare(model.config) if spec.name not in text]
    assert {spec.name for spec in own} == found.keys()
    for spec in own:
        expected = floats(model, spec.name)
        if "soft_emb_norm" in spec.name:  # is 1 less than what it multiplies by
            assert np.array_equal(found[spec.name] + np.float32(1), expected + np.float32(1))
            continue
        assert found[spec.name].shape == spec.shape
        assert np.array_equal(found[spec.name], expected), spec.name


def test_a_file_without_its_bounds_is_refused(tmp_path: Path):
    model = folder_of("tiny-gemma4-vl", tmp_path / "model")
    tensors = tower_tensors(model)
    del tensors["v.blk.1.ffn_up.output_max"]
    with pytest.raises(CheckpointError, match=r"lacks v\.blk\.1\.ffn_up\.output_max"):
        tensors_in(model, tmp_path / "mmproj.gguf", "tiny-gemma4-vl", tensors)
