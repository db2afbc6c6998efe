"""Weights that other libraries quantised mean what those libraries read in them.

`tests/oracle/make_quantised_fixtures.py` wrote the fixtures: one module each, with the elements
that the library itself dequantises.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cadenza.checkpoint.formats import read_scheme
from cadenza.checkpoint.formats.gptq import order_of_groups
from cadenza.errors import CheckpointError
from cadenza.json_object import JsonObject
from cadenza.weights.quantised_weight import QuantisedWeight
from cadenza.weights.safetensors_file import open_safetensors
from cadenza.weights.tensor_spec import TensorSpec
from cadenza.weights.weights import Weights

FOLDER = Path(__file__).parent / "quantised_by_others"
ORDERED = "gptq-int4-desc-act"
NAMES = sorted(path.stem for path in FOLDER.glob("*.safetensors"))
WEIGHT = "model.layers.0.mlp.up_proj.weight"


def settings_of(name: str) -> dict[str, object]:
    return json.loads((FOLDER / f"{name}.json").read_text())


def weights_of(name: str) -> Weights:
    file, tensors = open_safetensors(FOLDER / f"{name}.safetensors")
    return Weights(files=(file,), tensors=tensors)


def read(name: str, settings: dict[str, object] | None = None) -> QuantisedWeight:
    weights = weights_of(name)
    scheme = read_scheme(JsonObject(settings or settings_of(name), "config.json"))
    assert scheme is not None
    spec = TensorSpec(name=WEIGHT, shape=weights.shape("expected"), kind="linear")
    stored = scheme.find(spec, weights)
    assert stored is not None
    found = stored.load()
    assert isinstance(found, QuantisedWeight)
    assert found.format == stored.format
    assert {part.name for part in stored.parts} | {"expected"} == set(weights)
    return found


def expected_of(name: str) -> np.ndarray:
    return weights_of(name).array("expected")


@pytest.mark.parametrize("name", NAMES)
def test_a_weight_is_what_the_library_that_wrote_it_dequantises(name: str):
    assert len(NAMES) == 18
    found, expected = read(name).dequantised(), expected_of(name)
    if name == "mlx-int8-g128":  # codes get a sign, and the minimum moves: one more rounding
        np.testing.assert_allclose(found, expected, rtol=0, atol=2.0**-22 * abs(expected).max())
    else:
        np.testing.assert_array_equal(found, expected)


def test_inputs_in_the_order_of_their_activations_keep_that_order():
    found, expected = read(ORDERED), expected_of(ORDERED)
    assert found.order is not None
    assert sorted(found.order) == [*range(found.shape[1])]
    straight = replace(found, order=None).dequantised()
    assert (straight != expected).mean() > 0.9  # negative control
    np.testing.assert_array_equal(straight, expected[:, found.order])
    part = found.rows(3, 9)
    np.testing.assert_array_equal(part.dequantised(), expected[3:9])


def test_groups_of_other_sizes_than_the_settings_name_are_refused():
    groups = weights_of(ORDERED).array("model.layers.0.mlp.up_proj.g_idx").copy()
    for wrong in (np.zeros_like(groups), groups - 1, np.roll(np.sort(groups), 1) // 2):
        with pytest.raises(CheckpointError, match=r"g_idx does not name 32 inputs for each group"):
            order_of_groups("g_idx", wrong, 32)


@pytest.mark.parametrize("name", ["gptq-int4-v1", "gptq-int4-v2-asymmetric"])
def test_the_other_version_of_zero_points_gives_another_weight(name: str):
    settings = settings_of(name)
    config = settings["quantization_config"]
    assert isinstance(config, dict)
    other = "gptq" if config["checkpoint_format"] == "gptq_v2" else "gptq_v2"
    changed = {"quantization_config": {**config, "checkpoint_format": other, "sym": False}}
    assert (read(name, changed).dequantised() != expected_of(name)).mean() > 0.9


def test_symmetric_zero_points_of_the_other_version_are_refused():
    config = settings_of("gptq-int4-v1")["quantization_config"]
    assert isinstance(config, dict)
    changed = {"quantization_config": {**config, "checkpoint_format": "gptq_v2"}}
    with pytest.raises(CheckpointError, match="zero points other than 8"):
        read("gptq-int4-v1", changed)


def test_codes_in_another_order_give_another_weight():
    """AWQ's order is its own: read as if columns followed each other, most elements differ."""
    found, expected = read("awq-g64"), expected_of("awq-g64")
    straight = found.codes.reshape(-1, 8, found.shape[1])[:, [0, 2, 4, 6, 1, 3, 5, 7]]
    swapped = QuantisedWeight(
        straight.reshape(found.shape), found.scales, found.zero_points, bits=found.bits
    )
    assert (swapped.dequantised() != expected).mean() > 0.5
