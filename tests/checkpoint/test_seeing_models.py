"""Folders of models that see: what is read of them, and what makes them models of text."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.checkpoint.random_checkpoint import named_shape, shape_names, text_shape_names
from cadenza.errors import CheckpointError
from cadenza.models.towers.reader import VisionOptions
from cadenza.models.towers.registry import READERS
from cadenza.weights.weight_format import FLOAT_FORMATS
from tests.checkpoint.config_writer import write_random_checkpoint

SEEING = sorted({*shape_names()} - {*text_shape_names()})
PROCESSOR = "preprocessor_config.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("seeing") / "smolvlm"
    write_random_checkpoint(named_shape("tiny-smolvlm"), path, seed=0, dtype="float32")
    return path


def copy_of(folder: Path, target: Path, **changes: object) -> Path:
    """A folder with the same weights, and other files: their content, or None for none."""
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).symlink_to(path)
    for name, content in changes.items():
        path = target / f"{name}.json"
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_text(json.dumps(content))
    return target


def read(folder: Path, name: str) -> dict[str, object]:
    return json.loads((folder / name).read_text())


@pytest.mark.parametrize("name", [each for each in SEEING if each.startswith("tiny-")])
def test_a_random_checkpoint_of_a_shape_that_sees_is_read_as_that_shape(name: str, tmp_path: Path):
    shape = named_shape(name)
    write_random_checkpoint(shape, tmp_path / name, seed=0, dtype=shape.dtype)
    assert open_checkpoint(tmp_path / name).config == shape
    assert shape.vision is not None
    config = read(tmp_path / name, "config.json")
    assert config["model_type"] in READERS
    assert "text_config" in config


def test_the_processors_settings_may_be_in_either_file(folder: Path, tmp_path: Path):
    settings = read(folder, PROCESSOR)
    other = copy_of(
        folder,
        tmp_path / "new",
        preprocessor_config=None,
        processor_config={"image_processor": settings, "image_seq_len": 36},
    )
    assert open_checkpoint(other).config == open_checkpoint(folder).config
    both = copy_of(
        folder,
        tmp_path / "both",
        preprocessor_config={**settings, "resample": 3},
        processor_config={"image_processor": settings},
    )
    assert open_checkpoint(both).config == open_checkpoint(folder).config, "the newer one counts"


def test_a_model_without_its_processors_settings_is_one_of_text(folder: Path, tmp_path: Path):
    blind = open_checkpoint(copy_of(folder, tmp_path / "blind", preprocessor_config=None))
    assert blind.config == replace(open_checkpoint(folder).config, vision=None)
    assert not [name for name in blind.weights if "vision" in name]


def test_images_can_be_left_out(folder: Path):
    blind = open_checkpoint(folder, vision=VisionOptions(has_images=False))
    seeing = open_checkpoint(folder)
    assert blind.config.vision is None
    assert blind.num_weight_bytes < seeing.num_weight_bytes


def test_the_digest_has_what_decides_pixels(folder: Path, tmp_path: Path):
    settings = read(folder, PROCESSOR)
    other = copy_of(folder, tmp_path / "other", preprocessor_config={**settings, "resample": 3})
    assert open_checkpoint(other).digest != open_checkpoint(folder).digest


WRONG = {
    "an unknown filter": ({"resample": 9}, "resample"),
    "a step that is off": ({"do_rescale": False}, "do_rescale"),
    "tiles of another size": ({"max_image_size": {"longest_edge": 70}}, "tiles of 70 pixels"),
    "two means": ({"image_mean": [0.5, 0.5]}, "image_mean"),
    "no spread": ({"image_std": 0.0}, "image_std"),
}


@pytest.mark.parametrize(("change", "said"), WRONG.values(), ids=WRONG)
def test_wrong_settings_of_a_processor_are_refused_by_name(
    change: dict[str, object], said: str, folder: Path, tmp_path: Path
):
    wrong = copy_of(
        folder, tmp_path / "wrong", preprocessor_config={**read(folder, PROCESSOR), **change}
    )
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(wrong)


def test_a_number_beside_a_product_has_the_bytes_of_one_element():
    """Gemma 4's towers have some, which a plan counts."""
    assert FLOAT_FORMATS["bfloat16"].num_bytes(()) == 2
    assert FLOAT_FORMATS["float32"].num_bytes(()) == 4
