"""Notations in which a call is JSON (Llama's, bare objects), or a name and JSON (Mistral's,
DeepSeek's). Models deviate from their notation, so readers take what is certain all the same: raw
newlines and unknown escapes, null or empty arguments."""

import json
import re
from collections.abc import Sequence
from typing import Any, cast

from cadenza.structured import CallRule
from cadenza.text.answers.argument_schema import JSON_TEXT, json_object_of, json_text, json_values
from cadenza.text.answers.call_forms import BareCalls, MarkedCalls
from cadenza.text.answers.tool_format import (
    BEGIN_BLANKS,
    BLANKS,
    MAX_LISTED_CALLS,
    CallGrammar,
    Functions,
    Marks,
    Tool,
    ToolCall,
    ToolFormat,
    either,
    literal_in,
    up_to,
)

NAME = re.compile(r"[\w.-]+")
_JSON_KEYS = frozenset({"name", "arguments", "parameters", "type", "function", "id"})
_JSON_HEAD = re.compile(r'\[?\s*\{\s*"(\w+)"\s*:\s*')
_JSON_PART = re.compile(r'(\[\s*)?(\{\s*("\w*("\s*)?)?)?')
_JSON_NAME = re.compile(r'"name"\s*:\s*(?:"([^"\\]*)")?')
_NAME_PART = re.compile(r'("[^"\\]*)?')


def begins_json(text: str, functions: Functions) -> bool | None:
    """An object, or a list of them, whose first members are a call's, and whose name is known."""
    head = _JSON_HEAD.match(text)
    if head is None:
        return None if _JSON_PART.fullmatch(text) else False
    if head[1] not in _JSON_KEYS:
        return False
    name = _JSON_NAME.search(text)
    if name is None:
        return None if head[1] != "name" else False
    if name[1] is None:
        return None if _NAME_PART.fullmatch(text, name.end()) else False
    return not functions or name[1] in functions


def read_objects(text: str, functions: Functions) -> list[ToolCall] | None:
    """JSON: an object, a list of objects, or objects with ";" or blanks between them."""
    del functions
    found = json_values(text.strip())
    return None if found is None else _calls_of(found)


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


def _bare(calls: CallGrammar, marks: Marks) -> CallRule:
    del marks
    names = "|".join(re.escape(tool.name) for tool in calls.tools)
    begin = rf'\{{{BEGIN_BLANKS}"name"{BEGIN_BLANKS}:{BEGIN_BLANKS}"(?:{names})"'
    lines = ["start: call", BLANKS, *object_lines(calls.tools)]
    return CallRule(begin=begin, grammar=calls.whole(lines), is_read=True)


def object_lines(tools: Sequence[Tool]) -> list[str]:
    lines = [f"call: {either('call', len(tools))}"]
    lines.append(r'key: "\"arguments\"" | "\"parameters\""')
    for i, tool in enumerate(tools):
        name = json.dumps(json.dumps(tool.name))
        members = ['"{"', r'"\"name\""', '":"', name, '","', "key", '":"', f"@args_{i}", '"}"']
        lines.append(f"call_{i}: {' BLANKS? '.join(members)}")
    return lines


_SEPARATED = " \t\r\n;"
_BARE = BareCalls(first=re.compile(r"`{3,}|[\[{]"), begins=begins_json, read=read_objects)

JSON = ToolFormat(
    openers="[{",
    opening="[",
    between=", ",
    closing="]",
    forms=(_BARE,),
    write=_bare,
    skipped=_SEPARATED,
)

# Of models whose chat template has no place for tools: objects, one a line.
GENERIC = ToolFormat(openers="[{", forms=(_BARE,), write=_bare, skipped=_SEPARATED)
PYTHON_TAG = "<|python_tag|>"
LLAMA3 = ToolFormat(
    openers="{<",
    arguments="parameters",
    between="; ",
    forms=(
        BareCalls(
            prefix=PYTHON_TAG,
            first=re.compile(r"`{3,}|[\[{]|<\|python_tag\|>"),
            begins=begins_json,
            read=read_objects,
        ),
    ),
    write=_bare,
    skipped=_SEPARATED,
)

MISTRAL_MARK = "[TOOL_CALLS]"
_JSON_CALLS = re.compile(r"\s*(\{|\[\s*[{\]])")
_CALL_ID = re.compile(r"\[CALL_ID\][^\[{]*")


def read_mistral(text: str, functions: Functions) -> list[ToolCall] | None:
    """A list of objects, or a name, perhaps an id, and arguments, each after the marker."""
    if _JSON_CALLS.match(text):
        return read_objects(text, functions)
    calls: list[ToolCall] = []
    for part in _split(text, MISTRAL_MARK):
        head, brace, rest = part.partition("{")
        name = _CALL_ID.sub("", head).replace("[ARGS]", "")
        arguments = json_object_of(brace + rest) if brace else "{}"
        if not NAME.fullmatch(name.strip()) or arguments is None:
            return None
        calls.append(ToolCall(name.strip(), arguments))
    return calls


def _split(text: str, mark: str) -> list[str]:
    pieces: list[str] = []
    begin = 0
    for match in re.finditer(f"{JSON_TEXT}|({re.escape(mark)})", text, re.DOTALL):
        if match[1] is not None:
            pieces.append(text[begin : match.start()])
            begin = match.end()
    return [*pieces, text[begin:]]


def _mistral(calls: CallGrammar, marks: Marks) -> CallRule:
    arguments, call_id = (literal_in(mark, marks) for mark in ("[ARGS]", "[CALL_ID]"))
    flat = [
        f"flat_{i}: {json.dumps(tool.name)} ({call_id} ID)? ({arguments})? @args_{i}"
        for i, tool in enumerate(calls.tools)
    ]
    lines = [
        "start: BLANKS? (listed | flat)",
        'listed: "[" BLANKS? call more BLANKS? "]"',
        f'more: (BLANKS? "," BLANKS? call){{0,{MAX_LISTED_CALLS - 1}}}',
        f"flat: {either('flat', len(flat))}",
        "ID: /[a-zA-Z0-9]{1,32}/",
        BLANKS,
        *flat,
        *object_lines(calls.tools),
    ]
    return CallRule(begin=re.escape(MISTRAL_MARK), grammar=calls.whole(lines))


MISTRAL = ToolFormat(
    begin=MISTRAL_MARK,
    opening=f"{MISTRAL_MARK}[",
    between=", ",
    closing="]",
    forms=(MarkedCalls(begin=MISTRAL_MARK, read=read_mistral),),
    write=_mistral,
    inner_marks=("[ARGS]", "[CALL_ID]"),
)

_BAR = "\uff5c"

DEEPSEEK_CALLS, DEEPSEEK_CALLS_END, DEEPSEEK_CALL, DEEPSEEK_SEPARATOR, DEEPSEEK_CALL_END = (
    f"<{_BAR}tool▁{name}{_BAR}>"
    for name in ("calls▁begin", "calls▁end", "call▁begin", "sep", "call▁end")
)

_FENCED = re.compile(r"```\w*\s*(.*?)\s*(?:```)?", re.DOTALL)


def read_deepseek(text: str, functions: Functions) -> list[ToolCall] | None:
    """A name and its JSON; of V3 and R1 the word `function`, a name, and JSON in a code fence."""
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
    is_call = bool(mark) and NAME.fullmatch(name.strip()) is not None
    return ToolCall(name.strip(), arguments) if is_call and arguments is not None else None


def _deepseek_list(calls: CallGrammar, marks: Marks, most: int) -> str:
    begin, separator, end = (literal_in(each, marks) for each in calls.format.inner_marks)
    is_fenced = calls.format is DEEPSEEK_V3
    kind = f'"function" {separator}' if is_fenced else ""
    before, behind = ('"\\n```json\\n"', '"\\n```"') if is_fenced else (separator, "")
    between, last = (literal_in(each, marks) for each in (calls.format.between, calls.format.end))
    more = up_to(most - 1, f"{between} call")
    lines = [
        f"start: call {more} {last}",
        f"call: {either('call', len(calls.tools))}",
    ]
    for i, tool in enumerate(calls.tools):
        name = json.dumps(tool.name)
        lines.append(f"call_{i}: {begin} {kind} {name} {before} @args_{i} {behind} {end}")
    return calls.whole(lines)


_DEEPSEEK_MARKS = (DEEPSEEK_CALL, DEEPSEEK_SEPARATOR, DEEPSEEK_CALL_END)
_DEEPSEEK_CALLS = MarkedCalls(begin=DEEPSEEK_CALLS, end=DEEPSEEK_CALLS_END, read=read_deepseek)

DEEPSEEK_V3 = ToolFormat(
    begin=DEEPSEEK_CALLS,
    end=DEEPSEEK_CALLS_END,
    is_json=False,
    inner_marks=_DEEPSEEK_MARKS,
    forms=(_DEEPSEEK_CALLS,),
    listed=_deepseek_list,
    holds=lambda _: True,
    example=f"{DEEPSEEK_CALLS}{DEEPSEEK_CALL}function{DEEPSEEK_SEPARATOR}tool name\n```json\n"
    f'{{"parameter": "value"}}\n```{DEEPSEEK_CALL_END}{DEEPSEEK_CALLS_END}',
)

DEEPSEEK_V31 = ToolFormat(
    begin=DEEPSEEK_CALLS,
    end=DEEPSEEK_CALLS_END,
    between="",
    is_json=False,
    inner_marks=_DEEPSEEK_MARKS,
    forms=(_DEEPSEEK_CALLS,),
    listed=_deepseek_list,
    holds=lambda _: True,
    example=f"{DEEPSEEK_CALLS}{DEEPSEEK_CALL}tool name{DEEPSEEK_SEPARATOR}"
    f'{{"parameter": "value"}}{DEEPSEEK_CALL_END}{DEEPSEEK_CALLS_END}',
)
