"""`ControlTokens`: which added tokens are control tokens; `RenamedControls`: a tokenizer in which
user text cannot spell them. Invariant: it gives text without control tokens the original's ids.
"""

import json
import re
import secrets
from typing import TYPE_CHECKING, Any, cast

from cadenza.errors import InvalidRequestError
from cadenza.text.tokens.provenance import MarkedText

if TYPE_CHECKING:
    from tokenizers import Encoding
    from tokenizers import Tokenizer as NativeTokenizer

_SPACE_MARK = "▁"
_UNKNOWN = "\ufdd0"  # a Unicode noncharacter, which no vocabulary contains


class ControlTokens:
    """The special tokens, and all other added tokens but ordinary text: those of only letters,
    digits and white space."""

    __slots__ = ("content_of", "unknown_ids")

    content_of: dict[int, str]  # token id to text
    unknown_ids: set[int]  # those that the model emits for unknown characters

    def __init__(self, native: "NativeTokenizer") -> None:
        added = native.get_added_tokens_decoder()
        self.content_of = {
            index: token.content
            for index, token in added.items()
            if token.content and (token.special or not _is_text(token.content))
        }
        self.unknown_ids = _find_unknown_ids(native) & self.content_of.keys()

    def may_be_forged(self, encoding: "Encoding", ids: list[int], text: MarkedText) -> bool:
        """A cheap test before `is_forged`: False only if that is False. Needs no offsets."""
        return self._is_unknown_forged(text) or (
            not self.content_of.keys().isdisjoint(ids)
            and any(
                token_id in self.content_of and not is_added and token_id not in self.unknown_ids
                for token_id, is_added in zip(ids, encoding.special_tokens_mask, strict=True)
            )
        )

    def has_spelled_control(self, text: MarkedText) -> bool:
        return any(
            content in text and not self._is_all_own(content, text)
            for content in self.content_of.values()
        )

    def positions(self, encoding: "Encoding") -> list[int]:
        """Indices of the control tokens in an encoding that come from its text."""
        ids = encoding.ids
        if self.content_of.keys().isdisjoint(ids):
            return []
        added = encoding.special_tokens_mask
        return [
            index
            for index, token_id in enumerate(ids)
            if token_id in self.content_of
            and not (added[index] and encoding.token_to_chars(index) in (None, (0, 0)))
            and token_id not in self.unknown_ids
        ]

    def is_forged(self, encoding: "Encoding", text: MarkedText) -> bool:
        plain = str.__str__(text)
        for index in self.positions(encoding):
            # A token may include the white space around it, which anyone may write. Offsets are
            # read one by one: the library builds the full list while holding the GIL.
            start, stop = encoding.token_to_chars(index) or (0, 0)
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
    """A copy of a tokenizer in which control tokens have unguessable names, which `rename` inserts
    where the template wrote the tokens; everything else is encoded as text. Raises
    InvalidRequestError where they cannot be renamed."""

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
                    f"the text contains the text of a control token ({content!r}), and this "
                    f"tokenizer cannot encode it as plain text; leave it out"
                )

    def rename(self, text: MarkedText) -> tuple[str, int]:
        """The text for the copy, and the number of `ControlTokens.positions` it must have."""
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
    except BaseException:  # noqa: BLE001 # without an unknown token the library raises or panics
        return set()


def _rename_added_tokens(described: dict[str, Any], name_of: dict[str, str]) -> None:
    for token in described["added_tokens"]:
        if token["content"] in name_of:
            token["content"] = name_of[token["content"]]
            token["normalized"] = False


def _rename_pieces(model: dict[str, Any], name_of: dict[str, str]) -> None:
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
