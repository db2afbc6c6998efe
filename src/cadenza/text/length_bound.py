"""How many characters a token can stand for: `max_chars_per_token`.

Knows the parts of a tokenizer.json that keep every character. Invariant: where a number is given, a
text of more than that number times k characters has more than k tokens; where a part may drop
characters or fold any number of them into one token, there is none.
"""

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from tokenizers import Tokenizer as NativeTokenizer

MAX_COMPOSED_CHARS = 4
"""Unicode's longest canonical decomposition: NFC makes one character of at most so many."""

_NUM_BYTES = 256
_BYTE_LEVEL = "ByteLevel"


def max_chars_per_token(native: "NativeTokenizer") -> int | None:
    """The length of the longest token, times what the normalizer makes one character of.

    It holds for byte-pair encodings of bytes: each byte of the text is in exactly one token, and a
    character has at least one byte.
    """
    shrinking = _shrinking(_described(native.normalizer))
    if shrinking is None or not _keeps_all(native):
        return None
    added = native.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None  # such a token takes any amount of white space with it
    return shrinking * max(map(len, native.get_vocab(with_added_tokens=True)), default=1)


def _keeps_all(native: "NativeTokenizer") -> bool:
    """Whether the model has a token for each byte, so that nothing is unknown to it."""
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    model: Any = native.model
    if not isinstance(model, BPE):
        return False
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return False  # bytes are looked up with these around them
    splitters = list(_parts(_described(native.pre_tokenizer), "pretokenizers"))
    for splitter in splitters:
        if splitter["type"] not in ("Split", "Digits", "Metaspace", _BYTE_LEVEL):
            return False
        if splitter.get("behavior") == "Removed":
            return False
    spelt = ByteLevel.alphabet()
    if not any(splitter["type"] == _BYTE_LEVEL for splitter in splitters):
        spelt = [f"<0x{byte:02X}>" for byte in range(_NUM_BYTES)] if model.byte_fallback else [""]
    return all(native.token_to_id(byte) is not None for byte in spelt)


def _shrinking(normalizer: dict[str, Any] | None) -> int | None:
    """How many characters may become one; None where it cannot be said."""
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
