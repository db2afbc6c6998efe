"""Values that a JSON Schema lists, or has few of: `few_values` and `satisfies_bounds`.

Knows no grammar. Invariant: a value that is returned satisfies what of the schema was looked at.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any

from cadenza.text.schemas.schema_merge import Schema, UnsupportedSchemaError, is_of_type, types_of

MAX_UNIQUE = 64
"""Values that the items of a list without repetition may have: the bits of a rule's parameter."""

_SIMPLE: Mapping[str, Callable[[Any, Any], bool]] = {
    "minLength": operator.ge,
    "maxLength": operator.le,
    "minimum": operator.ge,
    "maximum": operator.le,
    "exclusiveMinimum": operator.gt,
    "exclusiveMaximum": operator.lt,
}
"""Keywords that may stand beside an enum."""


def satisfies_bounds(value: object, schema: Schema) -> bool:
    """Whether a value is of the types and within the bounds that stand beside it."""
    if not _SIMPLE.keys() >= schema.keys() - {"type"}:
        raise UnsupportedSchemaError
    if not is_of_type(value, types_of(schema)):
        return False
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    for name, bound in schema.items():
        if name != "type":
            measured = len(value) if isinstance(value, str) and name.endswith("Length") else value
            applies = isinstance(value, str) if name.endswith("Length") else is_number
            if isinstance(bound, bool):
                raise UnsupportedSchemaError
            if applies and not _SIMPLE[name](measured, bound):
                return False
    return True


def few_values(schema: Schema) -> list[object] | None:
    if "enum" in schema:
        return [each for each in schema["enum"] if is_of_type(each, types_of(schema))]
    types = types_of(schema)
    if types <= {"null", "boolean"}:
        return [
            *([None] if "null" in types else []),
            *([False, True] if "boolean" in types else []),
        ]
    low, high = schema.get("minimum"), schema.get("maximum")
    bounds = {"exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
    if types != {"integer"} or low is None or high is None or bounds & schema.keys():
        return None
    first, last = -int(-low // 1), int(high // 1)
    return list(range(first, last + 1)) if last - first < MAX_UNIQUE else None
