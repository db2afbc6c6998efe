"""How models write tool calls: `ToolFormat`, and the functions that read them.

Owns the formats by name, which one a chat template shows, and how a constrained call is written.
Knows no tokens and no endpoint. Invariant: `read` is a pure function of a text; it returns every
call of the text, or None where the text is something else.
"""

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast


class ToolCall(NamedTuple):
    """A call of a function; `arguments` is JSON."""

    name: str
    arguments: str


ReadCalls = Callable[[str], list[ToolCall] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """A family's notation.

    Args:
        begin: what a call begins with; empty where the whole answer is either calls or text.
        end: what it ends with; empty where it reaches to the end of the text.
        openers: where `begin` is empty: the first characters of an answer that may be calls.
        arguments: the member of a call's JSON that has its arguments.
        opening, between, closing: what a constrained answer has around its calls.
        is_json: calls are JSON, so that they can be constrained.
        read: the calls of what stands between `begin` and `end`.
    """

    begin: str = ""
    end: str = ""
    openers: str = ""
    arguments: str = "arguments"
    opening: str = ""
    between: str = "\n"
    closing: str = ""
    is_json: bool = True
    read: ReadCalls


def read_objects(text: str) -> list[ToolCall] | None:
    """JSON: an object, a list of objects, or objects with ";" or blanks between them."""
    decoder = json.JSONDecoder()
    found: list[object] = []
    place, text = 0, text.strip()
    while place < len(text):
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            return None
        found += cast(list[object], value) if isinstance(value, list) else [value]
        place = _SEPARATORS.match(text, place).end()  # pyright: ignore[reportOptionalMemberAccess]
    return _calls_of(found)


def read_llama(text: str) -> list[ToolCall] | None:
    """Objects, perhaps behind a mark."""
    return read_objects(text.strip().removeprefix("<|python_tag|>"))


def read_mistral(text: str) -> list[ToolCall] | None:
    """A list of objects, or a name and its arguments, each behind the marker."""
    if text.lstrip().startswith(("[", "{")):
        return read_objects(text)
    calls: list[ToolCall] = []
    for part in text.split(MISTRAL):
        name, brace, rest = part.replace("[ARGS]", "").partition("{")
        arguments = _json_object(brace + rest)
        if not _NAME.fullmatch(name.strip()) or arguments is None:
            return None
        calls.append(ToolCall(name.strip(), arguments))
    return calls


def read_pythonic(text: str) -> list[ToolCall] | None:
    """A Python list of calls with literal keyword arguments."""
    try:
        body = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    entries = body.elts if isinstance(body, ast.List) else [body]
    calls = [_python_call(each) for each in entries]
    return [each for each in calls if each is not None] if calls and None not in calls else None


def read_function_gemma(text: str) -> list[ToolCall] | None:
    """`call:name{key:value, …}`, in which texts stand between <escape> marks."""
    match = _GEMMA_CALL.fullmatch(text.strip())
    if match is None:
        return None
    written = _GEMMA_TEXT.sub(lambda found: json.dumps(found[1]), match[2])
    arguments = _json_object("{" + _GEMMA_KEY.sub(r'\1"\2":', written) + "}")
    return None if arguments is None else [ToolCall(match[1], arguments)]


MISTRAL = "[TOOL_CALLS]"
_SEPARATORS = re.compile(r"[\s;]*")
_NAME = re.compile(r"[\w.-]+")
_GEMMA_CALL = re.compile(r"call:([\w.-]+)\{(.*)\}", re.DOTALL)
_GEMMA_TEXT = re.compile(r"<escape>(.*?)<escape>", re.DOTALL)
_GEMMA_KEY = re.compile(r"([{,]\s*|^\s*)([A-Za-z_]\w*)\s*:")

TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": ToolFormat(
        begin="<tool_call>",
        end="</tool_call>",
        opening="<tool_call>\n",
        between="\n</tool_call>\n<tool_call>\n",
        closing="\n</tool_call>",
        read=read_objects,
    ),
    "mistral": ToolFormat(
        begin=MISTRAL,
        opening=f"{MISTRAL}[",
        between=", ",
        closing="]",
        read=read_mistral,
    ),
    "llama3_json": ToolFormat(openers="{<", arguments="parameters", between="; ", read=read_llama),
    "pythonic": ToolFormat(openers="[", is_json=False, read=read_pythonic),
    "functiongemma": ToolFormat(
        begin="<start_function_call>",
        end="<end_function_call>",
        is_json=False,
        read=read_function_gemma,
    ),
    "json": ToolFormat(openers="[{", opening="[", between=", ", closing="]", read=read_objects),
}
"""By the names that `--tool-call-parser` takes."""

FORCED = TOOL_FORMATS["json"]
"""What a constrained answer is written in where the family's own notation is not JSON."""

GENERIC = ToolFormat(openers="[{", read=read_objects)
"""Of models whose chat template has no place for tools: objects, one a line."""

_SHOWN_BY = (
    ("<start_function_call>", "functiongemma"),
    ("<tool_call>", "hermes"),
    (MISTRAL, "mistral"),
    ("<|python_tag|>", "llama3_json"),
    ("Environment: ipython", "llama3_json"),
    ("[func_name1(", "pythonic"),
)

TOOL_ALIASES = {
    "qwen": "hermes",
    "qwen2_5": "hermes",
    "llama3": "llama3_json",
    "gemma": "functiongemma",
}


def format_shown_by(template: str) -> str:
    """The name of the format that a chat template asks for; `json` where it shows none."""
    return next((name for marker, name in _SHOWN_BY if marker in template), "json")


def _calls_of(values: list[object]) -> list[ToolCall] | None:
    calls: list[ToolCall] = []
    for value in values:
        if not isinstance(value, dict):
            return None
        members = cast(dict[str, Any], value)
        name = members.get("name")
        arguments = members.get("arguments", members.get("parameters", {}))
        if not isinstance(name, str) or not name or not isinstance(arguments, dict | str):
            return None
        if _written(name) is None:
            return None
        is_text = isinstance(arguments, str)
        written = _json_object(arguments) if is_text else _written(cast(object, arguments))
        if written is None:
            return None
        calls.append(ToolCall(name, written))
    return calls or None


def _json_object(text: str) -> str | None:
    """The JSON object of a text, written anew; None if it is none."""
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return _written(cast(object, value)) if isinstance(value, dict) else None


def _written(value: object) -> str | None:
    """JSON that can be sent; None where there is none: of NaN, or of half a surrogate pair."""
    try:
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        written.encode()
    except ValueError:
        return None
    return written


def _python_call(node: ast.expr) -> ToolCall | None:
    if not isinstance(node, ast.Call) or node.args:
        return None
    name = ast.unparse(node.func)
    try:
        arguments = {str(each.arg): ast.literal_eval(each.value) for each in node.keywords}
        written = _written(arguments)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
    is_plain = None not in [each.arg for each in node.keywords] and _NAME.fullmatch(name)
    return ToolCall(name, written) if is_plain and written is not None else None
