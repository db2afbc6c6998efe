"""A GGUF file becomes a folder with the same model and tokenizer; what is not known is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.text import Tokenizer
from cadenza.text.tokens.provenance import written_by_template
from tests.tools.gguf_files import (
    BYTE_LEVEL,
    SENTENCEPIECE,
    TEMPLATE,
    SmallModel,
    small_model,
    write_gguf,
)
from tools.gguf_folder import write_folder
from tools.gguf_tokenizer import GGUFError

ARCHITECTURES = ["llama", "gemma3"]
Q8_0 = gguf.GGMLQuantizationType.Q8_0

each_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)


@pytest.fixture
def make(tmp_path: Path) -> Callable[[str], SmallModel]:
    return lambda architecture: small_model(architecture, tmp_path / "original")


def convert(model: SmallModel, tmp_path: Path) -> Path:
    folder = tmp_path / "converted"
    write_folder(write_gguf(model, tmp_path / "model.gguf"), folder)
    return folder


@each_architecture
def test_a_converted_model_has_the_originals_config_and_weights(
    make: Callable[[str], SmallModel], tmp_path: Path, architecture: str
):
    model = make(architecture)
    ours = open_checkpoint(convert(model, tmp_path))
    original = open_checkpoint(model.original)
    assert replace(ours.config, dtype="float32") == original.config
    assert ours.config.dtype == "bfloat16"
    assert set(ours.weights) == set(original.weights)
    for name in original.weights:
        found, expected = np.asarray(ours.weights[name]), np.asarray(original.weights[name])
        if architecture == "gemma3" and name.endswith("norm.weight"):
            found, expected = found + np.float32(1.0), expected + np.float32(1.0)
        assert np.array_equal(found, expected), name


def test_blocks_are_dequantised_to_the_values_that_they_stand_for(
    make: Callable[[str], SmallModel], tmp_path: Path
):
    """A block of Q8_0 is a scale in float16 and 32 signed bytes."""
    model = make("llama")
    model.types["blk.1.ffn_up.weight"] = Q8_0
    stored = gguf.quants.quantize(model.tensors["blk.1.ffn_up.weight"], Q8_0)
    blocks = stored.reshape(-1, 34)
    scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    expected = (scales * blocks[:, 2:].copy().view(np.int8)).reshape(64, 32)
    weights = open_checkpoint(convert(model, tmp_path)).weights
    found = np.asarray(weights["model.layers.1.mlp.up_proj.weight"])
    assert found.dtype == np.float32
    assert np.array_equal(found, expected)
    assert not np.array_equal(found, model.tensors["blk.1.ffn_up.weight"])


def with_linear_rope(model: SmallModel) -> None:
    model.metadata["rope.scaling.type"] = "linear"


def with_part_of_each_head_rotated(model: SmallModel) -> None:
    model.metadata["rope.dimension_count"] = 4


def with_a_tensor_more(model: SmallModel) -> None:
    model.tensors["rope_freqs.weight"] = np.ones(4, np.float32)


def with_a_tensor_less(model: SmallModel) -> None:
    del model.tensors["blk.1.attn_norm.weight"]


def with_a_tensor_of_another_shape(model: SmallModel) -> None:
    model.tensors["output_norm.weight"] = np.ones(31, np.float32)


def with_another_pre_tokenizer(model: SmallModel) -> None:
    model.tokenizer["pre"] = "qwen2"


def with_a_leading_space(model: SmallModel) -> None:
    model.tokenizer["add_space_prefix"] = True


def with_a_token_twice(model: SmallModel) -> None:
    model.tokenizer["tokens"] = ["a", *BYTE_LEVEL["tokens"][1:]]


def with_an_unused_token(model: SmallModel) -> None:
    model.tokenizer["token_type"] = [5, *BYTE_LEVEL["token_type"][1:]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (with_linear_rope, "llama.rope.scaling.type may change what the model computes"),
        (with_part_of_each_head_rotated, "llama.rope.dimension_count"),
        (with_a_tensor_more, "rope_freqs.weight is not expected"),
        (with_a_tensor_less, "blk.1.attn_norm.weight is missing"),
        (with_a_tensor_of_another_shape, "output_norm.weight has the shape"),
        (with_another_pre_tokenizer, "qwen2"),
        (with_a_leading_space, "leading space"),
        (with_a_token_twice, "the same text"),
        (with_an_unused_token, "UNUSED"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_name(
    make: Callable[[str], SmallModel],
    tmp_path: Path,
    change: Callable[[SmallModel], None],
    words: str,
):
    model = make("llama")
    change(model)
    with pytest.raises(GGUFError, match=words):
        convert(model, tmp_path)


def test_another_architecture_is_refused(make: Callable[[str], SmallModel], tmp_path: Path):
    model = make("llama")
    model.architecture = "gptneox"
    with pytest.raises(GGUFError, match="gptneox is not one of llama, gemma3"):
        convert(model, tmp_path)


def test_special_tokens_and_the_chat_template_are_those_of_the_file(
    make: Callable[[str], SmallModel], tmp_path: Path
):
    checkpoint = open_checkpoint(convert(make("gemma3"), tmp_path))
    assert checkpoint.chat_template == TEMPLATE
    assert checkpoint.eos_token_ids == (1,)
    assert checkpoint.tokenizer.special_tokens == {
        "bos_token": "<start>",
        "eos_token": "<end>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
    }


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("ab", ["ab"]),
        ("a ab", ["a", "Ġab"]),
        ("12", ["1", "2"]),
        ("é", ["Ã", "©"]),
        ("c'ab", ["c", "'", "ab"]),
    ],
)
def test_a_byte_level_vocabulary_splits_as_in_llama_cpp(
    make: Callable[[str], SmallModel], tmp_path: Path, text: str, tokens: list[str]
):
    """Digits are single, although the vocabulary has a merge of two."""
    tokenizer = Tokenizer(convert(make("llama"), tmp_path) / "tokenizer.json")
    ids = tokenizer.encode(text)
    assert [tokenizer.token_of(token_id) for token_id in ids] == tokens
    assert ids == [BYTE_LEVEL["tokens"].index(token) for token in tokens]
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("abc", ["a", "bc"]),  # bc has a higher score than ab
        ("abca", ["a", "bca"]),
        ("ab", ["ab"]),
        ("aab", ["a", "ab"]),
        (" ab", ["▁ab"]),
        ("  ab", ["  ", "ab"]),  # a run of spaces is never merged
        ("   ab", ["  ", "▁ab"]),
        ("é", ["<0xC3>", "<0xA9>"]),
        ("<0x41>", ["<", "<0x30>", "<0x78>", "<0x34>", "<0x31>", ">"]),
        ("<a>", ["<a", ">"]),  # a user-defined token that a text spells, as Cadenza has it
        (" bc", ["▁", "bc"]),
    ],
)
def test_a_sentencepiece_vocabulary_merges_by_its_scores(
    make: Callable[[str], SmallModel], tmp_path: Path, text: str, tokens: list[str]
):
    tokenizer = Tokenizer(convert(make("gemma3"), tmp_path) / "tokenizer.json")
    ids = tokenizer.encode(text)
    assert [tokenizer.token_of(token_id) for token_id in ids] == ["<start>", *tokens]
    assert ids[1:] == [SENTENCEPIECE["tokens"].index(token) for token in tokens]
    assert tokenizer.decode(ids) == text


def test_only_control_tokens_are_special(make: Callable[[str], SmallModel], tmp_path: Path):
    folder = convert(make("gemma3"), tmp_path)
    assert Tokenizer(folder / "tokenizer.json").special_token_ids == {0, 1, 2, 3}
    described = json.loads((folder / "tokenizer.json").read_text())
    added = [token["content"] for token in described["added_tokens"]]
    assert added == SENTENCEPIECE["tokens"][:6]
    assert Tokenizer(folder / "tokenizer.json").encode(written_by_template("<a>")) == [2, 5]
