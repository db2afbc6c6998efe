"""Configs, tensors and fixtures as transformers reads them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cadenza.checkpoint import (
    declare,
    named_shape,
    open_checkpoint,
    write_random_checkpoint,
)
from tests.oracle.hf import compute_logits, load_model

pytestmark = pytest.mark.oracle

FIXTURES = Path(__file__).parent.parent / "fixtures"
FOLDERS = sorted(path for path in FIXTURES.iterdir() if path.is_dir())


@pytest.fixture(scope="module", params=["tiny-llama", "tiny-qwen3"])
def random_folder(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random") / request.param
    write_random_checkpoint(named_shape(request.param), folder, seed=5, dtype="float32")
    return folder


def assert_configs_agree(folder: Path) -> None:
    from transformers import AutoConfig

    ours, theirs = open_checkpoint(folder).config, AutoConfig.from_pretrained(folder)
    assert ours.vocab_size == theirs.vocab_size
    assert ours.hidden_size == theirs.hidden_size
    assert ours.intermediate_size == theirs.intermediate_size
    assert ours.num_layers == theirs.num_hidden_layers
    assert ours.num_heads == theirs.num_attention_heads
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == theirs.head_dim
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.has_attention_bias == theirs.attention_bias
    assert ours.has_mlp_bias == getattr(theirs, "mlp_bias", False)
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    for name in ("factor", "low_freq_factor", "high_freq_factor"):
        assert getattr(ours.rope.scaling, name, None) == theirs.rope_parameters.get(name)


def assert_tensors_agree(folder: Path) -> None:
    """Each declared tensor is a parameter of transformers' model, and it has no others."""
    checkpoint = open_checkpoint(folder)
    theirs = dict(load_model(folder).named_parameters())
    assert {spec.name for spec in declare(checkpoint.config)} == set(theirs)
    for name, parameter in theirs.items():
        assert np.array_equal(checkpoint.weights[name], parameter.detach().numpy())


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_fixtures_are_read_as_transformers_reads_them(folder: Path):
    assert_configs_agree(folder)
    assert_tensors_agree(folder)


def test_random_checkpoints_are_read_by_transformers(random_folder: Path):
    assert_configs_agree(random_folder)
    assert_tensors_agree(random_folder)


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
