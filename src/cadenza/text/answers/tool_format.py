"""`ToolFormat`: a family's notation of calls: where they stand, what reads them, and the grammar
that they are of. `CallGrammar`: the tools of one request, with what grammars of calls are made of.
Invariant: the forms of a format read what its grammar allows as calls of its functions."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from cadenza.structured import CallRule
from cadenza.text.answers.argument_schema import OTHER_TYPES, ArgumentSchema, schema_members
from cadenza.text.answers.input_grammar import InputGrammar, arguments_of_written
from cadenza.text.schemas.grammar import joined_grammar, parts_of


class ToolCall(NamedTuple):
    """A call of a function; `arguments` is JSON."""

    name: str
    arguments: str


# The JSON Schemas of the arguments of the functions that may be called; empty: they are not known.
Functions = Mapping[str, Mapping[str, Any]]

ReadCalls = Callable[[str, Functions], list[ToolCall] | None]


class CallStart(NamedTuple):
    """Where a call begins; `is_certain`: its beginning is there, rather than a part of one."""

    position: int
    is_certain: bool


class Taken(NamedTuple):
    """The first `end` characters of a text are calls; without calls they are something else."""

    calls: tuple[ToolCall, ...]
    end: int


class CallMatcher(Protocol):
    """Takes one call; each text that is given begins with the one before."""

    def take(self, text: str, *, is_end: bool) -> Taken | None:
        """None until it is decided; at the end it is."""
        ...


class CallForm(Protocol):
    """One way in which a family writes calls."""

    @property
    def read(self) -> ReadCalls: ...

    def find(self, text: str, functions: Functions, *, is_end: bool) -> CallStart | None:
        """The first position at which a call begins, or, before the end, may begin."""
        ...

    def matcher(self, functions: Functions) -> CallMatcher: ...


Marks = Mapping[str, int]
"""The marks of a format that are tokens by themselves, with their ids; others are plain text."""

WriteRule = Callable[["CallGrammar", Marks], CallRule]

WriteList = Callable[["CallGrammar", Marks, int], str]  # of so many calls at most


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """A family's notation."""

    begin: str = ""  # of a call; empty where the whole answer is either calls or text
    end: str = ""  # empty where calls reach to the end of the text
    openers: str = ""  # where `begin` is empty: the first characters of answers that may be calls
    arguments: str = "arguments"  # the member of a call's JSON that has its arguments
    # What a constrained answer has around its calls.
    opening: str = ""
    between: str = "\n"
    closing: str = ""
    is_json: bool = True  # so that whole answers of calls can be constrained
    forms: tuple[CallForm, ...]  # where calls stand, and what reads them
    # The grammar of what the forms read: one of the two, `listed` where several calls stand between
    # one beginning and one end.
    write: WriteRule | None = None
    listed: WriteList | None = None
    keys: str = ""  # a pattern of the names of arguments that can be written; empty: any
    # Of a notation that is not JSON: whether it can write all that a function's schema asks for.
    holds: "Callable[[Tool], bool] | None" = None
    skipped: str = " \t\r\n"  # characters behind a call that are no content
    inner_marks: tuple[str, ...] = ()  # within a call
    # Characters that a JSON text within a call has escapes for, beside JSON's own: those with which
    # marks begin that no JSON text may have.
    escaped: str = ""
    # A call, for the description of tools that a chat template has no place for; empty: JSON
    # between `opening` and `closing`.
    example: str = ""

    def can_name(self, tools: "Sequence[Tool]") -> bool:
        names = (name for tool in tools for name in properties_of(tool))
        return not self.keys or all(re.fullmatch(self.keys, name) for name in names)


_NO_ARGUMENTS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function, or a custom tool."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None  # JSON Schema; None: no arguments
    is_strict: bool = False
    input: InputGrammar | None = None  # the text of a custom tool

    @property
    def schema(self) -> str:
        return json.dumps(self.parameters or _NO_ARGUMENTS)


MAX_LISTED_CALLS = 16  # of one list; without a bound a small model may call for ever
BLANKS = r"BLANKS: /[ \t]|\n[ \t]{0,16}/"
BEGIN_BLANKS = r"\s{0,16}"

Parts = list[dict[str, Any]]  # named grammars to which others refer

CompileSchema = Callable[[str], str]  # makes the grammar of a JSON Schema, which is given as JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class CallGrammar:
    """Makes the rules of one request's calls."""

    tools: Sequence[Tool]  # whose schemas can be followed
    format: ToolFormat
    compile: CompileSchema  # of their arguments
    inputs: Mapping[str, str]  # the grammars of the JSON texts that custom tools take

    def arguments(self, tool: Tool) -> str:
        text = self.inputs.get(tool.name)
        return self.compile(tool.schema) if text is None else arguments_of_written(text)

    def whole(self, lines: Sequence[str]) -> str:
        return whole_grammar(map(self.arguments, self.tools), lines)

    def value(self, tool: Tool, schema: object) -> str:
        text = self.inputs.get(tool.name)
        return (
            self.compile(property_schema(tool.parameters or {}, schema)) if text is None else text
        )

    def other_value(self, tool: Tool, schema: object) -> str:
        return self.value(tool, {"allOf": [schema], "type": OTHER_TYPES})

    def argument(self, tool: Tool, schema: object) -> ArgumentSchema | None:
        """What an argument may be; None where it is the JSON text of a custom tool."""
        is_input = tool.name in self.inputs
        return None if is_input else ArgumentSchema.of(schema, tool.parameters or {})


def properties_of(tool: Tool) -> Mapping[str, Any]:
    return (tool.parameters or {}).get("properties") or {}


# Members of a schema that ask for nothing.
ANNOTATIONS = frozenset({"description", "title", "default", "examples", "$schema"})

_PLAIN_OBJECT = ANNOTATIONS | {
    *("type", "properties", "required", "additionalProperties", "$defs", "definitions"),
}


def is_plain_object(tool: Tool) -> bool:
    schema, properties = tool.parameters or {}, properties_of(tool)
    if schema.keys() - _PLAIN_OBJECT or set(schema.get("required", ())) - properties.keys():
        return False
    return "properties" in schema or "additionalProperties" not in schema


def has_plain_texts(tool: Tool) -> bool:
    """Whether each text is any or one of an enum, and what may be any is nothing else."""
    if not is_plain_object(tool):
        return False
    for value in properties_of(tool).values():
        argument = ArgumentSchema.of(value, tool.parameters or {})
        is_plain = argument.has_plain_texts and not argument.has_others
        if not argument.is_resolved or (argument.texts is None and not is_plain):
            return False
    return True


def text_until(mark: str, marks: Marks, behind: str = "") -> list[str]:
    if mark not in marks:
        return [
            f"text_and_mark[suffix={json.dumps(mark)}]: /(.|\\n)*/",
            f"text: text_and_mark {behind}",
        ]
    return [text_without("TEXT", mark), f"text: TEXT {literal_in(mark, marks)} {behind}"]


def texts_until(name: str, texts: Sequence[str], mark: str, marks: Marks) -> tuple[str, str]:
    """A terminal of one of some texts, and what has it with the mark after it: few rules may be
    open at once, and with the mark, one text may begin with another."""
    listed = " | ".join(map(json.dumps, texts))
    if mark in marks:
        return f"{name.upper()}: {listed}", f"{name.upper()} {literal_in(mark, marks)}"
    return f"{name.upper()}: ({listed}) {json.dumps(mark)}", name.upper()


def whole_grammar(arguments: Iterable[str], lines: Sequence[str]) -> str:
    """Rules that refer to the functions' arguments as `args_0` and so on."""
    named = (parts_of(f"args_{i}", grammar) for i, grammar in enumerate(arguments))
    return joined_grammar("\n".join(lines), [part for parts in named for part in parts])


def either(name: str, count: int) -> str:
    return " | ".join(f"{name}_{i}" for i in range(count))


def up_to(most: int, text: str) -> str:
    """In Lark's notation, which has no word for none."""
    return f"({text}){{0,{most}}}" if most else ""


def text_without(name: str, mark: str) -> str:
    pattern = re.escape(mark).replace("/", r"\/")
    return rf"{name}: /(.|\n)*/ & ~/(.|\n)*{pattern}(.|\n)*/"


def literal_in(text: str, marks: Marks) -> str:
    """Marks that are tokens are named by id."""
    if not text:
        return ""
    pattern = "|".join(map(re.escape, marks)) or "(?!)"
    parts = re.split(f"({pattern})", text)
    return " ".join(
        f"<[{marks[part]}]>" if part in marks else json.dumps(part) for part in parts if part
    )


_REFERENCE = re.compile(r'"\$ref": "#([^"]*)"')
_DEFINITIONS = ("$defs", "definitions")


def property_schema(root: Mapping[str, Any], value: object) -> str:
    """The schema of a property of `root`, with what it may refer to."""
    shared = {name: root[name] for name in _DEFINITIONS if name in root}
    alone = json.dumps({**shared, **schema_members(value)})
    known = tuple(f"/{name}/" for name in _DEFINITIONS)
    if all(name.startswith(known) for name in _REFERENCE.findall(alone)):
        return alone
    whole = json.dumps({**schema_members(value), "$defs": {"root": root}})
    return _REFERENCE.sub(r'"$ref": "#/$defs/root\1"', whole)
