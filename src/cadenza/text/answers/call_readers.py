"""Readers: the calls that a text of a family's notation has.

Models deviate from their notation, so readers take what is certain all the same: raw newlines and
unknown escapes in JSON, arguments that are null or empty, Python's and JSON's words for true. Knows
no marks around calls, no tokens and no endpoint. Invariant: a reader is a pure function of a text
and of the functions; it returns every call of the text, or None where the text is something else.
"""

import ast
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast


class ToolCall(NamedTuple):
    """A call of a function; `arguments` is JSON."""

    name: str
    arguments: str


Functions = Mapping[str, Mapping[str, Any]]
"""The JSON Schemas of the arguments of the functions that may be called, by their names; empty
where they are not known."""

ReadCalls = Callable[[str, Functions], list[ToolCall] | None]

MAX_REFERENCES = 8
"""Of a schema that refers to one that refers to another."""

MISTRAL = "[TOOL_CALLS]"
_SEPARATORS = re.compile(r"[\s;]*")
_NAME = re.compile(r"[\w.-]+")
_BAD_ESCAPE = re.compile(r'\\(\\|["/bfnrt]|u[0-9a-fA-F]{4})?')
_NESTING = re.compile(r'"(?:[^"\\]|\\.)*+(")?|[{}\[\]]', re.DOTALL)
"""Of JSON: a text, with its end if it has one, or a bracket."""
_JSON_CALLS = re.compile(r"\s*(\{|\[\s*[{\]])")
_CALL_ID = re.compile(r"\[CALL_ID\][^\[{]*")
_GEMMA_CALL = re.compile(r"call:([\w.-]+)\{(.*)\}", re.DOTALL)
_GEMMA_KEY = re.compile(
    r'("(?:[^"\\]|\\.)*")|([{,]\s*|^\s*)([^\s"{}\[\],:]+)\s*:|\b(None|True|False)\b', re.DOTALL
)
_BAR = "\uff5c"
DEEPSEEK_CALLS, DEEPSEEK_CALLS_END, DEEPSEEK_CALL, DEEPSEEK_SEPARATOR, DEEPSEEK_CALL_END = (
    f"<{_BAR}tool▁{name}{_BAR}>"
    for name in ("calls▁begin", "calls▁end", "call▁begin", "sep", "call▁end")
)
_FENCED = re.compile(r"```\w*\s*(.*?)\s*(?:```)?", re.DOTALL)
GEMMA_QUOTE = '<|"|>'
_ESCAPE = "<escape>"
_XML_FUNCTION = re.compile(r"<function=([^>\s]+)\s*>(.*?)(?:</function>|\Z)", re.DOTALL)
_XML_VALUE = re.compile(
    r"<parameter=([^>\s]+)\s*>\r?\n?(.*?)\r?\n?(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL
)
_GLM_CALL = re.compile(r"\s*([\w.-]+)\s*(<arg_key>.*)?", re.DOTALL)
_GLM_VALUE = re.compile(
    r"<arg_key>(.*?)</arg_key>\s*<arg_value>\n?(.*?)\n?(?:</arg_value>|\Z)", re.DOTALL
)
_WORDS: Mapping[str, object] = {"true": True, "false": False, "null": None, "none": None}


def read_objects(text: str, functions: Functions) -> list[ToolCall] | None:
    """JSON: an object, a list of objects, or objects with ";" or blanks between them."""
    del functions
    found = _values(text.strip())
    return None if found is None else _calls_of(found)


def read_hermes(text: str, functions: Functions) -> list[ToolCall] | None:
    """Objects; or, as some models of this family write, elements."""
    return read_objects(text, functions) or read_xml(text, functions)


def read_mistral(text: str, functions: Functions) -> list[ToolCall] | None:
    """A list of objects, or a name, perhaps an id, and arguments, each behind the marker."""
    if _JSON_CALLS.match(text):
        return read_objects(text, functions)
    calls: list[ToolCall] = []
    for part in text.split(MISTRAL):
        name, brace, rest = _CALL_ID.sub("", part).replace("[ARGS]", "").partition("{")
        arguments = json_object_of(brace + rest) if brace else "{}"
        if not _NAME.fullmatch(name.strip()) or arguments is None:
            return None
        calls.append(ToolCall(name.strip(), arguments))
    return calls


def read_pythonic(text: str, functions: Functions) -> list[ToolCall] | None:
    """A Python list of calls with literal keyword arguments."""
    del functions
    try:
        body = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    entries = body.elts if isinstance(body, ast.List) else [body]
    calls = [_python_call(each) for each in entries]
    return [each for each in calls if each is not None] if calls and None not in calls else None


def read_lfm2(text: str, functions: Functions) -> list[ToolCall] | None:
    """A Python list, or, as a system text may ask for, objects."""
    return read_pythonic(text, functions) or read_objects(text, functions)


def read_deepseek(text: str, functions: Functions) -> list[ToolCall] | None:
    """Calls behind marks: a name and its JSON; of V3 and R1 the word `function`, a name, and JSON
    within a code fence."""
    del functions
    before, *calls = text.split(DEEPSEEK_CALL)
    found = [_deepseek_call(each.split(DEEPSEEK_CALL_END)[0]) for each in calls]
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
    """`call:name{key:value, …}`, in which texts stand between <escape> marks."""
    del functions
    return _read_gemma(text, _ESCAPE)


def read_gemma4(text: str, functions: Functions) -> list[ToolCall] | None:
    """As function-gemma's, in which texts stand between other marks."""
    del functions
    return _read_gemma(text, GEMMA_QUOTE)


def _read_gemma(text: str, quote: str) -> list[ToolCall] | None:
    match = _GEMMA_CALL.fullmatch(text.strip())
    if match is None:
        return None
    pieces = ("{" + match[2] + "}").split(quote)
    texts = [json.dumps(piece) for piece in pieces[1::2]]
    others = [_GEMMA_KEY.sub(_as_json, piece) for piece in pieces[::2]]
    written = "".join(a + b for a, b in zip(others, [*texts, ""], strict=False))
    arguments = json_object_of(written)
    return None if arguments is None or len(pieces) % 2 == 0 else [ToolCall(match[1], arguments)]


def _as_json(found: re.Match[str]) -> str:
    """A name, or a word of Python, as JSON has it; a text stays as it is."""
    if found[4]:
        return json.dumps(_WORDS[found[4].lower()])
    return found[1] or f'{found[2]}"{found[3]}":'


def read_xml(text: str, functions: Functions) -> list[ToolCall] | None:
    """`<function=name>` elements with `<parameter=key>` elements, as Qwen3-Coder writes them."""
    calls = [
        _typed_call(name, _XML_VALUE.findall(body), functions)
        for name, body in _XML_FUNCTION.findall(text)
    ]
    return [each for each in calls if each is not None] if calls and None not in calls else None


def read_glm(text: str, functions: Functions) -> list[ToolCall] | None:
    """A name, then `<arg_key>` and `<arg_value>` elements in turn, as GLM-4.5 writes them."""
    match = _GLM_CALL.fullmatch(text)
    if match is None:
        return read_objects(text, functions)
    call = _typed_call(match[1], _GLM_VALUE.findall(match[2] or ""), functions)
    return None if call is None else [call]


def closed(text: str, most: int) -> str | None:
    """JSON with its last brackets, where at most `most` are missing; None within a text."""
    missing: list[str] = []
    for match in _NESTING.finditer(text):
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
    """The JSON values of a text, those of lists among them; None if it is anything else."""
    decoder = json.JSONDecoder(strict=False)
    for written in (text, _BAD_ESCAPE.sub(_doubled, text)):
        found: list[object] = []
        place = 0
        try:
            while place < len(written):
                value, place = decoder.raw_decode(written, place)
                found += cast(list[object], value) if isinstance(value, list) else [value]
                place = _SEPARATORS.match(written, place).end()  # pyright: ignore[reportOptionalMemberAccess]
        except (ValueError, RecursionError):
            continue
        return found
    return None


def _doubled(escape: re.Match[str]) -> str:
    """An escape; the backslash of one that JSON does not know is a backslash."""
    return escape[0] if escape[1] else r"\\"


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
        if _written(name) is None:
            return None
        if isinstance(arguments, str):
            written = json_object_of(arguments) if arguments.strip() else "{}"
        else:
            written = _written(cast(object, arguments or {}))
        if written is None:
            return None
        calls.append(ToolCall(name, written))
    return calls or None


def json_object_of(text: str) -> str | None:
    """The JSON object of a text, written anew; None if it is none."""
    found = _values(text.strip())
    if found is None or len(found) != 1 or not isinstance(found[0], dict):
        return None
    return _written(cast(object, found[0]))


def _written(value: object) -> str | None:
    """JSON that can be sent; None where there is none: of NaN, or of half a surrogate pair."""
    try:
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        written.encode()
    except (ValueError, TypeError, RecursionError):
        return None
    return written


def _python_call(node: ast.expr) -> ToolCall | None:
    if not isinstance(node, ast.Call) or node.args:
        return None
    name = ast.unparse(node.func)
    try:
        written = _written({str(each.arg): _literal(each.value) for each in node.keywords})
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
    is_plain = None not in [each.arg for each in node.keywords] and _NAME.fullmatch(name)
    return ToolCall(name, written) if is_plain and written is not None else None


def _literal(node: ast.expr) -> object:
    """The value of a literal, in which JSON's words are known, too. Raises ValueError."""
    if isinstance(node, ast.Name) and node.id.lower() in _WORDS:
        return _WORDS[node.id.lower()]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(each) for each in node.elts]
    if isinstance(node, ast.Dict) and None not in node.keys:
        keys = [ast.literal_eval(each) for each in node.keys if each is not None]
        return dict(zip(keys, map(_literal, node.values), strict=True))
    return ast.literal_eval(node)


def _typed_call(name: str, values: list[tuple[str, str]], functions: Functions) -> ToolCall | None:
    """A call whose arguments are written as plain text: their types are the schema's."""
    schema = functions.get(name, {})
    properties: Mapping[str, Any] = schema.get("properties") or {}
    typed = {
        key.strip(): _typed(text, resolved(properties.get(key.strip()), schema))
        for key, text in values
    }
    written = _written(typed)
    return None if written is None or not _NAME.fullmatch(name) else ToolCall(name, written)


def _typed(text: str, schema: object) -> object:
    """A value of the schema's type, as far as the text is one; else the text itself."""
    kinds = kinds_of_schema(schema)
    if kinds == {"string"}:
        return text
    found = _values(text.strip())
    word = text.strip().lower()
    if word in _WORDS:
        value: object = _WORDS[word]
    elif found is None or len(found) != 1 or text.lstrip().startswith("["):
        value = _whole_value(text)
    else:
        value = found[0]
    is_wanted = not kinds or bool(kinds & _kinds_of(value))
    return value if is_wanted else text


def _whole_value(text: str) -> object:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return text


def resolved(schema: object, root: Mapping[str, Any]) -> object:
    """A schema, or that to which it refers within its root."""
    found: object = schema
    for _ in range(MAX_REFERENCES):
        name = schema_members(found).get("$ref")
        if not isinstance(name, str) or not name.startswith("#/"):
            break
        found = root
        for part in name.removeprefix("#/").split("/"):
            found = schema_members(found).get(part)
    return found


def schema_members(schema: object) -> Mapping[str, Any]:
    """Those of an object; none of anything else, such as true."""
    return cast(Mapping[str, Any], schema) if isinstance(schema, Mapping) else {}


def kinds_of_schema(schema: object) -> set[str]:
    """The types that a schema names, at its top and in its alternatives."""
    members = schema_members(schema)
    named = members.get("type", [])
    kinds = {named} if isinstance(named, str) else {str(each) for each in named}
    if not kinds:
        kinds = {kind for value in members.get("enum", ()) for kind in _kinds_of(value)}
    for each in (*members.get("anyOf", ()), *members.get("oneOf", ())):
        kinds |= kinds_of_schema(each)
    return kinds


def _kinds_of(value: object) -> set[str]:
    match value:
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number", "integer"} if value.is_integer() else {"number"}
        case str():
            return {"string"}
        case None:
            return {"null"}
        case list():
            return {"array"}
        case _:
            return {"object"}
