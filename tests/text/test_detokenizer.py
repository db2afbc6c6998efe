"""Text token by token equals text at once, for any tokens whatever."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models
from tokenizers import Tokenizer as NativeTokenizer

from cadenza.errors import CheckpointError, InvalidRequestError
from cadenza.text import IncrementalDetokenizer, StopMatcher, Tokenizer
from cadenza.text.tokens.decoder_stages import BYTE_OF_CHARACTER, CLEANUPS
from cadenza.text.tokens.detokenizer import plan_decoder
from tests.text.vocabularies import KINDS, SPACE

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


LETTERS = ["a", "b", "é", "東", "🙂", "Ġ", "Ã", "©", "â", " ", SPACE, "|", "#", "'", "<", ">", "0"]
TOKENS = [
    *LETTERS,
    *(old for old, _ in CLEANUPS),
    *("the", "Ġthe", "##ing", "##", "the</w>", "</w>", "</w></w>", "<pad>", "a<pad>b", "</", "w>"),
    *(
        f"{SPACE}dog",
        f"{SPACE}{SPACE}",
        f"a{SPACE}b",
        "n't",
        "do",
        "not",
        "  ",
        " a ",
        "aaa",
        "aba",
    ),
    *(
        " '",
        ".",
        " do",
        " not",
        "<0x41>",
        "<0xC3>",
        "<0xA9>",
        "<0xFF>",
        "<0x+F>",
        "<0xG0>",
        "<0x",
        "41>",
        "ð",
        "Ł",
        "ĺ",
        "Ĥ",
    ),
]
SPECIAL = ("<s>", "<end>")
VOCABULARY = {token: index for index, token in enumerate(dict.fromkeys(TOKENS))}
NUM_IDS = len(VOCABULARY) + len(SPECIAL) + 1

WORDS = ["a", "aa", "aab", "ab", "aba", "é", " ", "  ", SPACE, "Ġ", "<0x", "##", "</w>", "the"]
FLAG = st.booleans()
STEPS: list[st.SearchStrategy[Any]] = [
    st.builds(decoders.ByteLevel),
    st.builds(decoders.ByteFallback),
    st.builds(decoders.Fuse),
    st.builds(decoders.BPEDecoder, st.sampled_from(["</w>", "a", " ", ""])),
    st.builds(
        lambda pad, delimiter, cleanup: decoders.CTC(pad, delimiter, cleanup=cleanup),
        st.sampled_from(["<pad>", "a", ""]),
        st.sampled_from(["|", "##", ""]),
        FLAG,
    ),
    st.builds(
        lambda mark, scheme: decoders.Metaspace(mark, prepend_scheme=scheme),
        st.sampled_from([SPACE, "a"]),
        st.sampled_from(["always", "first", "never"]),
    ),
    st.builds(decoders.Replace, st.sampled_from(["", *WORDS]), st.sampled_from(["", *WORDS])),
    st.builds(
        decoders.Replace,
        st.sampled_from([Regex("a+"), Regex(r"\s+$"), Regex("(?<=a)b"), Regex("[Ġ ]")]),
        st.sampled_from(["", " ", "é"]),
    ),
    st.builds(
        decoders.Strip, st.sampled_from([" ", "a", SPACE]), st.integers(0, 2), st.integers(0, 2)
    ),
    st.builds(
        lambda prefix, cleanup: decoders.WordPiece(prefix, cleanup=cleanup),
        st.sampled_from(["##", "a", ""]),
        FLAG,
    ),
]
DECODERS = st.one_of(
    st.none(),
    st.one_of(STEPS),
    st.builds(decoders.Sequence, st.lists(st.one_of(STEPS), max_size=4)),
)
DECODED_IDS = st.lists(st.integers(0, NUM_IDS), max_size=14)

Make = Callable[[Any], Tokenizer]

settled = settings(max_examples=600)


@pytest.fixture(scope="session")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """A tokenizer with this decoder over the tokens above."""
    path = tmp_path_factory.mktemp("decoders") / "tokenizer.json"

    def write(decoder: Any) -> Tokenizer:
        native = NativeTokenizer(
            models.WordLevel({**VOCABULARY, "[UNK]": len(VOCABULARY)}, "[UNK]")
        )
        native.add_special_tokens(list(SPECIAL))
        if decoder is not None:
            native.decoder = decoder
        native.save(str(path))
        return Tokenizer(path)

    return write


def whole_text(tokenizer: Tokenizer, token_ids: list[int], skip: bool) -> str | None:
    """What the library decodes; None where it fails, as its Strip does on what is too short."""
    try:
        return tokenizer.decode(token_ids, skip_special_tokens=skip)
    except InvalidRequestError:
        return None


def check_each_length(tokenizer: Tokenizer, token_ids: list[int], skip: bool) -> None:
    """A stream that ends after any of its tokens is what these decode to."""
    for count in range(len(token_ids) + 1):
        detokenizer = IncrementalDetokenizer(tokenizer, skip)
        parts = [*map(detokenizer.push, token_ids[:count]), detokenizer.flush()]
        whole = whole_text(tokenizer, token_ids[:count], skip)
        if whole is not None:
            assert "".join(parts) == whole


@settled
@given(decoder=DECODERS, token_ids=DECODED_IDS, skip=FLAG)
def test_tokens_stream_to_what_any_decoder_makes_of_them(
    make: Make, decoder: Any, token_ids: list[int], skip: bool
):
    check_each_length(make(decoder), token_ids, skip)


EACH = {
    "byte_level": decoders.ByteLevel(),
    "byte_fallback": decoders.ByteFallback(),
    "fuse": decoders.Fuse(),
    "suffix": decoders.BPEDecoder(),
    "ctc": decoders.CTC("a", "|", cleanup=True),
    "ctc_bare": decoders.CTC("<pad>", "|", cleanup=False),
    "metaspace": decoders.Metaspace(),
    "metaspace_never": decoders.Metaspace(prepend_scheme="never"),
    "replace": decoders.Replace("aab", "<0x41>"),
    "replace_nothing": decoders.Replace("", " "),
    "replace_pattern": decoders.Replace(Regex("a+"), f"{SPACE}é"),
    "strip_start": decoders.Strip("a", 2, 0),
    "strip_end": decoders.Strip("b", 0, 1),
    "word_piece": decoders.WordPiece(),
    "word_piece_bare": decoders.WordPiece("a", cleanup=False),
}
STREAMS = [
    ["a", "a", "b", "aaa", "b", "|", "a", "b", "b"],
    ["<0x", "41>"],
    ["<0x41>", "<0xC3>", "<0xA9>", "a", "<0xFF>", "<0xC3>", "<0x+F>", "<0xG0>", "##ing", "b"],
    ["Ġthe", "Ã", "©", "東", "Ã", "©", "b"],
    ["the", "Ã", "©", "ð", "Ł"],
    [f"{SPACE}dog", SPACE, f"a{SPACE}b", "##ing", "the</w>", "</w>", "a", "</w></w>", "##"],
    ["do", " ", "n't", " '", "'", " ", " do", " not", " do not", ".", " .", "the", " ?", "<pad>"],
]


@pytest.mark.parametrize("second", EACH)
@pytest.mark.parametrize("first", EACH)
def test_every_two_steps_in_turn_are_followed(make: Make, first: str, second: str):
    tokenizer = make(decoders.Sequence([EACH[first], EACH[second]]))
    for tokens in STREAMS:
        check_each_length(tokenizer, [VOCABULARY[token] for token in tokens], False)


@pytest.mark.soak
@settings(max_examples=20_000)
@given(decoder=DECODERS, token_ids=DECODED_IDS, skip=FLAG)
def test_tokens_stream_to_what_any_of_many_decoders_makes_of_them(
    make: Make, decoder: Any, token_ids: list[int], skip: bool
):
    check_each_length(make(decoder), token_ids, skip)


@settled
@given(
    decoder=DECODERS,
    token_ids=DECODED_IDS,
    stop=st.sampled_from(["a", "ab", " t", "e", "é", "the", "''"]),
)
def test_a_stop_string_cuts_the_stream_where_it_cuts_the_whole_text(
    make: Make, decoder: Any, token_ids: list[int], stop: str
):
    tokenizer = make(decoder)
    whole = whole_text(tokenizer, token_ids, True)
    assume(whole is not None)
    assert whole is not None
    detokenizer, matcher = IncrementalDetokenizer(tokenizer), StopMatcher([stop])
    parts = [matcher.push(detokenizer.push(token_id)) for token_id in token_ids]
    parts += [matcher.push(detokenizer.flush()), matcher.flush()]
    assert "".join(parts) == whole.split(stop)[0]


def parts_of(make: Make, decoder: Any, *tokens: str) -> list[str]:
    tokenizer = make(decoder)
    detokenizer = IncrementalDetokenizer(tokenizer)
    ids = [tokenizer.id_of(token) for token in tokens]
    return [*(detokenizer.push(each) for each in ids if each is not None), detokenizer.flush()]


PROMPT = {
    "word_piece": (decoders.WordPiece(), ("the", "##ing", "do"), ["the", "ing", " do", ""]),
    "ctc": (decoders.CTC(), ("a", "a", "<pad>", "a", "|"), ["a", "", "", "a", " ", ""]),
    "suffix": (
        decoders.BPEDecoder(),
        ("do", "the</w>", "the</w>"),
        ["do", "", "the ", "the"],
    ),
    "fuse_replace_byte_level": (
        decoders.Sequence([decoders.Fuse(), decoders.Replace(SPACE, " "), decoders.ByteLevel()]),
        ("the", f"{SPACE}dog", "é", "東"),
        ["the", " dog", "é", "東", ""],
    ),
    "strip_at_the_end": (
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        ("the", " ", " ", "a", " "),
        ["the", "", " ", " a", "", ""],
    ),
    "replace_after_fuse": (
        decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]),
        ("the", "a", "b", "a"),
        ["the", "", "c", "", "a"],
    ),
    "byte_level_and_more": (
        decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]),
        ("Ġthe", "Ã", "©", "Ġthe"),
        ["the", "", "é", " the", ""],
    ),
}


@pytest.mark.parametrize(("decoder", "tokens", "parts"), PROMPT.values(), ids=PROMPT)
def test_text_comes_as_soon_as_it_is_certain(
    make: Make, decoder: Any, tokens: tuple[str, ...], parts: list[str]
):
    assert parts_of(make, decoder, *tokens) == parts


def test_bytes_after_a_fuse_wait_until_it_is_certain_that_they_are_bytes(make: Make):
    decoder = decoders.Sequence([decoders.Fuse(), decoders.ByteLevel()])
    assert parts_of(make, decoder, "the", "Ã", "©") == ["the", "", "", "é"]
    assert parts_of(make, decoder, "the", "Ã", "東", "©") == ["the", "", "Ã東", "©", ""]


def test_a_pattern_over_the_whole_text_waits_for_the_end(make: Make):
    decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex("a+"), "é")])
    assert parts_of(make, decoder, "a", "aaa", "b") == ["", "", "", "éb"]


def test_a_decoder_that_the_library_fails_in_still_streams(make: Make):
    tokenizer = make(decoders.Strip(" ", 1, 1))
    assert whole_text(tokenizer, [VOCABULARY[" "]], True) is None
    assert parts_of(make, decoders.Strip(" ", 1, 1), " ", " a ") == ["", "a", ""]


def test_a_step_of_an_unknown_kind_is_refused_by_name():
    steps = [{"type": "Fuse"}, {"type": "Rot13"}]
    with pytest.raises(CheckpointError, match=r"'Rot13'.*WordPiece"):
        plan_decoder({"type": "Sequence", "decoders": steps})
