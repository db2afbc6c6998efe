"""`max_chars_per_token`. Invariant: if the bound is n, a text of more than n * k characters has
more than k tokens. There is none if a part of the tokenizer may drop characters, or merge any
number into one.
"""

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from tokenizers import Tokenizer as NativeTokenizer

MAX_COMPOSED_CHARS = 4
"""Length of Unicode's longest canonical decomposition: NFC merges at most this many characters."""

_NUM_BYTES = 256
_BYTE_LEVEL = "ByteLevel"


def max_chars_per_token(native: "NativeTokenizer") -> int | None:
    """The length of the longest token times the most characters that the normalizer merges; None
    for other tokenizers than BPE in which every byte of the text belongs to exactly one token."""
    merged = _max_merged_chars(_described(native.normalizer))
    if merged is None or not _has_all_bytes(native):
        return None
    added = native.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None  # such a token includes any amount of white space next to it
    return merged * max(map(len, native.get_vocab(with_added_tokens=True)), default=1)


def _has_all_bytes(native: "NativeTokenizer") -> bool:
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    model: Any = native.model
    if not isinstance(model, BPE):
        return False
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return False  # bytes are looked up with the prefix or suffix attached
    splitters = list(_parts(_described(native.pre_tokenizer), "pretokenizers"))
    for splitter in splitters:
        if splitter["type"] not in ("Split", "Digits", "Metaspace", _BYTE_LEVEL):
            return False
        if splitter.get("behavior") == "Removed":
            return False
    byte_tokens = ByteLevel.alphabet()
    if not any(splitter["type"] == _BYTE_LEVEL for splitter in splitters):
        if not model.byte_fallback:
            return False
        byte_tokens = [f"<0x{byte:02X}>" for byte in range(_NUM_BYTES)]
    return all(native.token_to_id(token) is not None for token in byte_tokens)


def _max_merged_chars(normalizer: dict[str, Any] | None) -> int | None:
    """The most characters that the normalizer may merge into one; None if unbounded or unknown."""
    worst = 1
    for part in _parts(normalizer, "normalizers"):
        if part["type"] == "NFC":
            worst *= MAX_COMPOSED_CHARS
        elif part["type"] == "Replace":
            pattern = part["pattern"].get("String")
            if pattern is None or len(part["content"]) < len(pattern):
                return None
        elif part["type"] not in ("Prepend", "NFD", _BYTE_LEVEL):
            return None
    return worst


def _parts(described: dict[str, Any] | None, members: str) -> Iterable[dict[str, Any]]:
    if described is None:
        return
    if described["type"] != "Sequence":
        yield described
        return
    for part in described[members]:
        yield from _parts(part, members)


def _described(part: Any) -> dict[str, Any] | None:
    return None if part is None else cast(dict[str, Any], json.loads(part.__getstate__()))
