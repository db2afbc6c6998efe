"""A GGUF file's tokenizer as a tokenizer.json: `read_gguf_tokenizer`. Reads BPE over bytes, with
merges (`gpt2`), and SentencePiece's BPE, whose merges follow from the scores (`llama`) or are
listed (`gemma4`); other types and pre-tokenizers are refused by name. A text gets the ids that
the model's own tokenizer.json gives."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from cadenza.errors import CheckpointError
from cadenza.json_object import JsonObject, shorten
from cadenza.models.model_config import MAX_VOCAB_SIZE

Step = Mapping[str, object]  # of the `pre_tokenizer` of a tokenizer.json


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """The steps before BPE, after which bytes become characters."""

    steps: tuple[Step, ...] = ()
    splits_words: bool = False  # GPT-2's pattern splits what the steps leave
    has_nfc: bool = False  # texts are brought into the normal form C first
    ignores_merges: bool = False  # a word that is in the vocabulary is taken whole


def _split(pattern: str) -> Step:
    regex = {"Regex": pattern}
    return {"type": "Split", "pattern": regex, "behavior": "Isolated", "invert": False}


_DIGITS: Step = {"type": "Digits", "individual_digits": True}
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"


def _by_kind(digits: str) -> str:
    """GPT-4's pattern, which differs between models in how it groups digits."""
    return (
        rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _by_case(endings: str, digits: str) -> str:
    """GPT-4o's pattern, which splits words where the case changes."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    upper, lower = (rf"[\p{{L{case}}}\p{{Lm}}\p{{Lo}}\p{{M}}]" for case in ("u}\\p{Lt", "l"))
    return (
        rf"{lead}{upper}*{lower}+{endings}|{lead}{upper}+{lower}*{endings}|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_GPT2 = PreTokenizer(splits_words=True)
_SINGLE_DIGITS = PreTokenizer(steps=(_DIGITS,), splits_words=True)
_LLAMA3 = PreTokenizer(steps=(_split(_by_kind(r"\p{N}{1,3}")),), ignores_merges=True)
_GPT4 = PreTokenizer(steps=(_split(_by_kind(r"\p{N}{1,3}")),))
_QWEN2 = PreTokenizer(steps=(_split(_by_kind(r"\p{N}")),), has_nfc=True)
_GPT4O = PreTokenizer(steps=(_split(_by_case(f"{_ENDINGS}?", r"\p{N}{1,3}")),))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "gpt-2": _GPT2,
    **dict.fromkeys(("mpt", "olmo"), PreTokenizer(splits_words=True, has_nfc=True)),
    **dict.fromkeys(("smollm", "starcoder", "refact"), _SINGLE_DIGITS),
    "command-r": PreTokenizer(steps=(_DIGITS,), splits_words=True, has_nfc=True),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _GPT4),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "tekken": PreTokenizer(steps=(_split(_by_case("", r"\p{N}")),), ignores_merges=True),
    "deepseek-coder": PreTokenizer(
        steps=(
            _split(r"[\r\n]"),
            _split(r"\s?\p{L}+"),
            _split(r"\s?\p{P}+"),
            _split("[一-龥ࠀ-一가-퟿]+"),
            _DIGITS,
        ),
    ),
}


SPACE = "▁"  # SentencePiece's replacement for a space

_PREFIX = "tokenizer.ggml."
_COMPLETE = "tokenizer.huggingface.json"
_INSTEAD = "put the model's tokenizer.json beside the file and name the folder"

_PHI3_UNSTRIPPED = frozenset({"<unk>", "<s>", "<|endoftext|>"})


class _Kind(IntEnum):
    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# types of the tokens that are found in a text before its BPE
_SPLIT_OFF = (_Kind.UNKNOWN, _Kind.CONTROL, _Kind.USER_DEFINED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The tokens and their types, by id, and the metadata that they are from."""

    metadata: JsonObject
    tokens: list[str]
    kinds: list[int]

    @property
    def model(self) -> str | None:
        return self.metadata.text(f"{_PREFIX}model")

    def flag(self, name: str, default: bool) -> bool:
        return self.metadata.flag(f"{_PREFIX}{name}", default)

    def token_id(self, name: str) -> int | None:
        """The id under a key such as `bos_token_id`; None if it is absent or names no token."""
        key = f"{_PREFIX}{name}"
        if not self.metadata.has(key):
            return None
        found = self.metadata.integer(key, 0, (1 << 32) - 1)
        return found if found < len(self.tokens) else None

    def is_control(self, token_id: int) -> bool:
        return self.kinds[token_id] == _Kind.CONTROL


def read_vocabulary(metadata: JsonObject) -> Vocabulary | None:
    """None if the metadata have no vocabulary. Raises `CheckpointError`."""
    key = f"{_PREFIX}tokens"
    tokens = metadata.get(key)
    if tokens is None:
        return None
    if not isinstance(tokens, list) or not 0 < len(cast(list[str], tokens)) <= MAX_VOCAB_SIZE:
        raise metadata.wrong(key, f"an array of 1 to {MAX_VOCAB_SIZE} strings")
    tokens = cast(list[str], tokens)
    types = _numbers(metadata, "token_type", len(tokens), "iu")
    kinds: list[int] = [_Kind.NORMAL] * len(tokens) if types is None else types.tolist()
    if len(set(tokens)) != len(tokens):
        raise CheckpointError(
            f"{metadata.where}: two ids of {key} have the same text; convert the model again"
        )
    return Vocabulary(metadata=metadata, tokens=tokens, kinds=kinds)


def read_gguf_tokenizer(vocabulary: Vocabulary) -> bytes:
    """The content of a tokenizer.json. Raises CheckpointError if the metadata are invalid, or their
    type of tokenizer is not supported."""
    complete = vocabulary.metadata.text(_COMPLETE)
    if complete is not None:
        return complete.encode()
    described: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(_added_tokens(vocabulary)),
        "post_processor": _post_processor(vocabulary),
        **_read_parts(vocabulary),
    }
    return json.dumps(described, ensure_ascii=False, separators=(",", ":")).encode()


def _numbers(metadata: JsonObject, name: str, count: int, kinds: str) -> npt.NDArray[Any] | None:
    """An array with a number per token, of one of numpy's kinds of types."""
    key = f"{_PREFIX}{name}"
    if not metadata.has(key):
        return None
    value = metadata.get(key)
    found = cast(npt.NDArray[Any], value) if isinstance(value, np.ndarray) else None
    if found is None or found.dtype.kind not in kinds or len(found) != count:
        raise metadata.wrong(key, f"an array of {count} numbers, one per token")
    return found


def _read_parts(vocabulary: Vocabulary) -> dict[str, object]:
    match vocabulary.model:
        case "gpt2":
            return _byte_level(vocabulary)
        case "llama":
            return _sentencepiece(vocabulary, _merges_of_scores(vocabulary))
        case "gemma4":
            return _sentencepiece(vocabulary, _read_merges(vocabulary))
        case model:
            raise CheckpointError(
                f"{vocabulary.metadata.where}: {_PREFIX}model {shorten(model)} is not supported; "
                f"supported are gpt2, llama and gemma4; {_INSTEAD}"
            )


def _byte_level(vocabulary: Vocabulary) -> dict[str, object]:
    metadata, key = vocabulary.metadata, f"{_PREFIX}pre"
    name = metadata.text(key)
    found = PRE_TOKENIZERS.get(name or "")
    if found is None:
        state = "is missing" if name is None else f"{shorten(name)} is not supported"
        raise CheckpointError(
            f"{metadata.where}: {key} {state}; supported are {', '.join(PRE_TOKENIZERS)}; "
            f"{_INSTEAD}"
        )
    as_characters = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    last = {**as_characters, "use_regex": found.splits_words}
    steps = [*found.steps, last]
    return {
        "normalizer": {"type": "NFC"} if found.has_nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": {**as_characters, "use_regex": True},
        "model": {
            **_bpe(vocabulary, list(_read_merges(vocabulary))),
            "ignore_merges": found.ignores_merges,
        },
    }


def _read_merges(vocabulary: Vocabulary) -> Iterator[list[str]]:
    """Both parts of each merge; a space separates them, and may begin the first one."""
    metadata, key = vocabulary.metadata, f"{_PREFIX}merges"
    merges = metadata.get(key)
    if not isinstance(merges, list):
        raise metadata.wrong(key, "an array of strings")
    known = set(vocabulary.tokens)
    for merge in cast(list[str], merges):
        cut = merge.find(" ", 1)
        left, right = merge[:cut], merge[cut + 1 :]
        if cut < 0 or left not in known or right not in known or left + right not in known:
            raise CheckpointError(
                f"{metadata.where}: {key} has {shorten(merge)}; it must be two tokens, separated "
                f"by a space, whose concatenation is one; convert the model again"
            )
        yield [left, right]


def _sentencepiece(vocabulary: Vocabulary, merges: Iterator[list[str]]) -> dict[str, object]:
    has_prefix = vocabulary.flag("add_space_prefix", vocabulary.model == "llama")
    to_mark: dict[str, object] = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    to_space: dict[str, object] = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    normalizer = to_mark
    decoders: list[dict[str, object]] = [to_space, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if has_prefix:
        prefix = {"type": "Prepend", "prepend": SPACE}
        normalizer = {"type": "Sequence", "normalizers": [prefix, to_mark]}
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown_id = vocabulary.token_id("unknown_token_id")
    if unknown_id is None and _Kind.UNKNOWN in vocabulary.kinds:
        unknown_id = vocabulary.kinds.index(_Kind.UNKNOWN)
    return {
        "normalizer": normalizer,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            **_bpe(vocabulary, list(merges)),
            "unk_token": None if unknown_id is None else vocabulary.tokens[unknown_id],
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }


def _merges_of_scores(vocabulary: Vocabulary) -> Iterator[list[str]]:
    """Every split of a piece into two other pieces, in descending order of the pieces' scores.
    SentencePiece merges the adjacent pair whose piece has the highest score, the leftmost if equal.
    Merge ranks give the same order, except that two splits of one piece have different ranks."""
    tokens, metadata = vocabulary.tokens, vocabulary.metadata
    scores = _numbers(metadata, "scores", len(tokens), "fiu")
    if scores is None or not np.isfinite(scores).all():
        raise metadata.wrong(f"{_PREFIX}scores", f"an array of {len(tokens)} finite numbers")
    order: list[int] = np.argsort(-scores, kind="stable").tolist()
    pieces = [tokens[index] for index in order if vocabulary.kinds[index] == _Kind.NORMAL]
    known = set(pieces)
    for piece in pieces:
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in known and right in known:
                yield [left, right]


def _bpe(vocabulary: Vocabulary, merges: Sequence[Sequence[str]]) -> dict[str, object]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: token_id for token_id, token in enumerate(vocabulary.tokens)},
        "merges": merges,
    }


def _added_tokens(vocabulary: Vocabulary) -> Iterator[dict[str, object]]:
    """The tokens to split off before BPE; all except the user-defined ones are special."""
    for token_id, kind in enumerate(vocabulary.kinds):
        if kind in _SPLIT_OFF:
            content = vocabulary.tokens[token_id]
            yield {
                "id": token_id,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": kind != _Kind.USER_DEFINED and _strips_behind(vocabulary, content),
                "normalized": False,
                "special": kind != _Kind.USER_DEFINED,
            }


def _strips_behind(vocabulary: Vocabulary, content: str) -> bool:
    """Whether white space after a special token is dropped: Phi-3's do, by no metadata."""
    is_phi3 = vocabulary.metadata.text("general.architecture") == "phi3"
    return is_phi3 and vocabulary.model == "llama" and content not in _PHI3_UNSTRIPPED


def _post_processor(vocabulary: Vocabulary) -> object:
    """Adds the first and the last token to a text, as the metadata say."""
    bos = vocabulary.token_id("bos_token_id")
    eos = vocabulary.token_id("eos_token_id")
    adds_bos = vocabulary.model in ("llama", "gemma4")
    has_bos = vocabulary.flag("add_bos_token", adds_bos) and bos is not None
    has_eos = vocabulary.flag("add_eos_token", False) and eos is not None
    if not has_bos and not has_eos:
        return None
    names = {
        token_id: vocabulary.tokens[token_id] for token_id in (bos, eos) if token_id is not None
    }
    before = [_special(names[bos])] if has_bos and bos is not None else []
    after = [_special(names[eos])] if has_eos and eos is not None else []
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [*before, first, *after],
        "pair": [*before, first, *after, *before, second, *after],
        "special_tokens": {
            name: {"id": name, "ids": [token_id], "tokens": [name]}
            for token_id, name in names.items()
        },
    }


def _special(name: str) -> dict[str, object]:
    return {"SpecialToken": {"id": name, "type_id": 0}}
