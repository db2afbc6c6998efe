"""GGUF models: the config and weights of the model they were made of, and what is refused."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cadenza.checkpoint.folder import Checkpoint
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.errors import CheckpointError
from cadenza.models.rope_config import LongRopeScaling, YarnRopeScaling
from cadenza.models.rope_factors import rope_factors
from tests.checkpoint.gguf_bytes import File
from tests.checkpoint.gguf_models import (
    ARCHITECTURES,
    GEMMAS_4,
    Conversion,
    convert,
    convert_config,
    tiny_config,
)

Make = Callable[..., Conversion]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return lambda shape="llama", **options: convert(shape, tmp_path / "original", **options)


def opened(model: Conversion, tmp_path: Path, **options: Any) -> Checkpoint:
    return open_checkpoint(model.write(tmp_path / "model.gguf", **options))


def assert_same_weights(found: Checkpoint, original: Checkpoint) -> None:
    has_sums = original.config.norm_adds_one
    assert set(found.weights) == set(original.weights)
    for name in original.weights:
        ours = np.asarray(found.weights[name]).astype(np.float32)
        theirs = np.asarray(original.weights[name]).astype(np.float32)
        expected = theirs + np.float32(1.0) if has_sums and name.endswith("norm.weight") else theirs
        assert np.array_equal(ours, expected), name


@pytest.mark.parametrize("shape", ARCHITECTURES | GEMMAS_4)
def test_a_models_config_and_weights_are_those_of_its_folder(
    make: Make, tmp_path: Path, shape: str
):
    model = make(shape)
    found, original = opened(model, tmp_path), open_checkpoint(model.original)
    assert_same_weights(found, original)
    ours, theirs = found.config, original.config
    for mine, other in zip(ours.ropes, theirs.ropes, strict=True):
        assert np.allclose(rope_factors(mine, 64), rope_factors(other, 64), rtol=0, atol=2e-5)
    assert found.format == "gguf"
    assert replace(
        ours,
        family=theirs.family if shape == "gemma4-unified" else ours.family,  # not in files
        rope=theirs.rope,
        window_rope=theirs.window_rope,
        norm_adds_one=theirs.norm_adds_one,
        eos_token_ids=theirs.eos_token_ids,
        bos_token_id=theirs.bos_token_id,
    ) == replace(theirs, layer_pattern=ours.layer_pattern)
    assert ours.layer_kinds == theirs.layer_kinds


@pytest.mark.parametrize("shape", ["granite4", "granite4-moe"])
def test_granite_4_stores_rates_and_the_halves_of_its_mlp(make: Make, tmp_path: Path, shape: str):
    model = make(shape)
    found, original = opened(model, tmp_path), open_checkpoint(model.original)
    prefix = "model.layers.0"
    for name in original.weights:
        if "shared_mlp.input" not in name:
            theirs = np.asarray(original.weights[name])
            expected = -np.exp(theirs) if name.endswith("A_log") else theirs
            assert np.array_equal(np.asarray(found.weights[name]), expected), name
    halves = [found.weights[f"{prefix}.shared_mlp.{each}_proj.weight"] for each in ("gate", "up")]
    both = original.weights[f"{prefix}.shared_mlp.input_linear.weight"]
    assert np.array_equal(np.concatenate(halves), both)
    assert found.config.ropes == original.config.ropes
    assert found.config.experts == original.config.experts


def test_heads_of_keys_that_differ_by_layer_are_refused(make: Make, tmp_path: Path):
    model = make("lfm2")
    model.metadata["attention.head_count_kv"] = [0, 0, 2, 0, 3]
    with pytest.raises(CheckpointError, match=r"head_count_kv .* same for all layers with att"):
        opened(model, tmp_path)


def test_a_file_without_a_suffix_is_known_by_its_beginning(make: Make, tmp_path: Path):
    """As Ollama keeps them."""
    model = make()
    found = open_checkpoint(model.write(tmp_path / "sha256-00"))
    assert found.format == "gguf"
    assert_same_weights(found, open_checkpoint(model.original))


def test_rows_that_are_stored_in_pairs_are_not_those_of_the_folder(make: Make):
    """The negative control of the test above: the reader has to put them into order."""
    model = make("llama")
    weights = open_checkpoint(model.original).weights
    for letter in "qk":
        stored = model.tensors[f"blk.0.attn_{letter}.weight"]
        ordered = np.asarray(weights[f"model.layers.0.self_attn.{letter}_proj.weight"])
        assert not np.array_equal(stored, ordered)
        assert np.array_equal(np.sort(stored, axis=0), np.sort(ordered, axis=0))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_float_types_are_read_without_a_conversion(make: Make, tmp_path: Path, dtype: str):
    model = make(dtype=dtype)
    found, original = opened(model, tmp_path), open_checkpoint(model.original)
    assert_same_weights(found, original)
    name = "model.layers.1.mlp.up_proj.weight"
    assert found.weights[name].dtype == original.weights[name].dtype
    assert found.config.dtype == dtype
    assert not found.weights[name].flags.owndata
    assert not found.weights[name].flags.writeable
    assert found.num_weight_bytes < 1.05 * original.num_weight_bytes + 8000


def test_tensors_may_differ_in_type(make: Make, tmp_path: Path):
    model = make()
    model.kinds = {"blk.0.attn_v.weight": "F16", "token_embd.weight": "BF16"}
    weights = opened(model, tmp_path).weights
    assert weights["model.layers.0.self_attn.v_proj.weight"].dtype == np.float16
    assert weights.entry("model.embed_tokens.weight").dtype == "bfloat16"


@pytest.mark.parametrize("shape", ["llama", "olmoe"])
def test_a_model_in_several_files_is_read_like_one_in_a_single_file(
    make: Make, tmp_path: Path, shape: str
):
    model = make(shape)
    model.write(tmp_path / "model.gguf", num_per_file=9)
    names = sorted(path.name for path in tmp_path.glob("*.gguf"))
    assert len(names) > 3
    for name in (names[0], names[-1]):
        found = open_checkpoint(tmp_path / name)
        assert [file.name for file in found.weights.files] == names
        assert_same_weights(found, open_checkpoint(model.original))


def test_a_missing_part_of_a_model_is_named(make: Make, tmp_path: Path):
    make().write(tmp_path / "model.gguf", num_per_file=9)
    names = sorted(path.name for path in tmp_path.glob("*.gguf"))
    (tmp_path / names[1]).unlink()
    with pytest.raises(CheckpointError, match=f"1 are missing, such as {names[1]}"):
        open_checkpoint(tmp_path / names[0])


def test_parts_that_changed_places_are_refused(make: Make, tmp_path: Path):
    make().write(tmp_path / "model.gguf", num_per_file=9)
    first, second = sorted(tmp_path.glob("*.gguf"))[1:3]
    first.rename(tmp_path / "x")
    second.rename(first)
    (tmp_path / "x").rename(second)
    with pytest.raises(CheckpointError, match=r"split\.no and split\.count are 2 and \d+"):
        open_checkpoint(first)


def test_a_part_given_twice_is_refused(make: Make, tmp_path: Path):
    """A name that claims three parts, of files that are whole."""
    file = make().write(tmp_path / "model.gguf")
    for number in (1, 2):
        (tmp_path / f"m-0000{number}-of-00002.gguf").write_bytes(file.read_bytes())
    with pytest.raises(CheckpointError, match=r"split\.count are None and None"):
        open_checkpoint(tmp_path / "m-00001-of-00002.gguf")


def test_a_name_that_claims_parts_without_end_is_refused(tmp_path: Path):
    path = tmp_path / "m-00001-of-99999.gguf"
    path.write_bytes(File().encode())
    with pytest.raises(CheckpointError, match="part 1 of 99999; supported are up to 4096"):
        open_checkpoint(path)


def test_fused_queries_keys_and_values_are_taken_apart(make: Make, tmp_path: Path):
    model = make()
    for kind in ("weight", "bias"):
        parts = [model.tensors.pop(f"blk.2.attn_{letter}.{kind}") for letter in "qkv"]
        model.tensors[f"blk.2.attn_qkv.{kind}"] = np.concatenate(parts)
    assert_same_weights(opened(model, tmp_path), open_checkpoint(model.original))


def test_fused_gates_and_ups_of_experts_are_taken_apart(make: Make, tmp_path: Path):
    model = make("olmoe")
    parts = [model.tensors.pop(f"blk.1.ffn_{name}_exps.weight") for name in ("gate", "up")]
    model.tensors["blk.1.ffn_gate_up_exps.weight"] = np.concatenate(parts, axis=1)
    assert_same_weights(opened(model, tmp_path), open_checkpoint(model.original))


def test_numbers_of_heads_may_be_given_for_each_layer(make: Make, tmp_path: Path):
    model = make()
    model.metadata["attention.head_count_kv"] = [2, 2, 2]
    assert opened(model, tmp_path).config.num_kv_heads == 2
    model.metadata["attention.head_count_kv"] = [2, 1, 2]
    with pytest.raises(CheckpointError, match=r"llama\.attention\.head_count_kv has the values"):
        opened(model, tmp_path)


def test_rope_scalings_are_those_of_the_metadata(make: Make, tmp_path: Path):
    model = make("qwen2")
    model.metadata |= {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32,
    }
    scaling = opened(model, tmp_path).config.rope.scaling
    assert isinstance(scaling, YarnRopeScaling)
    assert (scaling.factor, scaling.original_max_position_embeddings) == (4.0, 32)
    assert scaling.attention_factor == pytest.approx(0.1 * np.log(4.0) + 1.0)


def test_rope_factors_are_the_tensors_values(make: Make, tmp_path: Path):
    model = make()
    scaling = opened(model, tmp_path).config.rope.scaling
    assert isinstance(scaling, LongRopeScaling)
    stored = model.tensors["rope_freqs.weight"]
    assert stored.min() == 1.0
    assert stored.max() > 7.9
    assert np.array_equal(np.array(scaling.long_factor, np.float32), stored)
    assert scaling.short_factor == scaling.long_factor


def test_gemmas_of_27b_scale_their_scores_by_the_width_per_head(make: Make, tmp_path: Path):
    model = make("gemma2")
    assert opened(model, tmp_path).config.attention_scale == 1 / math.sqrt(32)
    model.metadata["block_count"] = 46
    layers = {
        name.replace("blk.0.", f"blk.{index}."): array
        for name, array in model.tensors.items()
        if name.startswith("blk.0.")
        for index in range(46)
    }
    model.tensors |= layers
    assert opened(model, tmp_path).config.attention_scale == 1 / math.sqrt(96 // 6)


def test_gemma_without_a_pattern_has_every_sixth_layer_full(make: Make, tmp_path: Path):
    model = make("gemma3")
    del model.metadata["attention.sliding_window_pattern"]
    kinds = opened(model, tmp_path).config.layer_kinds
    assert [kind.window for kind in kinds] == [39] * 4


def test_keys_of_layers_that_read_those_of_others_are_left_out(make: Make, tmp_path: Path):
    model = make("gemma4")
    for name in ("attn_k", "attn_v", "attn_k_norm"):
        model.tensors[f"blk.4.{name}.weight"] = model.tensors[f"blk.2.{name}.weight"]
    found = opened(model, tmp_path)
    assert "model.layers.4.self_attn.k_proj.weight" not in found.weights


def without(key: str) -> Callable[[Conversion], object]:
    return lambda model: model.metadata.pop(key)


def setting(**changes: Any) -> Callable[[Conversion], object]:
    values = {key.replace("__", "."): value for key, value in changes.items()}
    return lambda model: model.metadata.update(values)


def tensor(name: str, array: np.ndarray) -> Callable[[Conversion], object]:
    return lambda model: model.tensors.update({name: array})


def lacking(name: str) -> Callable[[Conversion], object]:
    return lambda model: model.tensors.pop(name)


def named(architecture: str) -> Callable[[Conversion], object]:
    return lambda model: setattr(model, "architecture", architecture)


ROPE = "rope_freqs.weight"
REFUSED: dict[str, tuple[Callable[[Conversion], object], str]] = {
    "another architecture": (
        named("mamba"),
        "the architecture 'mamba' is not supported; supported",
    ),
    "a setting that is not known": (
        setting(rope__scaling__alpha=2.0),
        r"llama\.rope\.scaling\.alpha is set",
    ),
    "no number of layers": (without("block_count"), r"llama\.block_count is missing"),
    "layers without end": (setting(block_count=1 << 31), r"llama\.block_count is 2147483648"),
    "heads that do not divide": (
        setting(attention__head_count=5),
        "num_attention_heads 5 is not a",
    ),
    "keys and values of different lengths": (
        setting(attention__value_length=32),
        r"attention\.value_length is 32; it must be 64",
    ),
    "a rope of another type": (
        lambda model: (
            model.tensors.pop(ROPE),
            model.metadata.update({"rope.scaling.type": "ntk"}),
        ),
        r"rope\.scaling\.type is 'ntk'; it must be none, linear, yarn",
    ),
    "long factors that are not there": (
        lambda model: (
            model.tensors.pop(ROPE),
            model.metadata.update({"rope.scaling.type": "longrope"}),
        ),
        r"or longrope with rope_factors_long\.weight",
    ),
    "part of each head rotated": (
        lambda model: (
            model.tensors.pop(ROPE),
            model.metadata.update({"rope.dimension_count": 32}),
        ),
        "partial_rotary_factor is 0.5; supported is 1",
    ),
    "rope factors of another length": (
        tensor(ROPE, np.ones(31, np.float32)),
        r"rope_freqs\.weight is F32 of shape \[31\]; it must be F32 of shape \[32\]",
    ),
    "a rope factor of zero": (tensor(ROPE, np.zeros(32, np.float32)), "short_factor"),
    "a rope factor that is not a number": (
        tensor(ROPE, np.full(32, np.nan, np.float32)),
        "short_factor",
    ),
    "no embedding": (
        lacking("token_embd.weight"),
        r"has no tensor token_embd\.weight; it is a part of a model",
    ),
    "an embedding of one axis": (
        tensor("token_embd.weight", np.ones(72, np.float32)),
        r"has token_embd\.weight with 1 axes; it must have 2",
    ),
    "a vocabulary alone": (
        lambda model: model.tensors.clear(),
        "has no tensors: it is of a vocabulary alone, which cannot be served$",
    ),
    "a tower alone": (
        lambda model: setattr(model, "tensors", {"v.patch_embd.weight": np.ones((4, 4))}),
        "has the tower and the projector of a model alone, .*, and this one by --mmproj$",
    ),
    "a projector's file": (
        named("clip"),
        "has the tower and the projector of a model alone, .*, and this one by --mmproj$",
    ),
    "a tensor less": (lacking("blk.1.attn_norm.weight"), r"lacks blk\.1\.attn_norm\.weight, which"),
    "a tensor more": (
        tensor("blk.1.ffn_norm_2.weight", np.ones(72, np.float32)),
        r"contains blk\.1\.ffn_norm_2\.weight, which its metadata do not account for",
    ),
    "a tensor of another shape": (
        tensor("output_norm.weight", np.ones(71, np.float32)),
        r"output_norm\.weight has shape \[71\]; the metadata require \[72\]",
    ),
    "a transposed tensor": (
        lambda model: model.tensors.update(
            {"blk.0.ffn_up.weight": model.tensors["blk.0.ffn_up.weight"].T}
        ),
        r"blk\.0\.ffn_up\.weight has shape \[72, 168\]; the metadata require \[168, 72\]",
    ),
}


OF_GEMMA_4: dict[str, tuple[Callable[[Conversion], object], str]] = {
    "a rope that turns other pairs": (
        lambda model: model.tensors[ROPE].__setitem__(1, 2.0),
        "rope_freqs",
    ),
    "wide MLPs in other layers": (
        setting(feed_forward_length=[88, 88, 88, 176, 88]),
        "feed_forward_length",
    ),
    "values of another length": (
        setting(attention__value_length_swa=32),
        r"attention\.value_length_swa",
    ),
    "a pattern of other layers": (
        setting(attention__sliding_window_pattern=[True] * 3),
        r"attention\.sliding_window_pattern",
    ),
}


@pytest.mark.parametrize("case", [*REFUSED, *OF_GEMMA_4])
def test_what_is_not_supported_is_refused_by_its_name(make: Make, tmp_path: Path, case: str):
    change, words = (REFUSED | OF_GEMMA_4)[case]
    model = make("gemma4" if case in OF_GEMMA_4 else "llama")
    assert opened(model, tmp_path)
    change(model)
    with pytest.raises(CheckpointError, match=words) as refusal:
        opened(model, tmp_path)
    assert "model.gguf" in str(refusal.value)


def test_other_quantised_types_are_refused_with_what_to_use_instead(tmp_path: Path):
    config = replace(tiny_config("llama"), intermediate_size=256)
    model = convert_config("llama", config, tmp_path / "original")
    model.kinds["blk.1.ffn_down.weight"] = "TQ2_0"
    with pytest.raises(
        CheckpointError, match=r"ffn_down\.weight has the type TQ2_0, .* such as one in Q4_K_M"
    ):
        opened(model, tmp_path)


def test_a_file_without_an_architecture_is_refused(tmp_path: Path):
    path = tmp_path / "model.gguf"
    path.write_bytes(File().encode())
    with pytest.raises(CheckpointError, match=r"general\.architecture is missing"):
        open_checkpoint(path)


def test_a_digest_follows_the_header(make: Make, tmp_path: Path):
    model = make()
    first = opened(model, tmp_path).digest
    assert opened(model, tmp_path).digest == first
    (path,) = tmp_path.glob("*.gguf")
    assert open_checkpoint(path.rename(tmp_path / "another name.gguf")).digest == first
    model.metadata["rope.freq_base"] = 20_000.0
    assert opened(model, tmp_path).digest != first
