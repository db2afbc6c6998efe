"""Experts that a file stores stacked: the same tensors, by the same names, from the same bytes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.errors import CheckpointError
from cadenza.weights.safetensors_file import open_safetensors
from cadenza.weights.stored_tensor import AnyArray
from cadenza.weights.weights import open_weights
from tests.checkpoint.files import write_tensors
from tests.checkpoint.quantised_folders import write_quantised
from tests.checkpoint.quantised_writers import ALIGNED, METHODS

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


MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def switched(folder: Path) -> dict[str, AnyArray]:
    """The tensors of a quantised folder as MLX stores them, with the experts in `switch_mlp`."""
    _, stored = open_safetensors(folder / "model.safetensors")
    tensors: dict[str, AnyArray] = {}
    experts: dict[str, list[AnyArray]] = {}
    for name in sorted(stored):  # fewer than ten experts
        layer, is_expert, rest = name.partition(".experts.")
        if is_expert:
            part = f"{layer}.switch_mlp.{rest.split('.', 1)[1]}"
            experts.setdefault(part, []).append(stored[name].array())
        else:
            tensors[name] = stored[name].array()
    assert len(experts) == 2 * 3 * 3, "layers, linears and their tensors"
    return tensors | {name: np.stack(parts) for name, parts in experts.items()}


def test_quantised_experts_of_mlx_are_read_as_single_ones(tmp_path: Path):
    """MLX quantises the router too; both are the same whether experts are stacked or not."""
    (tmp_path / "config.json").write_text(json.dumps(ALIGNED | MOE))
    settings, store = METHODS["mlx-4"]
    single = write_quantised(tmp_path, str(tmp_path / "config.json"), settings, store)
    stacked = tmp_path / "stacked"
    stacked.mkdir()
    write_tensors(stacked / "model.safetensors", switched(single))
    (stacked / "config.json").write_bytes((single / "config.json").read_bytes())
    expected, found = open_checkpoint(single).weights, open_checkpoint(stacked).weights
    assert set(expected.quantised) == set(found.quantised)
    names = [name for name in found.quantised if ".experts." in name or ".gate." in name]
    assert len(names) == 2 * (4 * 3 + 1)
    for name in names:
        assert np.array_equal(np.asarray(found[name]), np.asarray(expected[name])), name
        is_router = name.endswith("mlp.gate.weight")
        assert (found.format(name) is None) == is_router, "routers are computed in floats"


def test_quantised_experts_of_another_number_are_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(ALIGNED | MOE))
    settings, store = METHODS["mlx-4"]
    single = write_quantised(tmp_path, str(tmp_path / "config.json"), settings, store)
    stacked = tmp_path / "stacked"
    stacked.mkdir()
    tensors = switched(single)
    name = "model.layers.1.mlp.switch_mlp.up_proj.scales"
    write_tensors(stacked / "model.safetensors", tensors | {name: tensors[name][:3]})
    (stacked / "config.json").write_bytes((single / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=rf"{name} has shape .* requires 4 experts"):
        open_checkpoint(stacked)


@pytest.mark.parametrize("name", ["qwen3-moe-tied-bias"])
def test_stacks_may_have_inputs_as_their_rows(name: str, tmp_path: Path):
    tensors = stack(FIXTURES / name)
    turned = {
        key: np.ascontiguousarray(tensor.swapaxes(1, 2)) if ".experts." in key else tensor
        for key, tensor in tensors.items()
    }
    config = (FIXTURES / name / "config.json").read_bytes()
    expected = open_checkpoint(FIXTURES / name)
    found = open_checkpoint(write(tmp_path / "turned", config, turned))
    assert set(found.weights) == set(expected.weights)
    for key in expected.weights:
        assert np.array_equal(found.weights[key], expected.weights[key]), key
