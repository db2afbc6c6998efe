"""Answers in the harmony format: read however they are cut, and constrained message by message."""

import itertools
import json
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cadenza.frontend.answers import AnswerParsers, AnswerPlan, AnswerPlanner, AskedAnswer, ToolUse
from cadenza.frontend.sample_output import ContentStops
from cadenza.structured import Constraint, ConstraintSpec
from cadenza.text import Tokenizer
from cadenza.text.answers.harmony import (
    HARMONY,
    HARMONY_MARKS,
    MAX_HEADER_CHARS,
    HarmonyParser,
    tail_of,
)
from cadenza.text.answers.input_grammar import InputGrammar
from cadenza.text.answers.part_parser import REASONING_FORMATS, PartPlan
from cadenza.text.answers.tool_format import Tool
from cadenza.text.constraints.token_constraint import ConstraintCompiler
from cadenza.text.schemas.grammar import check_grammar
from cadenza.text.tokens.stop import StopMatcher
from tests.text.marked_tokenizers import marked_source, with_marks
from tests.text.parts import Joined, joined
from tests.text.walks import Judge, allowed_ids

TEMPLATE = (Path(__file__).parents[1] / "oracle/templates/channels.jinja").read_text()
PLAN = PartPlan(
    reasoning=REASONING_FORMATS["harmony"], tools=HARMONY, functions={"f": {}, "now": {}}
)
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"


def parse(plan: PartPlan, *pieces: str, begun: str = "") -> Joined:
    parser = HarmonyParser(plan, begun)
    parts = [part for piece in pieces for part in parser.push(piece)]
    return joined([*parts, *parser.flush()])


def thought(text: str) -> tuple[str, None, str]:
    return ("reasoning", None, text)


def told(text: str) -> tuple[str, None, str]:
    return ("content", None, text)


def called(arguments: str = '{"a": 1}', name: str = "f") -> tuple[str, str, str]:
    return ("tool_call", name, arguments)


CASES: list[tuple[str, Joined]] = [
    (f"{ANALYSIS} why\n{NEXT}{FINAL}\nso <|return|>", [thought(" why\n"), told("\nso ")]),
    (f'{ANALYSIS}x{NEXT}{CALL}{{"a": 1}}<|call|>', [thought("x"), called()]),
    (f'{CALL}{{"a": 1}}', [called()]),
    (f'{CALL}{{"a": 1', [called()]),
    (f'{CALL}{{"a": "1', [told('{"a": "1')]),
    (f"{CALL}<|call|>", [called("{}")]),
    (f"{CALL}not JSON<|call|>", [told("not JSON")]),
    (
        f'{CALL}{{"a": "<|call|>"}}<|call|>{FINAL}so',
        [called('{"a": "<|call|>"}'), told("so")],
    ),
    (f'{CALL}{{"a": "x<|call|>{FINAL}so', [told('{"a": "xso')]),
    (f'{CALL}{{"a": "<|channel|> <|x|>"}}<|call|>', [called('{"a": "<|channel|> <|x|>"}')]),
    (' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>', [called()]),
    ('<|channel|>commentary to=f<|message|>{"a": 1}<|call|>', [called()]),
    ('<|channel|>commentary to=f.g<|message|>{"a": 1}<|call|>', [thought('{"a": 1}')]),
    ('<|channel|>analysis to=functions.g code<|message|>{"a": 1}<|call|>', [called(name="g")]),
    ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", [thought("1 + 1")]),
    (
        f'{CALL}{{"a": 1}}<|call|><|start|>assistant{CALL}{{"a": 2}}<|call|>',
        [called(), called('{"a": 2}')],
    ),
    (
        f"<|channel|>commentary<|message|>I look.{NEXT} to=functions.now"
        "<|channel|>commentary json<|message|>{}<|call|>",
        [told("I look."), called("{}", "now")],
    ),
    (f"{ANALYSIS}a{NEXT}{ANALYSIS}b{NEXT}{FINAL}c", [thought("ab"), told("c")]),
    (f"{ANALYSIS}a<|start|>assistant{FINAL}c", [thought("a"), told("c")]),
    ("<|channel|>final <|constrain|>json<|message|>{}<|return|>", [told("{}")]),
    (f"{FINAL}a <|end|>\n", [told("a ")]),
    (f"{FINAL}a<|end|>b", [told("ab")]),
    ("<|message|>a", [told("a")]),
    (f"{ANALYSIS}cut", [thought("cut")]),
    ("<|channel|>fin", []),
    ("<|chan", []),
    (" \n", []),
    ("to=day", [told("to=day")]),
    (" plain <text> to=functions.f", [told(" plain <text> to=functions.f")]),
    ("<|channel|><|end|>x", [told("<|channel|>x")]),
]


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_an_answer_has_the_parts_of_its_messages_however_it_is_cut(text: str, expected: Joined):
    assert parse(PLAN, text) == expected
    assert parse(PLAN, *text) == expected
    for first, second in itertools.combinations(range(len(text) + 1), 2):
        assert parse(PLAN, text[:first], text[first:second], text[second:]) == expected


PIECES = st.lists(
    st.sampled_from(
        [
            *(*HARMONY_MARKS, ANALYSIS, FINAL, CALL, NEXT, "assistant", " to=functions.f", "to="),
            *("{}", "commentary", " ", "\n", "<", "<|", "word", '{"a": 1', "}"),
        ]
    ),
    max_size=10,
).map("".join)


@given(
    PIECES, st.sampled_from(["", " to=functions.f", "<|channel|>final", FINAL, ANALYSIS]), st.data()
)
def test_any_answer_has_the_same_parts_however_it_is_cut(
    text: str, begun: str, data: st.DataObject
):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    whole = parse(PLAN, text, begun=begun)
    assert parse(PLAN, *pieces, begun=begun) == whole
    assert parse(PLAN, *text, begun=begun) == whole


def test_without_tools_a_call_is_content_and_without_a_parser_reasoning_is():
    text = f"{ANALYSIS}a{NEXT}{CALL}{{}}<|call|>"
    assert parse(PartPlan(reasoning=PLAN.reasoning), text) == [thought("a"), told("{}")]
    assert parse(PartPlan(tools=HARMONY), text) == [told("a"), called("{}")]


def test_a_header_without_an_end_is_content_at_its_bound():
    text = "<|channel|>" + "x" * MAX_HEADER_CHARS
    parser = HarmonyParser(PLAN)
    assert joined([*parser.push(text)]) == [told(text)]
    assert parse(PLAN, *text) == [told(text)]


@pytest.mark.parametrize(
    ("prompt", "answer", "expected"),
    [
        ("<|start|>assistant", f"{FINAL}so", [told("so")]),
        (f"<|start|>assistant{FINAL}It is", " so<|return|>", [told(" so")]),
        (f"<|start|>assistant{ANALYSIS}I", f" see{NEXT}{FINAL}so", [thought(" see"), told("so")]),
        ("<|start|>assistant<|channel|>analysis", "<|message|>a", [thought("a")]),
        ("<|start|>assistant to=functions.f", "<|channel|>commentary<|message|>{}", [called("{}")]),
        ("no marks", "so", [told("so")]),
    ],
)
def test_an_answer_goes_on_where_the_prompt_ends(prompt: str, answer: str, expected: Joined):
    begun = tail_of("<|start|>user<|message|>x<|end|>" + prompt)
    assert parse(PLAN, answer, begun=begun) == expected
    assert parse(PLAN, *answer, begun=begun) == expected


def test_what_is_thought_counts_as_reasoning_token_by_token():
    parser, counted = HarmonyParser(PLAN), []
    for piece in ("<|channel|>", "analysis", "<|message|>", "a", "<|end|>", "<|start|>"):
        parser.push(piece)
        counted.append(parser.is_reasoning)
    assert counted == [False, False, True, True, False, False]


@pytest.mark.parametrize("stop", ["STOP", "P", "\n"])
def test_a_stop_string_acts_in_each_message_of_content_only(stop: str):
    preamble = "<|channel|>commentary<|message|>"
    text = f"{ANALYSIS}STOP\n{NEXT}{preamble}ST{NEXT}{FINAL}OP and STOP\nmore<|return|>"
    shown: list[Any] = []
    for pieces in ([text], list(text)):
        make = partial(StopMatcher, [stop])
        stops = ContentStops(HarmonyParser(PLAN), [stop], make)
        parts = [part for piece in pieces for part in stops.push(piece).parts]
        parts += stops.flush().parts
        assert stops.match is not None
        place = text.index(f"{FINAL}OP") + len(FINAL)
        assert stops.match.end == text.index(stop, place) + len(stop)
        shown.append(joined(parts))
    cut = "OP and STOP\n".partition(stop)[0]
    assert shown[0] == shown[1] == [thought("STOP\n"), told(f"ST{cut}")]


# Constrained answers, with marks that are special tokens.

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}, "n": {"enum": [1, 2]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = (Tool(name="f", parameters=CITY), Tool(name="now"))
PROMPT = "<|start|>user<|message|>x<|end|><|start|>assistant"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(marked_source(HARMONY_MARKS))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[ConstraintCompiler]:
    ends = [tokenizer.added_tokens[mark] for mark in ("<|return|>", "<|call|>")]
    made = ConstraintCompiler(
        marked_source(HARMONY_MARKS), vocab_size=tokenizer.vocab_size, eos_token_ids=ends
    )
    yield made
    made.close()


@pytest.fixture(scope="module")
def judge(tokenizer: Tokenizer, compiler: ConstraintCompiler) -> Judge:
    return Judge(tokenizer, compiler)


def plan_of(
    tokenizer: Tokenizer,
    use: ToolUse | None = None,
    form: str | None = None,
    prompt: str = PROMPT,
    max_thinking: int | None = None,
) -> AnswerPlan:
    planner = AnswerPlanner(TEMPLATE, tokenizer, AnswerParsers())
    asked = AskedAnswer(use=use, max_thinking=max_thinking)
    spec = None if form is None else ConstraintSpec(grammar=form)
    return planner.plan(prompt, spec, asked, check_grammar)


def constraint_of(compiler: ConstraintCompiler, plan: AnswerPlan) -> Constraint:
    assert plan.constraint is not None
    made = compiler.compile(plan.constraint).result()
    assert made is not None
    return made


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text, in which marks are what they are in an answer."""
    return with_marks(tokenizer, text)


def takes(judge: Judge, plan: AnswerPlan, text: str) -> bool:
    """Whether an answer may be a text, to its last token."""
    constraint = constraint_of(judge.compiler, plan)
    for token_id in ids_of(judge.tokenizer, text):
        if token_id not in allowed_ids(constraint, judge.tokenizer.vocab_size):
            return False
        constraint.accept(token_id)
    return constraint.is_complete


FORM = 'start: "[" /[0-9]{2}/ "]"'


def test_a_form_is_that_of_the_final_channel_behind_any_thinking(judge: Judge):
    plan = plan_of(judge.tokenizer, form=FORM)
    assert plan.shows_special_tokens
    for text in (f"{FINAL}[12]", f"{ANALYSIS}Any [text]\n{NEXT}{FINAL}[34]"):
        assert takes(judge, plan, text), text
    for text in ("[12]", f"{FINAL}12", f"{ANALYSIS}x<|return|>", f"{CALL}{{}}"):
        assert not takes(judge, plan, text), text
    going_on = plan_of(judge.tokenizer, form=FORM, prompt=f"{PROMPT}{FINAL}")
    assert takes(judge, going_on, "[12]")
    thinking = plan_of(judge.tokenizer, form=FORM, prompt=f"{PROMPT}{ANALYSIS}I")
    assert takes(judge, thinking, f" see{NEXT}{FINAL}[12]")
    assert not takes(judge, thinking, f"{NEXT}[12]")


@pytest.mark.parametrize("named", [None, "f"])
def test_a_required_call_is_one_message_of_a_functions_schema(judge: Judge, named: str | None):
    use = ToolUse(tools=TOOLS, choice="required", named=named)
    plan = plan_of(judge.tokenizer, use)
    other = " to=functions.f<|channel|>commentary json<|message|>"
    for text in (f'{CALL}{{"city": "Oslo"}}', f'{ANALYSIS}so{NEXT}{other}{{"city": ""}}'):
        assert takes(judge, plan, text), text
    now = f"{CALL}{{}}".replace(".f ", ".now ")
    assert takes(judge, plan, now) == (named is None)
    for text in (f"{FINAL}no", f'{CALL}{{"city": "Trondheim"}}', f"{ANALYSIS}a{NEXT}{FINAL}"):
        assert not takes(judge, plan, text), text
    assert plan.make_parser is not None
    for seed in range(6):
        constraint, rng = constraint_of(judge.compiler, plan), random.Random(seed)
        ids = ids_of(judge.tokenizer, f"{ANALYSIS}so{NEXT}")
        for token_id in ids:
            constraint.accept(token_id)
        while not constraint.is_complete and len(ids) < 300:
            allowed = allowed_ids(constraint, judge.tokenizer.vocab_size)
            # No further thinking, whose texts are of any length.
            calm = [each for each in allowed if each not in ids_of(judge.tokenizer, "analysis")]
            ids.append(rng.choice(calm or allowed))
            constraint.accept(ids[-1])
        parser = plan.make_parser()
        answer = judge.tokenizer.decode(ids, skip_special_tokens=False)
        _, (kind, name, arguments) = joined([*parser.push(answer), *parser.flush()])
        assert kind == "tool_call", answer
        found = json.loads(arguments)
        assert found == {} if name == "now" else jsonschema_rs.is_valid(CITY, found)


def test_a_form_beside_tools_is_the_answer_unless_it_is_a_call(judge: Judge):
    plan = plan_of(judge.tokenizer, ToolUse(tools=TOOLS), form=FORM)
    for text in (f"{FINAL}[12]", f'{ANALYSIS}x{NEXT}{CALL}{{"city": "a"}}'):
        assert takes(judge, plan, text), text
    assert not takes(judge, plan, f"{FINAL}text")


def test_a_strict_tool_is_called_as_its_schema_says_or_not_at_all(judge: Judge):
    strict = (Tool(name="f", parameters={**CITY, "required": ["city", "n"]}, is_strict=True),)
    plan = plan_of(judge.tokenizer, ToolUse(tools=strict))
    told_first = f"<|channel|>commentary<|message|>I look.{NEXT}"
    for text in (f'{CALL}{{"city": "a", "n": 1}}', f'{told_first}{CALL}{{"city": "a", "n": 2}}'):
        assert takes(judge, plan, text), text
    assert not takes(judge, plan, f'{CALL}{{"city": "a", "n": 3}}')
    final = constraint_of(judge.compiler, plan)
    for token_id in ids_of(judge.tokenizer, f"{FINAL}Any text."):
        final.accept(token_id)
    end = judge.tokenizer.added_tokens["<|return|>"]
    assert not final.has_failed
    assert end in allowed_ids(final, judge.tokenizer.vocab_size)


@pytest.mark.parametrize(
    "beginning",
    [
        "<|channel|>commentary to=functions.",
        f"{ANALYSIS}to=functions.x{NEXT}<|channel|>commentary to=functions.",
        f"{ANALYSIS}x{NEXT} to=functions.",
        " to=functions.",
    ],
)
def test_a_call_that_begins_is_one_of_a_function(judge: Judge, beginning: str):
    plan = plan_of(judge.tokenizer, ToolUse(tools=TOOLS))
    constraint = constraint_of(judge.compiler, plan)
    for place, token_id in enumerate(ids_of(judge.tokenizer, beginning)):
        free = all(byte == 0xFF for byte in constraint.allowed())
        assert free, judge.tokenizer.decode(ids_of(judge.tokenizer, beginning)[:place])
        constraint.accept(token_id)
    allowed = allowed_ids(constraint, judge.tokenizer.vocab_size)
    assert judge.tokenizer.id_of("f") in allowed
    assert judge.tokenizer.id_of("g") not in allowed
    rest = "f" + CALL.partition(".f")[2] if "commentary" in beginning else None
    rest = rest or "f<|channel|>commentary json<|message|>"
    for token_id in ids_of(judge.tokenizer, f'{rest}{{"city": "a", "n": 1}}'):
        assert token_id in allowed_ids(constraint, judge.tokenizer.vocab_size), rest
        constraint.accept(token_id)
    assert all(byte == 0xFF for byte in constraint.allowed())


def test_thinking_is_bounded_in_analysis_and_content_is_not(judge: Judge):
    plan = plan_of(judge.tokenizer, max_thinking=3)
    end = judge.tokenizer.added_tokens["<|end|>"]

    def forced_after(text: str) -> bool:
        constraint = constraint_of(judge.compiler, plan)
        for token_id in ids_of(judge.tokenizer, text):
            constraint.accept(token_id)
        return allowed_ids(constraint, judge.tokenizer.vocab_size) == [end]

    assert not forced_after(f"{ANALYSIS}a b")
    assert forced_after(f"{ANALYSIS}a b c")
    assert not forced_after(f"{FINAL}a b c d e f")
    assert not forced_after(f"{ANALYSIS}a b c{NEXT}{FINAL}a b c d e")
    assert forced_after(f"{ANALYSIS}a b c{NEXT}{ANALYSIS}"), "further thinking counts alike"
    assert not forced_after("<|channel|>commentary<|message|>a b c d e")


def test_a_template_with_channels_shows_the_format(tokenizer: Tokenizer):
    planner = AnswerPlanner(TEMPLATE, tokenizer, AnswerParsers())
    assert planner.format_names == ("harmony", "harmony")
    named = AnswerParsers(reasoning="gpt_oss", tool_calls="openai")
    assert AnswerPlanner("", tokenizer, named).format_names == ("harmony", "harmony")
    silent = AnswerPlanner(TEMPLATE, tokenizer, AnswerParsers(reasoning="none"))
    assert silent.format_names == ("harmony",)


PATCH = 'start: ("+" | "-") /[a-z<"]{1,4}/ "\\n"'
CUSTOM = Tool(
    name="patch",
    parameters={
        "type": "object",
        "properties": {"input": {"type": "string"}},
        "required": ["input"],
    },
    input=InputGrammar(syntax="lark", definition=PATCH),
)


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_custom_tools_text_is_of_its_grammar(judge: Judge, choice: Any):
    plan = plan_of(judge.tokenizer, ToolUse(tools=(CUSTOM,), choice=choice))
    assert plan.constraint is not None
    assert plan.constraint.is_needed
    header = CALL.replace(".f ", ".patch ")
    for text, is_taken in (('{"input": "+a<\\"b\\n"}', True), ('{"input": "a"}', False)):
        constraint = constraint_of(judge.compiler, plan)
        taken: list[bool] = []
        for token_id in ids_of(judge.tokenizer, header + text):
            taken.append(token_id in allowed_ids(constraint, judge.tokenizer.vocab_size))
            if not taken[-1]:
                break
            constraint.accept(token_id)
        assert all(taken) == is_taken, text
    assert plan.make_parser is not None
    parser = plan.make_parser()
    answer = header + '{"input": "+a<\\"b\\n"}<|call|>'
    (part,) = (*parser.push(answer), *parser.flush())
    assert json.loads(part.text) == {"input": '+a<"b\n'}
