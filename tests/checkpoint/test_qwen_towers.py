"""What is read of the towers and processors of the Qwen models, by each name that files use."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cadenza.checkpoint.folder import Checkpoint
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.errors import CheckpointError
from cadenza.json_object import JsonObject
from cadenza.models.towers.qwen import read_qwen_images
from cadenza.models.towers.reader import VisionOptions
from cadenza.vision.tower_config import VisionConfig
from cadenza.vision.whole_images import QwenImages
from cadenza.weights.safetensors_file import SINGLE_FILE
from tests.checkpoint.config_writer import write_random_checkpoint

FILE = "preprocessor_config.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_random_checkpoint(named_shape("tiny-qwen3-vl"), tmp_path / "m", seed=3, dtype="float32")
    return tmp_path / "m"


def vision_of(checkpoint: Checkpoint) -> VisionConfig:
    assert checkpoint.config.vision is not None
    return checkpoint.config.vision


def change(folder: Path, file: str, edit: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads((folder / file).read_text())
    edit(values)
    (folder / file).write_text(json.dumps(values))


def processor(**values: Any) -> QwenImages:
    return read_qwen_images(JsonObject(values, FILE), 4096)


def test_bounds_of_pixels_have_two_names_in_two_places():
    size = {"shortest_edge": 5000, "longest_edge": 9000}
    for given in (
        {"size": size},
        {"min_pixels": 5000, "max_pixels": 9000},
        {"size": {"min_pixels": 5000, "max_pixels": 9000}},
        {"size": {"shortest_edge": 1, "longest_edge": 2}, "min_pixels": 5000, "max_pixels": 9000},
    ):
        found = processor(**given)
        assert (found.min_pixels, found.max_pixels) == (5000, 9000)


def test_a_processor_without_settings_has_those_of_transformers():
    found = processor()
    assert (found.min_pixels, found.max_pixels) == (56 * 56, 28 * 28 * 1280)
    assert (found.patch_size, found.merge_size, found.resample) == (14, 2, "bicubic")


def test_the_processors_settings_may_lie_in_either_file(folder: Path):
    expected = vision_of(open_checkpoint(folder))
    inner = json.loads((folder / FILE).read_text())
    (folder / FILE).unlink()
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": inner}))
    assert vision_of(open_checkpoint(folder)) == expected


def test_older_files_name_the_tower_without_model(folder: Path):
    expected = open_checkpoint(folder).weights
    path = folder / SINGLE_FILE
    tensors = {
        name.replace("model.visual.", "visual."): tensor for name, tensor in load_file(path).items()
    }
    save_file(tensors, path)
    found = open_checkpoint(folder).weights
    assert set(found) == set(expected)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_deepstack_has_a_part_for_each_of_its_layers(folder: Path):
    vision = vision_of(open_checkpoint(folder))
    assert vision.tower.deepstack_layers == (0, 1)
    assert vision.num_parts == 3


def test_a_limit_of_tokens_is_part_of_the_settings(folder: Path):
    limited = vision_of(open_checkpoint(folder, vision=VisionOptions(max_tokens=20)))
    assert limited.max_part_tokens == 20
    assert limited.processor.settings != vision_of(open_checkpoint(folder)).processor.settings
    assert limited.processor.plan(64, 64).num_tokens <= 20


def test_without_its_processors_settings_a_model_is_a_text_model(folder: Path):
    (folder / FILE).unlink()
    assert open_checkpoint(folder).config.vision is None


WRONG: dict[str, tuple[str, Callable[[dict[str, Any]], object], str]] = {
    "no axes": (
        "config.json",
        lambda values: values["text_config"]["rope_parameters"].pop("mrope_section"),
        "no mrope_section",
    ),
    "a table that is no square": (
        "config.json",
        lambda values: values["vision_config"].update(num_position_embeddings=35),
        "the square of a number",
    ),
    "deepstack behind the tower": (
        "config.json",
        lambda values: values["vision_config"].update(deepstack_visual_indexes=[1, 3]),
        "layers from 0 to 2",
    ),
    "another width": (
        "config.json",
        lambda values: values["vision_config"].update(out_hidden_size=95),
        "the text model's hidden_size",
    ),
    "a token outside the vocabulary": (
        "config.json",
        lambda values: values.update(image_token_id=331),
        "within the vocabulary",
    ),
    "other patches": (FILE, lambda values: values.update(patch_size=8), "correct one of them"),
    "no resizing": (FILE, lambda values: values.update(do_resize=False), "do_resize"),
}


@pytest.mark.parametrize(("file", "edit", "said"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_together_is_refused(
    folder: Path, file: str, edit: Callable[[dict[str, Any]], object], said: str
):
    change(folder, file, edit)
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(folder)
