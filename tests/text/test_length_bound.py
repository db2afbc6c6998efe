"""Texts of more tokens than allowed: found early, told exactly, never found where they fit."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as NativeTokenizer

from cadenza.errors import TextTooLongError
from cadenza.text import Tokenizer
from cadenza.text.tokens.provenance import join_marked, written_by_template
from cadenza.text.tokens.tokenizer import SHORT_TEXT, max_chars_per_token
from tests.text.test_tokenizer import FORGED, TEXT, shared
from tests.text.vocabularies import KINDS, byte_level

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
) -> None:
    assert {kind for kind in KINDS if bound_of(tokenizers[kind]) is not None} == set(BOUNDED)
    assert bound_of(composer) == 4 * (bound_of(tokenizers["byte_level"]) or 0)


@pytest.mark.parametrize("around", ["continuing_subword_prefix", "end_of_word_suffix"])
def test_there_is_no_bound_where_a_byte_inside_a_word_has_no_token(
    tmp_path: Path, around: str
) -> None:
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
) -> None:
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
) -> None:
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


def test_a_vocabulary_that_lacks_a_byte_has_no_bound() -> None:
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
) -> None:
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


def test_a_text_far_too_long_is_refused_by_its_characters(
    tokenizers: dict[str, Tokenizer],
) -> None:
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
) -> None:
    native = tokenizers[kind]._native
    long = text + "the dog " * (SHORT_TEXT // 8)
    slow = native.encode(long)
    assert tokenizers[kind]._encode(native, long, True).ids == slow.ids
    assert slow.special_tokens_mask == native.encode_batch_fast([long])[0].special_tokens_mask
