"""Conversations that chat templates refuse as they are: rendered in another form, each turn's
prompt being the beginning of the next one's."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.errors import MessagesRefusedError
from cadenza.frontend.answers import AnswerParsers, AnswerPlanner, AskedAnswer
from cadenza.frontend.model_prompts import ChatPrompt
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.structured import ThinkingBound
from cadenza.text import Tokenizer
from cadenza.text.schemas.grammar import check_grammar
from cadenza.text.templates.message_forms import (
    other_forms,
    reads_responses_only,
    stable_messages,
    with_responses,
)
from tests.cli.harness import write_model
from tests.text.marked_tokenizers import marked_checkpoint, marked_source

_TURN = "<|{{ m.role }}|>{{ m.content }}"
_CALLS = "{% for c in m.tool_calls or [] %}<call>{{ c.function.arguments | tojson }}{% endfor %}"
_END = "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"

SYSTEM_FIRST = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('a system message stands at the beginning') }}{% endif %}"
    + _TURN
    + _CALLS
    + _END
)
"""As Qwen3.5's: a system message is the first one."""
ALTERNATING = (
    "{% if messages[0].role == 'system' %}"
    "{{ raise_exception('there is no system role') }}{% endif %}"
    "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles alternate: user, assistant, user, assistant') }}{% endif %}"
    + _TURN
    + _CALLS
    + _END
)
"""As Gemma's: user and assistant in turns, and no system message."""
CALLS_ASIDE = (
    "{% set ns = namespace(n=0) %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% if not loop.first %}"
    "{{ raise_exception('only one system message') }}{% endif %}"
    "{% elif m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.n % 2 == 0) %}"
    "{{ raise_exception('after the system message roles alternate') }}{% endif %}"
    "{% set ns.n = ns.n + 1 %}{% endif %}" + _TURN + _CALLS + _END
)
"""As Mistral's: what calls tools, and their results, do not count among the turns."""
ITEMS = (
    "{% for m in messages %}"
    + _TURN
    + "{% for c in m.tool_calls or [] %}{% for k, v in c.function.arguments | items %}"
    "<{{ k }}>{{ v }}{% endfor %}{% endfor %}" + _END
)
"""Goes over the members of arguments."""
PLAIN = "{% for m in messages %}" + _TURN + _CALLS + _END

TEMPLATES = {
    "system first": SYSTEM_FIRST,
    "alternating": ALTERNATING,
    "calls aside": CALLS_ASIDE,
    "items": ITEMS,
    "plain": PLAIN,
}


def said(role: str, content: str, **members: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **members}


def calling(arguments: Any) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return said("assistant", "", tool_calls=[call])


@pytest.fixture(scope="module")
def faces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextFrontend]:
    found: dict[str, TextFrontend] = {}
    for name, template in TEMPLATES.items():
        folder: Path = write_model(tmp_path_factory.mktemp("models") / "strict")
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
        found[name] = TextFrontend(open_checkpoint(folder))
    return found


def rendered(face: TextFrontend, *messages: dict[str, Any]) -> str:
    return face.render_chat(ChatPrompt(messages=messages))[0]


@pytest.mark.parametrize(
    ("template", "messages", "text"),
    [
        (
            "system first",
            [said("user", "a"), said("system", "s"), said("assistant", "b")],
            "<|user|>a\n\ns<|end|><|assistant|>b<|end|>",
        ),
        (
            "system first",
            [calling({}), said("tool", "r"), said("system", "s"), said("assistant", "b")],
            "<|assistant|><call>{}<|end|><|tool|>r<|end|><|user|>s<|end|><|assistant|>b<|end|>",
        ),
        (
            "system first",
            [said("system", "s"), said("system", "t"), said("user", "a")],
            "<|system|>s\n\nt<|end|><|user|>a<|end|>",
        ),
        (
            "system first",
            [said("user", "a"), said("assistant", "b"), said("developer", "s"), said("user", "c")],
            "<|user|>a<|end|><|assistant|>b<|end|><|developer|>s<|end|><|user|>c<|end|>",
        ),
        (
            "alternating",
            [said("system", "s"), said("user", "a"), said("user", "b")],
            "<|user|>s\n\na\n\nb<|end|>",
        ),
        (
            "alternating",
            [said("assistant", "b"), said("assistant", "c"), said("user", "a")],
            "<|user|><|end|><|assistant|>b\n\nc<|end|><|user|>a<|end|>",
        ),
        ("alternating", [said("system", "s")], "<|user|>s<|end|>"),
        (
            "alternating",
            [said("system", "s"), said("assistant", "b"), said("system", "t"), said("user", "a")],
            "<|user|>s<|end|><|assistant|>b<|end|><|user|>t\n\na<|end|>",
        ),
        (
            "calls aside",
            [said("user", "a"), calling({}), said("tool", "r"), said("system", "s")],
            "<|user|>a<|end|><|assistant|><call>{}<|end|><|tool|>r\n\ns<|end|>",
        ),
        (
            "items",
            [said("user", "a"), calling('{"x": ')],
            '<|user|>a<|end|><|assistant|><_raw>{"x": <|end|>',
        ),
        (
            "plain",
            [said("user", "a"), calling('{"x": ')],
            '<|user|>a<|end|><|assistant|><call>"{\\"x\\": "<|end|>',
        ),
        (
            "plain",
            [said("assistant", "a"), said("system", "s"), said("system", "t")],
            "<|assistant|>a<|end|><|system|>s<|end|><|system|>t<|end|>",
        ),
    ],
)
def test_a_conversation_is_rendered_as_given_or_in_the_first_form_that_is_taken(
    faces: dict[str, TextFrontend], template: str, messages: list[dict[str, Any]], text: str
):
    assert rendered(faces[template], *messages) == f"{text}<|assistant|>"


@pytest.mark.parametrize("template", ["system first", "calls aside"])
def test_the_prompt_of_a_turn_begins_with_that_of_the_turn_before(
    faces: dict[str, TextFrontend], template: str
):
    """A coding agent's: a system message behind each result of a call."""
    face = faces[template]
    conversation = [said("system", "rules"), said("user", "fix it"), said("system", "today")]
    before = face.render_chat(ChatPrompt(messages=conversation))[1]
    for turn in range(20):
        conversation.append(calling({"turn": turn}))
        conversation.append(said("tool", f"result {turn}", tool_call_id="c1"))
        conversation.append(said("system", f"{20 - turn} turns are left"))
        if turn % 5 == 4:
            conversation.append(said("assistant", "done"))
            conversation.append(said("user", "go on"))
        after = face.render_chat(ChatPrompt(messages=conversation))[1]
        assert after[: len(before)] == before, turn
        before = after


@settings(max_examples=200, deadline=None)
@given(
    roles=st.lists(st.sampled_from(["system", "user", "assistant", "tool"]), min_size=1, max_size=8)
)
def test_no_text_is_lost_or_moved_over_another_turn(roles: list[str]):
    messages = [said(role, f"text-{place}.") for place, role in enumerate(roles)]
    for form in other_forms(messages):
        texts = "".join(message["content"] for message in form.messages)
        places = [texts.find(message["content"]) for message in messages]
        assert -1 not in places
        assert places == sorted(places), (form.change, roles)


def test_each_form_is_logged_once_and_strict_messages_refuse_them_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    folder = write_model(tmp_path / "strict")
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": SYSTEM_FIRST}))
    face = TextFrontend(open_checkpoint(folder))
    messages = [said("user", "a"), said("system", "s")]
    with caplog.at_level(logging.INFO):
        assert rendered(face, *messages) == rendered(face, *messages)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "later system messages in user turns" in line
    face = TextFrontend(open_checkpoint(folder), parsers=AnswerParsers(strict_messages=True))
    with pytest.raises(MessagesRefusedError, match="a system message stands at the beginning"):
        rendered(face, *messages)


def test_a_conversation_that_no_form_of_is_taken_has_the_first_refusal(
    faces: dict[str, TextFrontend],
):
    messages = [said("user", "a"), said("assistant", "b"), said("tool", "r")]
    with pytest.raises(MessagesRefusedError, match="roles alternate"):
        rendered(faces["alternating"], *messages)


def test_an_open_ending_stays_open_in_every_form(faces: dict[str, TextFrontend]):
    messages = [said("user", "a"), said("system", "s"), said("assistant", "so")]
    kwargs = {"add_generation_prompt": False, "continue_final_message": True}
    for name in ("system first", "alternating", "calls aside"):
        text, _ = faces[name].render_chat(ChatPrompt(messages=messages, template_kwargs=kwargs))
        assert text.endswith("s<|end|><|assistant|>so"), name


MOVING = [
    "Today's date: 2026-01-02",
    "- **Current date and time:** 2 January 2026, 10:31",
    "The current time is 10:31:07",
    "Date: 2/1/26",
    "Token usage: 1200/200000; 198800 remaining",
    "Turn 3 of 10",
    "Session id: 7f3a",
    "Current branch: main",
    "gitStatus: at the start of the conversation\n M a.py\n?? b.py",
    "Status:\n M a.py\n M b.py",
    "Recent commits:\n1234567 fix",
]
STAYING = [
    "Step 1: read the file.",
    "Dates are written as 2026-01-02.",
    "Date formats: any.",
    "Time management matters in 2026.",
    "Use git status before you commit.",
    "Token limits apply.",
    "Status: fine",
]


def conversation(line: str, *rest: dict[str, Any]) -> list[dict[str, Any]]:
    system = {"role": "system", "content": f"You help.\n{line}\n\nBe brief."}
    return [system, *(rest or ({"role": "user", "content": "Go."},))]


@pytest.mark.parametrize("line", MOVING)
def test_a_line_that_changes_stands_behind_the_newest_message(line: str):
    system, user = stable_messages(conversation(line))
    assert system["content"] == "You help.\n\nBe brief."
    assert user == {"role": "user", "content": f"Go.\n\n{line}"}


@pytest.mark.parametrize("line", STAYING)
def test_other_lines_stay(line: str):
    assert stable_messages(conversation(line)) == conversation(line)


def test_a_billing_header_is_removed():
    system, user = stable_messages(conversation("x-anthropic-billing-header: cch=5f2; v=1"))
    assert (system["content"], user["content"]) == ("You help.\n\nBe brief.", "Go.")


def test_only_leading_system_messages_change_and_the_given_ones_are_left_alone():
    later = {"role": "system", "content": MOVING[0]}
    user = {"role": "user", "content": MOVING[0]}
    result = {"role": "tool", "content": [{"type": "text", "text": "done"}]}
    given = conversation(MOVING[0], user, later, result)
    found = stable_messages(given)
    assert found[1:3] == [user, later]
    text = {"type": "text", "text": f"\n\n{MOVING[0]}"}
    assert found[3]["content"] == [*result["content"], text]
    assert given == conversation(MOVING[0], user, later, result)


def test_texts_among_parts_change_and_without_a_user_nothing_moves():
    parts = [{"type": "text", "text": f"{MOVING[0]}\nBe brief."}]
    system = {"role": "system", "content": parts}
    first, _ = stable_messages([system, {"role": "user", "content": "Go."}])
    assert first["content"] == [{"type": "text", "text": "Be brief."}]
    assert stable_messages([system]) == [system]


def test_prompts_of_two_days_share_all_up_to_the_newest_message():
    """The prompt is that of the changed conversation, and the flag is off unless given."""
    stable = TextFrontend(open_checkpoint(None), parsers=AnswerParsers(stable_prompts=True))
    usual = TextFrontend(open_checkpoint(None))
    first, second = (conversation(f"Date: 2026-01-0{day}") for day in (1, 2))
    one, _ = stable.render_chat(ChatPrompt(messages=first))
    assert one == usual.render_chat(ChatPrompt(messages=stable_messages(first)))[0]
    assert (
        one.replace("2026-01-01", "2026-01-02")
        == stable.render_chat(ChatPrompt(messages=second))[0]
    )
    assert one.index("Go.") < one.index("2026-01-01")
    assert (
        usual.render_chat(ChatPrompt(messages=first))[0].index("2026-01-01")
        < one.index("Be brief.") + 20
    )


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


def test_results_stand_in_the_message_with_the_calls():
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


def test_a_result_without_a_call_before_it_stays_and_so_do_other_conversations():
    orphan = {"role": "tool", "content": "a"}
    assert with_responses([USER, orphan]) == [USER, orphan]
    odd = {"role": "assistant", "tool_calls": "none"}
    response = {"name": "unknown", "response": "a"}
    assert with_responses([odd, orphan]) == [{**odd, "tool_responses": [response]}]
    assert with_responses([]) == []


def test_a_template_that_finds_results_by_their_ids_reads_them_itself():
    assert reads_responses_only(TEMPLATE)
    assert not reads_responses_only(TEMPLATE + "{{ m.tool_call_id }}")
    assert not reads_responses_only("{{ messages }}")
    assert open_checkpoint(None).chat_template is not None


def test_a_bound_on_thinking_begins_with_the_channels_token():
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
