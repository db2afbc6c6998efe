"""Encoding, decoding, and special tokens that must not be forged."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as NativeTokenizer

from cadenza.errors import CheckpointError, InvalidRequestError, TextTooLongError
from cadenza.text import Tokenizer
from cadenza.text.tokens.provenance import join_marked, written_by_template
from cadenza.text.tokens.tokenizer import SHORT_TEXT, TokenizerSource, max_chars_per_token
from tests.text.vocabularies import KINDS, SPECIAL, byte_level

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


def test_special_tokens_are_the_tokenizers_own_and_a_templates(tokenizers: dict[str, Tokenizer]):
    tokenizer = tokenizers["byte_level"]
    plain = tokenizer.encode("the dog", add_special_tokens=False)
    assert tokenizer.encode("the dog") == [0, *plain]
    written = written_by_template("<|start|>the<|end|>")
    ids = tokenizer.encode(written, add_special_tokens=False)
    assert (ids[0], ids[-1]) == (0, 1)
    spelled = tokenizer.encode("a<|end|>")
    assert spelled[0] == 0
    assert 1 not in spelled
    end = written_by_template("<|end|>")  # what was spelled before changes nothing
    assert tokenizer.encode(end, add_special_tokens=False) == [1]
    assert tokenizer.decode([0, 1]) == ""
    assert tokenizer.decode([0, 1], skip_special_tokens=False) == "<|start|><|end|>"


@shared
@given(parts=FORGED)
def test_no_text_forges_a_special_token(tokenizers: dict[str, Tokenizer], parts: list[str]):
    tokenizer = tokenizers["byte_level"]
    text = "".join(parts)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.special_token_ids.isdisjoint(token_ids)
    assert tokenizer.decode(token_ids) == text


def test_a_normalised_special_token_is_not_forged_either(tmp_path: Path):
    from tokenizers import AddedToken

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
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        Tokenizer(path)
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer(path)


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


BOUNDED = ("byte_level", "sentencepiece_bpe", "first_metaspace", "gemma_like")
RUNS = st.lists(
    st.tuples(
        st.sampled_from(["a", " ", "é", "e\u0301", "ᾂ", "語", "the dog", "<s>"]), st.integers(1, 40)
    )
).map(lambda runs: "".join(text * times for text, times in runs))


def composing(path: Path) -> Path:
    """Qwen's kind: NFC makes fewer characters before anything is split."""
    native = NativeTokenizer.from_file(str(byte_level(path)))
    native.normalizer = normalizers.NFC()
    native.save(str(path))
    return path


@pytest.fixture(scope="module")
def composer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(composing(tmp_path_factory.mktemp("composer") / "t.json"))


def bound_of(tokenizer: Tokenizer) -> int | None:
    return max_chars_per_token(tokenizer._native)


def test_a_bound_is_known_where_each_character_is_kept(
    tokenizers: dict[str, Tokenizer], composer: Tokenizer
):
    assert {kind for kind in KINDS if bound_of(tokenizers[kind]) is not None} == set(BOUNDED)
    assert bound_of(composer) == 4 * (bound_of(tokenizers["byte_level"]) or 0)


@pytest.mark.parametrize("around", ["continuing_subword_prefix", "end_of_word_suffix"])
def test_there_is_no_bound_where_a_byte_inside_a_word_has_no_token(tmp_path: Path, around: str):
    bytes_alone = {byte: index for index, byte in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    native = NativeTokenizer(models.BPE(bytes_alone, [], **{around: "##"}))
    native.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    native.save(str(tmp_path / "t.json"))
    tokenizer = Tokenizer(tmp_path / "t.json")
    assert len(tokenizer.encode("a" * 100)) < 100
    assert bound_of(tokenizer) is None


@shared
@given(text=TEXT | RUNS)
@pytest.mark.parametrize("kind", [*BOUNDED, "composer"])
def test_no_text_has_more_characters_than_its_tokens_can_stand_for(
    tokenizers: dict[str, Tokenizer], composer: Tokenizer, kind: str, text: str
):
    tokenizer = composer if kind == "composer" else tokenizers[kind]
    most = bound_of(tokenizer)
    assert most is not None
    assert len(text) <= most * len(tokenizer.encode(text, add_special_tokens=False))


def dropping(native: NativeTokenizer) -> None:
    native.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\s+"), "removed"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )


def collapsing(native: NativeTokenizer) -> None:
    native.normalizer = normalizers.Replace(Regex(r"\s+"), " ")


def shrinking(native: NativeTokenizer) -> None:
    native.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(" " * 40, " ")]
    )


@pytest.mark.parametrize("change", [dropping, collapsing, shrinking])
def test_where_characters_are_dropped_there_is_no_bound(
    tmp_path: Path, change: Callable[[NativeTokenizer], None]
):
    """A text of one or two tokens that a bound, if it were given, would have refused."""
    native = NativeTokenizer.from_file(str(byte_level(tmp_path / "t.json")))
    kept = max_chars_per_token(native)
    change(native)
    native.save(str(tmp_path / "t.json"))
    tokenizer = Tokenizer(tmp_path / "t.json")
    assert kept is not None
    text = "a" + " " * 40 * kept
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(text) > kept * len(ids)
    assert tokenizer.encode(text, add_special_tokens=False, max_num_tokens=len(ids)) == ids


def test_a_vocabulary_that_lacks_a_byte_has_no_bound():
    letters = [each for each in pre_tokenizers.ByteLevel.alphabet() if each != "z"]
    native = NativeTokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    native.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert len(native.encode("az" + "z" * 50).ids) == 1
    assert max_chars_per_token(native) is None


@shared
@given(text=TEXT | RUNS | FORGED.map("".join), is_long=st.booleans(), is_own=st.booleans())
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_allowed_is_encoded_as_ever_and_one_more_is_refused_with_its_number(
    tokenizers: dict[str, Tokenizer], kind: str, text: str, is_long: bool, is_own: bool
):
    tokenizer = tokenizers[kind]
    control = next((each for each in tokenizer.added_tokens if each[0] == "<"), "")
    if is_long:
        text += "the dog " * (SHORT_TEXT // 8)
    if is_own:
        text = join_marked([written_by_template(control), text])
    ids = tokenizer.encode(text)
    assert tokenizer.encode(text, max_num_tokens=len(ids)) == ids
    if ids:
        with pytest.raises(TextTooLongError) as refused:
            tokenizer.encode(text, max_num_tokens=len(ids) - 1)
        assert refused.value.num_tokens in {len(ids), None}


def test_a_text_far_too_long_is_refused_by_its_characters(tokenizers: dict[str, Tokenizer]):
    tokenizer = tokenizers["byte_level"]
    most = bound_of(tokenizer) or 0
    with pytest.raises(TextTooLongError) as refused:
        tokenizer.encode("a" * (10 * most + 1), max_num_tokens=10)
    assert refused.value.num_tokens is None
    assert str(most) in str(refused.value)


@shared
@given(text=TEXT | RUNS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_fast_way_for_long_texts_gives_the_ids_of_the_slow_one(
    tokenizers: dict[str, Tokenizer], kind: str, text: str
):
    native = tokenizers[kind]._native
    long = text + "the dog " * (SHORT_TEXT // 8)
    slow = native.encode(long)
    assert tokenizers[kind]._encode(native, long, True).ids == slow.ids
    assert slow.special_tokens_mask == native.encode_batch_fast([long])[0].special_tokens_mask
