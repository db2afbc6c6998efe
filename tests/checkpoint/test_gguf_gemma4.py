"""GGUF files of Gemma 4 as llama.cpp's converter writes them: their config and weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.errors import CheckpointError
from tests.checkpoint.gguf_models import GEMMAS_4, Conversion, convert


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Conversion]:
    return lambda shape="gemma4": convert(shape, tmp_path / "original")


@pytest.mark.parametrize("shape", GEMMAS_4)
def test_a_models_config_and_weights_are_those_of_its_folder(
    make: Callable[..., Conversion], tmp_path: Path, shape: str
):
    model = make(shape)
    found = open_checkpoint(model.write(tmp_path / "model.gguf"))
    original = open_checkpoint(model.original)
    assert set(found.weights) == set(original.weights)
    for name in original.weights:
        assert np.array_equal(found.weights[name], original.weights[name]), name
    ours, theirs = found.config, original.config
    for field in ("layer_kinds", "rope", "window_rope", "experts", "layer_inputs", "heads"):
        assert getattr(ours, field) == getattr(theirs, field), field
    assert ours.logit_soft_cap == theirs.logit_soft_cap
    assert ours.attention_scale == theirs.attention_scale == 1.0


def test_keys_of_layers_that_read_those_of_others_are_left_out(
    make: Callable[..., Conversion], tmp_path: Path
):
    model = make()
    for name in ("attn_k", "attn_v", "attn_k_norm"):
        model.tensors[f"blk.4.{name}.weight"] = model.tensors[f"blk.2.{name}.weight"]
    found = open_checkpoint(model.write(tmp_path / "model.gguf"))
    assert "model.layers.4.self_attn.k_proj.weight" not in found.weights


def test_a_rope_that_turns_other_pairs_is_refused(make: Callable[..., Conversion], tmp_path: Path):
    model = make()
    model.tensors["rope_freqs.weight"][1] = 2.0
    with pytest.raises(CheckpointError, match="rope_freqs"):
        open_checkpoint(model.write(tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("feed_forward_length", [88, 88, 88, 176, 88]),
        ("attention.value_length_swa", 32),
        ("attention.sliding_window_pattern", [True] * 3),
    ],
)
def test_metadata_of_layers_that_are_not_gemma_4s_are_refused(
    make: Callable[..., Conversion], tmp_path: Path, key: str, value: Any
):
    model = make()
    model.metadata[key] = value
    with pytest.raises(CheckpointError, match=key):
        open_checkpoint(model.write(tmp_path / "model.gguf"))
