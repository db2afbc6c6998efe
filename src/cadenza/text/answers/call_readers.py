"""Readers: pure functions of a text and of the functions, which return all its calls, or None where
it is something else. Models deviate from their notation, so readers take what is certain all the
same: raw newlines and unknown escapes in JSON, null or empty arguments, Python's and JSON's true.
"""

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from cadenza.text.answers.argument_schema import (
    NESTING,
    WORDS,
    ArgumentSchema,
    json_text,
    with_known_escapes,
)


class ToolCall(NamedTuple):
    """A call of a function; `arguments` is JSON."""

    name: str
    arguments: str


Functions = Mapping[str, Mapping[str, Any]]
"""The JSON Schemas of the arguments of the functions that may be called, by their names; empty
where they are not known."""

ReadCalls = Callable[[str, Functions], list[ToolCall] | None]

MISTRAL = "[TOOL_CALLS]"
_SEPARATORS = re.compile(r"[\s;]*")
_NAME = re.compile(r"[\w.-]+")
_JSON_CALLS = re.compile(r"\s*(\{|\[\s*[{\]])")
_CALL_ID = re.compile(r"\[CALL_ID\][^\[{]*")
_GEMMA_CALL = re.compile(r"call:([\w.-]+)\{(.*)\}", re.DOTALL)
_JSON_TEXT = r'"(?:[^"\\]|\\.)*+(?:"|\Z)'
_BAR = "\uff5c"
DEEPSEEK_CALLS, DEEPSEEK_CALLS_END, DEEPSEEK_CALL, DEEPSEEK_SEPARATOR, DEEPSEEK_CALL_END = (
    f"<{_BAR}tool▁{name}{_BAR}>"
    for name in ("calls▁begin", "calls▁end", "call▁begin", "sep", "call▁end")
)
_FENCED = re.compile(r"```\w*\s*(.*?)\s*(?:```)?", re.DOTALL)
GEMMA_QUOTE = '<|"|>'
ESCAPE = "<escape>"


def _gemma_parts(quote: str) -> re.Pattern[str]:
    """What is written otherwise than in JSON, and the texts of JSON, in which nothing is."""
    mark = re.escape(quote)
    name = rf'(?:(?!{mark})[^\s"{{}}\[\],:])+'
    return re.compile(
        rf"{mark}(?P<text>.*?){mark}|{_JSON_TEXT}"
        rf"|(?P<before>[{{,]\s*)(?P<name>{name})\s*:|\b(?P<word>None|True|False)\b",
        re.DOTALL,
    )


_GEMMA_PARTS = {quote: _gemma_parts(quote) for quote in (GEMMA_QUOTE, ESCAPE)}
_GAP = r"[ \t\r\n]{0,16}"
XML_ENDS = (
    rf"\n?</parameter>{_GAP}(?:<parameter=|</function>|</tool_call>)"
    rf"|\n?</function>{_GAP}</tool_call>|\n{_GAP}<parameter="
)
"""Where the text of an element ends, even where its own end is not written."""

_XML_FUNCTION = re.compile(r"<function=([^>\s]+)\s*>")
_GLM_NAME = re.compile(r"\s*([\w.-]+)\s*(?=<arg_key>|\Z)")
_PYTHON_MARK = re.compile(
    r"'{3}.*?'{3}|\"{3}.*?\"{3}|'(?:[^'\\]|\\.)*+'|\"(?:[^\"\\]|\\.)*+\"|['\"\[\](){},]", re.DOTALL
)
"""A text, a quote that begins none, a bracket or a comma."""
_PYTHON_CALL = re.compile(r"\s*([\w.-]+)\s*\((.*)\)\s*", re.DOTALL)
_PYTHON_ESCAPE = re.compile(r"""(\b[rR](?:'[^']*'|"[^"]*")|\\[\n\\'"abfnrtvxNuU0-7])|\\""")
"""A raw text or an escape, or a backslash of neither."""
PYTHON_KEY = r"""[^\s=()\[\]{},'"*][^\s=()\[\]{},'"]*"""
_PYTHON_ARGUMENT = re.compile(rf"\s*({PYTHON_KEY})\s*=(?!=)(.*)", re.DOTALL)


def read_objects(text: str, functions: Functions) -> list[ToolCall] | None:
    """JSON: an object, a list of objects, or objects with ";" or blanks between them."""
    del functions
    found = _values(text.strip())
    return None if found is None else _calls_of(found)


def read_hermes(text: str, functions: Functions) -> list[ToolCall] | None:
    return read_objects(text, functions) or read_xml(text, functions)


def read_mistral(text: str, functions: Functions) -> list[ToolCall] | None:
    """A list of objects, or a name, perhaps an id, and arguments, each after the marker."""
    if _JSON_CALLS.match(text):
        return read_objects(text, functions)
    calls: list[ToolCall] = []
    for part in _split(text, MISTRAL):
        head, brace, rest = part.partition("{")
        name = _CALL_ID.sub("", head).replace("[ARGS]", "")
        arguments = json_object_of(brace + rest) if brace else "{}"
        if not _NAME.fullmatch(name.strip()) or arguments is None:
            return None
        calls.append(ToolCall(name.strip(), arguments))
    return calls


def read_pythonic(text: str, functions: Functions) -> list[ToolCall] | None:
    """A Python list of calls with literal keyword arguments, whose names need not be Python's."""
    del functions
    body = text.strip()
    entries = _at_commas(body[1:-1] if body[:1] == "[" and body[-1:] == "]" else body)
    calls = [_python_call(each) for each in entries or ()]
    return [each for each in calls if each is not None] if calls and None not in calls else None


def read_lfm2(text: str, functions: Functions) -> list[ToolCall] | None:
    return read_pythonic(text, functions) or read_objects(text, functions)


def read_deepseek(text: str, functions: Functions) -> list[ToolCall] | None:
    """Calls after marks: a name and its JSON; of V3 and R1 the word `function`, a name, and JSON
    within a code fence."""
    del functions
    before, *calls = _split(text, DEEPSEEK_CALL)
    found = [_deepseek_call(_split(each, DEEPSEEK_CALL_END)[0]) for each in calls]
    if before.strip() or not found or None in found:
        return None
    return [each for each in found if each is not None]


def _deepseek_call(text: str) -> ToolCall | None:
    name, mark, written = text.partition(DEEPSEEK_SEPARATOR)
    if name.strip() == "function":
        name, _, written = written.partition("\n")
    fenced = _FENCED.fullmatch(written.strip())
    body = written if fenced is None else fenced[1]
    arguments = json_object_of(body) if body.strip() else "{}"
    is_call = bool(mark) and _NAME.fullmatch(name.strip()) is not None
    return ToolCall(name.strip(), arguments) if is_call and arguments is not None else None


def read_function_gemma(text: str, functions: Functions) -> list[ToolCall] | None:
    del functions
    return _read_gemma(text, ESCAPE)


def read_gemma4(text: str, functions: Functions) -> list[ToolCall] | None:
    del functions
    return _read_gemma(text, GEMMA_QUOTE)


def _read_gemma(text: str, quote: str) -> list[ToolCall] | None:
    call = _GEMMA_CALL.fullmatch(text.strip())
    if call is None:
        return None
    arguments = json_object_of(_GEMMA_PARTS[quote].sub(_as_json, "{" + call[2] + "}"))
    return None if arguments is None else [ToolCall(call[1], arguments)]


def _as_json(found: re.Match[str]) -> str:
    """A text, a name, or a word of Python, as JSON has it; a JSON text stays as it is."""
    text, before, name, word = found["text"], found["before"], found["name"], found["word"]
    if text is not None:
        return json.dumps(text)
    if name is not None:
        return f"{before}{json.dumps(name)}:"
    return found[0] if word is None else json.dumps(WORDS[word.lower()])


def read_xml(text: str, functions: Functions) -> list[ToolCall] | None:
    """`<function=name>` elements with `<parameter=key>` elements, as Qwen3-Coder writes them; None
    where the text of one has no end."""
    whole = text.strip() + "</tool_call>"
    calls: list[ToolCall] = []
    head = _XML_FUNCTION.match(whole)
    while head is not None:
        found = _XML.read(whole, head.end(), functions.get(head[1], {}))
        if found is None:
            return None
        calls.append(ToolCall(head[1], found.arguments))
        head = _XML_FUNCTION.search(whole, found.end)
    return calls if calls and all(_NAME.fullmatch(each.name) for each in calls) else None


def read_glm(text: str, functions: Functions) -> list[ToolCall] | None:
    """A name, then `<arg_key>` and `<arg_value>` elements in turn, as GLM-4.5 writes them; None
    where the text of one has no end."""
    head = _GLM_NAME.match(text)
    if head is None:
        return read_objects(text, functions)
    found = _GLM.read(text, head.end(), functions.get(head[1], {}))
    return None if found is None else [ToolCall(head[1], found.arguments)]


class _Found(NamedTuple):
    arguments: str
    end: int


@dataclass(frozen=True, slots=True)
class _Elements:
    """Arguments that are written as plain text: their types are the schema's. `begin`: of an
    element, with its key; without one it is cut, or `last`. `end`: of a text. `last`: what may
    follow the last element."""

    begin: re.Pattern[str]
    end: re.Pattern[str]
    last: str = ""

    def read(self, text: str, position: int, schema: Mapping[str, Any]) -> _Found | None:
        properties: Mapping[str, Any] = schema.get("properties") or {}
        typed: dict[str, object] = {}
        while (begin := self.begin.search(text, position)) is not None and begin[1] is not None:
            key = begin[1] if begin[1] in properties else begin[1].strip()
            argument = ArgumentSchema.of(properties.get(key), schema)
            first = begin.end()
            ends = (end.start() for end in self.end.finditer(text, first))
            position = next((end for end in ends if not argument.is_open(text[first:end])), -1)
            if position < 0:
                return None
            written = text[first:position]
            if begin[0].endswith("\r\n"):
                written = written.removesuffix("\r")
            typed[key] = argument.read(written)
        if begin is not None and begin[0] != self.last:
            return None
        arguments = json_text(typed)
        end = len(text) if begin is None else begin.end()
        return None if arguments is None else _Found(arguments, end)


_XML = _Elements(
    re.compile(r"<parameter=(?:([^>\n]+)>(?:\r?\n)?)?|</function>"),
    re.compile(XML_ENDS),
    "</function>",
)
_GLM = _Elements(
    re.compile(r"<arg_key>(?:([^<]*)</arg_key>\s*<arg_value>)?"), re.compile("</arg_value>")
)


def _split(text: str, mark: str) -> list[str]:
    pieces: list[str] = []
    begin = 0
    for match in re.finditer(f"{_JSON_TEXT}|({re.escape(mark)})", text, re.DOTALL):
        if match[1] is not None:
            pieces.append(text[begin : match.start()])
            begin = match.end()
    return [*pieces, text[begin:]]


def closed(text: str, most: int) -> str | None:
    """JSON with its last brackets, where at most `most` are missing; None within a text."""
    missing: list[str] = []
    for match in NESTING.finditer(text):
        mark = match[0]
        if mark[0] == '"':
            if match[1] is None:
                return None
        elif mark in "{[":
            missing.append("}" if mark == "{" else "]")
        elif not missing or missing.pop() != mark:
            return None
    return None if not 0 < len(missing) <= most else text + "".join(missing[::-1])


def _values(text: str) -> list[object] | None:
    decoder = json.JSONDecoder(strict=False)
    for written in (text, with_known_escapes(text)):
        found: list[object] = []
        position = 0
        try:
            while position < len(written):
                value, position = decoder.raw_decode(written, position)
                found += cast(list[object], value) if isinstance(value, list) else [value]
                position = _SEPARATORS.match(written, position).end()  # pyright: ignore[reportOptionalMemberAccess]
        except (ValueError, RecursionError):
            continue
        return found
    return None


def _calls_of(values: list[object]) -> list[ToolCall] | None:
    calls: list[ToolCall] = []
    for value in values:
        if not isinstance(value, dict):
            return None
        members = cast(dict[str, Any], value)
        if isinstance(members.get("function"), dict):
            members = members["function"]
        name = members.get("name", members.get("function"))
        arguments = members.get("arguments", members.get("parameters"))
        if not isinstance(name, str) or not name or not isinstance(arguments, dict | str | None):
            return None
        if json_text(name) is None:
            return None
        if isinstance(arguments, str):
            written = json_object_of(arguments) if arguments.strip() else "{}"
        else:
            written = json_text(cast(object, arguments or {}))
        if written is None:
            return None
        calls.append(ToolCall(name, written))
    return calls or None


def json_object_of(text: str) -> str | None:
    found = _values(text.strip())
    if found is None or len(found) != 1 or not isinstance(found[0], dict):
        return None
    return json_text(cast(object, found[0]))


def _at_commas(text: str) -> list[str] | None:
    """What is between commas that are in no brackets; None where a bracket or a quote is open."""
    pieces: list[str] = []
    begin = depth = 0
    for match in _PYTHON_MARK.finditer(text):
        mark = match[0]
        if mark in ("'", '"'):
            return None
        depth += (mark in "([{") - (mark in ")]}")
        if depth < 0:
            return None
        if mark == "," and not depth:
            pieces.append(text[begin : match.start()])
            begin = match.end()
    last = text[begin:]
    return None if depth else [*pieces, *([last] if last.strip() else [])]


def _python_call(text: str) -> ToolCall | None:
    call = _PYTHON_CALL.fullmatch(text)
    given = None if call is None else _at_commas(call[2])
    if call is None or given is None:
        return None
    arguments: dict[str, object] = {}
    try:
        for each in given:
            arguments |= _python_argument(each)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
    written = json_text(arguments)
    return None if written is None else ToolCall(call[1], written)


def _python_argument(text: str) -> Mapping[str, object]:
    """One argument, or those of an object behind two stars. Raises what reading a literal does."""
    found = _PYTHON_ARGUMENT.fullmatch(text)
    if found is not None:
        return {found[1]: _python_value(found[2])}
    stars, given = text.lstrip()[:2], _python_value(text.lstrip()[2:])
    if stars != "**" or not isinstance(given, dict):
        raise ValueError(text)
    return cast(dict[str, object], given)


def _python_value(text: str) -> object:
    try:
        return cast(object, json.loads(text, strict=False))
    except ValueError:
        literal = _PYTHON_ESCAPE.sub(lambda each: each[1] or r"\\", text.strip())
        return _literal(ast.parse(literal, mode="eval").body)


def _literal(node: ast.expr) -> object:
    if isinstance(node, ast.Name) and node.id.lower() in WORDS:
        return WORDS[node.id.lower()]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(each) for each in node.elts]
    if isinstance(node, ast.Dict) and None not in node.keys:
        keys = [ast.literal_eval(each) for each in node.keys if each is not None]
        return dict(zip(keys, map(_literal, node.values), strict=True))
    return ast.literal_eval(node)
