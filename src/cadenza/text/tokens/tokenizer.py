"""Text to token ids and back: `Tokenizer`, over tokenizer.json and the `tokenizers` library.
Invariant: control tokens in a prompt come from the tokenizer or from a template, never from user
text."""

import json
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cadenza.errors import CheckpointError, InvalidRequestError, TextTooLongError, show_size
from cadenza.text.tokens.control_tokens import ControlTokens, RenamedControls
from cadenza.text.tokens.provenance import MarkedText

if TYPE_CHECKING:
    from tokenizers import AddedToken, Encoding
    from tokenizers import Tokenizer as NativeTokenizer

MAX_COMPOSED_CHARS = 4
"""Length of Unicode's longest canonical decomposition: NFC merges at most this many characters."""

_NUM_BYTES = 256
_BYTE_LEVEL = "ByteLevel"


def max_chars_per_token(native: "NativeTokenizer") -> int | None:
    """The length of the longest token times the most characters that the normalizer merges: a text
    of more than k times that has more than k tokens. None for other tokenizers than BPE in which
    every byte of the text belongs to exactly one token."""
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


MAX_TOKENIZER_BYTES = 64 << 20
SHORT_TEXT = 2048
"""Texts of at most this many characters are encoded with the GIL held: releasing it costs more."""

_UNENCODABLE = "this text; its tokenizer.json has no token for a part of it"


@dataclass(frozen=True, kw_only=True)
class TokenizerSource:
    """A tokenizer.json that is not a file of its own, made by `read` from the file `name`."""

    name: str
    read: Callable[[], bytes]

    # Kept until `release`: it takes a quarter of a second to make, and a start needs it several
    # times.
    @cached_property
    def content(self) -> bytes:
        return self.read()

    @cached_property
    def num_bytes(self) -> int:
        return len(self.content)

    def release(self) -> None:
        vars(self).pop("content", None)


class Tokenizer:
    """Thread-safe. Raises CheckpointError where the file is missing, too large or no tokenizer."""

    __slots__ = (
        "_added",
        "_controls",
        "_max_chars_per_token",
        "_native",
        "_renamed",
        "special_token_ids",
    )

    special_token_ids: frozenset[int]

    def __init__(self, source: Path | TokenizerSource) -> None:
        self._native = _open_native(source)
        self._renamed: RenamedControls | None = None
        self._added: dict[int, AddedToken] = self._native.get_added_tokens_decoder()
        self.special_token_ids = frozenset(
            index for index, token in self._added.items() if token.special
        )
        self._controls = ControlTokens(self._native)
        self._max_chars_per_token = max_chars_per_token(self._native)

    @property
    def vocab_size(self) -> int:
        """With added tokens. Ids may have gaps."""
        return self._native.get_vocab_size(with_added_tokens=True)

    def vocabulary(self) -> dict[str, int]:
        return self._native.get_vocab(with_added_tokens=True)

    @property
    def added_tokens(self) -> dict[str, int]:
        return {token.content: index for index, token in self._added.items()}

    def id_of(self, content: str) -> int | None:
        return self._native.token_to_id(content)

    def token_of(self, token_id: int) -> str | None:
        """A token's vocabulary entry, the input of the decoder; None for an unused id."""
        return self._native.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_num_tokens: int | None = None
    ) -> list[int]:
        """Token ids. Text that spells a control token becomes that token only where a template
        wrote it (`MarkedText`); elsewhere it is encoded as text. `add_special_tokens`: the
        tokenizer's own around the text, such as bos. Raises TextTooLongError: there are more than
        `max_num_tokens`, which the number of characters may show; raises InvalidRequestError: the
        text is not valid Unicode or cannot be encoded."""
        _check_unicode(text)
        if max_num_tokens is not None:
            self._check_chars(text, max_num_tokens)
        marked = text if isinstance(text, MarkedText) else MarkedText(text)
        ids = self._encode_marked(marked, add_special_tokens, max_num_tokens)
        if max_num_tokens is not None and len(ids) > max_num_tokens:
            raise _too_long(len(ids), max_num_tokens)
        return ids

    def encode_pair(
        self, first: str, second: str, *, max_num_tokens: int | None = None
    ) -> list[int]:
        """Ids of two texts, with the tokenizer's own tokens for a pair; raises as `encode`."""
        with _tokenizer_errors(_UNENCODABLE):
            shown = self._native.encode("a", "a")
        before, between, behind = list[int](), list[int](), list[int]()
        part = before
        for token_id, sequence in zip(shown.ids, shown.sequence_ids, strict=True):
            if sequence is None:
                part.append(token_id)
            else:
                part = behind if sequence else between
        texts = [
            self.encode(text, add_special_tokens=False, max_num_tokens=max_num_tokens)
            for text in (first, second)
        ]
        ids = [*before, *texts[0], *between, *texts[1], *behind]
        if max_num_tokens is not None and len(ids) > max_num_tokens:
            raise _too_long(len(ids), max_num_tokens)
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Unused ids are skipped. Raises InvalidRequestError if the decoder fails."""
        known = [token_id for token_id in token_ids if 0 <= token_id < 1 << 32]
        with _tokenizer_errors("these tokens; its decoder cannot handle them"):
            return self._native.decode(known, skip_special_tokens=skip_special_tokens)

    def decoder_description(self) -> dict[str, object] | None:
        decoder = self._native.decoder
        if decoder is None:
            return None
        return cast(dict[str, object], json.loads(decoder.__getstate__()))

    def _check_chars(self, text: str, max_num_tokens: int) -> None:
        most = self._max_chars_per_token
        if most is not None and len(text) > most * max_num_tokens:
            raise TextTooLongError(
                f"the text has {len(text)} characters, which do not fit {max_num_tokens} tokens of "
                f"at most {most} characters each; shorten it",
                num_tokens=None,
                length=f"at least {-(-len(text) // most)} tokens ({len(text)} characters)",
            )

    def _encode_marked(
        self, marked: MarkedText, add_special_tokens: bool, max_num_tokens: int | None
    ) -> list[int]:
        # `Encoding.ids` builds a list under the GIL, so the length is checked before that.
        found = self._encode(self._native, str.__str__(marked), add_special_tokens)
        if max_num_tokens is not None and len(found) > max_num_tokens:
            if self._controls.has_spelled_control(marked):
                found, _ = self._renamed_encoding(marked, add_special_tokens)
            if len(found) > max_num_tokens:
                raise _too_long(len(found), max_num_tokens)
            return self._encode_renamed(marked, add_special_tokens)
        ids = found.ids
        if not self._controls.may_be_forged(found, ids, marked):
            return ids
        if marked.own_spans:
            placed = self._encode_placed(self._native, str.__str__(marked), add_special_tokens)
            if not self._controls.is_forged(placed, marked):
                return ids
        return self._encode_renamed(marked, add_special_tokens)

    def _encode_renamed(self, marked: MarkedText, add_special_tokens: bool) -> list[int]:
        encoding, num_controls = self._renamed_encoding(marked, add_special_tokens)
        if len(self._controls.positions(encoding)) != num_controls:
            raise InvalidRequestError(
                "the text contains the text of a control token, which this tokenizer cannot "
                "encode as plain text; leave it out"
            )
        return encoding.ids

    def _renamed_encoding(
        self, marked: MarkedText, add_special_tokens: bool
    ) -> "tuple[Encoding, int]":
        if self._renamed is None:
            self._renamed = RenamedControls(self._native, self._controls)
        text, num_controls = self._renamed.rename(marked)
        return self._encode(self._renamed.native, text, add_special_tokens), num_controls

    @staticmethod
    def _encode(native: "NativeTokenizer", text: str, add_special_tokens: bool) -> "Encoding":
        with _tokenizer_errors(_UNENCODABLE):
            if len(text) <= SHORT_TEXT:
                return native.encode(text, add_special_tokens=add_special_tokens)
            # Only batch calls release the GIL; without offsets they take a third of the time.
            return native.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]

    @staticmethod
    def _encode_placed(
        native: "NativeTokenizer", text: str, add_special_tokens: bool
    ) -> "Encoding":
        with _tokenizer_errors(_UNENCODABLE):
            return native.encode_batch([text], add_special_tokens=add_special_tokens)[0]


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"the text has a lone surrogate at character {error.start}; send valid Unicode"
        ) from error


def _too_long(num_tokens: int, max_num_tokens: int) -> TextTooLongError:
    return TextTooLongError(
        f"the text has {num_tokens} tokens; at most {max_num_tokens} are allowed: shorten it",
        num_tokens=num_tokens,
        length=f"{num_tokens} tokens",
    )


@contextmanager
def _tokenizer_errors(subject: str) -> Generator[None]:
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library's panics do not derive from `Exception`
        raise InvalidRequestError(f"the model's tokenizer fails on {subject}") from error


def _open_native(source: Path | TokenizerSource) -> "NativeTokenizer":
    from tokenizers import Tokenizer as NativeTokenizer

    content = _read_file(source) if isinstance(source, Path) else source.content
    if len(content) > MAX_TOKENIZER_BYTES:
        raise _too_large(source.name)
    try:
        native = NativeTokenizer.from_buffer(content)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library's panics do not derive from `Exception`
        raise CheckpointError(
            f"{source.name} is not a tokenizer that can be read; fetch the file again"
        ) from error
    native.no_truncation()
    native.no_padding()
    return native


def _read_file(path: Path) -> bytes:
    if not path.is_file():
        raise CheckpointError(f"the model folder has no {path.name}, which text prompts need")
    if path.stat().st_size > MAX_TOKENIZER_BYTES:
        raise _too_large(path.name)
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from error


def _too_large(name: str) -> CheckpointError:
    return CheckpointError(
        f"{name} has over {show_size(MAX_TOKENIZER_BYTES)}; check that it is the right file"
    )


def bad_word_token_ids(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """The token sequences to ban: each word encoded alone and after a space, in its usual
    tokenization. Raises InvalidRequestError where a word encodes to no tokens."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip() or word
        spellings = [
            tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (bare, f" {bare}")
        ]
        if not spellings[0]:
            raise InvalidRequestError(
                f"the bad word {word!r} has no tokens in this model's vocabulary; leave it out",
                param="bad_words",
            )
        found.update(dict.fromkeys(spellings))
    # Sequences that end with another banned one can never be completed.
    shortest_first = sorted(found, key=len)
    return tuple(
        ids
        for index, ids in enumerate(shortest_first)
        if not any(ids[-len(short) :] == short for short in shortest_first[:index])
    )
