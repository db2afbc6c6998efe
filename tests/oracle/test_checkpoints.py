"""Configs, tensors and fixtures as transformers reads them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.checkpoint.random_checkpoint import named_shape, text_shape_names
from cadenza.checkpoint.stacked_experts import split_stacks
from cadenza.models.declaration import declare
from cadenza.models.families import FAMILIES
from cadenza.weights.weights import open_weights
from tests.checkpoint.config_writer import write_random_checkpoint
from tests.oracle.hf import compute_logits, load_config, load_model

pytestmark = pytest.mark.oracle

FIXTURES = Path(__file__).parent.parent / "fixtures"
FOLDERS = sorted(path.parent for path in FIXTURES.glob("*/config.json"))
MIXTURES = [path for path in FOLDERS if named_shape(str(path)).experts is not None]


@pytest.fixture(
    scope="module", params=[name for name in text_shape_names() if name.startswith("tiny-")]
)
def random_folder(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random") / request.param
    write_random_checkpoint(named_shape(request.param), folder, seed=5, dtype="float32")
    return folder


def assert_configs_agree(folder: Path) -> None:
    ours, theirs = open_checkpoint(folder).config, load_config(folder)
    assert ours.vocab_size == theirs.vocab_size
    assert ours.hidden_size == theirs.hidden_size
    assert ours.intermediate_size == getattr(theirs, FAMILIES[ours.family].width_key)
    assert ours.num_layers == theirs.num_hidden_layers
    assert ours.num_heads == theirs.num_attention_heads
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (
        getattr(theirs, "head_dim", None) or ours.hidden_size // ours.num_heads
    )
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.has_qkv_bias == getattr(theirs, "attention_bias", theirs.model_type == "qwen2")
    assert ours.has_mlp_bias == getattr(theirs, "mlp_bias", False)
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    kinds = [ours.layer_kinds[index].window is not None for index in range(ours.num_layers)]
    window = getattr(theirs, "sliding_window", None)
    all_kinds = ["full_attention" if window is None else "sliding_attention"] * ours.num_layers
    their_kinds = getattr(theirs, "layer_types", None) or all_kinds
    assert kinds == [kind == "sliding_attention" for kind in their_kinds]
    ropes = theirs.rope_parameters
    assert ours.rope.theta == ropes.get("full_attention", ropes)["rope_theta"]


def assert_tensors_agree(folder: Path, saved: Path) -> None:
    """Each declared tensor is one that transformers loads and saves, and there are no others."""
    checkpoint = open_checkpoint(folder)
    load_model(folder).save_pretrained(saved)
    theirs = split_stacks(checkpoint.config, open_weights(saved))
    assert {spec.name for spec in declare(checkpoint.config)} == set(theirs)
    for name in theirs:
        assert np.array_equal(checkpoint.weights[name], theirs[name])


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_fixtures_are_read_as_transformers_reads_them(folder: Path, tmp_path: Path):
    assert_configs_agree(folder)
    assert_tensors_agree(folder, tmp_path)


def test_random_checkpoints_are_read_by_transformers(random_folder: Path, tmp_path: Path):
    assert_configs_agree(random_folder)
    assert_tensors_agree(random_folder, tmp_path)


@pytest.mark.parametrize("folder", MIXTURES, ids=lambda path: path.name)
def test_experts_that_transformers_saves_stacked_are_read_as_single_ones(
    folder: Path, tmp_path: Path
):
    load_model(folder).save_pretrained(tmp_path, save_original_format=False)
    assert any(name.endswith("experts.gate_up_proj") for name in open_weights(tmp_path))
    ours, stacked = open_checkpoint(folder).weights, open_checkpoint(tmp_path).weights
    assert set(ours) == set(stacked)
    assert all(np.array_equal(ours[tensor], stacked[tensor]) for tensor in ours)


def test_random_logits_are_neither_flat_nor_degenerate(random_folder: Path):
    vocab_size = named_shape(random_folder.name).vocab_size
    token_ids = np.random.default_rng(0).integers(0, vocab_size, 200).tolist()
    logits = compute_logits(random_folder, token_ids).astype(np.float64)  # [T, V]
    logits -= logits.max(axis=-1, keepdims=True)
    chances = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    entropy = -(chances * np.log(np.maximum(chances, 1e-300))).sum(axis=-1)
    assert 0.25 < entropy.mean() / np.log(vocab_size) < 0.8
    assert chances.max(axis=-1).mean() < 0.9
    assert len(set(logits.argmax(axis=-1).tolist())) > 40


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_fixtures_hold_what_transformers_computes(folder: Path):
    with np.load(folder / "expected.npz") as expected:
        token_ids, logits = expected["token_ids"].tolist(), expected["logits"]
        num_prompt_tokens = int(expected["num_prompt_tokens"])
    assert logits.shape == (len(token_ids) - 1, open_checkpoint(folder).config.vocab_size)
    error = np.abs(compute_logits(folder, token_ids[:-1]) - logits).max()
    assert error < 1e-5 * np.ptp(logits)
    greedy = logits[num_prompt_tokens - 1 :].argmax(axis=-1).tolist()
    assert token_ids[num_prompt_tokens:] == greedy


def test_fixtures_notice_a_wrong_rope(tmp_path: Path):
    """The negative control: a scaling that is not applied moves the logits by far."""
    import json
    import shutil

    for folder in FOLDERS:
        if folder.name.startswith("llama"):
            copy = tmp_path / folder.name
            shutil.copytree(folder, copy)
            config = json.loads((copy / "config.json").read_text())
            config.pop("rope_scaling", None)
            config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
            config.pop("rope_theta", None)
            (copy / "config.json").write_text(json.dumps(config))
            with np.load(folder / "expected.npz") as expected:
                token_ids, logits = expected["token_ids"].tolist(), expected["logits"]
            error = np.abs(compute_logits(copy, token_ids[:-1]) - logits).max()
            assert error > 1e-2 * np.ptp(logits)
