"""Lines that agents change from call to call leave the system prompt, and nothing else changes."""

from typing import Any

import pytest

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.frontend.answers import AnswerParsers
from cadenza.frontend.model_prompts import ChatPrompt
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.text.templates.message_forms import stable_messages

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
def test_a_line_that_changes_stands_behind_the_newest_message(line: str) -> None:
    system, user = stable_messages(conversation(line))
    assert system["content"] == "You help.\n\nBe brief."
    assert user == {"role": "user", "content": f"Go.\n\n{line}"}


@pytest.mark.parametrize("line", STAYING)
def test_other_lines_stay(line: str) -> None:
    assert stable_messages(conversation(line)) == conversation(line)


def test_a_billing_header_is_removed() -> None:
    system, user = stable_messages(conversation("x-anthropic-billing-header: cch=5f2; v=1"))
    assert (system["content"], user["content"]) == ("You help.\n\nBe brief.", "Go.")


def test_only_leading_system_messages_change_and_the_given_ones_are_left_alone() -> None:
    later = {"role": "system", "content": MOVING[0]}
    user = {"role": "user", "content": MOVING[0]}
    result = {"role": "tool", "content": [{"type": "text", "text": "done"}]}
    given = conversation(MOVING[0], user, later, result)
    found = stable_messages(given)
    assert found[1:3] == [user, later]
    text = {"type": "text", "text": f"\n\n{MOVING[0]}"}
    assert found[3]["content"] == [*result["content"], text]
    assert given == conversation(MOVING[0], user, later, result)


def test_texts_among_parts_change_and_without_a_user_nothing_moves() -> None:
    parts = [{"type": "text", "text": f"{MOVING[0]}\nBe brief."}]
    system = {"role": "system", "content": parts}
    first, _ = stable_messages([system, {"role": "user", "content": "Go."}])
    assert first["content"] == [{"type": "text", "text": "Be brief."}]
    assert stable_messages([system]) == [system]


def test_prompts_of_two_days_share_all_up_to_the_newest_message() -> None:
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
