"""Models that score: their head is read and left out of what the engine loads."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cadenza.checkpoint.folder import Checkpoint
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.errors import CheckpointError
from cadenza.models.score_head import ScoreHead
from tests.checkpoint.files import small_model, write_folder, write_tensors


def with_head(folder: Path, shape: tuple[int, ...] | None = None, **settings: Any) -> Path:
    """The small model as transformers writes one that has a score."""
    config, tensors = small_model()
    write_folder(folder)
    tensors.pop("lm_head.weight", None)
    size = math.prod(shape or (1, config.hidden_size))
    score = np.linspace(-1, 1, size, dtype=np.float32).reshape(shape or (1, config.hidden_size))
    write_tensors(folder / "model.safetensors", {**tensors, "score.weight": score})
    written = json.loads((folder / "config.json").read_text())
    (name,) = written["architectures"]
    written["architectures"] = [name.replace("ForCausalLM", "ForSequenceClassification")]
    (folder / "config.json").write_text(json.dumps({**written, **settings}))
    return folder


def head_of(checkpoint: Checkpoint) -> ScoreHead:
    assert checkpoint.score_head is not None
    return checkpoint.score_head


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_head_is_read_and_the_rest_is_the_decoder(tmp_path: Path, is_tied: bool) -> None:
    found = open_checkpoint(with_head(tmp_path / "scores", tie_word_embeddings=is_tied))
    whole = open_checkpoint(write_folder(tmp_path / "whole"))
    assert not found.can_generate
    assert "score.weight" not in found.weights
    embedding = "model.embed_tokens.weight"
    assert np.array_equal(found.weights[embedding], whole.weights[embedding])
    size = found.config.hidden_size
    assert head_of(found).weights == pytest.approx(np.linspace(-1, 1, size), abs=1e-7)
    assert whole.score_head is None
    assert whole.can_generate


def test_a_score_goes_through_the_sigmoid_unless_the_model_says_that_it_does_not(
    tmp_path: Path,
) -> None:
    bounded = head_of(open_checkpoint(with_head(tmp_path / "bounded")))
    named = {"activation_fn": "torch.nn.modules.linear.Identity"}
    plain = head_of(open_checkpoint(with_head(tmp_path / "plain", sentence_transformers=named)))
    older = {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}
    assert not head_of(open_checkpoint(with_head(tmp_path / "older", **older))).is_bounded
    state = [0.5 * place for place in range(len(plain.weights))]
    raw = math.fsum(w * x for w, x in zip(plain.weights, state, strict=True))
    assert plain.score(state) == raw
    assert bounded.score(state) == pytest.approx(1 / (1 + math.exp(-raw)), rel=1e-12)
    assert bounded.score([-1e6 * x for x in state]) == 0.0
    assert bounded.score([1e6 * x for x in state]) == 1.0


def test_a_head_of_several_labels_is_refused(tmp_path: Path) -> None:
    config, _ = small_model()
    with pytest.raises(CheckpointError, match="only a head of one score"):
        open_checkpoint(with_head(tmp_path / "labels", shape=(3, config.hidden_size)))


def test_a_model_without_its_head_is_refused(tmp_path: Path) -> None:
    folder = with_head(tmp_path / "scores", tie_word_embeddings=False)
    _, tensors = small_model()
    tensors.pop("lm_head.weight", None)
    write_tensors(folder / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=r"lack lm_head\.weight"):
        open_checkpoint(folder)
