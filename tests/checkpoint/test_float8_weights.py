"""Weights in float8_e4m3: which layouts of scales are read, and what codes and scales mean."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cadenza.backends import BACKENDS
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.checkpoint.tensor_formats import held_formats
from cadenza.config import EngineConfig
from cadenza.errors import CheckpointError, ConfigError
from cadenza.loading.build import describe_backend
from cadenza.loading.plan import make_plan
from cadenza.weights.quantised_weight import Float8Weight, scales_of_blocks
from cadenza.weights.tensor_spec import TensorSpec
from cadenza.weights.weight_format import FLOAT8
from tests.checkpoint.quantised_folders import write_quantised

SHAPE = "tiny-qwen3-moe"  # K is 96, 192, 168 and 40
FLOAT8_DTYPE = np.dtype(ml_dtypes.float8_e4m3fn)


class Writer:
    """Stores random codes, and remembers the elements [N, K] that they mean."""

    def __init__(self, scales: str, scale_name: str, *, inputs: str = "") -> None:
        self.scales, self.scale_name, self.inputs = scales, scale_name, inputs
        self.meant: dict[str, np.ndarray] = {}
        self.dtype: Any = np.float32

    def __call__(self, spec: TensorSpec, weight: np.ndarray) -> dict[str, np.ndarray] | None:
        if spec.kind != "linear" or spec.name.endswith("layers.0.self_attn.o_proj.weight"):
            return None
        random = np.random.default_rng(len(self.meant))
        codes = (weight * 100).astype(FLOAT8_DTYPE)
        rows, reduction = spec.shape
        shapes = {"tensor": (1,), "scalar": (), "channel": (rows, 1)}
        block = (-(-rows // 128), -(-reduction // 128))
        stored = random.uniform(1e-3, 2e-2, shapes.get(self.scales, block)).astype(self.dtype)
        wide = stored.astype(np.float32)
        if self.scales == "block":
            wide = np.repeat(np.repeat(wide, 128, axis=0), 128, axis=1)[:rows, :reduction]
        self.meant[spec.name] = codes.astype(np.float32) * wide
        tensors = {"weight": codes, self.scale_name: stored}
        return tensors | ({self.inputs: np.ones((), np.float32)} if self.inputs else {})


def fp8(**settings: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", **settings}}


def compressed(layout: str = "float-quantized", **weights: Any) -> dict[str, Any]:
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    settings = {"num_bits": 8, "type": "float", "symmetric": True, **weights}
    group = {"targets": ["Linear"], "weights": settings, "input_activations": inputs}
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": layout,
            "config_groups": {"group_0": group},
            "ignore": ["lm_head", "re:.*mlp\\.gate$", "model.layers.0.self_attn.o_proj"],
        }
    }


BLOCKS = fp8(activation_scheme="dynamic", weight_block_size=[128, 128])
CASES: dict[str, tuple[dict[str, Any], Writer]] = {
    "fp8 in blocks": (BLOCKS, Writer("block", "weight_scale_inv")),
    "fp8, static": (
        fp8(activation_scheme="static", weight_block_size=None),
        Writer("scalar", "weight_scale_inv", inputs="activation_scale"),
    ),
    "fp8 of vLLM, static": (
        fp8(activation_scheme="static"),
        Writer("tensor", "weight_scale", inputs="input_scale"),
    ),
    "compressed-tensors, tensor": (compressed(strategy="tensor"), Writer("tensor", "weight_scale")),
    "compressed-tensors, channel": (
        compressed(strategy="channel"),
        Writer("channel", "weight_scale"),
    ),
    "compressed-tensors, block": (
        compressed(strategy="block", block_structure=[128, 128]),
        Writer("block", "weight_scale"),
    ),
    "compressed-tensors, naive": (
        compressed("naive-quantized", strategy="channel"),
        Writer("channel", "weight_scale"),
    ),
}


def write(folder: Path, case: str) -> tuple[Path, Writer]:
    settings, writer = CASES[case]
    writer.meant.clear()
    return write_quantised(folder, SHAPE, settings, writer), writer


@pytest.mark.parametrize("case", CASES)
def test_float8_codes_mean_what_the_writer_meant(tmp_path: Path, case: str):
    folder, writer = write(tmp_path, case)
    weights = open_checkpoint(folder).weights
    assert len(writer.meant) > 100
    for name, meant in writer.meant.items():
        found = weights[name]
        assert isinstance(found, Float8Weight)
        np.testing.assert_array_equal(found.dequantised(), meant)
        np.testing.assert_array_equal(np.asarray(found), meant)
    assert set(weights.quantised) == set(writer.meant)
    assert not weights.has_codes


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e8m0fnu])
def test_scales_of_16_or_8_bits_are_read_exactly(tmp_path: Path, dtype: Any):
    settings, writer = BLOCKS, Writer("block", "weight_scale_inv")
    writer.dtype = dtype
    weights = open_checkpoint(write_quantised(tmp_path, SHAPE, settings, writer)).weights
    name, meant = next(iter(writer.meant.items()))
    np.testing.assert_array_equal(weights[name].dequantised(), meant)


def test_every_code_is_the_value_of_float8_e4m3fn():
    codes = np.arange(256, dtype=np.uint8)[None]
    found = Float8Weight(codes, np.ones((1, 2), np.float32)).dequantised()[0]
    sign, exponent, fraction = codes[0] >> 7, codes[0] >> 3 & 15, codes[0] & 7
    normal = np.ldexp(8.0 + fraction, exponent.astype(int) - 10)
    expected = np.where(exponent == 0, np.ldexp(fraction.astype(float), -9), normal)
    expected = np.where(sign == 1, -expected, expected)
    expected[codes[0] & 0x7F == 0x7F] = np.nan
    np.testing.assert_array_equal(found, expected.astype(np.float32))


def test_scales_of_blocks_reach_the_last_row_and_column():
    stored = np.arange(6, dtype=np.float32).reshape(3, 2)
    scales = scales_of_blocks(stored, (70, 300), (32, 256))
    assert scales.shape == (70, 3)
    assert scales[31].tolist() == [0, 0, 1]
    assert scales[32].tolist() == [2, 2, 3]
    assert scales[69].tolist() == [4, 4, 5]


def test_a_float8_checkpoint_is_planned_with_its_own_bytes(tmp_path: Path):
    folder, _ = write(tmp_path, "fp8 in blocks")
    config = EngineConfig(max_model_len=64, max_num_seqs=2, dtype="float32")
    checkpoint = open_checkpoint(folder)
    traits = describe_backend(config, checkpoint, BACKENDS)
    plain = make_plan(config, open_checkpoint(tmp_path / "plain"), traits, 1 << 30)
    planned = make_plan(config, checkpoint, traits, 1 << 30)
    assert planned.weight_bytes < 0.5 * plain.weight_bytes
    assert not planned.is_quantised, "activations are not rounded"
    assert FLOAT8.num_bytes((64, 256)) == 64 * (256 + 2 * 4)
    assert FLOAT8.num_bytes((3, 64, 130)) == 3 * 64 * (130 + 2 * 4)
    with pytest.raises(ConfigError, match=r"--quantization int8: .* fp8"):
        make_plan(EngineConfig(quantization="int8"), checkpoint, traits, 1 << 30)


def test_an_operand_of_float8_and_floats_is_planned_as_the_floats_that_it_is_held_in(
    tmp_path: Path,
):
    folder, writer = write(tmp_path, "fp8 in blocks")
    checkpoint = open_checkpoint(folder)
    own = held_formats(checkpoint.config, checkpoint.weights)
    assert {name for name in writer.meant if own(name) != FLOAT8} == set()
    mixed: dict[str, Any] = dict(checkpoint.weights.tensors)
    q_proj = "model.layers.1.self_attn.q_proj.weight"
    mixed[q_proj] = replace(mixed[q_proj], format=None)
    held = held_formats(checkpoint.config, replace(checkpoint.weights, tensors=mixed))
    names = [q_proj.replace("q_proj", each) for each in ("q_proj", "k_proj", "v_proj")]
    assert [held(name) for name in names] == [None] * 3
    assert {name for name in writer.meant if held(name) != FLOAT8} == set(names)


class Damaged(Writer):
    """Writes blocks, and `damage` changes the tensors of one weight."""

    def __init__(self, damage: Any) -> None:
        super().__init__("block", "weight_scale_inv")
        self.damage = damage

    def __call__(self, spec: TensorSpec, weight: np.ndarray) -> dict[str, np.ndarray] | None:
        tensors = super().__call__(spec, weight)
        if tensors is not None and spec.name.endswith("layers.1.self_attn.q_proj.weight"):
            self.damage(tensors)
        return tensors


def scale_of(value: float) -> Any:
    return lambda tensors: tensors["weight_scale_inv"].fill(value)


DAMAGES: dict[str, tuple[str, Any]] = {
    "no scale": (r"lack model\.layers\.1.*weight_scale_inv", lambda t: t.pop("weight_scale_inv")),
    "a scale of another shape": (
        r"weight_scale_inv has shape \[3, 1\]",
        lambda t: t.update(weight_scale_inv=np.ones((3, 1), np.float32)),
    ),
    "a scale of another type": (
        "has the type int32",
        lambda t: t.update(weight_scale_inv=t["weight_scale_inv"].astype(np.int32)),
    ),
    "an unknown tensor": ("account for", lambda t: t.update(k_scale=np.ones(1, np.float32))),
    "codes of another shape": (
        r"q_proj\.weight has shape",
        lambda t: t.update(weight=t["weight"][:-1]),
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_float8_weights_are_refused_by_name(tmp_path: Path, damage: str):
    words, change = DAMAGES[damage]
    folder = write_quantised(tmp_path, SHAPE, BLOCKS, Damaged(change))
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(folder)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_scale_that_is_not_finite_is_refused_when_it_is_loaded(tmp_path: Path, value: float):
    folder = write_quantised(tmp_path, SHAPE, BLOCKS, Damaged(scale_of(value)))
    weights = open_checkpoint(folder).weights
    with pytest.raises(CheckpointError, match=r"q_proj\.weight_scale_inv has a scale that is not"):
        _ = weights["model.layers.1.self_attn.q_proj.weight"]


SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "another type": ("fmt", fp8(fmt="e5m2")),
    "unknown activations": ("activation_scheme", fp8(activation_scheme="none")),
    "blocks of 64": (r"multiple of 128", fp8(weight_block_size=[128, 64])),
    "blocks of one number": ("weight_block_size", fp8(weight_block_size=[128])),
    "blocks of text": ("weight_block_size", fp8(weight_block_size=["128", "128"])),
    "blocks of none": ("weight_block_size", fp8(weight_block_size=[0, 128])),
    "groups of 32": ("multiple of 128", compressed(strategy="group", group_size=32)),
    "blocks without sizes": ("multiple of 128", compressed(strategy="block")),
    "integers": ("beside integer weights", compressed(type="int")),
    "asymmetric": ("symmetric float with 8", compressed(symmetric=False)),
    "4 bits": ("symmetric float with 8", compressed(num_bits=4)),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_are_not_supported_are_refused_by_name(tmp_path: Path, case: str):
    words, settings = SETTINGS[case]
    folder = write_quantised(tmp_path, SHAPE, settings, Writer("channel", "weight_scale"))
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(folder)


def test_an_embedding_in_float8_is_refused_by_name(tmp_path: Path):
    class Everything(Writer):
        def __call__(self, spec: TensorSpec, weight: np.ndarray) -> dict[str, np.ndarray] | None:
            if spec.kind != "embedding":
                return None
            return {"weight": weight.astype(FLOAT8_DTYPE), "weight_scale": np.ones(1, np.float32)}

    writer = Everything("tensor", "weight_scale")
    folder = write_quantised(tmp_path, SHAPE, fp8(), writer)
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight .* embedding"):
        open_checkpoint(folder)
