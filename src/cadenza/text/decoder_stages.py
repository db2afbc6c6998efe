"""The steps of tokenizer.json's `decoder`, each one incremental.

The library hands a list of tokens from step to step. `Fuse` and `ByteLevel` make it a list of one
token, the whole text. So every step exists twice: before the join it takes tokens (`TokenStage`),
after it the parts of the one text (`TextStage`). Knows nothing of vocabularies or requests.
Invariant: what a stage gives for all of its input, put together, is what the library's step gives
for that input at once; what a stage has given is final, and it gives what it can as early as that
allows.
"""

import codecs
import re
from collections.abc import Callable
from functools import reduce
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_BYTE_TOKEN = re.compile(r"<0x(?:[0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")
_NUM_BYTE_TOKEN_CHARS = 6

Changes = tuple[tuple[str, str], ...]
"""What to replace by what, one after the other."""

CLEANUPS: Changes = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)
"""The `cleanup` of WordPiece and CTC."""

TokenEdit = Callable[[str, bool], str]
"""Edits one token; the flag tells the step's first token."""

Decode = Callable[[list[str]], str]
"""The library's decoder of one step."""


class TokenStage(Protocol):
    """Tokens in, tokens out."""

    def push(self, token: str) -> list[str]: ...

    def flush(self) -> list[str]: ...


class TextStage(Protocol):
    """The parts of one text in, the parts of another one out."""

    def push(self, text: str) -> str: ...

    def flush(self) -> str: ...


def replace_all(text: str, changes: Changes) -> str:
    return reduce(lambda changed, change: changed.replace(*change), changes, text)


class EditTokens:
    """Each token by itself."""

    __slots__ = ("_edit", "_is_first")

    def __init__(self, edit: TokenEdit) -> None:
        self._edit = edit
        self._is_first = True

    def push(self, token: str) -> list[str]:
        edited = self._edit(token, self._is_first)
        self._is_first = False
        return [edited]

    def flush(self) -> list[str]:
        return []


class ByteFallbackTokens:
    """Tokens like <0xE2> are bytes. A run of them is decoded as a whole (one bad byte turns every
    byte of its run into U+FFFD), so that its text is given when the run has ended.
    """

    __slots__ = ("_run",)

    def __init__(self) -> None:
        self._run = bytearray()

    def push(self, token: str) -> list[str]:
        if _BYTE_TOKEN.fullmatch(token):
            self._run.append(int(token[3:5], 16))
            return []
        return [*self.flush(), token] if self._run else [token]

    def flush(self) -> list[str]:
        if not self._run:
            return []
        run = bytes(self._run)
        self._run.clear()
        try:
            return [run.decode("utf-8")]
        except UnicodeDecodeError:
            return [REPLACEMENT] * len(run)


class SuffixTokens:
    """`BPEDecoder`: the suffix is a space, but in the last token nothing; so a token with it waits
    for the next one.
    """

    __slots__ = ("_held", "_suffix")

    def __init__(self, suffix: str) -> None:
        self._suffix = suffix
        self._held: str | None = None

    def push(self, token: str) -> list[str]:
        given = [] if self._held is None else [self._held.replace(self._suffix, " ")]
        self._held = token if self._suffix in token else None
        return given if self._held is not None else [*given, token]

    def flush(self) -> list[str]:
        held, self._held = self._held, None
        return [] if held is None else [held.replace(self._suffix, "")]


class CTCTokens:
    """A token that equals the one before it is dropped; then each is edited, and dropped if that
    leaves nothing.
    """

    __slots__ = ("_changes", "_previous")

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._previous: str | None = None

    def push(self, token: str) -> list[str]:
        if token == self._previous:
            return []
        self._previous = token
        edited = replace_all(token, self._changes)
        return [edited] if edited else []

    def flush(self) -> list[str]:
        return []


class JoinBytes:
    """`ByteLevel`: every character of a token stands for a byte; an unfinished character waits."""

    __slots__ = ("_utf8",)

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, text: str) -> str:
        try:
            data = bytes([BYTE_OF_CHARACTER[character] for character in text])
        except KeyError:  # an added token, spelt as itself
            data = text.encode("utf-8")
        return self._utf8.decode(data)

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class ReplaceText:
    """Every `old` becomes `new`; what may be the beginning of an `old` waits."""

    __slots__ = ("_held", "_new", "_old")

    def __init__(self, old: str, new: str) -> None:
        self._old, self._new = old, new
        self._held = ""

    def push(self, text: str) -> str:
        *replaced, rest = (self._held + text).split(self._old)
        most = min(len(rest), len(self._old) - 1)
        waiting = next((n for n in range(most, 0, -1) if self._old.startswith(rest[-n:])), 0)
        self._held = rest[len(rest) - waiting :]
        return self._new.join([*replaced, rest[: len(rest) - waiting]])

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


class StripText:
    """Takes `content`, one character, from the start of the text and from its end."""

    __slots__ = ("_content", "_num_held", "_num_strippable", "_stop")

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content, self._num_strippable, self._stop = content, start, stop
        self._num_held = 0

    def push(self, text: str) -> str:
        while self._num_strippable and text:
            if not text.startswith(self._content):
                self._num_strippable = 0
                break
            text = text[1:]
            self._num_strippable -= 1
        if not self._stop:
            return text
        whole = self._content * self._num_held + text
        num_trailing = len(whole) - len(whole.rstrip(self._content))
        self._num_held = min(num_trailing, self._stop)
        return whole[: len(whole) - self._num_held]

    def flush(self) -> str:
        return ""


class ByteLevelText:
    """`ByteLevel` over one token: it is bytes only if all of its characters stand for one.

    ASCII reads the same either way. What follows it waits for the first character that is no byte,
    or for the end.
    """

    __slots__ = ("_held", "_is_text")

    def __init__(self) -> None:
        self._held: list[str] = []
        self._is_text = False

    def push(self, text: str) -> str:
        if self._is_text:
            return text
        if any(character not in BYTE_OF_CHARACTER for character in text):
            self._is_text = True
            held, self._held = self._held, []
            return "".join([*held, text])
        num_plain = 0 if self._held else len(text) - len(text.lstrip(_PLAIN))
        if num_plain < len(text):
            self._held.append(text[num_plain:])
        return text[:num_plain]

    def flush(self) -> str:
        joiner = JoinBytes()
        return joiner.push("".join(self._held)) + joiner.flush()


class ByteFallbackText:
    """`ByteFallback` over one token: it is a byte only if all of the text is like <0xE2>."""

    __slots__ = ("_held", "_is_text")

    def __init__(self) -> None:
        self._held = ""
        self._is_text = False

    def push(self, text: str) -> str:
        if self._is_text:
            return text
        held = self._held + text
        is_open = "<0x".startswith(held[:3]) and len(held) <= _NUM_BYTE_TOKEN_CHARS
        self._held, self._is_text = (held, False) if is_open else ("", True)
        return "" if is_open else held

    def flush(self) -> str:
        tokens = ByteFallbackTokens()
        return "".join([*tokens.push(self._held), *tokens.flush()])


class WholeText:
    """What needs all of the text, say a regular expression over it: nothing is given before the
    end.
    """

    __slots__ = ("_decode", "_parts")

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._parts: list[str] = []

    def push(self, text: str) -> str:
        self._parts.append(text)
        return ""

    def flush(self) -> str:
        return self._decode(["".join(self._parts)])


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: a printable Latin-1 byte is itself, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_alphabet()

_PLAIN = "".join(map(chr, range(0x21, 0x7F)))
"""Characters that stand for the byte that spells them."""
