"""`compile_schema`: a JSON Schema, given as text, becomes a grammar, by our own compiler or, for
rare combinations, the grammar library's. Invariant: a grammar allows no text that the schema does
not, but for the keywords that it names as unenforced.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from urllib.parse import unquote

from cadenza.errors import InvalidRequestError
from cadenza.structured import JsonStyle
from cadenza.text.schemas.json_rules import library_options
from cadenza.text.schemas.schema_grammar import SchemaGrammar
from cadenza.text.schemas.schema_merge import UnsatisfiableError, UnsupportedSchemaError

NO_TEXT = "no text can satisfy it; loosen what it asks for together"
MAX_DEPTH = 64  # levels of objects and lists within each other; also the bound of request bodies
MAX_LEVELS_CHARS = 100_000  # of the rules of all levels of what refers to itself
MIN_LEVELS = 2
UNENFORCEABLE = (  # keywords that no grammar holds
    *("not", "if", "then", "else", "contains", "minContains", "maxContains"),
    *("dependentSchemas", "dependentRequired", "dependencies", "unevaluatedItems"),
)

_IDENTIFIERS = frozenset({"$id", "id", "$anchor", "$dynamicRef", "$dynamicAnchor"})
_FALLBACK_ONLY = ("uniqueItems", "propertyNames", "unevaluatedProperties")
"""Keywords that the library does not hold, and `SchemaGrammar` does in part."""

_ONE_SCHEMA = (
    *("items", "additionalProperties", "additionalItems", "not", "if", "then", "else"),
    *("contains", "propertyNames", "unevaluatedItems", "unevaluatedProperties"),
)
_SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")

_Schema = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonGrammar:
    """A schema as the grammar library reads it, and what is not followed."""

    text: str
    unenforced: tuple[str, ...] = ()  # keywords
    annotations: tuple[str, ...] = ()  # formats


def compile_schema(text: str, style: JsonStyle, *, is_strict: bool) -> JsonGrammar:
    """`is_strict`: refuse a keyword that the grammar does not hold. Raises InvalidRequestError."""
    schema = parse_schema(text)
    unenforced: dict[str, None] = {}
    annotations: dict[str, None] = {}
    if isinstance(schema, dict):
        _check_bounds(schema)
        for each in [*_subschemas(schema)]:
            _prepare(each, unenforced, annotations)
    grammar = _compiled(schema, style, unenforced)
    if is_strict and unenforced:
        raise _refused(
            f"uses {', '.join(unenforced)}, which cannot be enforced; leave it out, or leave out "
            f"strict, so that the answer is checked at its end"
        )
    return JsonGrammar(text=grammar, unenforced=tuple(unenforced), annotations=tuple(annotations))


def parse_schema(text: str) -> _Schema | bool:
    try:
        parsed: object = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise _refused("is not valid JSON, or is nested too deep") from None
    if parsed is True:
        return True
    if not isinstance(parsed, dict):
        raise _refused("is neither an object nor true")
    return cast(_Schema, parsed)


def _refuse_constant(name: str) -> object:
    raise ValueError(name)


def _check_bounds(schema: _Schema) -> None:
    if "x-guidance" in schema:
        raise _refused("has x-guidance, which is not a keyword here; leave it out")
    if _is_deeper_than(MAX_DEPTH, schema):
        raise _refused(f"is nested more than {MAX_DEPTH} levels deep, the most that is allowed")
    ending: set[str] = set()
    for each in _subschemas(schema):
        _check_references(schema, each, ending)


def _prepare(schema: _Schema, unenforced: dict[str, None], annotations: dict[str, None]) -> None:
    for name in UNENFORCEABLE:
        if name in schema:
            del schema[name]
            unenforced[name] = None
    narrow_texts(schema, unenforced, annotations)


def _compiled(schema: _Schema | bool, style: JsonStyle, unenforced: dict[str, None]) -> str:
    def resolve(name: str) -> object:
        found = resolve_reference(cast(_Schema, schema), name)
        if found is None:
            raise UnsupportedSchemaError
        return found

    left_out: dict[str, None] = {}
    draft = str(schema.get("$schema", "")) if isinstance(schema, dict) else ""
    make = partial(
        SchemaGrammar,
        style,
        resolve,
        left_out.setdefault,
        ignores_siblings="draft-0" in draft,
    )
    try:
        if isinstance(schema, dict) and _has_identifiers(schema):
            raise UnsupportedSchemaError
        lark = _bounded(schema, style, make)
    except UnsatisfiableError as error:
        raise _refused(f"is refused: {_impossible(error)}") from None
    except UnsupportedSchemaError:
        return _by_the_library(cast(_Schema, schema), style, unenforced)
    unenforced |= left_out
    return library().grammar_from_lark(lark)


def _bounded(schema: _Schema | bool, style: JsonStyle, make: Callable[[], SchemaGrammar]) -> str:
    """With bounded levels of references within themselves, unless the rules of two levels would be
    too many, or no text has so few levels."""
    compiler = make()
    lark = compiler.compile(schema)
    if style.max_depth is None or not compiler.recursive:
        return lark
    levels = min(style.max_depth, MAX_LEVELS_CHARS // len(lark))
    if levels < MIN_LEVELS:
        return lark
    try:
        return make().compile_levels(schema, compiler.recursive, levels)
    except (UnsatisfiableError, UnsupportedSchemaError):
        return lark


def _impossible(error: UnsatisfiableError) -> str:
    return NO_TEXT.replace("; loosen", f": {error.args[0]}; loosen") if error.args else NO_TEXT


def _by_the_library(schema: _Schema, style: JsonStyle, unenforced: dict[str, None]) -> str:
    """Blanks stand after commas and colons only, and nothing is bounded that the schema does not
    bound."""
    overrides = library_options(style)
    for each in [*_subschemas(schema)]:
        for name in _FALLBACK_ONLY:
            if name in each and (each.pop(name) or name != "uniqueItems"):
                unenforced[name] = None
        if "oneOf" in each:
            overrides |= {"coerce_one_of": True}
            unenforced["oneOf"] = None
    try:
        return library().grammar_from_json_schema(
            json.dumps(schema, ensure_ascii=False), overrides=overrides
        )
    except ValueError:
        raise _refused("cannot be read; check its keywords") from None


def _has_identifiers(schema: _Schema) -> bool:
    inner = (each for each in _subschemas(schema) if each is not schema)
    return any(not _IDENTIFIERS.isdisjoint(each) for each in inner)


def _refused(problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"the JSON schema {problem}", param="structured")


def _is_deeper_than(depth: int, value: object) -> bool:
    level: list[object] = [value]
    for _ in range(depth):
        level = [inner for each in level for inner in _members(each)]
        if not level:
            return False
    return any(isinstance(each, dict | list) for each in level)


def _members(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        yield from cast(_Schema, value).values()
    elif isinstance(value, list):
        yield from cast(list[object], value)


def _subschemas(schema: _Schema) -> Iterator[_Schema]:
    waiting: list[object] = [schema]
    while waiting:
        each = waiting.pop()
        if not isinstance(each, dict):
            continue
        found = cast(_Schema, each)
        yield found
        waiting += [found.get(name) for name in _ONE_SCHEMA]
        for name in _SCHEMA_LISTS:
            if isinstance(found.get(name), list):
                waiting += found[name]
        for name in _SCHEMA_MAPS:
            if isinstance(found.get(name), dict):
                waiting += found[name].values()


def _check_references(root: _Schema, schema: _Schema, ending: set[str]) -> None:
    """Raises for a reference that leads back to itself with nothing between. `ending`: the
    references that are known to end, to which those found here are added."""
    names: dict[str, None] = {}
    while isinstance(name := schema.get("$ref"), str) and name not in ending:
        if name in names:
            followed = list(names)
            cycle = " -> ".join([*followed[followed.index(name) :], name])
            raise _refused(f"has a $ref that leads back to itself: {cycle[:300]}")
        names[name] = None
        found = resolve_reference(root, name)
        if not isinstance(found, dict):
            break
        schema = cast(_Schema, found)
    ending.update(names)


def resolve_reference(root: _Schema, name: str) -> object:
    """What a pointer within the schema names; None if there is nothing, or it is no pointer."""
    found = cast(object, root)
    if name != "#" and not name.startswith("#/"):
        return None
    for part in unquote(name).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = cast(_Schema, found).get(key)
        elif isinstance(found, list) and key.isascii() and key.isdecimal():
            index, items = int(key[:9]), cast(list[object], found)
            found = items[index] if index < len(items) else None
        else:
            return None
    return found


def library() -> Any:
    # Imported where a request needs it: most have no structured output.
    from llguidance import LLMatcher

    return LLMatcher


_LEAP_DAY = r"(([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29)"
_DATE = rf"([0-9]{{4}}-(0[13-9]|1[0-2])-|[0-9]{{4}}-02-([01]|2[0-8])|{_LEAP_DAY})"
_SECONDS = r"[^:]*:[^:]*:[0-5][0-9](\.[0-9]{1,9})?[zZ+\-]"

# What texts of a format must match as well: the library's own expressions allow second 60 at any
# minute, 29 February in any year, and any number of digits behind a second.
FORMAT_PATTERNS: Mapping[str, str] = {
    "date": f"^{_DATE}",
    "time": f"^{_SECONDS}",
    "date-time": f"^{_DATE}{_SECONDS}",
}

FORMATS = frozenset(  # those that are followed; others are annotations, as JSON Schema has it
    "date-time time date duration email hostname ipv4 ipv6 uuid uri unknown".split()
)


_LOOKS_AROUND = re.compile(r"(?:[^\\]|^)(?:\\\\)*(?:\(\?<?[=!]|\\[1-9bB]|\\k<)")
_DECIMAL = re.compile(  # as pydantic writes decimals: with a digit, or with so many of them
    r"\^\(\?!\^\[-\+\.\]\*\$\)\[\+-\]\?0\*"
    r"(?:\\d\*\\\.\?\\d\*\$"
    r"|\(\?:\\d\{0,(\d+)\}\|\(\?=\[\\d\.\]\{1,(\d+)\}0\*\$\)\\d\{0,(\d+)\}\\\.\\d\{0,(\d+)\}0\*\$\))"
)

_EMAIL = re.compile(  # as zod writes an address: no point at its begin, and no two in a row
    r"\^\(\?!\\\.\)\(\?!\.\*\\\.\\\.\)\(\[(A-Za-z|A-Z)0-9_'\+\\-\\\.\]\*\)"
    r"\[\1(?:0-9)?_\+-?\\?-\]@\(\[\1(?:0-9)?\]\[\1(?:0-9)?\\-\]\*\\\.\)\+\[\1\]\{2,\}\$"
)


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
