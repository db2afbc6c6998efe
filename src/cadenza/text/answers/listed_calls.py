"""Grammars of calls with arguments between commas (Python's, function-gemma's, Gemma 4's) and of
lists of names with JSON (DeepSeek's), after a call's beginning. Invariant: the forms of the same
format read what a grammar allows.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from cadenza.structured import CallRule
from cadenza.text.answers.answer_grammar import Marks, Tool, literal_in
from cadenza.text.answers.call_readers import ESCAPE, GEMMA_QUOTE, PYTHON_KEY
from cadenza.text.answers.called_tools import (
    BEGIN_BLANKS,
    BLANKS,
    MAX_LISTED_CALLS,
    CallGrammar,
    Parts,
    are_keys,
    properties_of,
    text_until,
    up_to,
    whole_grammar,
)
from cadenza.text.answers.gemma_values import GemmaValues, gemma_key
from cadenza.text.answers.grammar_parts import joined_grammar, parts_of
from cadenza.text.answers.tool_calls import DEEPSEEK_V3


def pythonic_calls(calls: CallGrammar, marks: Marks) -> CallRule | None:
    """A list of calls, from the first one's name on. The names of arguments need not be Python's,
    but none has blanks or marks of the list."""
    if not have_list_names(calls.tools):
        return None
    names = "|".join(re.escape(tool.name) for tool in calls.tools)
    grammar = python_list(calls, marks, MAX_LISTED_CALLS)
    return CallRule(begin=rf"\[{BEGIN_BLANKS}(?:{names})\(", grammar=grammar, is_read=True)


def lfm2_calls(calls: CallGrammar, marks: Marks) -> CallRule | None:
    if not have_list_names(calls.tools):
        return None
    grammar = python_list(calls, marks, MAX_LISTED_CALLS)
    return CallRule(begin=re.escape(calls.format.begin), grammar=grammar)


def have_list_names(tools: Sequence[Tool]) -> bool:
    return are_keys(tools, PYTHON_KEY)


def python_list(calls: CallGrammar, marks: Marks, most: int) -> str:
    """At most `most` calls. Values are JSON, with Python's words as well, which the reader takes
    alike."""

    def value(tool: Tool, schema: object, name: str, parts: Parts) -> str:
        parts += parts_of(name, calls.value(tool, schema))
        argument = calls.argument(tool, schema)
        words = (each for each in (True, False, None) if argument and argument.allows(each))
        return f"({' | '.join([f'@{name}', *(json.dumps(repr(each)) for each in words)])})"

    end = literal_in(calls.format.end, marks)
    more = up_to(most - 1, 'BLANKS? "," BLANKS? call')
    lines = [
        f'start: "[" BLANKS? call {more} BLANKS? "]" {end}',
        "KEY: /[A-Za-z_][A-Za-z0-9_.-]{0,63}/",
    ]
    notation = _Arguments(
        head="{}(", end=")", key=lambda key: json.dumps(f"{key}="), any_key='KEY "="', value=value
    )
    return _with_arguments(calls, lines, notation)


def deepseek_calls(calls: CallGrammar, marks: Marks) -> CallRule:
    grammar = deepseek_list(calls, marks, MAX_LISTED_CALLS)
    return CallRule(begin=re.escape(calls.format.begin), grammar=grammar)


def deepseek_list(calls: CallGrammar, marks: Marks, most: int) -> str:
    """At most `most` calls, whose arguments are JSON."""
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
    """Arguments after their names; texts stand between marks, other values are JSON."""
    return _gemma_calls(calls, marks, ESCAPE, list)


def gemma4_calls(calls: CallGrammar, marks: Marks) -> CallRule:
    """As function-gemma's, but that arguments are sorted by their names, as the chat template has
    those of the functions."""
    return _gemma_calls(calls, marks, GEMMA_QUOTE, partial(sorted, key=str.lower))


def _gemma_calls(calls: CallGrammar, marks: Marks, quote: str, order: "_Order") -> CallRule:
    def value(tool: Tool, schema: object, name: str, parts: Parts) -> str:
        if tool.name in calls.inputs:
            parts += parts_of(name, calls.value(tool, schema))
            return f"@{name}"
        values = GemmaValues(
            root=tool.parameters or {},
            compile=calls.compile,
            quote=quote,
            marks=marks,
            parts=parts,
            lines=lines,
        )
        return values.of(schema, name)

    lines = [
        f"start: BLANKS? call BLANKS? {literal_in(calls.format.end, marks)}",
        "KEY: /[A-Za-z_][A-Za-z0-9_.-]{0,63}/",
        *text_until(quote, marks),
    ]
    notation = _Arguments(
        head="call:{}{{", end="}", key=gemma_key, any_key='KEY ":"', value=value, order=order
    )
    grammar = _with_arguments(calls, lines, notation)
    return CallRule(begin=re.escape(calls.format.begin), grammar=grammar)


_Order = Callable[[Iterable[str]], Iterable[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arguments:
    """How a call is written: `head`, with a field for the function's name, and `end` around its
    arguments; `key`: an argument's name and what follows it, in Lark's notation; `any_key`: of any
    name; `value`: of a tool, an argument's schema, and a name for the grammars that it refers to,
    which it adds to the others; `order`: of the arguments."""

    head: str
    end: str
    key: Callable[[str], str]
    any_key: str
    value: Callable[[Tool, object, str, Parts], str]
    order: _Order = list


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
        free = '""'
        if is_open:
            member = f"{notation.any_key} {notation.value(tool, {}, f'any_{i}', parts)}"
            free = f"({member} (COMMA {member}){{0,15}})?"
        lines.append(f"first_{i}_{len(properties)}: {free}")
        lines.append(f'tail_{i}_{len(properties)}: ""')
        head = json.dumps(notation.head.format(tool.name))
        lines.append(f"call_{i}: {head} first_{i}_0 {json.dumps(notation.end)}")
    return joined_grammar("\n".join(lines), parts)
