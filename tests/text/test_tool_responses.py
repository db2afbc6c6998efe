"""Results of calls for templates that read them in the message with the calls."""

from typing import Any

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.frontend.answers import AnswerParsers, AnswerPlanner, AskedAnswer
from cadenza.frontend.model_prompts import ChatPrompt
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.structured import ThinkingBound
from cadenza.text import Tokenizer
from cadenza.text.schemas.grammar import check_grammar
from cadenza.text.templates.message_forms import reads_responses_only, with_responses
from tests.text.marked_tokenizers import marked_checkpoint, marked_source

TEMPLATE = (
    "{% for m in messages %}<|turn>{{ m.role }}\n"
    "{% for c in m.tool_calls or [] %}<|tool_call>{{ c.function.name }}<tool_call|>{% endfor %}"
    "{% for r in m.tool_responses or [] %}<{{ r.name }}={{ r.response }}>{% endfor %}"
    "{{ m.content }}<turn|>\n{% endfor %}{% if tools %}{% endif %}"
)
USER = {"role": "user", "content": "x"}


def call(name: str, call_id: str | None) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": {}}}
    return made if call_id is None else {"id": call_id, **made}


def test_results_stand_in_the_message_with_the_calls() -> None:
    text = TextFrontend(marked_checkpoint(("<|turn>", "<turn|>"), TEMPLATE))
    turn = {"role": "assistant", "content": "", "tool_calls": [call("f", "1"), call("g", "2")]}
    results = [
        {"role": "tool", "tool_call_id": "2", "content": "b"},
        {"role": "tool", "tool_call_id": "1", "name": "other", "content": "a"},
        {"role": "tool", "name": "h", "content": None},
    ]
    prompt, _ = text.render_chat(ChatPrompt(messages=[USER, turn, *results]))
    called = "<|tool_call>f<tool_call|><|tool_call>g<tool_call|>"
    assert prompt.endswith(f"<|turn>assistant\n{called}<g=b><f=a><h=><turn|>\n")


def test_a_result_without_a_call_before_it_stays_and_so_do_other_conversations() -> None:
    orphan = {"role": "tool", "content": "a"}
    assert with_responses([USER, orphan]) == [USER, orphan]
    odd = {"role": "assistant", "tool_calls": "none"}
    response = {"name": "unknown", "response": "a"}
    assert with_responses([odd, orphan]) == [{**odd, "tool_responses": [response]}]
    assert with_responses([]) == []


def test_a_template_that_finds_results_by_their_ids_reads_them_itself() -> None:
    assert reads_responses_only(TEMPLATE)
    assert not reads_responses_only(TEMPLATE + "{{ m.tool_call_id }}")
    assert not reads_responses_only("{{ messages }}")
    assert open_checkpoint(None).chat_template is not None


def test_a_bound_on_thinking_begins_with_the_channels_token() -> None:
    source = marked_source(("<|channel>", "<channel|>"))
    tokenizer = Tokenizer(source)
    planner = AnswerPlanner("", tokenizer, AnswerParsers(reasoning="gemma4"))
    asked, added = AskedAnswer(max_thinking=5), tokenizer.added_tokens
    plan = planner.plan("<|turn>model\n", None, asked, check_grammar)
    assert plan.constraint is not None
    begin, end = added["<|channel>"], added["<channel|>"]
    assert plan.constraint.thinking == ThinkingBound(begin=begin, end=end, max_tokens=5)
    off = "<|turn>model\n<|channel>thought\n<channel|>"
    assert planner.plan(off, None, asked, check_grammar).constraint is None
