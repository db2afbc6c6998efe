"""Experts that a file stores stacked: the same tensors, by the same names, from the same bytes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cadenza.checkpoint import open_checkpoint, open_weights
from cadenza.checkpoint.tensor_file import AnyArray
from cadenza.errors import CheckpointError

FIXTURES = Path(__file__).parent.parent / "fixtures"
MIXTURES = ("mixtral-untied", "qwen3-moe-tied-bias", "olmoe-untied")
SHORT_NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def stack(folder: Path) -> dict[str, AnyArray]:
    """The tensors as the library that wrote the fixture has them in memory."""
    weights = open_weights(folder)
    stacked: dict[str, AnyArray] = {}
    experts: dict[str, dict[int, dict[str, AnyArray]]] = {}
    for name in weights:
        plain = name.replace("block_sparse_moe", "mlp")
        if ".experts." not in name:
            stacked[plain] = weights[name]
            continue
        prefix, _, rest = plain.partition(".experts.")
        index, part, _ = rest.split(".")
        layer = experts.setdefault(prefix, {})
        layer.setdefault(int(index), {})[SHORT_NAMES.get(part, part)] = weights[name]
    for prefix, layer in experts.items():
        parts = [layer[index] for index in sorted(layer)]
        gate_up = [np.concatenate([each["gate_proj"], each["up_proj"]]) for each in parts]
        stacked[f"{prefix}.experts.gate_up_proj"] = np.stack(gate_up)
        stacked[f"{prefix}.experts.down_proj"] = np.stack([each["down_proj"] for each in parts])
    return stacked


def write(folder: Path, config: bytes, tensors: dict[str, AnyArray]) -> Path:
    folder.mkdir()
    table, position = {}, 0
    for name, tensor in tensors.items():
        stop = position + tensor.nbytes
        table[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [position, stop]}
        position = stop
    header = json.dumps(table).encode()
    data = b"".join(tensor.tobytes() for tensor in tensors.values())
    path = folder / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    (folder / "config.json").write_bytes(config)
    return folder


@pytest.mark.parametrize("name", MIXTURES)
def test_stacked_experts_are_read_as_single_ones(tmp_path: Path, name: str):
    config = (FIXTURES / name / "config.json").read_bytes()
    folder = write(tmp_path / name, config, stack(FIXTURES / name))
    expected, found = open_checkpoint(FIXTURES / name), open_checkpoint(folder)
    assert set(expected.weights) == set(found.weights)
    for tensor in expected.weights:
        assert np.array_equal(found.weights[tensor], expected.weights[tensor])
        assert found.weights.entry(tensor).shape == expected.weights.entry(tensor).shape
    assert found.num_weight_bytes == expected.num_weight_bytes
    assert not found.weights[tensor].flags.owndata


@pytest.mark.parametrize(
    ("part", "cut", "message"),
    [
        ("gate_up_proj", np.s_[:-1], r"gate_up_proj has shape \[6, 22, 36\]; .* \[7, 22, 36\]"),
        ("gate_up_proj", np.s_[:, :-1], r"gate_up_proj has shape \[7, 21, 36\]"),
        ("down_proj", np.s_[..., :-1], r"down_proj has shape \[7, 36, 10\]; .* \[7, 36, 11\]"),
        ("down_proj", np.s_[0], r"down_proj has shape \[36, 11\]"),
    ],
)
def test_stacked_experts_of_another_shape_are_refused(
    tmp_path: Path, part: str, cut: Any, message: str
):
    fixture = FIXTURES / "qwen3-moe-tied-bias"
    tensors = stack(fixture)
    name = f"model.layers.1.mlp.experts.{part}"
    tensors[name] = np.ascontiguousarray(tensors[name][cut])
    folder = write(tmp_path / "spoilt", (fixture / "config.json").read_bytes(), tensors)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


def test_experts_that_are_stored_both_ways_are_refused(tmp_path: Path):
    fixture = FIXTURES / "qwen3-moe-tied-bias"
    tensors = stack(fixture)
    extra = "model.layers.1.mlp.experts.3.up_proj.weight"
    tensors[extra] = np.array(open_weights(fixture)[extra])
    folder = write(tmp_path / "both", (fixture / "config.json").read_bytes(), tensors)
    with pytest.raises(CheckpointError, match=r"experts\.3\.up_proj\.weight twice"):
        open_checkpoint(folder)


def test_stacked_experts_without_their_other_half_are_missing_tensors(tmp_path: Path):
    fixture = FIXTURES / "qwen3-moe-tied-bias"
    tensors = stack(fixture)
    del tensors["model.layers.1.mlp.experts.down_proj"]
    folder = write(tmp_path / "half", (fixture / "config.json").read_bytes(), tensors)
    with pytest.raises(CheckpointError, match=r"lack model\.layers\.1\.mlp\.experts\.0\.down_proj"):
        open_checkpoint(folder)
