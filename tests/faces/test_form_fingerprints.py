"""Options that decide the grammar of an answer: each changes the fingerprint, or no answer."""

from dataclasses import fields, replace
from typing import Any

import pytest

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.fingerprint import Fingerprint
from cadenza.frontend.answers import AnswerParsers, AskedAnswer, ToolUse
from cadenza.frontend.prepared_request import ChatPrompt
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.request import Request, SamplingParams
from cadenza.structured import JsonStyle, StructuredOutput
from cadenza.text.answers.part_parser import REASONING_FORMATS
from cadenza.text.answers.tool_calls import TOOL_FORMATS
from cadenza.text.answers.tool_format import Tool
from cadenza.text.schemas.grammar import name_forms

BLANK = Fingerprint(
    checkpoint="",
    arithmetic="",
    activations="",
    weights="",
    kv="",
    max_model_len=1,
    tokenizer="",
    template="",
    defaults="",
)
ASKED = [
    {"role": "system", "content": "Date: 2026-01-02\nBe brief."},
    {"role": "user", "content": "x"},
]
FREE_TEXT = StructuredOutput(json={"type": "string"})
CALLED = ToolUse(tools=(Tool(name="f"),), choice="required")
OTHERS: dict[str, tuple[Any, ...]] = {
    "reasoning": ("none", *REASONING_FORMATS),
    "tool_calls": (*TOOL_FORMATS,),
    "max_string": (10, None, 4096),
    "strict_tools": (True,),
    "strict_messages": (True,),
    "stable_prompts": (True,),
}
"""Of each option, the values beside its default."""


def answers(parsers: AnswerParsers) -> tuple[Request, ...]:
    """What decides the tokens of some answers: their prompts and their constraints."""
    text = TextFrontend(open_checkpoint(None), parsers=parsers)
    asked = (
        (SamplingParams(), AskedAnswer(use=CALLED)),
        (SamplingParams(structured=FREE_TEXT), AskedAnswer()),
        (SamplingParams(structured=FREE_TEXT), AskedAnswer(use=replace(CALLED, choice="auto"))),
        (SamplingParams(), AskedAnswer(use=replace(CALLED, choice="auto"))),
    )
    return tuple(
        text.prepare(ChatPrompt(messages=ASKED, asked=how), params).request for params, how in asked
    )


def forms_of(parsers: AnswerParsers) -> str:
    text = TextFrontend(open_checkpoint(None), parsers=parsers)
    return text.with_forms(BLANK).digest


def test_every_option_of_answers_is_tried():
    assert OTHERS.keys() == {each.name for each in fields(AnswerParsers)}


@pytest.mark.parametrize("name", OTHERS)
def test_an_option_changes_the_fingerprint_or_no_answer(name: str):
    usual = AnswerParsers()
    before, digest = answers(usual), forms_of(usual)
    num_changed = 0
    for value in OTHERS[name]:
        parsers = replace(usual, **{name: value})
        is_changed = answers(parsers) != before
        assert not is_changed or forms_of(parsers) != digest, value
        num_changed += is_changed
    assert num_changed or name.startswith("strict_"), (
        "the control: an option that decides something"
    )


def test_the_librarys_version_and_the_limits_are_in_the_fingerprint():
    style, parsers = JsonStyle(max_string=4096, max_items=512, max_depth=16), ("json",)
    name = name_forms(style, parsers)
    assert "llguidance-" in name
    for bound in ("max_string", "max_items", "max_depth"):
        assert name_forms(replace(style, **{bound: 1}), parsers) != name
    assert name_forms(style, ("mistral",)) != name


def test_a_parser_that_is_named_as_the_template_shows_it_changes_nothing():
    usual = AnswerParsers()
    shown = [
        name
        for name in TOOL_FORMATS
        if forms_of(replace(usual, tool_calls=name)) == forms_of(usual)
    ]
    assert len(shown) == 1
    assert answers(replace(usual, tool_calls=shown[0])) == answers(usual)
