"""Quantised blocks: the values are those of gguf-py, on blocks by other writers and on any bytes.

`tests/checkpoint/gguf_blocks.json` has `WAVES` as ggml's own `ggml_quantize_chunk` (libggml-base,
of llama.cpp as in llama-cpp-python 0.3.36) stores it, in base64: gguf-py writes no K-quants.
"""

import base64
import json
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from cadenza.checkpoint.gguf.blocks import BLOCKS, ENCODINGS
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.weights.quantised_weight import DECODED_AT_ONCE, BlockWeight
from tests.checkpoint.gguf_models import convert_config, tiny_config
from tests.checkpoint.gguf_random import TYPES, any_blocks

FIXTURES: dict[str, str] = json.loads(Path("tests/checkpoint/gguf_blocks.json").read_text())
PLACES = np.arange(768, dtype=np.float64)
WAVES = (
    np.sin(PLACES * 0.7) * np.exp(-((PLACES % 256) / 200)) * (1 + PLACES // 256)
    + 0.25 * np.cos(PLACES * 0.11)
).astype(np.float32)
WRITTEN_BY_GGUF_PY = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4")
MAX_ERROR = {"Q4_K": 0.06, "Q5_K": 0.04, "Q6_K": 0.016, "Q4_0": 0.14, "Q5_1": 0.05}
"""Of any element, relative to the largest."""


def by_gguf_py(stored: np.ndarray, name: str) -> np.ndarray:
    kind = gguf.GGMLQuantizationType[name]
    return gguf.quants.dequantize(stored.reshape(1, -1), kind).reshape(-1)


def test_every_type_is_tested():
    assert set(BLOCKS) == set(ENCODINGS) == {*WRITTEN_BY_GGUF_PY, "Q4_K", "Q5_K", "Q6_K"}


@pytest.mark.parametrize("name", BLOCKS)
def test_any_blocks_decode_as_in_gguf_py(name: str):
    stored = any_blocks(name, 500, seed=7)
    found = ENCODINGS[name].decode(stored.reshape(-1))
    assert found.dtype == np.float32
    assert np.array_equal(found, by_gguf_py(stored, name))


@pytest.mark.parametrize("name", WRITTEN_BY_GGUF_PY)
def test_blocks_of_gguf_py_decode_as_there(name: str):
    stored = gguf.quants.quantize(WAVES, gguf.GGMLQuantizationType[name]).reshape(-1)
    found = ENCODINGS[name].decode(stored)
    assert np.array_equal(found, by_gguf_py(stored, name))
    assert np.abs(found - WAVES).max() < 0.25 * np.abs(WAVES).max()


@pytest.mark.parametrize("name", FIXTURES)
def test_blocks_of_ggml_decode_to_what_they_were_made_of(name: str):
    stored = np.frombuffer(base64.b64decode(FIXTURES[name]), np.uint8)
    found = ENCODINGS[name].decode(stored)
    assert np.array_equal(found, by_gguf_py(stored, name))
    assert np.abs(found - WAVES).max() < MAX_ERROR[name] * np.abs(WAVES).max()


def swap_halves(stored: np.ndarray, name: str) -> np.ndarray:
    """The nibbles of each byte in the other order."""
    first = {"Q4_0": 2, "Q4_1": 4, "Q5_0": 6, "Q5_1": 8, "Q4_K": 16, "Q5_K": 48}.get(name, 0)
    last = 128 if name == "Q6_K" else None
    first = 1 if name == "MXFP4" else first
    spoilt = stored.copy()
    part = spoilt[:, first:last]
    spoilt[:, first:last] = (part << 4) | (part >> 4)
    return spoilt


@pytest.mark.parametrize("name", [name for name in BLOCKS if name != "Q8_0"])
def test_the_other_order_of_nibbles_is_noticed(name: str):
    """The negative control: what decodes to the same under it would show nothing above."""
    stored = any_blocks(name, 20, seed=8)
    spoilt = ENCODINGS[name].decode(swap_halves(stored, name).reshape(-1))
    assert np.mean(spoilt != by_gguf_py(stored, name)) > 0.5


@pytest.mark.parametrize("name", BLOCKS)
def test_a_zero_point_that_is_off_by_one_is_noticed(name: str):
    stored = any_blocks(name, 20, seed=9)
    coded = BLOCKS[name][0](stored)
    shifted = (coded.codes + np.int8(1)).astype(np.float32) * coded.scales[..., None]
    if coded.offsets is not None:
        shifted += coded.offsets[..., None]
    is_equal = shifted.reshape(-1) == by_gguf_py(stored, name)
    assert np.mean(is_equal) < 0.1


@pytest.mark.parametrize("name", BLOCKS)
def test_codes_are_in_the_range_of_their_bits(name: str):
    codes = BLOCKS[name][0](any_blocks(name, 2000, seed=10)).codes
    low, high = {
        "Q8_0": (-128, 127),
        "Q4_0": (-8, 7),
        "Q5_0": (-16, 15),
        "Q6_K": (-32, 31),
        "MXFP4": (-12, 12),
        "Q5_1": (0, 31),
        "Q5_K": (0, 31),
    }.get(name, (0, 15))
    assert (codes.min(), codes.max()) == (low, high)


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_become_codes_of_the_same_values(name: str):
    stored = any_blocks(name, 40, seed=12).reshape(10, -1)
    for heads in (None, 5):
        weight = BlockWeight(encoding=ENCODINGS[name], stored=stored, num_paired_heads=heads)
        assert weight.shape == (10, 4 * TYPES[name].block_len)
        assert np.array_equal(weight.as_codes().dequantised(), np.asarray(weight))
        expected = by_gguf_py(stored, name).reshape(weight.shape)
        assert np.array_equal(np.asarray(weight), expected)  # pairs of two rows are in order
    part = BlockWeight(encoding=ENCODINGS[name], stored=stored).rows(3, 7)
    assert np.array_equal(np.asarray(part), expected[3:7])


def test_a_scale_that_is_not_finite_gives_elements_that_are_not():
    """No warning, and no number that looks like a weight."""
    stored = np.zeros((1, 34), np.uint8)
    stored[0, :2] = np.array([np.inf], "<f2").view(np.uint8)
    stored[0, 2] = 1
    found = ENCODINGS["Q8_0"].decode(stored.reshape(-1))
    assert np.isinf(found[0])
    assert np.isnan(found[1:]).all()


def test_large_tensors_are_decoded_in_parts_alike():
    stored = any_blocks("Q4_0", DECODED_AT_ONCE // 32 + 5, seed=11)
    found = ENCODINGS["Q4_0"].decode(stored.reshape(-1))
    assert np.array_equal(found, by_gguf_py(stored, "Q4_0"))


@pytest.mark.parametrize("name", WRITTEN_BY_GGUF_PY)
def test_a_quantised_model_has_the_weights_of_its_blocks(tmp_path: Path, name: str):
    config = replace(tiny_config("granite"), intermediate_size=192, num_layers=2)
    model = convert_config("granite", config, tmp_path / "original")
    model.kind = name
    found = open_checkpoint(model.write(tmp_path / "model.gguf"))
    kind = gguf.GGMLQuantizationType[name]
    for stored, ours in (("ffn_down", "mlp.down_proj"), ("attn_q", "self_attn.q_proj")):
        array = np.ascontiguousarray(model.tensors[f"blk.1.{stored}.weight"])
        expected = gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind)
        if stored == "attn_q":
            heads = expected.reshape(config.num_heads, config.head_dim, -1)
            expected = np.concatenate([heads[:, 0::2], heads[:, 1::2]], axis=1).reshape(array.shape)
        entry = found.weights.entry(f"model.layers.1.{ours}.weight")
        assert (entry.stored_type, entry.dtype) == (name, "float32")
        weight = found.weights[entry.name]
        assert isinstance(weight, BlockWeight)
        assert np.array_equal(np.asarray(weight), expected)
        assert np.array_equal(weight.as_codes().dequantised(), expected)
    assert found.config.dtype == "bfloat16"
