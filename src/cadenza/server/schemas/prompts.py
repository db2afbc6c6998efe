"""Plain prompts: texts and token ids, one or several.

Owns their bounds. Knows no tokenizer. Invariant: what was checked is one prompt or more, none of
them empty.
"""

from dataclasses import dataclass
from typing import cast

from cadenza.server.errors import invalid_value
from cadenza.server.schemas.field_types import Schema, String, TokenIds, refuse
from cadenza.server.schemas.generation import MAX_CHOICES

MAX_PROMPT_TOKENS = 1 << 24
MAX_PROMPT_CHARS = 1 << 26

PlainPrompt = str | tuple[int, ...]

_TEXT = String(min_chars=1, max_chars=MAX_PROMPT_CHARS)
_IDS = TokenIds(MAX_PROMPT_TOKENS, min_items=1)


@dataclass(frozen=True, slots=True)
class PlainPrompts:
    """A text, token ids, or a list of either; checked into a tuple of prompts."""

    def check(self, name: str, value: object) -> tuple[PlainPrompt, ...]:
        if not isinstance(value, list):
            return (_TEXT.check(name, value),)
        items = cast(list[object], value)
        if items and isinstance(items[0], int | float):
            return (_IDS.check(name, items),)
        if not 1 <= len(items) <= MAX_CHOICES:
            raise invalid_value(
                f"{name} has {len(items)} prompts; from 1 to {MAX_CHOICES} are allowed", name
            )
        return tuple(self._one(name, item) for item in items)

    @staticmethod
    def _one(name: str, item: object) -> PlainPrompt:
        if isinstance(item, str):
            return _TEXT.check(name, item)
        if isinstance(item, list):
            return _IDS.check(name, cast(object, item))
        raise refuse(name, item, "a text, token ids, or a list of texts or of lists of token ids")

    def schema(self) -> Schema:
        text, ids = _TEXT.schema(), _IDS.schema()
        many = {
            "type": "array",
            "items": {"anyOf": [text, ids]},
            "minItems": 1,
            "maxItems": MAX_CHOICES,
        }
        return {"anyOf": [text, ids, many]}
