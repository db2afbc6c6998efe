"""Tokenizers of GGUF metadata: splits, merges, special tokens, templates, and what is refused.

`tests/oracle/test_gguf_vocabularies.py` compares complete vocabularies with the ids that llama.cpp
ships for them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as NativeTokenizer
from tokenizers.pre_tokenizers import ByteLevel

from cadenza.checkpoint.folder import Checkpoint
from cadenza.checkpoint.gguf.tokenizer import PRE_TOKENIZERS, read_gguf_tokenizer, read_vocabulary
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.errors import CheckpointError
from cadenza.json_object import JsonObject
from cadenza.text import Tokenizer
from cadenza.text.tokens.provenance import written_by_template
from tests.checkpoint.gguf_models import Conversion, convert
from tests.tools.gguf_files import BYTE_LEVEL, SENTENCEPIECE

Metadata = dict[str, Any]


def metadata(vocabulary: Metadata, **changes: Any) -> JsonObject:
    """As `reader` reads it: arrays of numbers are numpy's. None removes a key."""
    values: dict[str, object] = {}
    for key, value in {**vocabulary, **changes}.items():
        if value is not None:
            is_numbers = isinstance(value, list) and not isinstance(value[0], str)
            values[f"tokenizer.ggml.{key}"] = np.array(value) if is_numbers else value
    return JsonObject(values, "model.gguf")


def describe(vocabulary: Metadata, **changes: Any) -> bytes:
    found = read_vocabulary(metadata(vocabulary, **changes))
    assert found is not None
    return read_gguf_tokenizer(found)


def words(pre: str, text: str) -> list[str]:
    """The text as it is split before BPE."""
    native = NativeTokenizer.from_buffer(describe(BYTE_LEVEL, pre=pre))
    text = native.normalizer.normalize_str(text) if native.normalizer is not None else text
    splits = native.pre_tokenizer.pre_tokenize_str(text)
    encoded = ByteLevel.alphabet()
    assert all(set(word) <= set(encoded) for word, _ in splits)
    return [text[start:end] for _, (start, end) in splits]


SPLITS: list[tuple[str, str, list[str]]] = [
    ("gpt-2", "It's 1234 a\n\n b", ["It", "'s", " 1234", " a", "\n\n", " b"]),
    ("smollm", "It's 123 a", ["It", "'s", " ", "1", "2", "3", " a"]),
    ("refact", "x12", ["x", "1", "2"]),
    ("starcoder", "x12", ["x", "1", "2"]),
    ("llama-bpe", "I'LL be 12345!\n\n b", ["I", "'LL", " be", " ", "123", "45", "!\n\n", " b"]),
    ("dbrx", "a_b 1234", ["a", "_b", " ", "123", "4"]),
    ("qwen2", "I'll 123\r\n x", ["I", "'ll", " ", "1", "2", "3", "\r\n", " x"]),
    ("gpt-4o", "fooBar isn't 1234/\n", ["foo", "Bar", " isn't", " ", "123", "4", "/\n"]),
    ("tekken", "fooBar isn't 12", ["foo", "Bar", " isn", "'t", " ", "1", "2"]),
    ("deepseek-coder", "a b.\n漢字x 12", ["a", " b", ".", "\n", "漢字", "x", " ", "1", "2"]),
    ("olmo", "I'll 12", ["I", "'ll", " 12"]),
    ("mpt", "a  b", ["a", " ", " b"]),
    ("command-r", "a 12", ["a", " ", "1", "2"]),
]


@pytest.mark.parametrize(("pre", "text", "expected"), SPLITS)
def test_a_text_is_split_as_the_pre_tokenizer_says(pre: str, text: str, expected: list[str]):
    assert words(pre, text) == expected


def test_every_pattern_is_among_the_tested_ones():
    tested = [PRE_TOKENIZERS[name] for name, _, _ in SPLITS]
    assert all(each in tested for each in PRE_TOKENIZERS.values())


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_the_parts_of_any_split_are_the_whole_text(pre: str):
    text = "Ünïcode 漢字 🙂 1234567 _a-b \t\r\n\n  x's 'tis fooBAR  "
    assert "".join(words(pre, text)) == text


def test_texts_are_normalised_where_the_models_are():
    """e and a combining accent are one character in the normal form C."""
    assert words("qwen2", "e\u0301") == ["é"]
    assert words("llama-bpe", "e\u0301") != ["é"]


def test_a_whole_word_is_taken_where_merges_are_ignored():
    """The vocabulary has `abc`, to which no merge leads."""
    tokens, found = [*BYTE_LEVEL["tokens"][:-1], "abc"], {}
    for pre in ("tekken", "gpt-2"):
        native = NativeTokenizer.from_buffer(describe(BYTE_LEVEL, pre=pre, tokens=tokens))
        found[pre] = native.encode("abc", add_special_tokens=False).tokens
    assert found == {"tekken": ["abc"], "gpt-2": ["ab", "c"]}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ab", ["▁ab"]),
        (" ab", ["▁", "▁ab"]),
        ("", []),
        ("é", ["▁", "<0xC3>", "<0xA9>"]),
    ],
)
def test_a_leading_space_is_added_where_the_metadata_say_so(text: str, expected: list[str]):
    native = NativeTokenizer.from_buffer(describe(SENTENCEPIECE, add_space_prefix=True))
    found = native.encode(text, add_special_tokens=False)
    assert found.tokens == expected
    assert native.decode(found.ids) == text


def test_a_leading_space_is_the_default_of_sentencepiece():
    data = describe(SENTENCEPIECE, add_space_prefix=None)
    assert data == describe(SENTENCEPIECE, add_space_prefix=True)


@pytest.mark.parametrize(
    ("has_bos", "has_eos", "expected"),
    [
        (False, False, ["ab"]),
        (True, False, ["<start>", "ab"]),
        (False, True, ["ab", "<end>"]),
        (True, True, ["<start>", "ab", "<end>"]),
        (None, None, ["ab"]),
    ],
)
def test_first_and_last_tokens_are_added_as_the_metadata_say(
    has_bos: bool | None, has_eos: bool | None, expected: list[str]
):
    data = describe(BYTE_LEVEL, add_bos_token=has_bos, add_eos_token=has_eos)
    assert NativeTokenizer.from_buffer(data).encode("ab").tokens == expected


def test_a_first_token_is_the_default_of_sentencepiece():
    data = describe(SENTENCEPIECE, add_bos_token=None)
    assert NativeTokenizer.from_buffer(data).encode("ab").tokens == ["<start>", "ab"]


def test_white_space_behind_phi_3s_special_tokens_is_dropped():
    """So does its tokenizer.json, of which the metadata say nothing."""
    values = dict(metadata(SENTENCEPIECE).values)
    texts = {}
    for architecture in ("phi3", "llama"):
        given = JsonObject({**values, "general.architecture": architecture}, "model.gguf")
        found = read_vocabulary(given)
        assert found is not None
        native = NativeTokenizer.from_buffer(read_gguf_tokenizer(found))
        ids = native.encode("<end>\nab", add_special_tokens=False).ids
        texts[architecture] = [native.id_to_token(token_id) for token_id in ids]
    assert texts == {"phi3": ["<end>", "ab"], "llama": ["<end>", "<0x0A>", "ab"]}


def test_a_complete_tokenizer_in_the_metadata_is_taken_as_it_is():
    complete = describe(BYTE_LEVEL).decode()
    values = dict(metadata(SENTENCEPIECE).values)
    found = read_vocabulary(JsonObject({**values, "tokenizer.huggingface.json": complete}, "x"))
    assert found is not None
    assert read_gguf_tokenizer(found) == complete.encode()


def test_tokens_that_are_not_used_are_not_found_in_a_text():
    """An unused id has a text, which stands for nothing."""
    tokens = [*BYTE_LEVEL["tokens"], "[PAD15]"]
    data = describe(BYTE_LEVEL, tokens=tokens, token_type=[*BYTE_LEVEL["token_type"], 5])
    native = NativeTokenizer.from_buffer(data)
    assert native.id_to_token(15) == "[PAD15]"
    assert 15 not in native.encode("[PAD15]ab").ids


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"pre": "qwen99"}, "tokenizer.ggml.pre 'qwen99' is not supported; supported are gpt-2,"),
        ({"pre": None}, r"tokenizer\.ggml\.pre is missing"),
        ({"model": "t5"}, "tokenizer.ggml.model 't5' is not supported; supported are gpt2, llama"),
        ({"model": None}, "tokenizer.ggml.model None is not supported"),
        ({"merges": ["a"]}, "has 'a'; it must be two tokens, separated by a space"),
        ({"merges": ["a z"]}, "has 'a z'; it must be two tokens"),
        ({"merges": ["a 1"]}, "whose concatenation is one"),
        ({"merges": None}, r"tokenizer\.ggml\.merges is None; it must be an array of strings"),
        ({"merges": 7}, "it must be an array of strings"),
        ({"token_type": [1, 1]}, "an array of 15 numbers, one per token"),
        ({"token_type": "x"}, "an array of 15 numbers"),
        ({"tokens": "x"}, "an array of 1 to 4194304 strings"),
        ({"tokens": ["a"] * 15}, "two ids of tokenizer.ggml.tokens have the same text"),
        ({"add_bos_token": 1}, "add_bos_token is 1; it must be true or false"),
        ({"bos_token_id": -1}, "bos_token_id is -1; it must be a whole number"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_name(changes: Metadata, expected: str):
    with pytest.raises(CheckpointError, match=expected) as refusal:
        describe(BYTE_LEVEL, **{"add_bos_token": True, **changes})
    assert str(refusal.value).startswith("model.gguf: ")


@pytest.mark.parametrize("scores", [None, [1.0], "x", [float("nan")] * 269])
def test_scores_that_are_no_numbers_are_refused(scores: Any):
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.scores is"):
        describe(SENTENCEPIECE, scores=scores)


def test_an_unknown_pre_tokenizer_says_what_to_do_instead():
    with pytest.raises(CheckpointError, match=r"put the model's tokenizer\.json beside the file"):
        describe(BYTE_LEVEL, pre="new")


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Conversion]:
    def write(vocabulary: Metadata, **others: Any) -> Conversion:
        model = convert("llama", tmp_path / "original")
        model.others |= {f"tokenizer.ggml.{key}": value for key, value in vocabulary.items()}
        model.others |= others
        return model

    return write


def opened(model: Conversion, tmp_path: Path) -> Checkpoint:
    return open_checkpoint(model.write(tmp_path / "model.gguf"))


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer:
    assert checkpoint.tokenizer_source is not None
    return Tokenizer(checkpoint.tokenizer_source)


def test_a_checkpoints_tokenizer_special_tokens_and_templates_are_the_files(
    make: Callable[..., Conversion], tmp_path: Path
):
    templates = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools"}
    checkpoint = opened(make(SENTENCEPIECE, **templates), tmp_path)
    assert checkpoint.chat_template == "plain"
    assert checkpoint.tokenizer.chat_templates["tool_use"] == "tools"
    assert checkpoint.tokenizer.special_tokens == {
        "bos_token": "<start>",
        "eos_token": "<end>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
    }
    assert (checkpoint.eos_token_ids, checkpoint.config.bos_token_id) == ((1,), 2)
    tokenizer = tokenizer_of(checkpoint)
    assert tokenizer.special_token_ids == {0, 1, 2, 3}
    assert tokenizer.encode("ab<end>") != tokenizer.encode(written_by_template("ab<end>"))


def test_all_tokens_that_end_an_answer_are_found(make: Callable[..., Conversion], tmp_path: Path):
    """The metadata name some; others are control tokens of well-known texts, such as <|im_end|>."""
    tokens = [*BYTE_LEVEL["tokens"], "<|im_end|>", "<|eot_id|>", "</s>", "<eom>"]
    kinds = [*BYTE_LEVEL["token_type"], 3, 4, 1, 3]
    vocabulary = {**BYTE_LEVEL, "tokens": tokens, "token_type": kinds, "eom_token_id": 18}
    assert opened(make(vocabulary), tmp_path).eos_token_ids == (1, 15, 18)


@pytest.mark.parametrize(("last", "ends"), [("<|channel|>", (1, 16, 17)), ("<|x|>", (1, 15))])
def test_an_end_of_a_message_is_none_of_the_answer_in_the_harmony_format(
    make: Callable[..., Conversion], tmp_path: Path, last: str, ends: tuple[int, ...]
):
    """Whatever the metadata name: further messages follow `<|end|>`, and `<|call|>` ends a call."""
    vocabulary = {
        **BYTE_LEVEL,
        "tokens": [*BYTE_LEVEL["tokens"], "<|end|>", "<|call|>", "<|return|>", last],
        "token_type": [*BYTE_LEVEL["token_type"], 3, 3, 3, 3],
        "eot_token_id": 15,
    }
    assert opened(make(vocabulary), tmp_path).eos_token_ids == ends


def test_a_file_without_a_vocabulary_serves_token_ids(
    make: Callable[..., Conversion], tmp_path: Path
):
    checkpoint = opened(make({}), tmp_path)
    assert checkpoint.tokenizer_source is None
    assert checkpoint.eos_token_ids == ()


def test_more_tokens_than_rows_are_refused(make: Callable[..., Conversion], tmp_path: Path):
    count = 332
    vocabulary = {**BYTE_LEVEL, "tokens": [f"<{index}>" for index in range(count)]}
    vocabulary["token_type"] = [3] * count
    with pytest.raises(CheckpointError, match="has 332 tokens, but its embedding has 331 rows"):
        opened(make(vocabulary), tmp_path)


def test_a_tokenizer_that_is_not_supported_is_refused_when_text_is_needed(
    make: Callable[..., Conversion], tmp_path: Path
):
    checkpoint = opened(make({**BYTE_LEVEL, "pre": "new"}), tmp_path)
    with pytest.raises(CheckpointError, match="'new' is not supported"):
        tokenizer_of(checkpoint)


def test_tokenizer_json_in_the_folder_replaces_the_metadatas(
    make: Callable[..., Conversion], tmp_path: Path
):
    folder = tmp_path / "folder"
    folder.mkdir()
    make({**BYTE_LEVEL, "pre": "new"}).write(folder / "model.gguf")
    (folder / "tokenizer.json").write_bytes(describe(BYTE_LEVEL))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "ab"}')
    checkpoint = open_checkpoint(folder)
    assert tokenizer_of(checkpoint).encode("ab") == [BYTE_LEVEL["tokens"].index("ab")]
    assert checkpoint.eos_token_ids == (1, BYTE_LEVEL["tokens"].index("ab"))
    with pytest.raises(CheckpointError, match="'new' is not supported"):
        tokenizer_of(open_checkpoint(folder / "model.gguf"))


def test_recommended_sampling_is_read(make: Callable[..., Conversion], tmp_path: Path):
    sampling = {"temp": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "penalty_repeat": 1.5}
    values: Metadata = {f"general.sampling.{key}": value for key, value in sampling.items()}
    defaults = opened(make({}, **values, **{"general.sampling.mirostat": 2}), tmp_path)
    found = defaults.generation_defaults
    assert (found.temperature, found.top_k, found.top_p, found.min_p) == (0.7, 20, 0.8, 0.05)
    assert found.repetition_penalty == 1.5
    assert found.unapplied == ("general.sampling.mirostat",)
    assert found.assumed == ()


@pytest.mark.parametrize(
    ("stated", "assumed"),
    [
        ({}, ("temperature", "top_k", "top_p", "min_p")),
        ({"temp": 0.25, "top_k": 7}, ("top_p", "min_p")),
        ({"penalty_repeat": 1.5}, ("temperature", "top_k", "top_p", "min_p")),
    ],
)
def test_what_a_file_does_not_recommend_is_as_in_llama_cpp(
    make: Callable[..., Conversion],
    tmp_path: Path,
    stated: dict[str, float],
    assumed: tuple[str, ...],
):
    values: Metadata = {f"general.sampling.{key}": value for key, value in stated.items()}
    found = opened(make({}, **values), tmp_path).generation_defaults
    assert found.temperature == stated.get("temp", 0.8)
    assert found.top_k == stated.get("top_k", 40)
    assert (found.top_p, found.min_p) == (0.95, 0.05)
    assert found.repetition_penalty == stated.get("penalty_repeat")
    assert found.assumed == assumed


def test_a_template_without_end_is_refused(make: Callable[..., Conversion], tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"the chat template 'default' has over 1\.0 MiB"):
        opened(make({}, **{"tokenizer.chat_template": "x" * (1 << 20) + "x"}), tmp_path)


def test_merges_that_gemma_4_lists_take_the_place_of_scores():
    """Its pieces are SentencePiece's, without a leading space; only listed merges are made."""
    listed: Metadata = {"model": "gemma4", "scores": None, "add_space_prefix": None}
    known = set(SENTENCEPIECE["tokens"])
    first = next(piece for piece in known if len(piece) == 2 and set(piece) <= known)
    native = NativeTokenizer.from_buffer(
        describe(SENTENCEPIECE, **listed, merges=[f"{first[0]} {first[1]}"])
    )
    text = first.replace("▁", " ") + "é"
    found = native.encode(text, add_special_tokens=False)
    assert found.tokens == [first, "<0xC3>", "<0xA9>"]
    assert native.decode(found.ids) == text
    assert native.encode(text).tokens[0] == "<start>"
