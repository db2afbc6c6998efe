"""Rules of names: which tensor of a file is which of the model's."""

from pathlib import Path

import numpy as np
import pytest

from cadenza.errors import CheckpointError
from cadenza.weights.weights import by_rules, open_weights
from tests.checkpoint.files import write_tensors

RULES = (
    ("visual.head.*", None),
    ("visual.*", "model.visual.*"),
    ("h.{layer}.attn.q", "model.layers.{layer}.q_proj"),
    ("wte", "model.embed_tokens"),
)


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("visual.head.weight", None),
        ("visual.blocks.0\n*.w", "model.visual.blocks.0\n*.w"),
        ("h.12.attn.q", "model.layers.12.q_proj"),
        ("h.12.attn.q.weight", "h.12.attn.q.weight"),
        ("h.12345.attn.q", "h.12345.attn.q"),
        ("wte", "model.embed_tokens"),
        ("wte.weight", "wte.weight"),
        ("a.visual.x", "a.visual.x"),
    ],
)
def test_the_first_rule_that_fits_a_whole_name_holds(name: str, own: str | None):
    assert by_rules(RULES)(name) == own


def test_two_tensors_of_one_declared_name_are_refused(tmp_path: Path):
    tensors = {name: np.zeros(2, np.float32) for name in ("visual.x", "model.visual.x")}
    write_tensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=r"model\.visual\.x twice: .* in visual\.x; remove"):
        open_weights(tmp_path).renamed(by_rules(RULES))
