"""Tokens that steer a model, and how text that only spells them is kept apart from them.

Owns which added tokens are control tokens (`ControlTokens`) and a second tokenizer in which no text
can spell them (`RenamedControls`). Knows nothing of templates. Invariant: the second tokenizer
gives text without control tokens the same ids as the first.
"""

import json
import re
import secrets
from typing import TYPE_CHECKING, Any, cast

from cadenza.errors import InvalidRequestError
from cadenza.text.provenance import MarkedText

if TYPE_CHECKING:
    from tokenizers import Encoding
    from tokenizers import Tokenizer as NativeTokenizer

_SPACE_MARK = "▁"
_UNKNOWN = "\ufdd0"
"""A code point that is never assigned, so that no vocabulary has it."""


class ControlTokens:
    """The special tokens, and the added ones that look like marks.

    An added token of letters, digits and white space alone (runs of spaces, words of another
    language) is a piece of text that happens to be in the list.
    """

    __slots__ = ("content_of", "unknown_ids")

    content_of: dict[int, str]
    unknown_ids: set[int]

    def __init__(self, native: "NativeTokenizer") -> None:
        added = native.get_added_tokens_decoder()
        self.content_of = {
            index: token.content
            for index, token in added.items()
            if token.content and (token.special or not _is_text(token.content))
        }
        self.unknown_ids = _find_unknown_ids(native) & self.content_of.keys()

    def may_be_forged(self, encoding: "Encoding", ids: list[int], text: MarkedText) -> bool:
        """Whether `is_forged` has to be asked, of an encoding that need not know its offsets."""
        return self._is_unknown_forged(text) or (
            not self.content_of.keys().isdisjoint(ids)
            and any(
                token_id in self.content_of and not is_added and token_id not in self.unknown_ids
                for token_id, is_added in zip(ids, encoding.special_tokens_mask, strict=True)
            )
        )

    def are_spelt(self, text: MarkedText) -> bool:
        """Whether somebody else than the template wrote a control token's text."""
        return any(
            content in text and not self._is_all_own(content, text)
            for content in self.content_of.values()
        )

    def positions(self, encoding: "Encoding") -> list[int]:
        """Where an encoding has control tokens that come from its text.

        Those that the tokenizer put around the text do not count, nor does the token for unknown
        characters.
        """
        ids = encoding.ids
        if self.content_of.keys().isdisjoint(ids):
            return []
        added = encoding.special_tokens_mask
        return [
            place
            for place, token_id in enumerate(ids)
            if token_id in self.content_of
            and not (added[place] and encoding.token_to_chars(place) in (None, (0, 0)))
            and token_id not in self.unknown_ids
        ]

    def is_forged(self, encoding: "Encoding", text: MarkedText) -> bool:
        """Whether the encoding has a control token that the template did not write."""
        plain = str.__str__(text)
        for place in self.positions(encoding):
            # A token may take the white space around it, whoever wrote that. (Asked one by one:
            # the list of all offsets is long, and is made without letting other threads run.)
            start, stop = encoding.token_to_chars(place) or (0, 0)
            part = plain[start:stop].strip()
            start = plain.find(part, start)
            if not part or not text.is_own(start, start + len(part)):
                return True
        return self._is_unknown_forged(text)

    def _is_unknown_forged(self, text: MarkedText) -> bool:
        return any(
            self.content_of[index] in text and not self._is_all_own(self.content_of[index], text)
            for index in self.unknown_ids
        )

    def _is_all_own(self, content: str, text: MarkedText) -> bool:
        places = [match.span() for match in re.finditer(re.escape(content), str.__str__(text))]
        return all(text.is_own(start, stop) for start, stop in places)


class RenamedControls:
    """A copy of a tokenizer in which control tokens have names that nobody can guess.

    `rename` puts those names where the template wrote the tokens. Everything else, and so a
    control token that a user spelled, is text to the copy.
    """

    __slots__ = ("_name_of", "_pattern", "_uncounted", "native")

    native: "NativeTokenizer"

    def __init__(self, native: "NativeTokenizer", controls: ControlTokens) -> None:
        self._uncounted = {controls.content_of[index] for index in controls.unknown_ids}
        secret = secrets.token_hex(16)
        self._name_of = {
            content: f"\ue000{secret}.{index}\ue001"
            for index, content in controls.content_of.items()
        }
        longest_first = sorted(self._name_of, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)))
        described = cast(dict[str, Any], json.loads(native.to_str()))
        _rename_added_tokens(described, self._name_of)
        _rename_pieces(described["model"], self._name_of)
        self.native = type(native).from_str(json.dumps(described))
        for index, content in controls.content_of.items():
            if self.native.token_to_id(self._name_of[content]) != index:
                raise InvalidRequestError(
                    f"the text contains the text of a control token, and this tokenizer cannot "
                    f"tell the two apart ({content!r} is not where it was); leave it out"
                )

    def rename(self, text: MarkedText) -> tuple[str, int]:
        """The text for the copy, and how many `ControlTokens.positions` it should have."""
        plain = str.__str__(text)
        parts: list[str] = []
        position = num_controls = 0
        for start, stop in text.own_spans:
            for match in self._pattern.finditer(plain, start, stop):
                parts += [plain[position : match.start()], self._name_of[match[0]]]
                position = match.end()
                num_controls += match[0] not in self._uncounted
        parts.append(plain[position:])
        return "".join(parts), num_controls


def _is_text(content: str) -> bool:
    return all(char.isalnum() or char.isspace() or char == _SPACE_MARK for char in content)


def _find_unknown_ids(native: "NativeTokenizer") -> set[int]:
    try:
        return set(native.encode(_UNKNOWN, add_special_tokens=False).ids)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # noqa: BLE001 # a model without such a token fails, by panic or not
        return set()


def _rename_added_tokens(described: dict[str, Any], name_of: dict[str, str]) -> None:
    for token in described["added_tokens"]:
        if token["content"] in name_of:
            token["content"] = name_of[token["content"]]
            token["normalized"] = False


def _rename_pieces(model: dict[str, Any], name_of: dict[str, str]) -> None:
    """The same in the model's own vocabulary, from which text could get the token as well."""
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        pieces = cast(dict[str, int], vocab)
        model["vocab"] = {name_of.get(piece, piece): index for piece, index in pieces.items()}
    elif isinstance(vocab, list):
        scored = cast(list[tuple[str, float]], vocab)
        model["vocab"] = [[name_of.get(piece, piece), score] for piece, score in scored]
    if model.get("unk_token") in name_of:
        model["unk_token"] = name_of[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [
            merge for merge in model["merges"] if name_of.keys().isdisjoint(_pieces_of(merge))
        ]


def _pieces_of(merge: str | list[str]) -> tuple[str, ...]:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left, right, left + right
