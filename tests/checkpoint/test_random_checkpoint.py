"""Random checkpoints: reproducible, readable, and with weights that make errors show."""

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cadenza.checkpoint import random_checkpoint
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.checkpoint.random_checkpoint import named_shape, read_shape, shape_names
from cadenza.errors import CheckpointError
from cadenza.models.declaration import declare
from cadenza.weights.weight_format import WeightDType
from tests.checkpoint.config_writer import write_random_checkpoint


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "bfloat16") for name in shape_names() if name.startswith("tiny-")),
        ("tiny-llama", "float32"),
        ("tiny-qwen3-vl", "float16"),
    ],
)
def test_what_is_written_of_a_shape_opens_with_its_config(
    tmp_path: Path, name: str, dtype: WeightDType
):
    shape = read_shape(name)
    random_checkpoint.write_random_checkpoint(shape, tmp_path, seed=1, dtype=dtype)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config == replace(shape.config, dtype=dtype)
    found = {checkpoint.weights.stored_type(spec.name) for spec in declare(shape.config)}
    assert found == {dtype}


def test_the_type_of_the_weights_is_that_of_the_settings_under_any_name(tmp_path: Path):
    settings = dict(read_shape("tiny-llama").files["config.json"])
    settings |= {"torch_dtype": settings.pop("dtype")}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    shape, folder = read_shape(str(tmp_path)), tmp_path / "model"
    random_checkpoint.write_random_checkpoint(shape, folder, seed=1, dtype="bfloat16")
    assert open_checkpoint(folder).config.dtype == "bfloat16"
    assert "torch_dtype" not in json.loads((folder / "config.json").read_text())


def test_the_seed_fixes_every_byte(tmp_path: Path):
    config = named_shape("tiny-llama")
    contents = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_random_checkpoint(config, tmp_path / name, seed=seed, dtype="bfloat16")
        contents.append((tmp_path / name / "model.safetensors").read_bytes())
    assert contents[0] == contents[1] != contents[2]


def test_shards_hold_the_same_numbers_as_one_file(tmp_path: Path):
    config = named_shape("tiny-qwen3")
    write_random_checkpoint(config, tmp_path / "one", seed=3, dtype="float32")
    write_random_checkpoint(
        config, tmp_path / "many", seed=3, dtype="float32", max_shard_bytes=300_000
    )
    one, many = open_checkpoint(tmp_path / "one"), open_checkpoint(tmp_path / "many")
    assert len(many.weights.files) > 3
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(one.weights)
    for name in one.weights:
        assert np.array_equal(one.weights[name], many.weights[name])


def test_logits_are_neither_flat_nor_degenerate(tmp_path: Path):
    """A unit-size hidden state gives logits that leave about half of the largest entropy."""
    config = named_shape("tiny-qwen3")
    write_random_checkpoint(config, tmp_path, seed=0, dtype="float32")
    head = open_checkpoint(tmp_path).weights["model.embed_tokens.weight"]  # [V, E]
    hidden = np.random.default_rng(0).standard_normal((200, config.hidden_size))  # [T, E]
    logits = hidden @ head.T  # [T, V]
    logits -= logits.max(axis=-1, keepdims=True)
    chances = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    entropy = -(chances * np.log(chances)).sum(axis=-1).mean()
    assert 0.3 < entropy / np.log(config.vocab_size) < 0.8


def test_linears_keep_the_size_of_their_input(tmp_path: Path):
    config = named_shape("tiny-llama")
    write_random_checkpoint(config, tmp_path, seed=0, dtype="float32")
    weights = open_checkpoint(tmp_path).weights
    for spec in declare(config):
        if spec.kind == "linear" and spec.name != "lm_head.weight":
            size = weights[spec.name].std() * spec.shape[-1] ** 0.5
            assert 0.8 < size / (2.0 if "q_proj" in spec.name else 1.0) < 1.2
        if spec.kind == "norm":
            assert 0.1 < weights[spec.name].std() < 0.3


def test_tensors_differ_from_each_other(tmp_path: Path):
    config = named_shape("tiny-llama")
    write_random_checkpoint(config, tmp_path, seed=0, dtype="float32")
    weights = open_checkpoint(tmp_path).weights
    starts = {weights[spec.name].reshape(-1)[:8].tobytes() for spec in declare(config)}
    assert len(starts) == len(declare(config))


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path):
    (tmp_path / "precious").write_text("x")
    with pytest.raises(CheckpointError, match="not empty"):
        write_random_checkpoint(named_shape("tiny-llama"), tmp_path, seed=0, dtype="float32")
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_a_folder_that_cannot_be_made_is_a_named_error(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_random_checkpoint(
            named_shape("tiny-llama"), tmp_path / "file" / "x", seed=0, dtype="float32"
        )


def test_a_large_tensor_is_never_whole_in_memory(tmp_path: Path):
    config = replace(named_shape("tiny-qwen3"), vocab_size=1 << 18, num_layers=1)
    num_bytes = config.vocab_size * config.hidden_size * 4
    tracemalloc.start()
    write_random_checkpoint(config, tmp_path, seed=0, dtype="float32")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < num_bytes / 5
