"""Text from a stream of tokens: `IncrementalDetokenizer`.

Owns the decoding of byte-level and of SentencePiece-style vocabularies token by token, as the
steps that tokenizer.json's `decoder` lists. Knows nothing of stop strings or of requests.
Invariant: whatever the tokens, the parts put together are what `Tokenizer.decode` gives for all
of them; a part that was given out is final. Work per token does not grow with the stream.
"""

import codecs
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, cast

from cadenza.errors import CheckpointError
from cadenza.text.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

TokenEdit = Callable[[str, bool], str]
"""Edits one token's text; the flag tells the stream's first token."""

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class _Joiner(Protocol):
    """Joins edited tokens into text, and keeps back what a later token could change."""

    def push(self, token: str) -> str: ...

    def flush(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderPlan:
    """A tokenizer's decoder in three stages: edits of each token, joining, edits of the whole.

    `stripped` is cut from the start of the whole text, at most `max_stripped` times.
    """

    edits: tuple[TokenEdit, ...] = ()
    joining: Literal["text", "byte_level", "byte_fallback"] = "text"
    stripped: str = ""
    max_stripped: int = 0


class IncrementalDetokenizer:
    """Decodes one stream of tokens.

    Byte-fallback vocabularies decode a run of byte tokens as a whole (one bad byte turns every
    byte of its run into U+FFFD), so that a run's text is given out when the run has ended.

    Raises:
        CheckpointError: the tokenizer's decoder is not one that can be followed step by step.
    """

    __slots__ = ("_is_first", "_joiner", "_num_strippable", "_plan", "_skipped", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._plan = plan_decoder(tokenizer.decoder_description())
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        self._joiner = _new_joiner(self._plan)
        self._num_strippable = self._plan.max_stripped
        self._is_first = True

    def push(self, token_id: int) -> str:
        """The text that is certain now and was not before; often "" in mid-character."""
        token = None if token_id in self._skipped else self._tokenizer.token_of(token_id)
        if token is None:
            return ""
        for edit in self._plan.edits:
            token = edit(token, self._is_first)
        self._is_first = False
        return self._strip(self._joiner.push(token))

    def flush(self) -> str:
        """What was kept back; the stream has ended."""
        return self._strip(self._joiner.flush())

    def _strip(self, text: str) -> str:
        while self._num_strippable and text:
            if not text.startswith(self._plan.stripped):
                self._num_strippable = 0
                break
            text = text[1:]
            self._num_strippable -= 1
        return text


def plan_decoder(description: Mapping[str, object] | None) -> DecoderPlan:
    """Turns tokenizer.json's `decoder` into stages.

    Raises:
        CheckpointError: it has a step, or an order of steps, that has no stages.
    """
    if description is None:
        return DecoderPlan(edits=(_put_space_before,))
    steps = _flatten(description)
    kinds = [cast(str, step["type"]) for step in steps]
    edits: list[TokenEdit] = []
    while steps and kinds[0] in _EDITS:
        edits.append(_EDITS[kinds.pop(0)](steps.pop(0)))
    if kinds == ["ByteLevel"]:
        return DecoderPlan(edits=tuple(edits), joining="byte_level")
    has_fallback = kinds[:1] == ["ByteFallback"]
    rest, kinds = (steps[1:], kinds[1:]) if has_fallback else (steps, kinds)
    joining = "byte_fallback" if has_fallback else "text"
    if kinds in ([], ["Fuse"]):
        return DecoderPlan(edits=tuple(edits), joining=joining)
    if kinds == ["Fuse", "Strip"] and rest[1]["stop"] == 0:
        return DecoderPlan(
            edits=tuple(edits),
            joining=joining,
            stripped=cast(str, rest[1]["content"]),
            max_stripped=cast(int, rest[1]["start"]),
        )
    raise _unsupported(kinds)


def _flatten(description: Mapping[str, object]) -> list[Mapping[str, object]]:
    if description["type"] != "Sequence":
        return [description]
    inner = cast(list[Mapping[str, object]], description["decoders"])
    return [step for part in inner for step in _flatten(part)]


def _unsupported(kinds: list[str]) -> CheckpointError:
    return CheckpointError(
        f"the tokenizer's decoder ends with {' + '.join(kinds)}, which cannot be followed token by "
        f"token; supported are ByteLevel, Metaspace, Replace, ByteFallback, Fuse and a Strip at "
        f"the start; use a tokenizer with one of these"
    )


def _put_space_before(token: str, is_first: bool) -> str:
    return token if is_first else " " + token


def _replace_edit(step: Mapping[str, object]) -> TokenEdit:
    pattern = cast(dict[str, str], step["pattern"])
    if "String" not in pattern:
        raise _unsupported(["Replace with a regular expression"])
    old, new = pattern["String"], cast(str, step["content"])
    if not old:
        raise _unsupported(["Replace of an empty string"])
    return lambda token, _: token.replace(old, new)


def _metaspace_edit(step: Mapping[str, object]) -> TokenEdit:
    mark = cast(str, step["replacement"])
    first = " " if step["prepend_scheme"] == "never" else ""
    return lambda token, is_first: token.replace(mark, first if is_first else " ")


_EDITS: dict[str, Callable[[Mapping[str, object]], TokenEdit]] = {
    "Replace": _replace_edit,
    "Metaspace": _metaspace_edit,
}


def _new_joiner(plan: DecoderPlan) -> _Joiner:
    if plan.joining == "byte_level":
        return _ByteLevelJoiner()
    return _ByteFallbackJoiner() if plan.joining == "byte_fallback" else _TextJoiner()


class _TextJoiner:
    """Every token is text."""

    __slots__ = ()

    def push(self, token: str) -> str:
        return token

    def flush(self) -> str:
        return ""


class _ByteLevelJoiner:
    """Every character of a token stands for a byte; keeps back an unfinished character."""

    __slots__ = ("_utf8",)

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: str) -> str:
        try:
            data = bytes([BYTE_OF_CHARACTER[character] for character in token])
        except KeyError:  # an added token, spelt as itself
            data = token.encode("utf-8")
        return self._utf8.decode(data)

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _ByteFallbackJoiner:
    """Tokens are text, but for those like <0xE2>; keeps back a run of these."""

    __slots__ = ("_run",)

    def __init__(self) -> None:
        self._run = bytearray()

    def push(self, token: str) -> str:
        if _BYTE_TOKEN.fullmatch(token):
            self._run.append(int(token[3:5], 16))
            return ""
        return self.flush() + token

    def flush(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: a printable Latin-1 byte is itself, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_alphabet()
