"""Positions of three axes (M-RoPE): which axis each pair of a head has, by family and file."""

from typing import Any

import pytest

from cadenza.errors import CheckpointError
from cadenza.models.config_json import parse_model_config
from cadenza.models.rope_config import axes_of
from tests.checkpoint.config_writer import format_model_config

TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
WRAPPED = {
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "qwen2_5_vl": "qwen2",
    "qwen2_vl": "qwen2",
    "qwen3_5": "qwen3_5_text",
}


def sections(*numbers: int, **more: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": "default", "mrope_section": list(numbers), **more}}


def wrapped(model_type: str, **changes: Any) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "vision_config": {},
        "text_config": {**TEXT, "model_type": f"{model_type}_text", **changes},
    }


def test_interleaved_pairs_go_by_turns_as_long_as_each_axis_has_some_left():
    assert axes_of((24, 20, 20), 64, "interleaved") == (0, 1, 2) * 20 + (0, 0, 0, 0)
    assert axes_of((11, 11, 10), 32, "interleaved") == (0, 1, 2) * 10 + (0, 1)


def test_joined_pairs_of_an_axis_are_behind_those_of_another():
    assert axes_of((2, 3, 1), 6, "joined") == (0, 0, 1, 1, 1, 2)


@pytest.mark.parametrize("model_type", WRAPPED)
def test_text_models_of_vision_models_have_the_axes_of_their_family(model_type: str):
    share = {"partial_rotary_factor": 1.0} if model_type == "qwen3_5" else {}
    config = parse_model_config(wrapped(model_type, **sections(3, 3, 2), **share))
    assert config.family == WRAPPED[model_type]
    joined = WRAPPED[model_type] == "qwen2"
    assert config.rope.axes == ((0, 0, 0, 1, 1, 1, 2, 2) if joined else (0, 1, 2, 0, 1, 2, 0, 1))


def test_a_mixture_of_qwen3_vl_weighs_its_experts_among_the_chosen():
    config = parse_model_config(wrapped("qwen3_vl_moe"))
    assert config.experts is not None
    assert config.experts.over_chosen


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl"])
def test_older_files_of_qwen2_vl_have_no_text_config(model_type: str):
    rope = {"rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]}}
    flat = {**TEXT, **rope, "model_type": model_type, "vision_config": {"depth": 1}}
    nested = wrapped(model_type, **sections(4, 2, 2))
    assert parse_model_config(flat) == parse_model_config(nested)


def test_a_written_config_has_the_axes_that_were_read():
    for model_type in WRAPPED:
        share = {"partial_rotary_factor": 1.0} if model_type == "qwen3_5" else {}
        config = parse_model_config(wrapped(model_type, **sections(3, 3, 2), **share))
        assert parse_model_config(format_model_config(config)) == config


def test_a_file_without_sections_has_one_axis():
    assert parse_model_config(wrapped("qwen3_vl")).rope.axes == ()
    assert not parse_model_config(wrapped("qwen3_vl")).has_rope_axes


@pytest.mark.parametrize(
    ("model_type", "rope", "message"),
    [
        ("qwen2_5_vl", sections(3, 3, 3), "whose sum is 8"),
        ("qwen3_vl", sections(3, 3), "three numbers of pairs"),
        ("qwen3_vl", sections(3, 3, -1), "three numbers of pairs"),
        ("qwen3_vl", sections(3, 3, 2, mrope_interleaved=False), "mrope_interleaved"),
        ("qwen2_5_vl", sections(3, 3, 2, mrope_interleaved=True), "mrope_interleaved"),
    ],
)
def test_sections_that_a_family_does_not_have_are_refused(
    model_type: str, rope: dict[str, Any], message: str
):
    with pytest.raises(CheckpointError, match=message):
        parse_model_config(wrapped(model_type, **rope))
