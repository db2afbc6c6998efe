"""`TextParts`: a text, or a list of parts that hold texts, as items and content blocks have them.

Knows no API: the types of the parts and their members are parameters. Invariant: what was checked
are whole texts, and a part that is no text was refused by its type.
"""

from dataclasses import dataclass
from typing import cast

from cadenza.request import show
from cadenza.server.errors import invalid_value, not_built
from cadenza.server.schemas.body import DeclaredObject, ObjectOf
from cadenza.server.schemas.field_types import Schema, String, members_of, refuse

MAX_PARTS = 4096
PART_TEXT = String(max_chars=1 << 26)


@dataclass(frozen=True, slots=True)
class TextParts:
    """Checked into the texts.

    Args:
        types: of the parts that hold a text.
        part: a part's members, of which `type` and `text` are two; a `refusal` stands for a text.
    """

    types: tuple[str, ...]
    part: type[DeclaredObject]

    def check(self, name: str, value: object) -> tuple[str, ...]:
        if isinstance(value, str):
            return (PART_TEXT.check(name, value),)
        if not isinstance(value, list):
            raise refuse(name, value, "a text, or a list of text parts")
        parts = cast(list[object], value)
        if len(parts) > MAX_PARTS:
            raise invalid_value(f"{name} has {len(parts)} parts; at most {MAX_PARTS}", name)
        return tuple(self._text_of(name, part) for part in parts)

    def schema(self) -> Schema:
        parts = {"type": "array", "items": self.part.object_schema(), "maxItems": MAX_PARTS}
        return {"anyOf": [PART_TEXT.schema(), parts]}

    def _text_of(self, name: str, part: object) -> str:
        kind = members_of(part).get("type")
        if isinstance(kind, str) and kind not in self.types:
            raise not_built(name, f"the content part {show(kind)} here")
        values = checked_object(name, part, self.part).values
        return values.get("text") or values.get("refusal") or ""


def checked_object(name: str, value: object, declared: type[DeclaredObject]) -> DeclaredObject:
    """An object with all that it needs. Raises ApiError (400)."""
    found = ObjectOf(declared).check(name, value)
    for needed in declared.required_names:
        if needed not in found.values:
            raise invalid_value(f"{name}.{needed} is missing; it is needed here", name)
    return found
