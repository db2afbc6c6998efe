"""The folder that `cadenza quantize` writes: codes, files, and all or nothing."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from cadenza.checkpoint.folder import Checkpoint
from cadenza.checkpoint.formats.methods import format_at_load
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.checkpoint.quantised_folder import write_quantised_folder
from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.checkpoint.tensor_formats import format_of
from cadenza.config import Quantization
from cadenza.errors import CheckpointError
from cadenza.models.declaration import declare
from cadenza.weights.quantised_weight import QuantisedWeight, quantise_int4, quantise_int8
from cadenza.weights.weight_format import INT4
from tests.checkpoint.config_writer import write_random_checkpoint

SCHEMES: tuple[Quantization, ...] = ("int8", "int4")


def original(folder: Path, shape: str = "tiny-qwen2") -> Checkpoint:
    write_random_checkpoint(named_shape(shape), folder, seed=3, dtype="bfloat16")
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "LICENSE").write_text("free")
    (folder / "pytorch_model.bin").write_text("not copied")
    return open_checkpoint(folder)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", ["tiny-qwen2", "tiny-qwen3-moe"])
def test_the_folder_has_the_codes_that_are_made_at_load(
    tmp_path: Path, scheme: Quantization, shape: str
):
    plain = original(tmp_path / "plain", shape)
    steps: list[tuple[int, int]] = []
    write_quantised_folder(
        plain,
        tmp_path / "out",
        scheme,
        on_progress=lambda done, total: steps.append((done, total)),
        max_shard_bytes=100_000,
    )
    found = open_checkpoint(tmp_path / "out")
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    assert steps[-1][0] == steps[-1][1] == max(steps)[0]
    for spec in declare(plain.config):
        weight, floats = found.weights[spec.name], plain.weights[spec.name]
        wanted = format_of(spec, "bfloat16", scheme)
        if not wanted.is_quantised:
            np.testing.assert_array_equal(weight, floats)
            continue
        assert isinstance(weight, QuantisedWeight)
        assert weight.format == wanted == found.weights.format(spec.name)
        made = quantise_int4(floats) if wanted.bits == 4 else quantise_int8(floats)
        np.testing.assert_array_equal(weight.codes, made.codes)
        np.testing.assert_array_equal(weight.scales, made.scales)
        if made.zero_points is not None:
            np.testing.assert_array_equal(weight.zero_points, made.zero_points)


def test_small_files_are_copied_and_weights_are_not(tmp_path: Path):
    write_quantised_folder(original(tmp_path / "plain"), tmp_path / "out", "int8")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "LICENSE", "model.safetensors", "tokenizer_config.json"}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path: Path):
    plain = original(tmp_path / "plain")
    (tmp_path / "out").mkdir()
    write_quantised_folder(plain, tmp_path / "out", "int8")  # an empty folder is taken
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    with pytest.raises(CheckpointError, match="not an empty folder"):
        write_quantised_folder(plain, tmp_path / "out", "int4")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_an_interrupted_write_leaves_nothing(tmp_path: Path):
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_quantised_folder(
            original(tmp_path / "plain"), tmp_path / "out", "int8", on_progress=interrupt
        )
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]


def test_a_quantised_folder_is_not_quantised_again(tmp_path: Path):
    write_quantised_folder(original(tmp_path / "plain"), tmp_path / "out", "int8")
    with pytest.raises(CheckpointError, match="already stored as compressed-tensors"):
        write_quantised_folder(open_checkpoint(tmp_path / "out"), tmp_path / "again", "int4")


def test_the_first_layer_is_floats_beside_int4(tmp_path: Path):
    """A reader with kernels for 4 bits alone can then compute with the folder."""
    plain = original(tmp_path / "plain", "tiny-qwen3-moe")
    write_quantised_folder(plain, tmp_path / "out", "int4")
    with safe_open(tmp_path / "out" / "model.safetensors", "numpy") as file:
        stored = set(file.keys())
    first = [spec for spec in declare(plain.config) if spec.is_in_first_layer]
    assert {spec.name for spec in first} <= stored
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    ignored = settings["quantization_config"]["ignore"]
    linears = {
        spec.name.removesuffix(".weight") for spec in first if spec.kind in ("linear", "router")
    }
    assert linears <= set(ignored)
    scheme = open_checkpoint(tmp_path / "out").scheme
    assert scheme is not None
    assert "first layer int8 at load" in scheme.name


def test_a_folder_of_int4_whose_first_layer_has_4_bits_is_read_as_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    plain = original(tmp_path / "plain")
    written_by = "cadenza.checkpoint.quantised_folder"
    monkeypatch.setattr(f"{written_by}.is_float_until_load", lambda *_: False)
    monkeypatch.setattr(f"{written_by}.format_at_load", lambda _: format_at_load("int8"))
    write_quantised_folder(plain, tmp_path / "out", "int4")
    found = open_checkpoint(tmp_path / "out")
    linears = [spec for spec in declare(plain.config) if spec.kind == "linear"]
    assert {found.weights.format(spec.name) for spec in linears} == {INT4}


def test_another_value_of_the_setting_for_load_is_refused(tmp_path: Path):
    write_quantised_folder(original(tmp_path / "plain"), tmp_path / "out", "int8")
    path = tmp_path / "out" / "config.json"
    changed = json.loads(path.read_text()) | {"cadenza_quantization": {"embedding": "int3"}}
    path.write_text(json.dumps(changed))
    with pytest.raises(CheckpointError, match="cadenza_quantization"):
        open_checkpoint(tmp_path / "out")
