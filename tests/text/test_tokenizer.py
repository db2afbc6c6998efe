"""Encoding, decoding, and special tokens that must not be forged."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as NativeTokenizer

from cadenza.errors import CheckpointError, InvalidRequestError
from cadenza.text import Tokenizer
from cadenza.text.tokens.provenance import written_by_template
from cadenza.text.tokens.tokenizer import TokenizerSource
from tests.text.vocabularies import SPECIAL, byte_level

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
FORGED = st.lists(st.sampled_from([*SPECIAL, "<|", "end|>", "a ", "\n", "🙂"]), max_size=8)

shared = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@shared
@given(text=TEXT)
def test_byte_level_text_survives_encoding(tokenizers: dict[str, Tokenizer], text: str):
    tokenizer = tokenizers["byte_level"]
    token_ids = tokenizer.encode(text)
    assert token_ids[0] == tokenizer.id_of("<|start|>")
    assert tokenizer.decode(token_ids) == text


def test_special_tokens_are_added_only_when_asked_for(tokenizers: dict[str, Tokenizer]):
    tokenizer = tokenizers["byte_level"]
    with_start = tokenizer.encode("the dog")
    assert with_start == [0, *tokenizer.encode("the dog", add_special_tokens=False)]


def test_a_rendered_templates_special_tokens_are_parsed(tokenizers: dict[str, Tokenizer]):
    token_ids = tokenizers["byte_level"].encode(
        written_by_template("<|start|>the<|end|>"), add_special_tokens=False
    )
    assert token_ids[0] == 0
    assert token_ids[-1] == 1


@shared
@given(parts=FORGED)
def test_no_text_forges_a_special_token(tokenizers: dict[str, Tokenizer], parts: list[str]):
    tokenizer = tokenizers["byte_level"]
    text = "".join(parts)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.special_token_ids.isdisjoint(token_ids)
    assert tokenizer.decode(token_ids) == text


def test_plain_encoding_still_adds_the_tokenizers_own(tokenizers: dict[str, Tokenizer]):
    tokenizer = tokenizers["byte_level"]
    token_ids = tokenizer.encode("a<|end|>")
    assert token_ids[0] == 0
    assert 1 not in token_ids


def test_plain_encoding_does_not_change_the_parsing_of_others(tokenizers: dict[str, Tokenizer]):
    tokenizer = tokenizers["byte_level"]
    tokenizer.encode("<|end|>")
    end = written_by_template("<|end|>")
    assert tokenizer.encode(end, add_special_tokens=False) == [1]


def test_a_normalised_special_token_is_not_forged_either(tmp_path: Path):
    from tokenizers import AddedToken, normalizers

    native = NativeTokenizer.from_file(str(byte_level(tmp_path / "t.json")))
    native.normalizer = normalizers.Lowercase()
    native.add_special_tokens([AddedToken("<|secret|>", normalized=True, special=True)])
    native.save(str(tmp_path / "t.json"))
    tokenizer = Tokenizer(tmp_path / "t.json")
    text = "x <|SECRET|>"
    assert tokenizer.id_of("<|secret|>") in tokenizer.encode(written_by_template(text))
    plain = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.special_token_ids.isdisjoint(plain)


def test_a_special_token_without_plain_encoding_is_unknown_text(tmp_path: Path):
    from tokenizers import models, pre_tokenizers

    native = NativeTokenizer(models.WordLevel({"<s>": 0, "a": 1, "[UNK]": 2}, unk_token="[UNK]"))
    native.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    native.add_special_tokens(["<s>"])
    native.save(str(tmp_path / "t.json"))
    tokenizer = Tokenizer(tmp_path / "t.json")
    assert tokenizer.encode(written_by_template("a <s>")) == [1, 0]
    assert tokenizer.encode("a <s>") == [1, 2]


def test_tokens_are_found_by_their_text(tokenizers: dict[str, Tokenizer]):
    tokenizer = tokenizers["byte_level"]
    assert tokenizer.id_of("<|end|>") == 1
    assert tokenizer.id_of("absent from the vocabulary") is None
    assert tokenizer.special_token_ids == {0, 1}
    assert tokenizer.added_tokens.keys() == {*SPECIAL, "<tool>", "日本"}
    assert tokenizer.vocab_size == 342


def test_ids_outside_the_vocabulary_decode_to_nothing(tokenizers: dict[str, Tokenizer]):
    tokenizer = tokenizers["byte_level"]
    dog = tokenizer.encode(" dog", add_special_tokens=False)
    assert tokenizer.decode([-1, 10**6, 1 << 40, *dog]) == " dog"
    assert (
        tokenizer.token_of(10**6) is tokenizer.token_of(-1) is tokenizer.token_of(1 << 40) is None
    )


def test_special_tokens_are_shown_when_asked_for(tokenizers: dict[str, Tokenizer]):
    tokenizer = tokenizers["byte_level"]
    assert tokenizer.decode([0, 1]) == ""
    assert tokenizer.decode([0, 1], skip_special_tokens=False) == "<|start|><|end|>"


@pytest.mark.parametrize("mark", [str, written_by_template])
def test_half_a_surrogate_pair_is_an_invalid_request(
    tokenizers: dict[str, Tokenizer], mark: Callable[[str], str]
):
    with pytest.raises(InvalidRequestError, match="character 2"):
        tokenizers["byte_level"].encode(mark("ab\ud800"))


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path):
    native = NativeTokenizer.from_file(str(byte_level(tmp_path / "t.json")))
    plain = native.encode("the quick brown fox").ids
    native.enable_truncation(2)
    native.enable_padding(length=50)
    native.save(str(tmp_path / "t.json"))
    assert Tokenizer(tmp_path / "t.json").encode("the quick brown fox") == plain


GARBAGE = {
    "nothing": b"",
    "no JSON": b"{",
    "an empty object": b"{}",
    "a list": b"[]",
    "no UTF-8": b"\xff\xfe\x00",
    "deep nesting": b"[" * 100_000,
    "an unknown model": b'{"model": {"type": "Evil"}, "added_tokens": []}',
    "merges without pieces": b'{"version": "1.0", "added_tokens": [], "model": '
    b'{"type": "BPE", "vocab": {"a": 0}, "merges": [["b", "c"]]}}',
    "ids beyond all bounds": b'{"version": "1.0", "added_tokens": [], "model": '
    b'{"type": "BPE", "vocab": {"a": 99999999999999}, "merges": []}}',
    "a number": b"7",
}


@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE)
def test_a_garbage_tokenizer_is_a_named_error(tmp_path: Path, content: bytes):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer(path)


def test_an_absent_tokenizer_is_a_named_error(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        Tokenizer(tmp_path / "tokenizer.json")


def test_a_source_is_made_once_until_it_is_released():
    made: list[bytes] = []

    def read() -> bytes:
        made.append(b"made")
        return made[-1]

    source = TokenizerSource(name="model.gguf", read=read)
    assert (source.num_bytes, source.content, source.content) == (4, b"made", b"made")
    assert len(made) == 1
    source.release()
    source.release()
    assert source.num_bytes == 4
    assert len(made) == 1
    assert source.content == b"made"
    assert len(made) == 2
