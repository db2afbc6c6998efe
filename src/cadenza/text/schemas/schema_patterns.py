"""`narrow_texts`: patterns and formats of one schema, as a grammar can hold them.

Invariant: no replacement allows a text that its pattern does not.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

_LEAP_DAY = r"(([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29)"
_DATE = rf"([0-9]{{4}}-(0[13-9]|1[0-2])-|[0-9]{{4}}-02-([01]|2[0-8])|{_LEAP_DAY})"
_SECONDS = r"[^:]*:[^:]*:[0-5][0-9](\.[0-9]{1,9})?[zZ+\-]"

FORMAT_PATTERNS: Mapping[str, str] = {
    "date": f"^{_DATE}",
    "time": f"^{_SECONDS}",
    "date-time": f"^{_DATE}{_SECONDS}",
}
"""What texts of a format must match as well. The library's own expressions allow second 60 at any
minute, 29 February in any year, and any number of digits behind a second."""

FORMATS = frozenset(
    "date-time time date duration email hostname ipv4 ipv6 uuid uri unknown".split()
)
"""Those that are followed; others are annotations, as JSON Schema has it."""


_LOOKS_AROUND = re.compile(r"(?:[^\\]|^)(?:\\\\)*(?:\(\?<?[=!]|\\[1-9bB]|\\k<)")

_DECIMAL = re.compile(
    r"\^\(\?!\^\[-\+\.\]\*\$\)\[\+-\]\?0\*"
    r"(?:\\d\*\\\.\?\\d\*\$"
    r"|\(\?:\\d\{0,(\d+)\}\|\(\?=\[\\d\.\]\{1,(\d+)\}0\*\$\)\\d\{0,(\d+)\}\\\.\\d\{0,(\d+)\}0\*\$\))"
)
"""As pydantic writes the texts of decimals: with at least one digit, or with so many of them."""

_EMAIL = re.compile(
    r"\^\(\?!\\\.\)\(\?!\.\*\\\.\\\.\)\(\[(A-Za-z|A-Z)0-9_'\+\\-\\\.\]\*\)"
    r"\[\1(?:0-9)?_\+-?\\?-\]@\(\[\1(?:0-9)?\]\[\1(?:0-9)?\\-\]\*\\\.\)\+\[\1\]\{2,\}\$"
)
"""As zod writes an address: no point at the begin of its first part, and no two in a row."""


def narrow_texts(
    schema: dict[str, Any], unenforced: dict[str, None], annotations: dict[str, None]
) -> None:
    """Replaces a schema's pattern, and adds its format's; names what is not followed."""
    name = schema.get("format")
    if isinstance(name, str) and name not in FORMATS:
        del schema["format"]
        annotations[name] = None
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and _LOOKS_AROUND.search(pattern):
        equal = without_looking(pattern)
        schema["pattern"] = equal
        if equal is None:
            del schema["pattern"]
            unenforced["pattern"] = None
    added = FORMAT_PATTERNS.get(name) if isinstance(name, str) else None
    if added is None:
        return
    if "pattern" not in schema:
        schema["pattern"] = added
    elif isinstance(schema.setdefault("allOf", []), list):
        schema["allOf"].append({"pattern": added})


def without_looking(pattern: str) -> str | None:
    """An equal pattern that does not look around, or one for less; None if none is known."""
    for known, replaced in _REPLACED:
        found = known.fullmatch(pattern)
        if found is not None:
            return replaced(found)
    return None


def _decimal(found: "re.Match[str]") -> str | None:
    total, digits, whole, fraction = found.groups()
    if total is None:
        return r"^[+-]?([0-9]{1,19}(\.[0-9]{0,17})?|\.[0-9]{1,17})$"
    if int(digits) < int(whole) + int(fraction) + 1:
        return rf"^[+-]?[0-9]{{1,{total}}}$"
    parts = rf"[0-9]{{1,{whole}}}(\.[0-9]{{0,{fraction}}})?|\.[0-9]{{1,{fraction}}}"
    return rf"^[+-]?({parts})$" if int(whole) and int(fraction) else None


def _email(found: "re.Match[str]") -> str:
    letters = found.group(1)
    part, last = rf"[{letters}0-9_'+\-]", rf"[{letters}0-9_+\-]"
    domain = rf"([{letters}0-9][{letters}0-9\-]*\.)+[{letters}]{{2,}}"
    return rf"^({part}+\.)*{part}*{last}@{domain}$"


_REPLACED: tuple[tuple["re.Pattern[str]", Callable[["re.Match[str]"], str | None]], ...] = (
    (_DECIMAL, _decimal),
    (_EMAIL, _email),
)
