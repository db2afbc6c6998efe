"""Text token by token equals text at once, for any tokens whatever."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.text import IncrementalDetokenizer, Tokenizer
from cadenza.text.tokens.decoder_stages import BYTE_OF_CHARACTER
from cadenza.text.tokens.detokenizer import plan_decoder
from tests.text.vocabularies import KINDS

KIND = st.sampled_from(sorted(KINDS))
IDS = st.lists(st.integers(0, 420), max_size=30)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)

NUM_SOAK_CASES = 50_000
CHARACTER_OF_BYTE = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}

shared = settings(max_examples=300)


def stream(tokenizer: Tokenizer, token_ids: list[int], skip_special_tokens: bool) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
    return [*map(detokenizer.push, token_ids), detokenizer.flush()]


def check_stream(tokenizer: Tokenizer, token_ids: list[int], skip_special_tokens: bool) -> None:
    parts = stream(tokenizer, token_ids, skip_special_tokens)
    whole = tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
    assert "".join(parts) == whole


@shared
@given(kind=KIND, token_ids=IDS, skip=st.booleans())
def test_any_tokens_stream_to_what_they_decode_to(
    tokenizers: dict[str, Tokenizer], kind: str, token_ids: list[int], skip: bool
):
    check_stream(tokenizers[kind], token_ids, skip)


@pytest.mark.soak
@settings(max_examples=NUM_SOAK_CASES)
@given(kind=KIND, token_ids=IDS, skip=st.booleans())
def test_any_of_many_token_streams_is_what_it_decodes_to(
    tokenizers: dict[str, Tokenizer], kind: str, token_ids: list[int], skip: bool
):
    check_stream(tokenizers[kind], token_ids, skip)


@st.composite
def split_texts(draw: st.DrawFn) -> tuple[str, list[bytes]]:
    """Any text, cut into pieces anywhere, in the middle of characters too."""
    text = draw(TEXT)
    data = text.encode()
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=8)))
    ends = [*cuts, len(data)]
    return text, [data[start:end] for start, end in zip([0, *cuts], ends, strict=True)]


def check_split_text(tokenizers: dict[str, Tokenizer], text: str, pieces: list[bytes]) -> None:
    """Each piece in one token where the vocabulary has it, in a token for each byte where not."""
    tokenizer = tokenizers["byte_level"]
    token_ids: list[int] = []
    for piece in pieces:
        whole = tokenizer.id_of("".join(CHARACTER_OF_BYTE[byte] for byte in piece))
        found = [whole] if whole is not None else byte_tokens(tokenizers, list(piece))["byte_level"]
        token_ids += found
    parts = stream(tokenizer, token_ids, True)
    assert "".join(parts) == text
    for part in parts:
        assert "\ufffd" not in part or "\ufffd" in text


@shared
@given(split=split_texts())
def test_any_split_of_any_text_into_byte_tokens_streams_to_the_text(
    tokenizers: dict[str, Tokenizer], split: tuple[str, list[bytes]]
):
    check_split_text(tokenizers, *split)


@pytest.mark.soak
@settings(max_examples=NUM_SOAK_CASES)
@given(split=split_texts())
def test_any_of_many_splits_of_any_text_streams_to_the_text(
    tokenizers: dict[str, Tokenizer], split: tuple[str, list[bytes]]
):
    check_split_text(tokenizers, *split)


@shared
@given(kind=KIND, text=TEXT)
def test_any_text_streams_to_what_it_decodes_to(
    tokenizers: dict[str, Tokenizer], kind: str, text: str
):
    tokenizer = tokenizers[kind]
    token_ids = tokenizer.encode(text)
    assert "".join(stream(tokenizer, token_ids, True)) == tokenizer.decode(token_ids)


@shared
@given(data=st.lists(st.integers(0, 255), max_size=16))
def test_any_bytes_stream_to_what_they_decode_to(tokenizers: dict[str, Tokenizer], data: list[int]):
    """Mostly invalid UTF-8, spelt in the byte tokens of either kind."""
    for kind, token_ids in byte_tokens(tokenizers, data).items():
        parts = stream(tokenizers[kind], token_ids, True)
        assert "".join(parts) == tokenizers[kind].decode(token_ids)
    assert "".join(
        stream(tokenizers["byte_level"], byte_tokens(tokenizers, data)["byte_level"], True)
    ) == bytes(data).decode("utf-8", "replace")


def byte_tokens(tokenizers: dict[str, Tokenizer], data: list[int]) -> dict[str, list[int]]:
    names = {
        "byte_level": [CHARACTER_OF_BYTE[byte] for byte in data],
        "sentencepiece_bpe": [f"<0x{byte:02X}>" for byte in data],
    }
    found: dict[str, list[int]] = {}
    for kind, tokens in names.items():
        ids = [tokenizers[kind].id_of(token) for token in tokens]
        assert None not in ids
        found[kind] = [token_id for token_id in ids if token_id is not None]
    return found


@shared
@given(text=TEXT)
def test_whole_characters_are_given_out_at_once(tokenizers: dict[str, Tokenizer], text: str):
    tokenizer = tokenizers["byte_level"]
    parts = stream(tokenizer, tokenizer.encode(text), True)
    assert parts[-1] == ""


def test_an_unfinished_character_is_kept_back_until_it_is_whole(tokenizers: dict[str, Tokenizer]):
    token_ids = byte_tokens(tokenizers, list("é🙂".encode()))["byte_level"]
    assert stream(tokenizers["byte_level"], token_ids, True) == ["", "é", "", "", "", "🙂", ""]


def test_an_unfinished_character_at_the_end_is_a_replacement(tokenizers: dict[str, Tokenizer]):
    token_ids = byte_tokens(tokenizers, list("🙂".encode()[:3]))["byte_level"]
    assert stream(tokenizers["byte_level"], token_ids, True) == ["", "", "", "\ufffd"]


@shared
@given(text=TEXT, num_bytes=st.integers(0, 3))
def test_a_cut_stream_has_whole_characters_only(
    tokenizers: dict[str, Tokenizer], text: str, num_bytes: int
):
    data = [*text.encode(), *"🙂".encode()[:num_bytes]]
    for kind, token_ids in byte_tokens(tokenizers, data).items():
        detokenizer = IncrementalDetokenizer(tokenizers[kind])
        parts = [*map(detokenizer.push, token_ids)]
        detokenizer.drop_incomplete()
        expected = tokenizers[kind].decode(token_ids[: len(token_ids) - num_bytes])
        assert "".join([*parts, detokenizer.flush()]) == expected


def test_byte_fallback_spoils_a_whole_run_as_the_library_does(tokenizers: dict[str, Tokenizer]):
    token_ids = byte_tokens(tokenizers, [*"é".encode(), 0xFF])["sentencepiece_bpe"]
    assert stream(tokenizers["sentencepiece_bpe"], token_ids, True)[-1] == "\ufffd" * 3


def test_only_the_first_space_is_stripped(tokenizers: dict[str, Tokenizer]):
    tokenizer = tokenizers["sentencepiece_bpe"]
    token_ids = tokenizer.encode("  the dog", add_special_tokens=False)
    assert "".join(stream(tokenizer, token_ids, True)) == "  the dog"


def test_decoding_each_token_alone_would_be_wrong(tokenizers: dict[str, Tokenizer]):
    """The negative control: the corpus can tell a stream decoder from a naive one."""
    for kind in ("byte_level", "sentencepiece_bpe", "unigram", "without_decoder"):
        tokenizer = tokenizers[kind]
        token_ids = tokenizer.encode("the Größe 東京 🙂 dog")
        naive = "".join(tokenizer.decode([token_id]) for token_id in token_ids)
        assert naive != tokenizer.decode(token_ids), kind


def test_a_sequence_of_one_step_is_that_step():
    step = {"type": "ByteLevel"}
    assert plan_decoder({"type": "Sequence", "decoders": [step]}) == plan_decoder(step)
