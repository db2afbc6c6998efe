"""Answers in the notations of families, in every API: whole, streamed, and sent back."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cadenza.frontend.text_frontend import TextFrontend
from cadenza.request import SamplingParams
from cadenza.server.calls.conversation import AskedConversation
from cadenza.server.fields.thinking import EFFORTS, AskedThinking, nearest_effort
from cadenza.structured import ThinkingBound
from cadenza.text.answers.harmony import HARMONY_MARKS
from cadenza.text.answers.json_calls import (
    DEEPSEEK_CALL,
    DEEPSEEK_CALL_END,
    DEEPSEEK_CALLS,
    DEEPSEEK_CALLS_END,
    DEEPSEEK_SEPARATOR,
)
from tests.server.dialects import (
    CONVERSING,
    Json,
    Told,
    body_of,
    post,
    stream,
    told,
    told_in_stream,
    tools_of,
)
from tests.server.harness import RunningServer, running_server
from tests.server.scripted_engine import ScriptedEngine
from tests.text.marked_tokenizers import marked_checkpoint, with_marks

TESTS = Path(__file__).parents[1]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["city"],
}
WEATHER = {"name": "weather", "description": "The weather.", "parameters": CITY}
USER = {"role": "user", "content": "Which weather?"}
CALLED = ("weather", {"city": 'Oslo {"<x>"}', "n": 2})


GEMMA_MARKS = (
    *("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>", "<|tool>", "<tool|>"),
    *("<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>'),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Notation:
    """How a family answers.

    Args:
        thought: reasoning that is "It\\nsnows.", up to what follows it.
        content: an answer that is "Snow.\\n\\n1.".
        call: an answer that is `CALLED`.
        history: what a template writes of a turn with the thought and the call, and its result.
    """

    template: str
    marks: tuple[str, ...]
    thought: str
    content: str
    call: str
    history: str


NOTATIONS = {
    "harmony": Notation(
        template="oracle/templates/channels",
        marks=HARMONY_MARKS,
        thought="<|channel|>analysis<|message|>It\nsnows.<|end|><|start|>assistant",
        content="<|channel|>final<|message|>Snow.\n\n1.",
        call="<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        '{"city": "Oslo {\\"<x>\\"}", "n": 2}',
        history="<|start|>assistant<|channel|>analysis<|message|>It\nsnows.<|end|>"
        "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>"
        '{"city": "Oslo {\\"<x>\\"}", "n": 2}<|call|>'
        '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"Cold."<|end|>'
        "<|start|>assistant",
    ),
    "gemma4": Notation(
        template="oracle/templates/named_values",
        marks=GEMMA_MARKS,
        thought="<|channel>thought\nIt\nsnows.\n<channel|>",
        content="Snow.\n\n1.",
        call='<|tool_call>call:weather{city:<|"|>Oslo {"<x>"}<|"|>,n:2}<tool_call|>',
        history="<|turn>model\n<|channel>thought\nIt\nsnows.\n<channel|>"
        '<|tool_call>call:weather{city:<|"|>Oslo {"<x>"}<|"|>,n:2}<tool_call|>'
        '<|tool_response>response:weather{value:<|"|>Cold.<|"|>}<tool_response|>',
    ),
    "qwen3.5": Notation(
        template="oracle/templates/element_calls",
        marks=("<|turn|>", "<|over|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
        thought="It\nsnows.\n</think>\n\n",
        content="Snow.\n\n1.",
        call='<tool_call>\n<function=weather>\n<parameter=city>\nOslo {"<x>"}\n</parameter>\n'
        "<parameter=n>\n2\n</parameter>\n</function>\n</tool_call>",
        history="<|turn|>assistant\n<think>\nIt\nsnows.\n</think>\n\n"
        '<tool_call>\n<function=weather>\n<parameter=city>\nOslo {"<x>"}\n</parameter>\n'
        "<parameter=n>\n2\n</parameter>\n</function>\n</tool_call><|over|>\n"
        "<|turn|>user\n<tool_response>\nCold.\n</tool_response><|over|>\n"
        "<|turn|>assistant\n<think>\n",
    ),
    "glm4.7": Notation(
        template="oracle/templates/keyed_values",
        marks=("<|turn|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>"),
        thought="\n<think>It\nsnows.</think>\n",
        content="Snow.\n\n1.",
        call='<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo {"<x>"}</arg_value>'
        "<arg_key>n</arg_key><arg_value>2</arg_value></tool_call>",
        history="<|assistant|>\n<think>It\nsnows.</think>\n"
        '<tool_call>weather<arg_key>city</arg_key>\n<arg_value>Oslo {"<x>"}</arg_value>\n'
        "<arg_key>n</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
        "<|observation|>\n<tool_response>\nCold.\n</tool_response><|assistant|>",
    ),
    "lfm2": Notation(
        template="oracle/templates/listed_tools",
        marks=("<|turn|>", "<|over|>", "<|tool_call_start|>", "<|tool_call_end|>"),
        thought="<think>It\nsnows.</think>",
        content="Snow.\n\n1.",
        call="<|tool_call_start|>[weather(city='Oslo {\"<x>\"}', n=2)]<|tool_call_end|>",
        history="<|turn|>assistant\n"
        '<|tool_call_start|>[weather(city="Oslo {\\"<x>\\"}", n=2)]<|tool_call_end|><|over|>\n'
        "<|turn|>tool\n<|tool_response_start|>Cold.<|tool_response_end|><|over|>\n"
        "<|turn|>assistant\n",
    ),
    "deepseek-v3.1": Notation(
        template="text/joined_calls",
        marks=(DEEPSEEK_CALLS, DEEPSEEK_CALLS_END, DEEPSEEK_CALL, DEEPSEEK_CALL_END, "<think>"),
        thought="It\nsnows.</think>",
        content="Snow.\n\n1.",
        call=f"{DEEPSEEK_CALLS}{DEEPSEEK_CALL}weather{DEEPSEEK_SEPARATOR}"
        f'{{"city": "Oslo {{\\"<x>\\"}}", "n": 2}}{DEEPSEEK_CALL_END}{DEEPSEEK_CALLS_END}',
        history=f"<|assistant|></think>{DEEPSEEK_CALLS}{DEEPSEEK_CALL}weather{DEEPSEEK_SEPARATOR}"
        f'{{"city": "Oslo {{\\"<x>\\"}}", "n": 2}}{DEEPSEEK_CALL_END}{DEEPSEEK_CALLS_END}<|end|>'
        f"{DEEPSEEK_CALLS.replace('calls', 'output')}Cold."
        f"{DEEPSEEK_CALLS_END.replace('calls', 'output')}",
    ),
    "ministral3": Notation(
        template="oracle/templates/bracketed_calls",
        marks=("[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]", "[INST]", "[/INST]"),
        thought="[THINK]It\nsnows.[/THINK]",
        content="Snow.\n\n1.",
        call='[TOOL_CALLS]weather[ARGS]{"city": "Oslo {\\"<x>\\"}", "n": 2}',
        history='[/INST][TOOL_CALLS]weather[ARGS]{"city": "Oslo {\\"<x>\\"}", "n": 2}<|im_end|>'
        "[TOOL_RESULTS]Cold.[/TOOL_RESULTS]",
    ),
    "granite4": Notation(
        template="text/object_calls",
        marks=("<|start_of_role|>", "<tool_call>", "</tool_call>"),
        thought="<think>It\nsnows.</think>",
        content="Snow.\n\n1.",
        call='<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo {\\"<x>\\"}", "n": 2}}\n'
        "</tool_call>",
        history="<|start_of_role|>assistant<|end_of_role|>"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo {\\"<x>\\"}", "n": 2}}\n'
        "</tool_call>\n<|start_of_role|>user<|end_of_role|><tool_response>Cold.</tool_response>\n"
        "<|start_of_role|>assistant<|end_of_role|>",
    ),
}
each_notation = pytest.mark.parametrize("notation", NOTATIONS.values(), ids=NOTATIONS)
each_dialect = pytest.mark.parametrize("name", CONVERSING)


def front_end(notation: Notation) -> TextFrontend:
    template = (TESTS / f"{notation.template}.jinja").read_text()
    return TextFrontend(marked_checkpoint(notation.marks, template))


@pytest.fixture(scope="module", params=NOTATIONS.values(), ids=NOTATIONS)
def served(request: Any) -> Iterator["Served"]:
    notation: Notation = request.param
    text = front_end(notation)
    assert text.tokenizer is not None
    engine = ScriptedEngine(
        (0,), vocab_size=text.tokenizer.vocab_size, max_model_len=2048, hidden_size=None
    )
    with running_server(engine, text) as server:
        yield Served(notation, text, engine, server)


@dataclass(frozen=True, slots=True)
class Served:
    notation: Notation
    text: TextFrontend
    engine: ScriptedEngine
    server: RunningServer

    def answering(self, answer: str) -> int:
        """Makes the model answer with a text, of so many tokens."""
        assert self.text.tokenizer is not None
        self.engine.script = tuple(with_marks(self.text.tokenizer, answer))
        return len(self.engine.script)


def thinking(name: str) -> Json:
    """The fields of an API that ask for reasoning, where it does not come by itself."""
    match name:
        case "messages":
            return {"thinking": {"type": "adaptive"}}
        case "ollama_chat":
            return {"think": True}
        case _:
            return {"reasoning_effort": "high"}


@each_dialect
def test_reasoning_and_content_are_told_apart_whole_and_streamed(served: Served, name: str) -> None:
    num_tokens = served.answering(served.notation.thought + served.notation.content)
    body = body_of(name, [USER], num_tokens, **thinking(name))
    expected = Told(reasoning="It\nsnows.", content="Snow.\n\n1.")
    assert told(name, post(served.server, name, body)) == expected
    assert told_in_stream(name, stream(served.server, name, body)) == expected


@each_dialect
def test_a_call_is_told_apart_whole_and_streamed(served: Served, name: str) -> None:
    num_tokens = served.answering(served.notation.thought + served.notation.call)
    body = body_of(name, [USER], num_tokens, tools=tools_of(name, WEATHER), **thinking(name))
    expected = Told(reasoning="It\nsnows.", calls=[CALLED])
    assert told(name, post(served.server, name, body)) == expected
    assert told_in_stream(name, stream(served.server, name, body)) == expected


@each_dialect
def test_a_turn_that_is_sent_back_is_what_the_template_writes(served: Served, name: str) -> None:
    num_tokens = served.answering(served.notation.thought + served.notation.call)
    fields = {"tools": tools_of(name, WEATHER), **thinking(name)}
    answer = post(served.server, name, body_of(name, [USER], num_tokens, **fields))
    body = body_of(name, [USER, *sent_back(name, answer)], 1, **fields)
    post(served.server, name, body)
    prompt = served.text.decode(served.engine.submitted[-1].prompt_token_ids)
    assert prompt.endswith(served.notation.history), prompt


@each_dialect
def test_an_answer_with_leaked_headers_does_not_refuse_later_turns(name: str) -> None:
    notation = NOTATIONS["harmony"]
    text = front_end(notation)
    assert text.tokenizer is not None
    size = text.tokenizer.vocab_size
    engine = ScriptedEngine((0,), vocab_size=size, max_model_len=2048, hidden_size=None)
    leaked = {"role": "assistant", "content": notation.thought + notation.content}
    with running_server(engine, text) as server:
        post(server, name, body_of(name, [USER, leaked, USER], 1, **thinking(name)))
    prompt = text.decode(engine.submitted[-1].prompt_token_ids)
    told = "<|start|>assistant<|channel|>final<|message|>Snow.\n\n1.<|end|>"
    asked = "<|start|>user<|message|>Which weather?<|end|>"
    assert prompt.endswith(f"{asked}{told}{asked}<|start|>assistant")


def sent_back(name: str, answer: Json) -> list[Json]:
    """An answer with a call, and its result, as clients send them back."""
    match name:
        case "responses":
            call = next(item for item in answer["output"] if item["type"] == "function_call")
            told = {"type": "function_call_output", "call_id": call["call_id"], "output": "Cold."}
            return [*answer["output"], told]
        case "messages":
            call = next(each for each in answer["content"] if each["type"] == "tool_use")
            told = {"type": "tool_result", "tool_use_id": call["id"], "content": "Cold."}
            turn = {"role": "assistant", "content": answer["content"]}
            return [turn, {"role": "user", "content": [told]}]
        case "ollama_chat":
            turn = answer["message"]
            called = turn["tool_calls"][0]["function"]["name"]
            return [turn, {"role": "tool", "tool_name": called, "content": "Cold."}]
        case _:
            turn = answer["choices"][0]["message"]
            call = turn["tool_calls"][0]["id"]
            return [turn, {"role": "tool", "tool_call_id": call, "content": "Cold."}]


def test_an_effort_is_the_nearest_one_that_the_model_knows() -> None:
    text = front_end(NOTATIONS["harmony"])
    assert text.tokenizer is not None
    shown: dict[str, str] = {}
    for effort in EFFORTS:
        asked = AskedConversation(
            messages=[USER], use=None, thinking=AskedThinking(effort=effort), template_kwargs={}
        )
        prepared = text.prepare(asked.prompt(text), SamplingParams())
        assert prepared.text is not None
        shown[effort] = prepared.text.partition("Reasoning: ")[2].partition("<|end|>")[0]
        constraint = prepared.request.constraint
        assert (constraint is not None) == (effort == "none")
        if constraint is not None:
            bound = constraint.thinking
            assert isinstance(bound, ThinkingBound)
            assert bound.max_tokens == 0
    low, high = dict.fromkeys(("none", "minimal", "low"), "low"), ("high", "xhigh", "max")
    assert shown == {**low, "medium": "medium", **dict.fromkeys(high, "high")}
    assert nearest_effort("xhigh", ()) == "xhigh"
    assert json.dumps(shown)
