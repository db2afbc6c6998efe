"""Experts as gpt-oss stores them: stacked, the outputs of gate and up in turn, floats or MXFP4."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cadenza.checkpoint.folder import Checkpoint
from cadenza.checkpoint.formats.grouped import mxfp4_weight
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.errors import CheckpointError
from cadenza.models.config_json import parse_model_config
from cadenza.models.model_config import ModelConfig
from cadenza.weights.safetensors_file import NewTensor, Part, write_shards
from cadenza.weights.weight_format import INT8, MXFP4, code_format, joined
from cadenza.weights.weights import open_weights
from tests.checkpoint.config_writer import format_model_config, write_random_checkpoint

EXPERTS = "model.layers.1.mlp.experts"
VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
"""Of E2M1 (OCP Microscaling Formats 1.0)."""

Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return named_shape("tiny-gpt-oss")


@pytest.fixture(scope="module")
def floats(config: ModelConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("floats") / "model"
    write_random_checkpoint(config, folder, seed=3, dtype="float32")
    return folder


def write(folder: Path, config: dict[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    folder.mkdir()
    parts = [
        Part(
            tensors=(NewTensor(name=name, dtype=dtype_of(each), shape=each.shape),),
            make=lambda each=each: [each],
        )
        for name, each in tensors.items()
    ]
    write_shards(folder, parts)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def dtype_of(array: np.ndarray) -> Any:
    return str(array.dtype)


def stored(folder: Path) -> Arrays:
    weights = open_weights(folder)
    return {name: np.array(weights[name]) for name in weights}


def in_mxfp4(tensors: Arrays, seed: int) -> tuple[Arrays, Arrays]:
    """The tensors with random codes in place of the experts' weights; and these weights, stacked,
    by the name of the floats [X, K, N]."""
    random = np.random.default_rng(seed)
    coded, weights = dict(tensors), {}
    for name in [each for each in tensors if each.endswith(("gate_up_proj", "down_proj"))]:
        if ".experts." not in name:
            continue
        count, num_in, num_out = coded.pop(name).shape
        nibbles = random.integers(0, 16, (count, num_out, num_in // 32, 32), np.uint8)
        exponents = random.integers(118, 124, (count, num_out, num_in // 32), np.uint8)
        coded[f"{name}_blocks"] = nibbles[..., 0::2] | nibbles[..., 1::2] << 4
        coded[f"{name}_scales"] = exponents
        values = np.array(VALUES)[nibbles] * np.exp2(exponents[..., None] - 127.0)
        weights[name] = values.reshape(count, num_out, num_in).swapaxes(1, 2).astype(np.float32)
    return coded, weights


def quantised(config: ModelConfig) -> dict[str, Any]:
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "model.embed_tokens"]}
    return {**format_model_config(config), "quantization_config": method}


def opened_in_mxfp4(floats: Path, folder: Path, **changes: np.ndarray) -> Checkpoint:
    coded, _ = in_mxfp4(stored(floats), 7)
    return open_checkpoint(write(folder, quantised(named_shape("tiny-gpt-oss")), coded | changes))


def test_outputs_in_turn_are_those_of_gate_and_up(floats: Path):
    raw, weights = stored(floats), open_checkpoint(floats).weights
    for index in (0, 5):
        own = f"{EXPERTS}.{index}"
        stacked = raw[f"{EXPERTS}.gate_up_proj"][index]  # [E, 2 F]
        assert np.array_equal(weights[f"{own}.gate_proj.weight"], stacked[:, 0::2].T)
        assert np.array_equal(weights[f"{own}.up_proj.weight"], stacked[:, 1::2].T)
        bias = raw[f"{EXPERTS}.gate_up_proj_bias"][index]
        assert np.array_equal(weights[f"{own}.gate_proj.bias"], bias[0::2])
        assert np.array_equal(weights[f"{own}.up_proj.bias"], bias[1::2])
        down = raw[f"{EXPERTS}.down_proj"][index]
        assert np.array_equal(weights[f"{own}.down_proj.weight"], down.T)
        assert np.array_equal(
            weights[f"{own}.down_proj.bias"], raw[f"{EXPERTS}.down_proj_bias"][index]
        )


def test_a_stacked_models_size_is_that_of_its_tensors(floats: Path):
    assert open_checkpoint(floats).num_weight_bytes == sum(
        each.nbytes for each in stored(floats).values()
    )


def test_codes_in_mxfp4_stand_for_the_floats_that_they_say(floats: Path, tmp_path: Path):
    coded, weights = in_mxfp4(stored(floats), 7)
    config = format_model_config(named_shape("tiny-gpt-oss"))
    plain = open_checkpoint(write(tmp_path / "plain", config, stored(floats) | weights))
    found = opened_in_mxfp4(floats, tmp_path / "codes")
    assert set(found.weights) == set(plain.weights)
    for name in plain.weights:
        assert np.array_equal(np.asarray(found.weights[name]), plain.weights[name]), name
    assert found.weights.stored_type(f"{EXPERTS}.0.up_proj.weight") == "mxfp4"
    assert found.scheme is not None
    assert found.scheme.name == "mxfp4 with groups of 32"
    assert found.num_weight_bytes == sum(each.nbytes for each in coded.values())


def test_weights_in_mxfp4_stay_in_4_bits(floats: Path, tmp_path: Path):
    weights = opened_in_mxfp4(floats, tmp_path / "codes").weights
    coded = weights[f"{EXPERTS}.0.up_proj.weight"]
    assert (
        coded.format == coded.rows(3, 9).format == weights.format(f"{EXPERTS}.1.gate_proj.weight")
    )
    assert coded.format == MXFP4
    assert MXFP4.num_bytes((10, 64)) == 10 * 64 * 4.5 / 8


def test_weights_in_mxfp4_beside_other_codes_have_8_bits():
    wide = code_format(8, "float32")
    assert joined([MXFP4, MXFP4]) == MXFP4
    assert joined([MXFP4, INT8]) == joined([MXFP4, code_format(4)]) == wide
    coded = mxfp4_weight(np.arange(32, dtype=np.uint8)[None] % 16, np.array([[130]], np.uint8))
    held = coded.in_format(wide)
    assert held.format == wide
    assert np.array_equal(held.dequantised(), coded.dequantised())
    assert np.array_equal(held.dequantised()[0, :16], 8 * np.array(VALUES, np.float32))


def test_an_exponent_of_255_is_not_a_number():
    exponents = np.array([[255, 127]], np.uint8)
    found = mxfp4_weight(np.full((1, 64), 2, np.uint8), exponents).dequantised()
    assert np.isnan(found[:, :32]).all()
    assert np.array_equal(found[:, 32:], np.ones((1, 32)))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("gate_up_proj", (6, 96, 127), r"gate_up_proj has shape .*; .* \[6, 96, 128\]"),
        ("down_proj", (5, 64, 96), r"down_proj has shape .*; .* \[6, 64, 96\]"),
        ("down_proj_bias", (6, 95), r"down_proj_bias has shape .*; .* \[6, 96\]"),
    ],
)
def test_a_stack_of_another_shape_is_refused(
    floats: Path, tmp_path: Path, name: str, shape: tuple[int, ...], message: str
):
    tensors = stored(floats) | {f"{EXPERTS}.{name}": np.zeros(shape, np.float32)}
    config = format_model_config(named_shape("tiny-gpt-oss"))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(write(tmp_path / "spoilt", config, tensors))


def test_blocks_of_another_shape_are_refused(floats: Path, tmp_path: Path):
    name = f"{EXPERTS}.down_proj_blocks"
    with pytest.raises(CheckpointError, match=r"down_proj_blocks has shape .* \[6, 96, 2, 16\]"):
        opened_in_mxfp4(floats, tmp_path / "bad", **{name: np.zeros((6, 96, 3, 16), np.uint8)})


def test_an_expert_that_is_stored_twice_is_refused(floats: Path, tmp_path: Path):
    name = f"{EXPERTS}.2.up_proj.bias"
    tensors = stored(floats) | {name: np.zeros(64, np.float32)}
    config = format_model_config(named_shape("tiny-gpt-oss"))
    with pytest.raises(CheckpointError, match=r"experts\.2\.up_proj\.bias twice: .* and in"):
        open_checkpoint(write(tmp_path / "both", config, tensors))


def test_a_silent_config_has_the_rope_and_the_windows_of_the_published_models(config: ModelConfig):
    values = format_model_config(config)
    for key in ("rope_parameters", "sliding_window", "layer_types", "attention_bias"):
        del values[key]
    found = parse_model_config(values)
    assert [kind.window for kind in found.layer_kinds] == [128, None, 128, None]
    assert found.has_qkv_bias
    scaling: Any = found.rope.scaling
    assert (found.rope.theta, scaling.factor, scaling.truncate) == (150_000.0, 32.0, False)
    assert scaling.original_max_position_embeddings == 4096
