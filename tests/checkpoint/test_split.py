"""Models divided among devices."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.errors import ConfigError
from cadenza.models.declaration import declare
from cadenza.models.split import Rank, obstacle_to_split, split_model, split_weights
from cadenza.weights.weights import open_weights
from tests.checkpoint.config_writer import write_random_checkpoint

MODEL = replace(named_shape("tiny-llama"), num_layers=1, num_heads=8, num_kv_heads=4)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_parts_of_all_devices_are_the_model(tmp_path: Path, count: int) -> None:
    write_random_checkpoint(MODEL, tmp_path / "model", seed=0, dtype="float32")
    whole = open_weights(tmp_path / "model")
    parts = [split_weights(whole, MODEL, Rank(index, count)) for index in range(count)]
    own = {spec.name: spec.shape for spec in declare(split_model(MODEL, count))}
    for spec in declare(MODEL):
        pieces = [np.asarray(part[spec.name]) for part in parts]
        if spec.kind != "head":
            assert pieces[0].shape == own[spec.name], spec.name
        axis = next(
            (i for i, (a, b) in enumerate(zip(pieces[0].shape, spec.shape, strict=True)) if a != b),
            None,
        )
        joined = pieces[0] if axis is None else np.concatenate(pieces, axis)
        assert np.array_equal(joined, np.asarray(whole[spec.name])), spec.name


def test_a_number_of_devices_that_cannot_share_the_heads_is_refused_with_one_that_can() -> None:
    with pytest.raises(
        ConfigError, match=r"4 KV heads, which 8 devices .* set --tensor-parallel-size 4"
    ):
        split_model(MODEL, 8)
    with pytest.raises(ConfigError, match="supported are 1, 2, 4, 8"):
        split_model(MODEL, 3)


def test_families_with_other_layers_are_refused_by_name() -> None:
    for shape in ("tiny-granite4", "tiny-mixtral", "tiny-gemma4", "tiny-phi3", "tiny-gpt-oss"):
        model = named_shape(shape)
        assert f"models of the family {model.family} yet" in (obstacle_to_split(model) or ""), shape
    assert obstacle_to_split(MODEL) is None
