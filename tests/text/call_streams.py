"""Streams with calls of two functions, in the notations of families."""

import random
from typing import Any

from cadenza.frontend.answers import AnswerParsers, AnswerPlanner, AskedAnswer, ToolUse
from cadenza.structured import CallRule, Constraint, ConstraintSpec
from cadenza.text import Tokenizer
from cadenza.text.answers.json_calls import (
    DEEPSEEK_CALL,
    DEEPSEEK_CALL_END,
    DEEPSEEK_CALLS,
    DEEPSEEK_CALLS_END,
    DEEPSEEK_SEPARATOR,
)
from cadenza.text.answers.tool_format import Tool
from cadenza.text.constraints.token_constraint import ConstraintCompiler
from cadenza.text.schemas.grammar import check_grammar
from tests.text.marked_tokenizers import with_marks
from tests.text.walks import Judge, allowed_ids

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 5},
        "n": {"$ref": "#/$defs/n"},
        "unit": {"type": "string", "enum": ["c", "f"]},
    },
    "required": ["city", "n"],
    "additionalProperties": False,
    "$defs": {"n": {"type": "integer", "minimum": 1, "maximum": 9}},
}
TOOLS = (Tool(name="f", parameters=SCHEMA), Tool(name="now"))
LISTED = ("lfm2", "deepseek_v3", "deepseek_v31")
BEGINNINGS = {
    "hermes": "<tool_call>",
    "qwen3_coder": "<tool_call>",
    "mistral": "[TOOL_CALLS]",
    "llama3_json": '{"name": "f"',
    "pythonic": "[f(",
    "glm45": "<tool_call>",
    "functiongemma": "<start_function_call>",
    "gemma4": "<|tool_call>",
    "lfm2": "<|tool_call_start|>",
    "deepseek_v3": DEEPSEEK_CALLS,
    "deepseek_v31": DEEPSEEK_CALLS,
    "json": '```json\n{ "name":"now"',
}


WRITTEN = {
    "glm45": (
        "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>It's </a> x</arg_value>\n"
        "<arg_key>n</arg_key>\n<arg_value>",
        "7</arg_value>\n<arg_key>unit</arg_key>\n<arg_value>f</arg_value>\n</tool_call>",
    ),
    "functiongemma": (
        "<start_function_call>call:f{city:<escape>It's </a> x<escape>,n:",
        "7, unit:<escape>f<escape>}<end_function_call>",
    ),
    "gemma4": (
        '<|tool_call>call:f{city:<|"|>It\'s </a> x<|"|>,n:',
        '7,unit:<|"|>f<|"|>}<tool_call|>',
    ),
    "pythonic": ('[f(city="It\'s ", n=', '7, unit="f"), now()]'),
    "lfm2": (
        '<|tool_call_start|>[f(city="It\'s ", n=',
        '7, unit="f"), now()]<|tool_call_end|>',
    ),
    "deepseek_v31": (
        f'{DEEPSEEK_CALLS}{DEEPSEEK_CALL}f{DEEPSEEK_SEPARATOR}{{"city": "It\'s ", "n": ',
        f'7, "unit": "f"}}{DEEPSEEK_CALL_END}{DEEPSEEK_CALL}now{DEEPSEEK_SEPARATOR}{{}}'
        f"{DEEPSEEK_CALL_END}{DEEPSEEK_CALLS_END}",
    ),
    "deepseek_v3": (
        f"{DEEPSEEK_CALLS}{DEEPSEEK_CALL}function{DEEPSEEK_SEPARATOR}f\n```json\n"
        '{"city": "It\'s ", "n": ',
        f'7, "unit": "f"}}\n```{DEEPSEEK_CALL_END}\n{DEEPSEEK_CALL}function{DEEPSEEK_SEPARATOR}'
        f"now\n```json\n{{}}\n```{DEEPSEEK_CALL_END}{DEEPSEEK_CALLS_END}",
    ),
}


def rule_of(
    tokenizer: Tokenizer, name: str, tools: tuple[Tool, ...] = TOOLS, reasoning: str = "none"
) -> CallRule | None:
    planner = AnswerPlanner("", tokenizer, AnswerParsers(tool_calls=name, reasoning=reasoning))
    plan = planner.plan("", None, AskedAnswer(use=ToolUse(tools=tools)), check_grammar)
    return None if plan.constraint is None else plan.constraint.calls


def constraint_of(compiler: ConstraintCompiler, rule: CallRule | None) -> Constraint:
    made = compiler.compile(ConstraintSpec(calls=rule)).result()
    assert made is not None
    return made


class Stream:
    """A constraint and the text of what it accepted."""

    def __init__(self, tokenizer: Tokenizer, constraint: Constraint) -> None:
        self.tokenizer = tokenizer
        self.constraint = constraint
        self.ids: list[int] = []

    def write(self, text: str) -> None:
        for token_id in with_marks(self.tokenizer, text):
            self.take(token_id)

    def take(self, token_id: int) -> None:
        self.constraint.accept(token_id)
        self.ids.append(token_id)

    @property
    def text(self) -> str:
        return self.tokenizer.decode(self.ids, skip_special_tokens=False)

    @property
    def is_free(self) -> bool:
        return all(byte == 0xFF for byte in self.constraint.allowed())

    @property
    def allowed(self) -> list[int]:
        return allowed_ids(self.constraint, self.tokenizer.vocab_size)

    def finish_call(self, rng: random.Random) -> None:
        for _ in range(1500):
            if self.is_free:
                return
            forced = self.constraint.forced()
            assert not forced or self.allowed == [forced[0]]
            self.take(rng.choice(self.allowed))
        raise AssertionError(f"the call does not end: {self.text}")


def stream_of(judge: Judge, name: str, tools: tuple[Tool, ...] = TOOLS) -> Stream:
    rule = rule_of(judge.tokenizer, name, tools)
    return Stream(judge.tokenizer, constraint_of(judge.compiler, rule))
