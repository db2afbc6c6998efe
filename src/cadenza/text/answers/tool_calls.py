"""The notations of calls by their names, which of them a chat template shows, and the grammars of
their calls. Invariant: a call that a format's `opening` begins is found by one of its `forms`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cadenza.structured import CallRule
from cadenza.text.answers.element_calls import GLM45, HERMES, QWEN3_CODER, TOOL_CALL
from cadenza.text.answers.harmony import HARMONY
from cadenza.text.answers.json_calls import (
    DEEPSEEK_CALLS,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    JSON,
    LLAMA3,
    MISTRAL,
    MISTRAL_MARK,
    PYTHON_TAG,
)
from cadenza.text.answers.listed_calls import FUNCTION_GEMMA, GEMMA4, LFM2, PYTHONIC
from cadenza.text.answers.tool_format import (
    MAX_LISTED_CALLS,
    CallGrammar,
    Marks,
    Tool,
    ToolFormat,
    literal_in,
    up_to,
)
from cadenza.text.schemas.grammar import joined_grammar, parts_of

TOOL_FORMATS: Mapping[str, ToolFormat] = {  # by the names that `--tool-call-parser` takes
    "hermes": HERMES,
    "qwen3_coder": QWEN3_CODER,
    "glm45": GLM45,
    "mistral": MISTRAL,
    "llama3_json": LLAMA3,
    "pythonic": PYTHONIC,
    "functiongemma": FUNCTION_GEMMA,
    "gemma4": GEMMA4,
    "lfm2": LFM2,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "json": JSON,
    "harmony": HARMONY,
}

FORCED = JSON  # what a constrained answer is written in where the family's own notation cannot be

_SHOWN_BY = (
    ("<|channel|>", "harmony"),
    ("<|tool_call>", "gemma4"),
    ("<|tool_call_start|>", "lfm2"),
    ("List of tools: ", "lfm2"),
    ("<start_function_call>", "functiongemma"),
    ("<arg_key>", "glm45"),
    ("<function=", "qwen3_coder"),
    (TOOL_CALL, "hermes"),
    (MISTRAL_MARK, "mistral"),
    (PYTHON_TAG, "llama3_json"),
    ("Environment: ipython", "llama3_json"),
    ("[func_name1(", "pythonic"),
)

TOOL_ALIASES = {
    "qwen": "hermes",
    "qwen2_5": "hermes",
    "qwen3_xml": "qwen3_coder",
    "glm4_moe": "glm45",
    "llama3": "llama3_json",
    "gemma": "functiongemma",
    "gpt_oss": "harmony",
    "openai": "harmony",
}


def format_shown_by(template: str) -> str:
    """The name of the format that a chat template asks for; `json` where it shows none."""
    if DEEPSEEK_CALLS in template:
        return "deepseek_v3" if "```json" in template else "deepseek_v31"
    return next((name for marker, name in _SHOWN_BY if marker in template), "json")


ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def call_rule(calls: CallGrammar, marks: Marks) -> CallRule | None:
    """What a call may be that a model begins by itself; None where calls cannot be constrained.
    Raises InvalidRequestError where a schema cannot be read."""
    format = calls.format
    if not format.can_name(calls.tools):
        return None
    if format.listed is not None:
        grammar = format.listed(calls, marks, MAX_LISTED_CALLS)
        rule = CallRule(begin=re.escape(format.begin), grammar=grammar)
    else:
        assert format.write is not None, "a notation has one of them"
        rule = format.write(calls, marks)
    return replace(rule, is_needed=bool(calls.inputs))


def holds_schemas(format: ToolFormat, tools: Sequence[Tool]) -> bool:
    """Whether required calls can be written in a format that is not JSON."""
    return format.holds is not None and format.can_name(tools) and all(map(format.holds, tools))


def required_calls(calls: CallGrammar, marks: Marks, *, max_calls: int) -> str:
    """The grammar of an answer of calls in the format's own notation, of which `holds_schemas`."""
    tools = [
        replace(tool, parameters=None)
        if "properties" in schema and not schema["properties"]
        else tool
        for tool in calls.tools
        for schema in (tool.parameters or {},)
    ]
    calls, format = replace(calls, tools=tools), calls.format
    begin = literal_in(format.begin, marks)
    if format.listed is not None:
        lines = format.listed(calls, marks, max_calls)
        return joined_grammar(f"start: {begin} @all", parts_of("all", lines))
    rule = call_rule(calls, marks)
    assert rule is not None, "all names can be written"
    more = up_to(max_calls - 1, f"{literal_in(format.between, marks)} call")
    lark = f"start: call {more}\ncall: {begin} @one"
    return joined_grammar(lark, parts_of("one", rule.grammar))
