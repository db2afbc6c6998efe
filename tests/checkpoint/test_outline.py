"""`ModelOutline`: what is read of a config.json whose family is not known."""

from typing import Any

import pytest

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.errors import CheckpointError
from cadenza.models.config_json import DEFAULT_POSITIONS, outline_of, read_outline

PLAIN: dict[str, Any] = {"model_type": "mamba9", "vocab_size": 50, "torch_dtype": "bfloat16"}


def test_a_model_without_a_length_has_the_default_one():
    outline = read_outline(PLAIN | {"eos_token_id": [3, 1]})
    assert (outline.family, outline.vocab_size, outline.dtype) == ("mamba9", 50, "bfloat16")
    assert outline.max_position_embeddings == DEFAULT_POSITIONS
    assert outline.eos_token_ids == (1, 3)


def test_nested_settings_are_those_of_the_text_model():
    inner = {"vocab_size": 60, "n_positions": 77, "sliding_window": 16, "dtype": "float16"}
    outline = read_outline({"model_type": "many", "eos_token_id": 4, "text_config": inner})
    assert (outline.vocab_size, outline.max_position_embeddings) == (60, 77)
    assert (outline.windows, outline.dtype, outline.eos_token_ids) == ((16,), "float16", (4,))


def test_a_known_models_outline_is_that_of_its_arithmetic():
    checkpoint = open_checkpoint(None)
    assert checkpoint.outline == outline_of(checkpoint.config)


@pytest.mark.parametrize(
    "change",
    [{"vocab_size": None}, {"vocab_size": "9"}, {"n_positions": -1}, {"torch_dtype": "int4"}],
    ids=str,
)
def test_a_setting_of_the_wrong_kind_is_refused_by_its_name(change: dict[str, Any]):
    with pytest.raises(CheckpointError, match=next(iter(change))):
        read_outline(PLAIN | change)
