"""Calls with arguments between commas: lists of Python's calls, function-gemma's and Gemma 4's; and
lists of calls with JSON behind names, DeepSeek's.

Owns their grammars behind a call's beginning. Knows no tokens beside marks. Invariant: what a
grammar allows is read by the forms of the same format.
"""

import json
import keyword
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from cadenza.structured import CallRule
from cadenza.text.answers.answer_grammar import Marks, Tool, literal_in, texts_and_end
from cadenza.text.answers.call_readers import (
    GEMMA_QUOTE,
    kinds_of_schema,
    resolved,
    schema_members,
)
from cadenza.text.answers.called_tools import (
    BEGIN_BLANKS,
    BLANKS,
    MAX_LISTED_CALLS,
    CallGrammar,
    Parts,
    properties_of,
    text_until,
    up_to,
    whole_grammar,
)
from cadenza.text.answers.gemma_values import GemmaValues, gemma_key
from cadenza.text.answers.grammar_parts import joined_grammar, parts_of
from cadenza.text.answers.tool_calls import DEEPSEEK_V3


def pythonic_calls(calls: CallGrammar, marks: Marks) -> CallRule | None:
    """A list of calls, from the first one's name on. Python must take the names of arguments."""
    if not have_python_names(calls.tools):
        return None
    names = "|".join(re.escape(tool.name) for tool in calls.tools)
    grammar = python_list(calls, marks, MAX_LISTED_CALLS)
    return CallRule(begin=rf"\[{BEGIN_BLANKS}(?:{names})\(", grammar=grammar, is_read=True)


def lfm2_calls(calls: CallGrammar, marks: Marks) -> CallRule | None:
    """Such a list between marks."""
    if not have_python_names(calls.tools):
        return None
    grammar = python_list(calls, marks, MAX_LISTED_CALLS)
    return CallRule(begin=re.escape(calls.format.begin), grammar=grammar)


def have_python_names(tools: Sequence[Tool]) -> bool:
    keys = [key for tool in tools for key in properties_of(tool)]
    parts = [part for tool in tools for part in tool.name.split(".")]
    return all(map(_is_python_name, (*keys, *parts)))


def python_list(calls: CallGrammar, marks: Marks, most: int) -> str:
    """At most so many calls. Values are JSON, with Python's words beside it, which the reader takes
    alike."""

    def value(tool: Tool, schema: object, name: str, parts: Parts) -> str:
        parts += parts_of(name, calls.value(tool, schema))
        found = resolved(schema, tool.parameters or {})
        kinds = kinds_of_schema(found)
        is_any = not {"enum", "const"} & schema_members(found).keys()
        words = ['"True"', '"False"'] if "boolean" in kinds and is_any else []
        words += ['"None"'] if "null" in kinds and is_any else []
        return f"({' | '.join([f'@{name}', *words])})"

    reserved = "|".join(keyword.kwlist)
    end = literal_in(calls.format.end, marks)
    more = up_to(most - 1, 'BLANKS? "," BLANKS? call')
    lines = [
        f'start: "[" BLANKS? call {more} BLANKS? "]" {end}',
        f"KEY: /[A-Za-z_][A-Za-z0-9_]{{0,63}}/ & ~/{reserved}/",
    ]
    notation = _Arguments(
        head="{}(", end=")", key=lambda key: json.dumps(f"{key}="), any_key='KEY "="', value=value
    )
    return _with_arguments(calls, lines, notation)


def deepseek_calls(calls: CallGrammar, marks: Marks) -> CallRule:
    grammar = deepseek_list(calls, marks, MAX_LISTED_CALLS)
    return CallRule(begin=re.escape(calls.format.begin), grammar=grammar)


def deepseek_list(calls: CallGrammar, marks: Marks, most: int) -> str:
    """At most so many calls, whose arguments are JSON."""
    begin, separator, end = (literal_in(each, marks) for each in calls.format.inner_marks)
    is_fenced = calls.format is DEEPSEEK_V3
    kind = f'"function" {separator}' if is_fenced else ""
    before, behind = ('"\\n```json\\n"', '"\\n```"') if is_fenced else (separator, "")
    between, last = (literal_in(each, marks) for each in (calls.format.between, calls.format.end))
    more = up_to(most - 1, f"{between} call")
    lines = [
        f"start: call {more} {last}",
        f"call: {' | '.join(f'call_{i}' for i in range(len(calls.tools)))}",
    ]
    for i, tool in enumerate(calls.tools):
        name = json.dumps(tool.name)
        lines.append(f"call_{i}: {begin} {kind} {name} {before} @args_{i} {behind} {end}")
    return whole_grammar(calls, lines)


def function_gemma_calls(calls: CallGrammar, marks: Marks) -> CallRule:
    """Arguments behind their names; texts stand between marks, other values are JSON."""
    mark = literal_in("<escape>", marks)

    def value(tool: Tool, schema: object, name: str, parts: Parts) -> str:
        parts += parts_of(name, calls.value(tool, schema))
        found = resolved(schema, tool.parameters or {})
        if tool.name in calls.inputs or kinds_of_schema(found) != {"string"}:
            return f"@{name}"
        return f"{mark} {texts_and_end(found, 'text', mark)}"

    def key(name: str) -> str:
        is_plain = re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII)
        return json.dumps(f"{name if is_plain else json.dumps(name)}:")

    lines = [
        f"start: BLANKS? call BLANKS? {literal_in(calls.format.end, marks)}",
        "KEY: /[A-Za-z_][A-Za-z0-9_]{0,63}/",
        *text_until("<escape>", marks),
    ]
    notation = _Arguments(head="call:{}{{", end="}", key=key, any_key='KEY ":"', value=value)
    grammar = _with_arguments(calls, lines, notation)
    return CallRule(begin=re.escape(calls.format.begin), grammar=grammar)


def gemma4_calls(calls: CallGrammar, marks: Marks) -> CallRule:
    """As function-gemma's, but that texts within lists and objects stand between marks, too, and
    that arguments are sorted by their names, as the chat template has those of the functions."""

    def value(tool: Tool, schema: object, name: str, parts: Parts) -> str:
        if tool.name in calls.inputs:
            parts += parts_of(name, calls.value(tool, schema))
            return f"@{name}"
        root = tool.parameters or {}
        values = GemmaValues(
            root=root, compile=calls.compile, marks=marks, parts=parts, lines=lines
        )
        return values.of(schema, name)

    lines = [
        f"start: BLANKS? call BLANKS? {literal_in(calls.format.end, marks)}",
        "KEY: /[A-Za-z_][A-Za-z0-9_.-]{0,63}/",
        *text_until(GEMMA_QUOTE, marks),
    ]
    notation = _Arguments(
        head="call:{}{{",
        end="}",
        key=gemma_key,
        any_key='KEY ":"',
        value=value,
        order=partial(sorted, key=str.lower),
    )
    grammar = _with_arguments(calls, lines, notation)
    return CallRule(begin=re.escape(calls.format.begin), grammar=grammar)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arguments:
    """How a call with arguments between commas is written.

    Args:
        head: what is in front of them, with a place for the function's name.
        end: what is behind them.
        key: an argument's name and what is behind it, in Lark's notation.
        any_key: of any name.
        value: of a tool, an argument's schema, and a name for the grammars that it refers to, which
            it adds to the others.
        order: of the arguments.
    """

    head: str
    end: str
    key: Callable[[str], str]
    any_key: str
    value: Callable[[Tool, object, str, Parts], str]
    order: Callable[[Iterable[str]], Iterable[str]] = list


def _with_arguments(calls: CallGrammar, lines: list[str], notation: _Arguments) -> str:
    lines += [
        BLANKS,
        "COMMA: /,[ \\t]?/",
        f"call: {' | '.join(f'call_{i}' for i in range(len(calls.tools)))}",
    ]
    parts: Parts = []
    for i, tool in enumerate(calls.tools):
        schema, properties = tool.parameters or {}, properties_of(tool)
        for j, key in enumerate(notation.order(properties)):
            value = notation.value(tool, properties[key], f"args_{i}_{j}", parts)
            lines.append(f"pair_{i}_{j}: {notation.key(key)} {value}")
            # A comma stands between the arguments that are there.
            rest, is_needed = f"tail_{i}_{j + 1}", key in schema.get("required", ())
            lines.append(
                f"first_{i}_{j}: pair_{i}_{j} {rest}"
                + ("" if is_needed else f" | first_{i}_{j + 1}")
            )
            lines.append(
                f"tail_{i}_{j}: COMMA pair_{i}_{j} {rest}" + ("" if is_needed else f" | {rest}")
            )
        is_open = tool.parameters is not None and "properties" not in schema
        free = (
            f"({notation.any_key} @any (COMMA {notation.any_key} @any){{0,15}})?"
            if is_open
            else '""'
        )
        lines.append(f"first_{i}_{len(properties)}: {free}")
        lines.append(f'tail_{i}_{len(properties)}: ""')
        if is_open:
            parts += parts_of("any", calls.compile("{}"))
        head = json.dumps(notation.head.format(tool.name))
        lines.append(f"call_{i}: {head} first_{i}_0 {json.dumps(notation.end)}")
    return joined_grammar("\n".join(lines), parts)


def _is_python_name(name: str) -> bool:
    return name.isidentifier() and name.isascii() and not keyword.iskeyword(name)
