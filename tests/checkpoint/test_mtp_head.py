"""An MTP layer as a model of one layer: its tensors, and what of a checkpoint is refused."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cadenza.checkpoint.folder import Checkpoint
from cadenza.checkpoint.mtp_head import declare_mtp_layers, mtp_head_of
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.errors import CheckpointError
from cadenza.models.declaration import check_weights, declare
from cadenza.models.model_config import ModelConfig
from cadenza.models.mtp_layout import DEEPSEEK_MTP, QWEN_MTP
from cadenza.weights.weights import open_weights
from tests.checkpoint.config_writer import write_random_checkpoint

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


def with_qwen_layers(shape: str, count: int = 1) -> ModelConfig:
    return replace(named_shape(shape), num_mtp_layers=count, mtp_layout=QWEN_MTP)


def test_the_tensors_of_qwens_layout_have_their_published_names():
    names = {spec.name for spec in declare_mtp_layers(with_qwen_layers("tiny-qwen3", 2))}
    around = {"fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"}
    assert {name for name in names if ".layers." not in name} == {
        f"mtp.{name}.weight" for name in around
    }
    block = {name.removeprefix("mtp.layers.1.") for name in names if ".layers.1." in name}
    decoder = {spec.name for spec in declare(named_shape("tiny-qwen3"))}
    assert {f"model.layers.1.{name}" for name in block} == {
        name for name in decoder if ".layers.1." in name
    }


def test_the_mtp_layer_of_a_mixture_is_a_mixture():
    names = {spec.name for spec in declare_mtp_layers(with_qwen_layers("tiny-qwen3-moe"))}
    assert {"mtp.layers.0.mlp.gate.weight", "mtp.layers.0.mlp.experts.12.up_proj.weight"} <= names


def test_of_several_layers_the_first_is_the_head(tmp_path: Path):
    write_random_checkpoint(with_qwen_layers("tiny-qwen3", 2), tmp_path, seed=1, dtype="float32")
    whole = open_checkpoint(tmp_path)
    head = mtp_head_of(whole)
    for name, stored in (
        ("model.layers.0.mlp.down_proj.weight", "mtp.layers.0.mlp.down_proj.weight"),
        ("model.norm.weight", "mtp.norm.weight"),
        ("model.input_proj.weight", "mtp.fc.weight"),
    ):
        assert np.array_equal(head.weights[name], whole.weights[stored])


@pytest.mark.parametrize(
    "name",
    [
        "mtp.layers.0.mlp.shared_expert.up_proj.weight",
        "mtp.layers.0.self_attn.kv_a_proj_with_mqa.weight",
        "mtp.embed_tokens.weight",
    ],
)
def test_what_is_not_computed_in_an_mtp_layer_is_refused_by_name(name: str, tmp_path: Path):
    """Shared experts, latent attention and an embedding of its own, which change its logits."""
    write_random_checkpoint(with_qwen_layers("tiny-qwen3"), tmp_path, seed=1, dtype="float32")
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), name: np.ones((2, 2), np.float32)}, file)
    whole = open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=f"has {name}, which is not computed"):
        mtp_head_of(whole)


def test_a_gate_of_attention_is_refused_by_its_setting_and_its_shape(tmp_path: Path):
    """Qwen3-Next's `q_proj` has a gate for each query head beside the query."""
    write_random_checkpoint(with_qwen_layers("tiny-qwen3"), tmp_path, seed=1, dtype="float32")
    file, config_file = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors, name = load_file(file), "mtp.layers.0.self_attn.q_proj.weight"
    save_file({**tensors, name: np.concatenate([tensors[name]] * 2)}, file)
    whole = open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"q_proj\.weight has shape"):
        mtp_head_of(whole)
    values = json.loads(config_file.read_text())
    config_file.write_text(json.dumps({**values, "attn_output_gate": True}))
    with pytest.raises(CheckpointError, match="attn_output_gate is True"):
        open_checkpoint(tmp_path)


def with_deepseek_layers(folder: Path, **copies: float) -> Checkpoint:
    """A tiny Qwen3-MoE of 4 layers with an MTP layer, and `copies` of the embedding and the head,
    to which a number is added.
    """
    shape = replace(named_shape("tiny-qwen3-moe"), num_mtp_layers=1, mtp_layout=DEEPSEEK_MTP)
    write_random_checkpoint(shape, folder, seed=1, dtype="float32")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    sources = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
    made = {
        f"model.layers.4.{name}.weight": tensors[f"{sources[name]}.weight"] + np.float32(added)
        for name, added in copies.items()
    }
    save_file({**tensors, **made}, file)
    return open_checkpoint(folder)


def test_the_tensors_of_deepseeks_layout_have_their_published_names(tmp_path: Path):
    whole = with_deepseek_layers(tmp_path)
    names = {spec.name for spec in declare_mtp_layers(whole.config)}
    around = {"enorm", "hnorm", "eh_proj", "shared_head.norm"}
    assert {f"model.layers.4.{name}.weight" for name in around} <= names
    assert names == {name for name in whole.weights if name.startswith("model.layers.4.")}
    assert {spec.name for spec in declare(whole.config)}.isdisjoint(names)


def test_copies_of_embedding_and_head_are_taken_if_they_are_equal(tmp_path: Path):
    whole = with_deepseek_layers(tmp_path, **{"embed_tokens": 0.0, "shared_head.head": 0.0})
    head = mtp_head_of(whole)
    assert {spec.name for spec in declare(head.config)} == set(head.weights)


@pytest.mark.parametrize("name", ["embed_tokens", "shared_head.head"])
def test_an_embedding_or_a_head_of_its_own_is_refused_by_name(name: str, tmp_path: Path):
    whole = with_deepseek_layers(tmp_path, **{name: 0.5})
    with pytest.raises(CheckpointError, match=rf"layers\.4\.{name}\.weight .* differs from"):
        mtp_head_of(whole)


def test_a_random_checkpoint_has_its_mtp_layers(tmp_path: Path):
    write_random_checkpoint(named_shape("tiny-mimo"), tmp_path, seed=1, dtype="bfloat16")
    head = mtp_head_of(open_checkpoint(tmp_path))
    assert head.config.num_layers == 1
    assert head.weights["model.input_proj.weight"].shape == (96, 192)


def test_a_model_without_mtp_layers_is_refused(tmp_path: Path):
    config = named_shape("tiny-mimo")
    write_random_checkpoint(replace(config, num_mtp_layers=0), tmp_path, seed=1, dtype="float32")
    with pytest.raises(CheckpointError, match="has no MTP layers"):
        mtp_head_of(open_checkpoint(tmp_path))


def test_mtp_layers_that_were_left_out_are_missed_by_name(tmp_path: Path):
    whole = open_checkpoint(FIXTURE)
    missing = "model.mtp_layers.0.input_proj.weight"
    partial = whole.weights.with_parts({missing: {}})
    with pytest.raises(CheckpointError, match=f"lack {missing}"):
        mtp_head_of(replace(whole, known=(whole.config, partial)))


def test_a_tensor_of_an_mtp_layer_of_another_shape_is_refused_by_name():
    whole = open_checkpoint(FIXTURE)
    wrong, other = "model.mtp_layers.0.input_proj.weight", "model.mtp_layers.0.mlp.up_proj.weight"
    entry = replace(whole.weights.entry(other), name=wrong)
    mixed = whole.weights.with_parts({wrong: {wrong: entry}})
    with pytest.raises(CheckpointError, match=r"input_proj\.weight"):
        mtp_head_of(replace(whole, known=(whole.config, mixed)))
