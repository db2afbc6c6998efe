"""Models that were saved without their head."""

import json
from pathlib import Path

import numpy as np
import pytest

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.errors import CheckpointError
from tests.checkpoint.files import small_model, write_base_model, write_folder, write_tensors


def test_the_tensors_get_their_declared_names(tmp_path: Path) -> None:
    whole = open_checkpoint(write_folder(tmp_path / "whole"))
    base = open_checkpoint(write_base_model(tmp_path / "base", tmp_path / "whole"))
    assert base.config == whole.config
    assert set(base.weights) == set(whole.weights)
    assert all(np.array_equal(base.weights[name], whole.weights[name]) for name in whole.weights)
    assert base.num_weight_bytes == whole.num_weight_bytes
    assert base.can_generate


def untie(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))


def test_without_a_head_of_its_own_it_cannot_generate(tmp_path: Path) -> None:
    write_folder(tmp_path / "whole")
    folder = write_base_model(tmp_path / "base", tmp_path / "whole")
    untie(folder)
    assert not open_checkpoint(folder).can_generate


def test_a_head_beside_bare_names_is_used(tmp_path: Path) -> None:
    _, tensors = small_model()
    folder = write_folder(tmp_path / "model")
    untie(folder)
    head = tensors["model.embed_tokens.weight"] + 1
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    write_tensors(folder / "model.safetensors", {**bare, "lm_head.weight": head})
    checkpoint = open_checkpoint(folder)
    assert checkpoint.can_generate
    assert np.array_equal(checkpoint.weights["lm_head.weight"], head)


def test_a_whole_model_without_its_head_is_still_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    untie(folder)
    with pytest.raises(CheckpointError, match=r"lack lm_head\.weight"):
        open_checkpoint(folder)


def test_names_with_and_without_the_prefix_are_not_mixed(tmp_path: Path) -> None:
    _, tensors = small_model()
    folder = write_folder(tmp_path / "model")
    write_tensors(
        folder / "model.safetensors",
        {**tensors, "embed_tokens.weight": tensors["model.embed_tokens.weight"]},
    )
    with pytest.raises(CheckpointError, match=r"contain embed_tokens\.weight"):
        open_checkpoint(folder)
