"""Writes the tokenizer of a GGUF file's metadata as tokenizer.json and tokenizer_config.json.

Owns the two kinds of vocabulary that `tools.real_models` needs: byte-level BPE with merges
(`gpt2`), and SentencePiece BPE, whose merges are derived from the scores (`llama`). Invariant:
token ids are those of the file; unsupported token types and pre-tokenizers are refused.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

SPACE = "▁"  # SentencePiece's replacement for a space

_PREFIX = "tokenizer.ggml."
_SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


class GGUFError(Exception):
    """A GGUF file has something that is not supported; the message names it."""


class _Kind(IntEnum):
    """GGUF's token types."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def write_tokenizer(metadata: Mapping[str, Any], folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json.

    Raises:
        GGUFError: the metadata has something that is not supported.
    """
    tokens: list[str] = metadata[f"{_PREFIX}tokens"]
    kinds = [_Kind(kind) for kind in metadata[f"{_PREFIX}token_type"]]
    if len(set(tokens)) != len(tokens):
        raise GGUFError("two ids of the vocabulary have the same text")
    if metadata.get(f"{_PREFIX}add_space_prefix", True) or metadata.get(f"{_PREFIX}add_eos_token"):
        raise GGUFError("a tokenizer that adds a leading space or an end token is not supported")
    parts = _parts(metadata, tokens, kinds)
    described = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(_added_tokens(tokens, kinds)),
        "post_processor": _post_processor(metadata, tokens),
        **parts,
    }
    _write_json(folder / "tokenizer.json", described)
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(metadata, tokens))


def _parts(
    metadata: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[_Kind]
) -> dict[str, object]:
    """Normalizer, pre-tokenizer, model and decoder."""
    model, pre = metadata[f"{_PREFIX}model"], metadata.get(f"{_PREFIX}pre", "default")
    match model, pre:
        case "gpt2", "smollm":
            return _single_digits_byte_level(tokens, metadata[f"{_PREFIX}merges"])
        case "llama", "default":
            ranked = sorted(
                (token_id for token_id, kind in enumerate(kinds) if kind == _Kind.NORMAL),
                key=lambda token_id: -metadata[f"{_PREFIX}scores"][token_id],
            )
            return _sentencepiece(tokens, ranked, metadata[f"{_PREFIX}unknown_token_id"])
        case _:
            raise GGUFError(f"the tokenizer {model} with the pre-tokenizer {pre} is not supported")


def _single_digits_byte_level(tokens: Sequence[str], merges: Sequence[str]) -> dict[str, object]:
    byte_level = {"add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    pre = {"type": "Sequence", "pretokenizers": [digits, {"type": "ByteLevel", **byte_level}]}
    return {
        "normalizer": None,
        "pre_tokenizer": pre,
        "decoder": {"type": "ByteLevel", **byte_level},
        "model": _bpe(tokens, [merge.split(" ") for merge in merges], unknown=None),
    }


def _sentencepiece(
    tokens: Sequence[str], ranked: Sequence[int], unknown_id: int
) -> dict[str, object]:
    """`ranked`: ids of normal tokens in descending order of score."""
    to_space = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    return {
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [to_space, {"type": "ByteFallback"}, {"type": "Fuse"}],
        },
        "model": _bpe(
            tokens,
            list(_merges([tokens[token_id] for token_id in ranked])),
            unknown=tokens[unknown_id],
        ),
    }


def _merges(pieces: Sequence[str]) -> Iterator[list[str]]:
    """Every split of a piece into two other pieces, in the order of the pieces.

    SentencePiece merges the adjacent pair whose piece has the highest score, the leftmost if equal.
    Merge ranks give the same order, except that two splits of one piece have different ranks.
    """
    known = set(pieces)
    for piece in pieces:
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in known and right in known:
                yield [left, right]


def _bpe(
    tokens: Sequence[str], merges: Sequence[Sequence[str]], *, unknown: str | None
) -> dict[str, object]:
    """A BPE model; with an `unknown` token, characters not in the vocabulary become byte tokens."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": unknown is not None,
        "byte_fallback": unknown is not None,
        "ignore_merges": False,
        "vocab": {token: token_id for token_id, token in enumerate(tokens)},
        "merges": merges,
    }


def _added_tokens(tokens: Sequence[str], kinds: Sequence[_Kind]) -> Iterator[dict[str, object]]:
    """All tokens to split off before BPE; all except the user-defined ones are special."""
    for token_id, (content, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind in (_Kind.NORMAL, _Kind.BYTE):
            continue
        if kind == _Kind.UNUSED:
            raise GGUFError(f"token {token_id} is of type {kind.name}, which is not supported")
        yield {
            "id": token_id,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != _Kind.USER_DEFINED,
        }


def _post_processor(metadata: Mapping[str, Any], tokens: Sequence[str]) -> object:
    if not metadata.get(f"{_PREFIX}add_bos_token", False):
        return None
    bos_id = metadata[f"{_PREFIX}bos_token_id"]
    bos = {"SpecialToken": {"id": tokens[bos_id], "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    used = {"id": tokens[bos_id], "ids": [bos_id], "tokens": [tokens[bos_id]]}
    return {
        "type": "TemplateProcessing",
        "single": [bos, first],
        "pair": [bos, first, bos, second],
        "special_tokens": {tokens[bos_id]: used},
    }


def _tokenizer_config(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, object]:
    """The class is the one with which transformers uses tokenizer.json unchanged."""
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for name, key in _SPECIAL_TOKENS.items():
        if f"{_PREFIX}{key}" in metadata:
            config[name] = tokens[metadata[f"{_PREFIX}{key}"]]
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    return config


def _write_json(path: Path, values: Mapping[str, object]) -> None:
    path.write_text(json.dumps(values, ensure_ascii=False) + "\n", encoding="utf-8")
