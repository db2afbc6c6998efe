"""An MTP layer as a model of one layer: its tensors, and what of a checkpoint is refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cadenza.checkpoint import check_weights, declare, named_shape, open_checkpoint, open_weights
from cadenza.checkpoint.mtp_head import declare_mtp_layers, mtp_head_of
from cadenza.checkpoint.random_checkpoint import write_random_checkpoint
from cadenza.errors import CheckpointError

FIXTURE = Path(__file__).parent.parent / "fixtures" / "mimo-untied-bias"


def test_the_head_has_the_layers_tensors_and_the_models_embedding_and_head():
    whole = open_checkpoint(FIXTURE)
    head = mtp_head_of(whole)
    check_weights(head.config, head.weights)
    assert {spec.name for spec in declare(head.config)} == set(head.weights)
    for name, stored in (
        ("lm_head.weight", "lm_head.weight"),
        ("model.norm.weight", "model.mtp_layers.0.final_layernorm.weight"),
        ("model.input_proj.weight", "model.mtp_layers.0.input_proj.weight"),
        ("model.layers.0.mlp.down_proj.weight", "model.mtp_layers.0.mlp.down_proj.weight"),
    ):
        assert np.array_equal(head.weights[name], whole.weights[stored])


def test_the_tensors_of_mtp_layers_are_those_of_the_fixture():
    config = named_shape(str(FIXTURE))
    stored = {name for name in open_weights(FIXTURE) if "mtp_layers" in name}
    assert {spec.name for spec in declare_mtp_layers(config)} == stored
    assert len(declare_mtp_layers(replace(config, num_mtp_layers=3))) == 3 * len(stored)


def test_a_random_checkpoint_has_its_mtp_layers(tmp_path: Path):
    write_random_checkpoint(named_shape("tiny-mimo"), tmp_path, seed=1, dtype="bfloat16")
    head = mtp_head_of(open_checkpoint(tmp_path))
    assert head.config.num_layers == 1
    assert head.weights["model.input_proj.weight"].shape == (96, 192)


def test_a_model_without_mtp_layers_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match="has no MTP layers"):
        mtp_head_of(open_checkpoint(None))
    config = named_shape("tiny-mimo")
    write_random_checkpoint(replace(config, num_mtp_layers=0), tmp_path, seed=1, dtype="float32")
    with pytest.raises(CheckpointError, match="has no MTP layers"):
        mtp_head_of(open_checkpoint(tmp_path))


def test_mtp_layers_that_were_left_out_are_missed_by_name(tmp_path: Path):
    whole = open_checkpoint(FIXTURE)
    missing = "model.mtp_layers.0.input_proj.weight"
    partial = whole.weights.with_parts({missing: []})
    with pytest.raises(CheckpointError, match=f"lack {missing}"):
        mtp_head_of(replace(whole, known=(whole.config, partial)))


def test_a_tensor_of_an_mtp_layer_of_another_shape_is_refused_by_name():
    whole = open_checkpoint(FIXTURE)
    wrong, other = "model.mtp_layers.0.input_proj.weight", "model.mtp_layers.0.mlp.up_proj.weight"
    entry = replace(whole.weights.entry(other), name=wrong)
    mixed = whole.weights.with_parts({wrong: [entry]})
    with pytest.raises(CheckpointError, match=r"input_proj\.weight"):
        mtp_head_of(replace(whole, known=(whole.config, mixed)))
