"""`ToolFormat`: how models write tool calls, by family, and which format a chat template shows.

Invariant: a call that a format's `opening` begins is found by one of its `forms`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from cadenza.text.answers.call_forms import (
    BareCalls,
    CallForm,
    MarkedCalls,
    begins_json,
    begins_python,
)
from cadenza.text.answers.call_readers import (
    DEEPSEEK_CALL,
    DEEPSEEK_CALL_END,
    DEEPSEEK_CALLS,
    DEEPSEEK_CALLS_END,
    DEEPSEEK_SEPARATOR,
    GEMMA_QUOTE,
    MISTRAL,
    read_deepseek,
    read_function_gemma,
    read_gemma4,
    read_glm,
    read_hermes,
    read_lfm2,
    read_mistral,
    read_objects,
    read_pythonic,
    read_xml,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """A family's notation.

    Args:
        begin: what a call begins with; empty where the whole answer is either calls or text.
        end: what it ends with; empty where it reaches to the end of the text.
        openers: where `begin` is empty: the first characters of a constrained answer that may be
            calls.
        arguments: the member of a call's JSON that has its arguments.
        opening, between, closing: what a constrained answer has around its calls.
        is_json: calls are JSON, so that whole answers of them can be constrained.
        forms: where calls stand, and what reads them.
        skipped: characters behind a call that are no content.
        inner_marks: marks within a call.
        example: a call of the notation, for the description of tools that a chat template has no
            place for; empty: JSON between `opening` and `closing`.
        escaped: characters that a JSON text within a call has escapes for, beside JSON's own: those
            with which marks begin that no JSON text may have.
    """

    begin: str = ""
    end: str = ""
    openers: str = ""
    arguments: str = "arguments"
    opening: str = ""
    between: str = "\n"
    closing: str = ""
    is_json: bool = True
    forms: tuple[CallForm, ...]
    skipped: str = " \t\r\n"
    inner_marks: tuple[str, ...] = ()
    escaped: str = ""
    example: str = ""


_JSON_FIRST = re.compile(r"`{3,}|[\[{]")
_BARE_JSON = BareCalls(first=_JSON_FIRST, begins=begins_json, read=read_objects)
_TOOL_CALL, _TOOL_CALL_END = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_SEPARATED = " \t\r\n;"

HARMONY_MARKS = (
    *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"),
    *("<|end|>", "<|call|>", "<|return|>"),
)
"""Of gpt-oss's answers, each of whose messages has a header."""

HARMONY = ToolFormat(forms=(), inner_marks=HARMONY_MARKS)
"""Its calls are messages (`text.answers.harmony`), and no texts within one."""

GEMMA4 = ToolFormat(
    begin="<|tool_call>",
    end="<tool_call|>",
    between="",
    is_json=False,
    escaped="<",
    inner_marks=(GEMMA_QUOTE,),
    forms=(MarkedCalls(begin="<|tool_call>", end="<tool_call|>", read=read_gemma4),),
)

LFM2 = ToolFormat(
    begin="<|tool_call_start|>",
    end="<|tool_call_end|>",
    is_json=False,
    forms=(MarkedCalls(begin="<|tool_call_start|>", end="<|tool_call_end|>", read=read_lfm2),),
)

_DEEPSEEK_MARKS = (DEEPSEEK_CALL, DEEPSEEK_SEPARATOR, DEEPSEEK_CALL_END)
_DEEPSEEK_CALLS = MarkedCalls(begin=DEEPSEEK_CALLS, end=DEEPSEEK_CALLS_END, read=read_deepseek)
DEEPSEEK_V3 = ToolFormat(
    begin=DEEPSEEK_CALLS,
    end=DEEPSEEK_CALLS_END,
    is_json=False,
    inner_marks=_DEEPSEEK_MARKS,
    forms=(_DEEPSEEK_CALLS,),
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
    example=f"{DEEPSEEK_CALLS}{DEEPSEEK_CALL}tool name{DEEPSEEK_SEPARATOR}"
    f'{{"parameter": "value"}}{DEEPSEEK_CALL_END}{DEEPSEEK_CALLS_END}',
)

TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": ToolFormat(
        begin=_TOOL_CALL,
        end=_TOOL_CALL_END,
        opening="<tool_call>\n",
        between="\n</tool_call>\n<tool_call>\n",
        closing="\n</tool_call>",
        forms=(MarkedCalls(begin=_TOOL_CALL, end=_TOOL_CALL_END, read=read_hermes),),
    ),
    "qwen3_coder": ToolFormat(
        begin=_TOOL_CALL,
        end=_TOOL_CALL_END,
        is_json=False,
        escaped="<",
        forms=(
            MarkedCalls(begin=_TOOL_CALL, end=_TOOL_CALL_END, read=read_hermes),
            # Some answers leave the outer mark out.
            MarkedCalls(
                begin="<function=",
                end="</function>",
                trailing=_TOOL_CALL_END,
                is_named=True,
                read=read_xml,
            ),
        ),
    ),
    "glm45": ToolFormat(
        begin=_TOOL_CALL,
        end=_TOOL_CALL_END,
        is_json=False,
        escaped="<",
        inner_marks=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        forms=(MarkedCalls(begin=_TOOL_CALL, end=_TOOL_CALL_END, read=read_glm),),
    ),
    "mistral": ToolFormat(
        begin=MISTRAL,
        opening=f"{MISTRAL}[",
        between=", ",
        closing="]",
        forms=(MarkedCalls(begin=MISTRAL, read=read_mistral),),
        inner_marks=("[ARGS]", "[CALL_ID]"),
    ),
    "llama3_json": ToolFormat(
        openers="{<",
        arguments="parameters",
        between="; ",
        forms=(
            BareCalls(
                prefix=_PYTHON_TAG,
                first=re.compile(r"`{3,}|[\[{]|<\|python_tag\|>"),
                begins=begins_json,
                read=read_objects,
            ),
        ),
        skipped=_SEPARATED,
    ),
    "pythonic": ToolFormat(
        openers="[",
        is_json=False,
        forms=(
            BareCalls(
                prefix=_PYTHON_TAG,
                first=re.compile(r"`{3,}|\[|<\|python_tag\|>"),
                quotes="\"'",
                begins=begins_python,
                read=read_pythonic,
            ),
        ),
    ),
    "functiongemma": ToolFormat(
        begin="<start_function_call>",
        end="<end_function_call>",
        is_json=False,
        escaped="<",
        inner_marks=("<escape>",),
        forms=(
            MarkedCalls(
                begin="<start_function_call>", end="<end_function_call>", read=read_function_gemma
            ),
        ),
    ),
    "gemma4": GEMMA4,
    "lfm2": LFM2,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "json": ToolFormat(
        openers="[{",
        opening="[",
        between=", ",
        closing="]",
        forms=(_BARE_JSON,),
        skipped=_SEPARATED,
    ),
    "harmony": HARMONY,
}
"""By the names that `--tool-call-parser` takes."""

FORCED = TOOL_FORMATS["json"]
"""What a constrained answer is written in where the family's own notation cannot be."""

GENERIC = ToolFormat(openers="[{", forms=(_BARE_JSON,), skipped=_SEPARATED)
"""Of models whose chat template has no place for tools: objects, one a line."""

_SHOWN_BY = (
    ("<|channel|>", "harmony"),
    ("<|tool_call>", "gemma4"),
    ("<|tool_call_start|>", "lfm2"),
    ("List of tools: ", "lfm2"),
    ("<start_function_call>", "functiongemma"),
    ("<arg_key>", "glm45"),
    ("<function=", "qwen3_coder"),
    (_TOOL_CALL, "hermes"),
    (MISTRAL, "mistral"),
    (_PYTHON_TAG, "llama3_json"),
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
