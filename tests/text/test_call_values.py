"""What the grammar of a call allows is read as that value: each notation, each kind of schema."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from cadenza.frontend.answers import ToolUse
from cadenza.text.answers.harmony import HARMONY, HarmonyParser
from cadenza.text.answers.json_calls import (
    DEEPSEEK_CALL,
    DEEPSEEK_CALL_END,
    DEEPSEEK_CALLS,
    DEEPSEEK_CALLS_END,
    DEEPSEEK_SEPARATOR,
    GENERIC,
)
from cadenza.text.answers.part_parser import PartParser, PartPlan
from cadenza.text.answers.tool_calls import TOOL_FORMATS, call_rule
from cadenza.text.answers.tool_format import CallGrammar, Tool
from cadenza.text.schemas.grammar import ARGUMENTS_STYLE
from cadenza.text.schemas.json_schema import compile_schema
from tests.text.parts import Joined, joined

Arguments = Mapping[str, Any]
FORMATS = {**TOOL_FORMATS, "generic": GENERIC}


class Written(NamedTuple):
    """A call: what begins it, and what its grammar is of."""

    begun: str
    rest: str
    is_read: bool = False
    """The beginning is of the grammar, too."""


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", r"\u007f")


class Quoted(str):
    """A text that elements have as JSON."""


def _text(value: object) -> str:
    if isinstance(value, Quoted):
        return _json(value).replace("<", r"\u003c")
    return value if isinstance(value, str) else _json(value)


def _marked(value: object, quote: str) -> str:
    """As Gemma's templates write values."""
    match value:
        case str():
            return f"{quote}{value}{quote}"
        case list():
            return f"[{','.join(_marked(each, quote) for each in value)}]"
        case dict():
            pairs = sorted(value.items(), key=lambda pair: pair[0].lower())
            return "{" + ",".join(f"{_key(k)}:{_marked(v, quote)}" for k, v in pairs) + "}"
        case _:
            return _json(value)


def _key(name: str) -> str:
    return _json(name) if {*name} & {*" <,:"} else name


def _xml(name: str, arguments: Arguments) -> Written:
    values = (f"<parameter={k}>\n{_text(v)}\n</parameter>\n" for k, v in arguments.items())
    return Written(
        "<tool_call>", f"\n<function={name}>\n{''.join(values)}</function>\n</tool_call>"
    )


def _glm(name: str, arguments: Arguments) -> Written:
    values = (
        f"<arg_key>{k}</arg_key>\n<arg_value>{_text(v)}</arg_value>\n" for k, v in arguments.items()
    )
    return Written("<tool_call>", f"{name}\n{''.join(values)}</tool_call>")


def _list(begin: str, end: str) -> "Write":
    def write(name: str, arguments: Arguments) -> Written:
        call = f"[{name}({', '.join(f'{k}={_json(v)}' for k, v in arguments.items())})]"
        return Written(begin, call + end) if begin else Written(f"[{name}(", call, is_read=True)

    return write


def _gemma(begin: str, end: str, quote: str, *, is_sorted: bool) -> "Write":
    def write(name: str, arguments: Arguments) -> Written:
        order = sorted(arguments, key=str.lower) if is_sorted else arguments
        pairs = (f"{_key(key)}:{_marked(arguments[key], quote)}" for key in order)
        return Written(begin, f"call:{name}{{{','.join(pairs)}}}{end}")

    return write


def _bare(name: str, arguments: Arguments) -> Written:
    call = f'{{"name": "{name}", "arguments": {_json(arguments)}}}'
    return Written(f'{{"name": "{name}"', call, is_read=True)


Write = Callable[[str, Arguments], Written]
WRITE: Mapping[str, Write] = {
    "hermes": lambda n, a: Written("<tool_call>", f"\n{_bare(n, a).rest}\n</tool_call>"),
    "qwen3_coder": _xml,
    "glm45": _glm,
    "mistral": lambda n, a: Written("[TOOL_CALLS]", f"{n}[ARGS]{_json(a)}"),
    "llama3_json": _bare,
    "json": _bare,
    "generic": _bare,
    "pythonic": _list("", ""),
    "lfm2": _list("<|tool_call_start|>", "<|tool_call_end|>"),
    "functiongemma": _gemma(
        "<start_function_call>", "<end_function_call>", "<escape>", is_sorted=False
    ),
    "gemma4": _gemma("<|tool_call>", "<tool_call|>", '<|"|>', is_sorted=True),
    "deepseek_v3": lambda n, a: Written(
        DEEPSEEK_CALLS,
        f"{DEEPSEEK_CALL}function{DEEPSEEK_SEPARATOR}{n}\n```json\n{_json(a)}\n```"
        f"{DEEPSEEK_CALL_END}{DEEPSEEK_CALLS_END}",
    ),
    "deepseek_v31": lambda n, a: Written(
        DEEPSEEK_CALLS,
        f"{DEEPSEEK_CALL}{n}{DEEPSEEK_SEPARATOR}{_json(a)}{DEEPSEEK_CALL_END}{DEEPSEEK_CALLS_END}",
    ),
    "harmony": lambda n, a: Written(
        "<|channel|>commentary to=functions.", f"{n} <|constrain|>json<|message|>{_json(a)}"
    ),
}

ENDS: Mapping[str, tuple[str, ...]] = {
    "qwen3_coder": ("</parameter>", "</function>", "<parameter="),
    "glm45": ("</arg_value>",),
    "functiongemma": ("<escape>",),
    "gemma4": ('<|"|>',),
}
"""Without these, each text can be written in a notation that has texts as they are."""


class Notation:
    """The grammar of a function's calls in a notation, over bytes, and their parser."""

    def __init__(self, name: str, schema: Mapping[str, Any], called: str = "f") -> None:
        self.schema, self.called = schema, called
        self._write, self._ends = WRITE[name], ENDS.get(name, ())
        tool = Tool(name=called, parameters=schema)
        calls = CallGrammar(tools=(tool,), format=FORMATS[name], compile=_lenient, inputs={})
        rule = call_rule(calls, {})
        self.grammar = None if rule is None else rule.grammar
        self._matcher = None if rule is None else LLMatcher(_BYTES, rule.grammar)
        functions = ToolUse(tools=(tool,)).schemas
        self._plan = PartPlan(tools=FORMATS[name], functions=functions)

    def is_allowed(self, text: str) -> bool:
        matcher = self._matcher
        assert matcher is not None
        assert not matcher.is_error(), matcher.get_error()
        matcher.reset()
        written = [*text.encode()]
        return matcher.try_consume_tokens(written) == len(written) and matcher.is_accepting()

    def read(self, text: str) -> Any:
        """The arguments of the call that a text is, whole and a character at a time."""
        found: list[Joined] = []
        for pieces in ([text], [*text]):
            is_harmony = self._plan.tools is HARMONY
            parser = HarmonyParser(self._plan) if is_harmony else PartParser(self._plan)
            parts = [part for piece in pieces for part in parser.push(piece)]
            found.append(joined([*parts, *parser.flush()]))
        whole, cut = found
        assert whole == cut, text
        assert [each[:2] for each in whole] == [("tool_call", self.called)], text
        return json.loads(whole[0][2])

    def check(self, arguments: Arguments) -> None:
        """The grammar allows the arguments, as they are or with texts as JSON, and what it allows
        is read as them. A text that elements have as it is may be that of another value."""
        found = self._read_if_allowed(arguments)
        if _exact(found) == _exact(arguments):
            return
        has_end = any(end in "".join(_texts(arguments)) for end in self._ends)
        if self._read_if_allowed(dict.fromkeys(arguments, "§")) is not None:  # any text
            is_other = _exact(found) == _exact(_other_values(arguments))
            assert has_end if found is None else is_other and self._write in (_xml, _glm)
        else:
            quoted = self._read_if_allowed(_quoted(arguments))
            assert _exact(quoted) == _exact(arguments) or has_end

    def _read_if_allowed(self, arguments: Arguments) -> Any:
        call = self._write(self.called, arguments)
        if not self.is_allowed(call.rest):
            return None
        text = call.rest if call.is_read else call.begun + call.rest
        found = self.read(text)
        assert jsonschema_rs.is_valid(self.schema, found), text
        return found


def _quoted(arguments: Arguments) -> Arguments:
    return {k: Quoted(v) if isinstance(v, str) else v for k, v in arguments.items()}


def _other_values(arguments: Arguments) -> Arguments:
    return {key: _other_value(value) for key, value in arguments.items()}


def _lenient(schema: str) -> str:
    return compile_schema(schema, ARGUMENTS_STYLE, is_strict=False).text


_BYTES = LLTokenizer("byte")


def _other_value(value: object) -> object:
    try:
        return json.loads(value.strip().lower().replace("none", "null"))  # type: ignore[union-attr]
    except (AttributeError, ValueError):
        return value


def _exact(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def _texts(value: object) -> Iterator[str]:
    match value:
        case str():
            yield value
        case list() | dict():
            for each in value.values() if isinstance(value, dict) else value:
                yield from _texts(each)
        case _:
            pass


TEXT = {"type": "string"}
STATUS = {"anyOf": [{"enum": ["pending", "completed"]}, {"enum": ["deleted"]}]}
TEXTS = [
    *("", " ", "\n", "\n\na\n\n", "a\r\n", "\r\na\r", "\t a ", "x=1, y=2", "f(a=1)]", "it's"),
    *('"quoted"', '"a', "'a'", "5", "-1.5e3", "true", "null", "None", "NaN", "[1, 2]", '{"a": 1}'),
    *("é 東京 😀", "\u2028\u0085\ufeff", "\\ \\n \\u0041 \\d", "\x00\x1b\x7f", "a, b: c", "}}>"),
    *("{[(", "<b>", "</p>", "<tool_call>", "</tool_call>", "</function>", "</parameter>"),
    *("<parameter=a>", "a</parameter> b", "a</function> b", "</tool_call> <tool_call>"),
    *("<function=f>", "<arg_key>", "<arg_value>", "</arg_value>", '<|"|>', "<escape>"),
    *("[TOOL_CALLS]f", "[ARGS]{", "[CALL_ID]1", "}<end_function_call>", "}<tool_call|>"),
    *(")]<|tool_call_end|>", "```\n", '```json\n{"a": 1}', "<|python_tag|>"),
    *(DEEPSEEK_CALL, DEEPSEEK_CALL_END, DEEPSEEK_CALLS_END, DEEPSEEK_SEPARATOR),
    *("<|end|>", '"}<|call|>', "<|start|>assistant", "<|channel|>final<|message|>"),
]
S = {"$ref": "#/$defs/s"}
DEFS = {"s": STATUS, "n": {"anyOf": [S, {"type": "array", "items": {"$ref": "#/$defs/n"}}]}}
LISTED = [1, "1", None, "null", True, "true", [1], "[1]", ""]
PAIR = {"type": "object", "properties": {"b": TEXT, "from": STATUS}, "required": ["b"]}
VALUES: list[tuple[object, list[Any]]] = [
    (TEXT, TEXTS),
    ({"enum": TEXTS}, TEXTS),
    ({"anyOf": [{"enum": TEXTS}, {"type": ["number", "null", "object"]}]}, [*TEXTS, 5, None]),
    ({"type": "array", "items": TEXT}, [[each, "x"] for each in TEXTS]),
    (STATUS, ["pending", "completed", "deleted"]),
    ({"oneOf": [{"const": "a"}, {"anyOf": [STATUS, {"const": 5}]}]}, ["a", "deleted", 5]),
    ({"type": "string", "enum": ["5", "true", ""]}, ["5", "true", ""]),
    ({"enum": LISTED}, LISTED),
    ({"const": "x y"}, ["x y"]),
    ({"const": {"a": ["\n", 1], "from": None}}, [{"a": ["\n", 1], "from": None}]),
    ({"type": ["string", "null"]}, [None, "\na\n", '"a"', "5"]),
    ({"anyOf": [TEXT, {"type": "null"}]}, [None, "a", '"a"', "true"]),
    ({"anyOf": [S, {"type": "null"}]}, [None, "deleted"]),
    ({"allOf": [S], "default": "x", "description": "y"}, ["pending"]),
    ({"anyOf": [TEXT, {"type": "integer", "maximum": 5}]}, ["9", 3, "a"]),
    ({"anyOf": [{"type": "boolean"}, {"enum": ["auto"]}]}, [True, False, "auto"]),
    ({"type": "array", "items": STATUS}, [[], ["pending"], ["deleted", "pending"]]),
    (PAIR, [{"b": '\n"'}, {"b": "}", "from": "deleted"}]),
    ({"anyOf": [PAIR, {"type": "null"}, STATUS]}, [{"b": ","}, None, "deleted"]),
    ({"$ref": "#/$defs/n"}, ["pending", [["deleted"], "pending"]]),
    ({"$ref": "#/properties/b"}, ["deleted"]),
    ({"type": "number"}, [0, -7, 1.5, 1e-07, 123456789012345]),
    ({"enum": [f"zone/{i}" for i in range(600)]}, ["zone/7", "zone/77"]),
]


@pytest.mark.parametrize("name", WRITE)
@pytest.mark.parametrize(("schema", "values"), VALUES, ids=lambda each: str(each)[:60])
def test_each_value_that_a_schema_allows_is_written_and_read_in_each_notation(
    name: str, schema: object, values: list[Any]
):
    properties = {"a": schema, "b": STATUS}
    function = {"type": "object", "properties": properties, "required": ["a"], "$defs": DEFS}
    notation = Notation(name, function)
    for value in values:
        notation.check({"a": value})


NAMES = ("from", "class", "None", "max-results", "a.b", "größe", "$ref", "_", "9")


@pytest.mark.parametrize("called", ["get-mail", "class", "m.g", "9f"])
@pytest.mark.parametrize("name", WRITE)
def test_names_that_a_language_reserves_are_those_of_functions_and_arguments(
    name: str, called: str
):
    notation = Notation(name, {"type": "object", "properties": dict.fromkeys(NAMES, TEXT)}, called)
    notation.check(dict.fromkeys(NAMES, "\nx"))
    for each in NAMES:
        notation.check({each: "x"})


@pytest.mark.parametrize("name", WRITE)
def test_a_name_that_a_notation_cannot_write_is_not_constrained(name: str):
    schema = {"type": "object", "properties": {"a=<b>": TEXT}}
    is_written = Notation(name, schema).grammar is not None
    assert is_written == (name not in ("qwen3_coder", "glm45", "pythonic", "lfm2"))
    if is_written:
        Notation(name, schema).check({"a=<b>": "x"})


PIECES = st.sampled_from([*TEXTS, "a", "\n", " ", "<", '"', "'", "\\", "]", "}", ",", ":", "é"])
WORDS = st.one_of(st.sampled_from(TEXTS), st.lists(PIECES, max_size=6).map("".join), st.text())
Typed = tuple[dict[str, Any], Any]
"""A schema, and a value of it."""


def _listed(values: list[Any]) -> st.SearchStrategy[Typed]:
    return st.sampled_from(values).map(lambda value: ({"enum": values}, value))


PLAIN: st.SearchStrategy[Typed] = st.one_of(
    WORDS.map(lambda text: (TEXT, text)),
    WORDS.map(lambda text: ({"const": text}, text)),
    st.lists(WORDS | st.none() | st.booleans() | st.integers(0, 9), min_size=1).flatmap(_listed),
    st.integers(-5, 5).map(lambda n: ({"type": "integer", "minimum": n, "maximum": n + 3}, n + 1)),
    st.floats(-1e9, 1e9).map(lambda x: ({"type": "number"}, x)),
    st.booleans().map(lambda value: ({"type": "boolean"}, value)),
    st.just(({"type": "null"}, None)),
)


def _nested(inner: st.SearchStrategy[Typed]) -> st.SearchStrategy[Typed]:
    pairs = st.tuples(inner, inner)
    return st.one_of(
        pairs.map(lambda two: ({"anyOf": [two[0][0], two[1][0]]}, two[0][1])),
        inner.map(lambda one: ({"oneOf": [one[0], {"const": "§§"}]}, one[1])),
        inner.map(lambda one: ({"allOf": [one[0]], "title": "t"}, one[1])),
        inner.map(lambda one: ({"type": "array", "items": one[0]}, [one[1]] * 2)),
        pairs.map(_object),
    )


def _object(two: tuple[Typed, Typed]) -> Typed:
    properties = {"from": two[0][0], "b c": two[1][0]}
    return {"type": "object", "properties": properties}, {"from": two[0][1], "b c": two[1][1]}


@given(st.sampled_from(sorted(WRITE)), st.recursive(PLAIN, _nested, max_leaves=4), st.booleans())
def test_any_value_of_any_schema_is_written_and_read(name: str, typed: Typed, is_nullable: bool):
    schema, value = typed
    if is_nullable:
        schema = {"anyOf": [schema, {"type": "null"}]}
    Notation(name, {"type": "object", "properties": {"a": schema}}).check({"a": value})
