"""Towers in GGUF files: what is read of them, and which file of a folder is meant."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cadenza.checkpoint.folder import Checkpoint
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.errors import CheckpointError
from cadenza.models.declaration import declare
from cadenza.models.towers.reader import VisionOptions
from tests.checkpoint.config_writer import write_random_checkpoint
from tests.checkpoint.mmproj_files import (
    floats,
    same_models,
    write_text,
    write_tower,
)

SMOLVLM: dict[str, Any] = {
    "clip.has_vision_encoder": True,
    "clip.projector_type": "idefics3",
    "clip.use_gelu": True,
    "clip.vision.image_size": 84,
    "clip.vision.patch_size": 7,
    "clip.vision.embedding_length": 48,
    "clip.vision.feed_forward_length": 88,
    "clip.vision.block_count": 3,
    "clip.vision.attention.head_count": 3,
    "clip.vision.attention.layer_norm_epsilon": 1e-5,
    "clip.vision.projection_dim": 96,
    "clip.vision.image_mean": [0.5, 0.5, 0.5],
    "clip.vision.image_std": [0.5, 0.5, 0.5],
    "clip.vision.projector.scale_factor": 2,
    "clip.vision.preproc_image_size": 168,
}
"""As the converter writes them for a config.json without a constant of norms."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("seeing") / "smolvlm"
    write_random_checkpoint(named_shape("tiny-smolvlm"), folder, seed=0, dtype="float32")
    return open_checkpoint(folder)


@pytest.fixture(scope="module")
def converted(model: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both files."""
    folder = tmp_path_factory.mktemp("gguf")
    write_text(model, "llama", folder / "model-F32.gguf", {7: "<image>"})
    write_tower(model, folder / "mmproj-model-F32.gguf", SMOLVLM)
    return folder


def copy_of(converted: Path, folder: Path) -> Path:
    shutil.copytree(converted, folder)
    return folder


def test_a_tower_in_a_file_is_that_of_the_folder_to_the_bit(model: Checkpoint, converted: Path):
    same_models(converted, model.folder)
    same_models(converted / "model-F32.gguf", model.folder)


def test_a_file_may_lie_elsewhere_and_is_then_named(
    model: Checkpoint, converted: Path, tmp_path: Path
):
    folder = copy_of(converted, tmp_path / "copy")
    tower = (folder / "mmproj-model-F32.gguf").rename(tmp_path / "tower.gguf")
    assert open_checkpoint(folder).config.vision is None
    named = open_checkpoint(folder, vision=VisionOptions(projector=tower))
    assert named.config.vision == model.config.vision
    assert named.weights.files[-1].path == tower


def test_images_can_be_left_out_of_a_gguf_model(converted: Path):
    blind = open_checkpoint(converted, vision=VisionOptions(has_images=False))
    assert blind.config.vision is None
    assert len(blind.weights.files) == 1
    assert blind.digest != open_checkpoint(converted).digest


def test_linears_of_a_tower_may_be_in_half_precision(
    model: Checkpoint, converted: Path, tmp_path: Path
):
    folder = copy_of(converted, tmp_path / "copy")
    (folder / "mmproj-model-F32.gguf").unlink()
    write_tower(model, folder / "mmproj-F16.gguf", SMOLVLM, kind="F16")
    half = open_checkpoint(folder)
    names = [spec.name for spec in declare(half.config) if "vision_model.encoder" in spec.name]
    for name in [name for name in names if name.endswith("_proj.weight")]:
        expected = floats(model, name).astype(np.float16).astype(np.float32)
        assert np.array_equal(floats(half, name), expected)


def test_of_several_files_one_must_be_named(converted: Path, tmp_path: Path):
    folder = copy_of(converted, tmp_path / "copy")
    other = shutil.copy(folder / "mmproj-model-F32.gguf", folder / "mmproj-model-F16.gguf")
    with pytest.raises(CheckpointError, match="2 files beside model-F32"):
        open_checkpoint(folder)
    assert open_checkpoint(folder, vision=VisionOptions(projector=Path(other))).config.vision


def test_a_file_beside_the_model_that_is_for_another_one_is_left_alone(
    model: Checkpoint, converted: Path, tmp_path: Path
):
    folder = copy_of(converted, tmp_path / "copy")
    tower = folder / "mmproj-model-F32.gguf"
    tower.unlink()
    write_tower(model, tower, {**SMOLVLM, "clip.vision.projection_dim": 100})
    assert open_checkpoint(folder).config.vision is None
    with pytest.raises(CheckpointError, match="for text models of width 100"):
        open_checkpoint(folder, vision=VisionOptions(projector=tower))
    tower.write_bytes(b"GGUF")
    assert open_checkpoint(folder).config.vision is None


WRONG = {
    "another projector": ({"clip.projector_type": "ultravox"}, "type 'ultravox'"),
    "smaller tiles": ({"clip.vision.image_size": 70}, "position_embd.weight has shape"),
    "more layers": ({"clip.vision.block_count": 4}, "lacks v.blk.3"),
    "fewer layers": ({"clip.vision.block_count": 2}, "contains v.blk.2"),
    "wider MLPs": ({"clip.vision.feed_forward_length": 96}, "ffn_up.weight has shape"),
}


@pytest.mark.parametrize(("change", "said"), WRONG.values(), ids=WRONG)
def test_a_file_that_was_named_and_cannot_be_read_is_refused(
    change: dict[str, Any], said: str, model: Checkpoint, converted: Path, tmp_path: Path
):
    tower = write_tower(model, tmp_path / "tower.gguf", SMOLVLM | change)
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(converted / "model-F32.gguf", vision=VisionOptions(projector=tower))


def test_a_model_without_the_image_token_does_not_see(model: Checkpoint, tmp_path: Path):
    write_text(model, "llama", tmp_path / "model.gguf", {})
    tower = write_tower(model, tmp_path / "mmproj.gguf", SMOLVLM)
    with pytest.raises(CheckpointError, match="for models with the token '<image>'"):
        open_checkpoint(tmp_path, vision=VisionOptions(projector=tower))
