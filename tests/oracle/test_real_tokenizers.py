"""The tokenizers of `make real` against others that read the same GGUF file.

Gemma's vocabulary goes into a SentencePiece model and through that library; SmolLM2's through byte
pair encoding as GPT-2 published it, written out here. Neither sees the tokenizer.json under test.
Texts are given as a template's own characters, since in a user's text Cadenza takes no token but
plain ones.
"""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cadenza.text import Tokenizer
from cadenza.text.tokens.provenance import written_by_template

pytestmark = pytest.mark.oracle

Encode = Callable[[str], list[int]]

FILES = sorted([*Path().glob("*.md"), *Path("docs").glob("*.md"), *Path("src").rglob("*.py")])
TEXTS = (
    "",
    " lead, trail  ",
    "   a    b  \n\n\n c \t\t\td\r\n\r\n",
    " " * 100 + "x" + "\n" * 80 + "\t" * 40,
    "1234567890 + 0.5 = 3,141,592 ½ ² Ⅷ ٣",
    "naïve Größe Łódź 東京 日本語 🙂👩‍👩‍👧 \u200d \ufffd é e\u0301",
    "Привет, мир! Ελληνικά العربية हिन्दी ไทย 한국어",
    "I'm we'll THEY'VE can't 'tis",
    "<table><td>a</td> </table> <0x0A> <h1>",
    "x" * 300 + "aaaa" * 50,
)
TEXT = st.lists(
    st.sampled_from(["the", " The", "  ", "\n\n", "\t", "<b>", "東京", "🙂", "1", "'s", "x" * 9])
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=12),
    max_size=12,
).map("".join)


def fields_of(folder: Path) -> dict[str, Any]:
    """The tokenizer's metadata in the GGUF file that the folder was made of."""
    import gguf

    reader = gguf.GGUFReader(folder.with_name(f"{folder.name}.gguf"))
    prefix = "tokenizer.ggml."
    return {
        name.removeprefix(prefix): field.contents()
        for name, field in reader.fields.items()
        if name.startswith(prefix)
    }


@pytest.fixture(scope="module")
def sentencepiece_encode(gemma3_folder: Path) -> Encode:
    from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

    fields = fields_of(gemma3_folder)
    names: Any = sentencepiece_model_pb2  # its classes are made when it is imported
    model = names.ModelProto()
    model.trainer_spec.model_type = names.TrainerSpec.BPE
    model.trainer_spec.byte_fallback = True
    for name in ("bos", "eos", "unk", "pad"):
        key = {"unk": "unknown", "pad": "padding"}.get(name, name)
        setattr(model.trainer_spec, f"{name}_id", fields[f"{key}_token_id"])
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = False
    model.normalizer_spec.remove_extra_whitespaces = False
    for token_id, (text, score, kind) in enumerate(
        zip(fields["tokens"], fields["scores"], fields["token_type"], strict=True)
    ):
        is_user_defined = kind == model.SentencePiece.USER_DEFINED
        is_unknown = token_id == fields["unknown_token_id"]
        model.pieces.add(
            piece=text.replace(" ", "▁") if is_user_defined else text,
            score=score,
            type=model.SentencePiece.UNKNOWN if is_unknown else kind,
        )
    return SentencePieceProcessor(model_proto=model.SerializeToString()).encode


@pytest.fixture(scope="module")
def plain_bpe_encode(smollm2_folder: Path) -> Encode:
    """Single digits, GPT-2's pattern, bytes as characters, and merges by rank.

    The vocabulary lacks 21 bytes, which valid text hardly has; they are left out.
    """
    import regex
    from tokenizers.pre_tokenizers import ByteLevel

    fields = fields_of(smollm2_folder)
    ids = {token: token_id for token_id, token in enumerate(fields["tokens"])}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(fields["merges"])}
    words = regex.compile(
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    )
    characters = byte_characters()
    assert set(characters) == set(ByteLevel.alphabet())

    def split(text: str) -> list[str]:
        parts = [part for part in regex.split(r"(\p{N})", text) if part]
        return [word for part in parts for word in words.findall(part)]

    def merge(word: str) -> list[str]:
        spelt = [characters[byte] for byte in word.encode()]
        symbols = [symbol for symbol in spelt if symbol in ids]
        while len(symbols) > 1:
            pairs = list(itertools.pairwise(symbols))
            best = min(pairs, key=lambda pair: ranks.get(pair, len(ranks)))
            if best not in ranks:
                break
            merged, index = [], 0
            while index < len(symbols):
                is_best = tuple(symbols[index : index + 2]) == best
                merged.append("".join(best) if is_best else symbols[index])
                index += 1 + is_best
            symbols = merged
        return symbols

    return lambda text: [ids[symbol] for word in split(text) for symbol in merge(word)]


def byte_characters() -> list[str]:
    """GPT-2's character for each byte: printable ones are themselves, others follow from 256."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 256 + others.index(byte)) for byte in range(256)]


def assert_same(folder: Path, encode: Encode, texts: list[str]) -> None:
    tokenizer = Tokenizer(folder / "tokenizer.json")
    for text in texts:
        ids = tokenizer.encode(written_by_template(text), add_special_tokens=False)
        assert ids == encode(text), text[:200]
        assert tokenizer.decode(ids, skip_special_tokens=False) == text, text[:200]


def texts_without(*spelt: str) -> list[str]:
    """The fixed texts and the repository's files, but those that spell one of `spelt`."""
    texts = [*TEXTS, *(path.read_text(encoding="utf-8") for path in FILES)]
    found = [text for text in texts if not any(each in text for each in spelt)]
    assert len(found) > 100
    return found


def test_gemmas_ids_are_sentencepieces(gemma3_folder: Path, sentencepiece_encode: Encode):
    """But for a text that holds the character that stands for a space."""
    assert_same(gemma3_folder, sentencepiece_encode, texts_without("▁"))


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXT)
def test_any_texts_ids_are_sentencepieces(
    gemma3_tokenizer: Tokenizer, sentencepiece_encode: Encode, text: str
):
    ids = gemma3_tokenizer.encode(written_by_template(text), add_special_tokens=False)
    assert ids == sentencepiece_encode(text)


def test_smollm2s_ids_are_those_of_plain_byte_pair_encoding(
    smollm2_folder: Path, plain_bpe_encode: Encode
):
    assert_same(smollm2_folder, plain_bpe_encode, texts_without("<|", "<filename>"))


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXT)
def test_any_texts_ids_are_those_of_plain_byte_pair_encoding(
    smollm2_tokenizer: Tokenizer, plain_bpe_encode: Encode, text: str
):
    ids = smollm2_tokenizer.encode(written_by_template(text), add_special_tokens=False)
    assert ids == plain_bpe_encode(text)


@pytest.fixture(scope="module")
def gemma3_tokenizer(gemma3_folder: Path) -> Tokenizer:
    return Tokenizer(gemma3_folder / "tokenizer.json")


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2_folder: Path) -> Tokenizer:
    return Tokenizer(smollm2_folder / "tokenizer.json")


def test_transformers_reads_the_folders_tokenizer_alike(real_folder: Path):
    """What transformers makes of tokenizer_config.json beside it changes no id."""
    from transformers import AutoTokenizer

    ours = Tokenizer(real_folder / "tokenizer.json")
    theirs = AutoTokenizer.from_pretrained(real_folder, local_files_only=True)
    for text in (*TEXTS, "<|im_start|>user\nHi<|im_end|>\n", "<start_of_turn>user"):
        assert ours.encode(written_by_template(text)) == theirs.encode(text), text[:200]
