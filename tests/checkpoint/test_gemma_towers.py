"""What is read of models of Gemma and Mistral that see, and what is refused."""

from collections.abc import Callable
from typing import Any

import pytest

from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.errors import CheckpointError
from cadenza.json_object import JsonObject
from cadenza.models.towers.reader import VisionOptions
from cadenza.models.towers.registry import read_vision
from cadenza.models.wrapped_text import unwrap_config
from cadenza.vision.tower_config import VisionConfig
from tests.checkpoint.config_writer import format_files

Settings = dict[str, Any]


def read(
    shape: str, change: Callable[[Settings, Settings], None], max_tokens: int = 4096
) -> VisionConfig | None:
    """A shape's files with other settings in config.json, and of its processor."""
    model = named_shape(shape)
    files: Any = format_files(model)
    config, processor = files["config.json"], files["preprocessor_config.json"]
    change(config, processor)
    return read_vision(
        JsonObject(config, "config.json"),
        JsonObject(processor, "preprocessor_config.json"),
        model,
        VisionOptions(max_tokens=max_tokens),
    )


def unchanged(config: Settings, processor: Settings) -> None:
    del config, processor


@pytest.mark.parametrize(
    ("shape", "sees"),
    [
        ("tiny-gemma3-vl", [True, True, True, True]),
        ("tiny-gemma4-vl", [False] * 5),
        ("tiny-gemma4-moe-vl", [True, False, False]),
        ("tiny-gemma4-unified-vl", [True, True, False]),
        ("tiny-mistral3-vl", [False] * 4),
    ],
)
def test_images_attend_both_ways_in_the_layers_of_their_family(shape: str, sees: list[bool]):
    model = named_shape(shape)
    assert [model.sees_spans(kind) for kind in model.layer_kinds] == sees


@pytest.mark.parametrize(("max_tokens", "budget"), [(4096, 70), (70, 70), (139, 70)])
def test_a_budget_of_gemma_4_is_never_above_the_files(max_tokens: int, budget: int):
    vision = read("tiny-gemma4-vl", unchanged, max_tokens)
    assert vision is not None
    assert vision.max_part_tokens == budget


def test_fewer_tokens_than_the_least_that_an_image_takes_are_refused():
    with pytest.raises(CheckpointError, match="--image-max-tokens 15 is below 16"):
        read("tiny-gemma3-vl", unchanged, 15)
    with pytest.raises(CheckpointError, match="--image-max-tokens 69 is below 70"):
        read("tiny-gemma4-vl", unchanged, 69)


WRONG: dict[str, tuple[str, Callable[[Settings, Settings], Any], str]] = {
    "pan and scan": (
        "tiny-gemma3-vl",
        lambda config, processor: processor.update(do_pan_and_scan=True),
        "do_pan_and_scan",
    ),
    "another size": (
        "tiny-gemma3-vl",
        lambda config, processor: processor.update(size={"height": 112, "width": 56}),
        "112 x 56 pixels, and the tower takes images of 56 x 56",
    ),
    "tokens that are no square": (
        "tiny-gemma3-vl",
        lambda config, processor: config.update(mm_tokens_per_image=15),
        "mm_tokens_per_image",
    ),
    "a budget of its own": (
        "tiny-gemma4-vl",
        lambda config, processor: processor.update(max_soft_tokens=100),
        "max_soft_tokens",
    ),
    "a table that is too small": (
        "tiny-gemma4-vl",
        lambda config, processor: processor.update(max_soft_tokens=280),
        "positions for 420 patches",
    ),
    "normalised pixels": (
        "tiny-gemma4-vl",
        lambda config, processor: processor.update(do_normalize=True),
        "do_normalize",
    ),
    "patches of another size": (
        "tiny-gemma4-moe-vl",
        lambda config, processor: processor.update(patch_size=8),
        "patch_size",
    ),
    "an inner layer's features": (
        "tiny-mistral3-vl",
        lambda config, processor: config.update(vision_feature_layer=-2),
        "vision_feature_layer",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_settings_that_would_change_an_answer_are_refused(name: str):
    shape, change, named = WRONG[name]
    with pytest.raises(CheckpointError, match=named):
        read(shape, change)


def test_gemma_3_without_most_of_its_text_settings_has_those_of_transformers():
    raw = JsonObject(
        {
            "model_type": "gemma3",
            "text_config": {"model_type": "gemma3_text", "hidden_size": 2560},
        },
        "config.json",
    )
    text = unwrap_config(raw)
    assert (text.get("hidden_size"), text.get("num_attention_heads")) == (2560, 8)
    assert (text.get("vocab_size"), text.get("head_dim")) == (262_208, 256)
