"""Incremental versions of tokenizer.json's decoder steps: on tokens (`TokenStage`) before `Fuse` or
`ByteLevel` join them, and on parts of the text (`TextStage`) after. Invariant: a stage's joined
output equals the library's for the complete input; output is final, and emitted as early as that
allows."""

import codecs
import re
from collections.abc import Callable
from functools import reduce
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile(r"<0x(?:[0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")
_NUM_BYTE_TOKEN_CHARS = 6

Changes = tuple[tuple[str, str], ...]  # (old, new) replacements, applied in order

CLEANUPS: Changes = (  # the replacements of the `cleanup` option of WordPiece and CTC
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

TokenEdit = Callable[[str, bool], str]  # a token, and whether it is the stream's first

Decode = Callable[[list[str]], str]  # by one step of the library's decoder


class TokenStage(Protocol):
    """A step that maps tokens to tokens."""

    def push(self, token: str) -> list[str]: ...

    def flush(self) -> list[str]: ...


class TextStage(Protocol):
    """A step that maps the parts of a text to the parts of the edited text."""

    def push(self, text: str) -> str: ...

    def flush(self) -> str: ...


def replace_all(text: str, changes: Changes) -> str:
    return reduce(lambda changed, change: changed.replace(*change), changes, text)


class EditTokens:
    """Edits each token by itself."""

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
    """Decodes runs of byte tokens such as <0xE2>, at a run's end: one invalid byte turns all into
    U+FFFD."""

    __slots__ = ("_run",)

    def __init__(self) -> None:
        self._run = bytearray()

    def push(self, token: str) -> list[str]:
        if _BYTE_TOKEN.fullmatch(token):
            self._run.append(int(token[3:5], 16))
            return []
        return [*self.flush(), token] if self._run else [token]

    def drop_incomplete(self) -> None:
        try:
            whole = codecs.getincrementaldecoder("utf-8")().decode(bytes(self._run))
        except UnicodeDecodeError:
            return
        del self._run[len(whole.encode()) :]

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
    """`BPEDecoder`: replaces the suffix by a space, and by nothing in the last token, so a token
    waits for the next."""

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
    """`CTC`: drops repeated tokens, edits the others, and drops those that become empty."""

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
    """`ByteLevel`: each character of a token is a byte; incomplete UTF-8 sequences are held."""

    __slots__ = ("_utf8",)

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, text: str) -> str:
        try:
            data = bytes([BYTE_OF_CHARACTER[character] for character in text])
        except KeyError:  # an added token, which is not in the byte alphabet
            data = text.encode("utf-8")
        return self._utf8.decode(data)

    def drop_incomplete(self) -> None:
        self._utf8.reset()

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class ReplaceText:
    """Replaces `old` by `new`; text that may be the beginning of an `old` is held."""

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
    """Strips up to `start` and `stop` copies of the character `content` from the text's ends."""

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
        pending = self._content * self._num_held + text
        num_trailing = len(pending) - len(pending.rstrip(self._content))
        self._num_held = min(num_trailing, self._stop)
        return pending[: len(pending) - self._num_held]

    def flush(self) -> str:
        return ""


class ByteLevelText:
    """`ByteLevel` over the joined text: bytes only if every character is in the byte alphabet.
    Leading printable ASCII reads the same either way; the rest is held until the first other
    character."""

    __slots__ = ("_drops", "_held", "_is_text")

    def __init__(self) -> None:
        self._held: list[str] = []
        self._is_text = False
        self._drops = False

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

    def drop_incomplete(self) -> None:
        self._drops = True

    def flush(self) -> str:
        joiner = JoinBytes()
        text = joiner.push("".join(self._held))
        return text if self._drops else text + joiner.flush()


class ByteFallbackText:
    """`ByteFallback` over the joined text: decoded only if all of the text is one byte token."""

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


class BufferedText:
    """A step that needs the complete text, such as a regular expression: emits only at the end."""

    __slots__ = ("_decode", "_parts")

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._parts: list[str] = []

    def push(self, text: str) -> str:
        self._parts.append(text)
        return ""

    def flush(self) -> str:
        return self._decode(["".join(self._parts)])


def _byte_alphabet() -> dict[str, int]:  # GPT-2's: printable Latin-1 as is, the rest from U+0100
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_alphabet()
_PLAIN = "".join(map(chr, range(0x21, 0x7F)))  # which maps to itself in the byte alphabet


def bytes_of_token(token: str) -> bytes | None:
    """The bytes that an entry of a vocabulary of bytes stands for; None if it is another one."""
    if _BYTE_TOKEN.fullmatch(token):
        return bytes([int(token[3:5], 16)])
    if any(character not in BYTE_OF_CHARACTER for character in token):
        return None
    return bytes([BYTE_OF_CHARACTER[character] for character in token])
