"""Text to token ids and back: `Tokenizer`, over a tokenizer.json and the `tokenizers` library.

Owns the treatment of special tokens in text. Knows nothing of chat templates or models.
Invariant: with `parse_special=False` no text whatever yields a special token.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from cadenza.errors import CheckpointError, InvalidRequestError

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as NativeTokenizer

MAX_TOKENIZER_BYTES = 64 << 20


class Tokenizer:
    """A tokenizer.json. Thread-safe.

    Raises:
        CheckpointError: the file is absent, too large, or no tokenizer that can be read.
    """

    __slots__ = ("_added", "_native", "_plain", "_special_pattern", "special_token_ids")

    special_token_ids: frozenset[int]

    def __init__(self, path: Path) -> None:
        self._native = _open_native(path)
        self._plain: NativeTokenizer | None = None
        self._added: dict[int, AddedToken] = self._native.get_added_tokens_decoder()
        special = {index: token for index, token in self._added.items() if token.special}
        self.special_token_ids = frozenset(special)
        self._special_pattern = _match_any(list(special.values()))

    @property
    def vocab_size(self) -> int:
        """Entries of the vocabulary, added tokens included. Ids may have gaps."""
        return self._native.get_vocab_size(with_added_tokens=True)

    @property
    def added_tokens(self) -> dict[str, int]:
        """The added tokens, special or not: text to id."""
        return {token.content: index for index, token in self._added.items()}

    def id_of(self, content: str) -> int | None:
        """The id of the token with this text (say the `eos_token` of tokenizer_config.json)."""
        return self._native.token_to_id(content)

    def token_of(self, token_id: int) -> str | None:
        """A token's entry in the vocabulary, as the decoder sees it; `None` for an unused id."""
        return self._native.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Token ids of `text`.

        Args:
            add_special_tokens: put what the tokenizer puts around a text, such as a bos token.
            parse_special: a special token's text becomes that token, as a rendered chat template
                needs it; otherwise it is text like any other, as what a user wrote should be.

        Raises:
            InvalidRequestError: the text is not valid Unicode, or has no plain encoding.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"the text has half a surrogate pair at character {error.start}; "
                f"send whole characters"
            ) from error
        if parse_special or not self._may_hold_special(text):
            return self._native.encode(text, add_special_tokens=add_special_tokens).ids
        return self._encode_plain(text, add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; ids that the vocabulary does not use count as nothing."""
        known = [token_id for token_id in token_ids if 0 <= token_id < 1 << 32]
        return self._native.decode(known, skip_special_tokens=skip_special_tokens)

    def decoder_description(self) -> dict[str, object] | None:
        """The `decoder` of tokenizer.json; `None` if it has none."""
        decoder = self._native.decoder
        if decoder is None:
            return None
        return cast(dict[str, object], json.loads(decoder.__getstate__()))

    def _may_hold_special(self, text: str) -> bool:
        return self._special_pattern is None or self._special_pattern.search(text) is not None

    def _encode_plain(self, text: str, add_special_tokens: bool) -> list[int]:
        if self._plain is None:
            self._plain = _copy_as_plain(self._native)
        inner = self._plain.encode(text, add_special_tokens=False).ids
        if not self.special_token_ids.isdisjoint(inner):
            raise InvalidRequestError(
                "the text contains the text of a special token, which this tokenizer cannot "
                "encode as plain text; leave it out"
            )
        if not add_special_tokens:
            return inner
        return self._plain.encode(text, add_special_tokens=True).ids


def _open_native(path: Path) -> "NativeTokenizer":
    from tokenizers import Tokenizer as NativeTokenizer

    if not path.is_file():
        raise CheckpointError(f"there is no file {path.name}; text needs a tokenizer.json")
    if path.stat().st_size > MAX_TOKENIZER_BYTES:
        raise CheckpointError(
            f"{path.name} has over {MAX_TOKENIZER_BYTES} bytes; check that it is the right file"
        )
    try:
        native = NativeTokenizer.from_file(str(path))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library's panics are no `Exception`
        raise CheckpointError(
            f"{path.name} is not a tokenizer that can be read; fetch the file again"
        ) from error
    native.no_truncation()
    native.no_padding()
    return native


def _copy_as_plain(native: "NativeTokenizer") -> "NativeTokenizer":
    """A second tokenizer to which special tokens are text: the switch is not per call."""
    plain = type(native).from_str(native.to_str())
    plain.encode_special_tokens = True
    return plain


def _match_any(tokens: "list[AddedToken]") -> re.Pattern[str] | None:
    """Finds any of the tokens in text; `None` when that cannot be told from the raw text.

    A normalised token is looked for in normalised text, so that raw text does not show it.
    """
    if any(token.normalized for token in tokens):
        return None
    if not tokens:
        return re.compile(r"(?!)")
    return re.compile("|".join(re.escape(token.content) for token in tokens))
