"""The chat of the page at /, as a person uses it."""

import json
from pathlib import Path
from typing import Any

from cadenza.server.access import ApiKeys
from tests.server.harness import options
from tests.ui.conftest import Visit, Visiting

KEY = "a-key-of-eight"
HOSTILE = (
    "Before.\n\n<script>window.ran = 1</script>\n\n<img src=x onerror='window.ran = 1'>\n\n"
    "[press](javascript:window.ran=1) [safe](https://example.org/a)\n\n"
    "![pixel](https://example.org/p.png?secret)\n\n"
    "<svg onload='window.ran=1'></svg>\n\n"
    "```html\n<b onclick='window.ran=1'>bold</b>\n```\n\nAfter &lt;b&gt; and **bold**."
)


def answers(visit: Visit) -> list[str]:
    return visit.page.locator(".message.assistant .md").all_inner_texts()


def see_answers(visit: Visit, *texts: str) -> None:
    """Waits for answers with exactly these texts."""
    from playwright.sync_api import expect

    expect(visit.page.locator(".message.assistant .md")).to_have_text(list(texts))


def finish(visit: Visit) -> None:
    visit.page.locator("button", has_text="Send").wait_for(state="visible")
    visit.page.locator(".message.assistant .actions").first.wait_for(state="visible")


def test_an_answer_is_shown_kept_made_again_and_edited(visit: Visiting) -> None:
    seen = visit("A *fox*,\n\n- a dog\n- a cat\n")
    seen.ask("What is here?")
    seen.see("first after")
    finish(seen)
    assert [each.split() for each in answers(seen)] == [["A", "fox,", "a", "dog", "a", "cat"]]
    assert seen.page.locator(".md em").inner_text() == "fox"
    assert seen.page.locator(".md li").count() == 2

    seen.press("Regenerate")
    seen.see("2 of 2")
    finish(seen)
    seen.press("Earlier version")
    seen.see("1 of 2")

    seen.press("Edit")
    seen.page.get_by_label("Edit your message").fill("And now?")
    seen.press("Send as a new version")
    seen.page.locator(".message.user", has_text="And now?").wait_for()
    finish(seen)

    seen.page.reload()
    seen.page.locator(".welcome").wait_for()
    seen.press("And now?")
    seen.page.locator(".message.user", has_text="And now?").wait_for()
    seen.press("Earlier version")
    seen.see("What is here?")


def test_continuing_sends_the_answer_as_a_beginning(visit: Visiting) -> None:
    seen = visit("One two three")
    bodies: list[Any] = []
    seen.page.on(
        "request", lambda sent: sent.method == "POST" and bodies.append(sent.post_data_json)
    )
    seen.ask()
    finish(seen)
    seen.press("Continue")
    seen.see("One two threeOne two three")
    finish(seen)
    last = bodies[-1]
    assert last["continue_final_message"] is True
    assert last["messages"][-1] == {"role": "assistant", "content": "One two three"}


def test_escape_stops_an_answer_and_keeps_what_came(visit: Visiting) -> None:
    seen = visit("word " * 400, step_s=0.05)
    seen.ask()
    seen.see("word word")
    seen.page.keyboard.press("Escape")
    seen.see("Stopped.")
    finish(seen)
    assert answers(seen)[0].startswith("word word")
    assert seen.page.evaluate("document.activeElement.id") == "message"
    while seen.engine.num_open:
        seen.page.wait_for_timeout(20)
    assert seen.engine.cancelled


def test_a_hostile_answer_is_text(visit: Visiting) -> None:
    seen = visit(HOSTILE)
    seen.ask()
    seen.see("After <b> and bold.")
    finish(seen)
    for words in ("<script>window.ran = 1</script>", "onerror=", "<svg onload=", "<b onclick="):
        assert words in answers(seen)[0]
    assert seen.page.locator(".md :is(script, img, svg, iframe, style, b)").count() == 0
    links = seen.page.locator(".md a")
    assert [each.get_attribute("href") for each in links.all()] == [
        "https://example.org/a",
        "https://example.org/p.png?secret",
    ]
    assert {each.get_attribute("rel") for each in links.all()} == {"noopener noreferrer"}
    assert seen.page.evaluate("window.ran") is None


def test_nothing_in_the_address_starts_anything(visit: Visiting) -> None:
    seen = visit()
    seen.page.goto(f"{seen.server.url}/?q=Hello&prompt=Hello&model=x#Hello")
    seen.page.locator(".welcome").wait_for()
    assert seen.engine.submitted == []
    assert seen.page.locator("#message").input_value() == ""


def test_thinking_is_folded_and_a_call_is_shown_and_answered(visit: Visiting) -> None:
    seen = visit()
    call = {"name": "weather", "arguments": '{"city":"Bern"}'}
    seen.stream(
        {"reasoning": "I need the ", "reasoning_content": "I need the "},
        {"reasoning": "weather."},
        {"tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": call}]},
    )
    seen.ask("How is it in Bern?")
    seen.see("Calls")
    finish(seen)
    assert not seen.page.get_by_text("I need the weather.").is_visible()
    seen.page.locator("summary").click()
    assert seen.page.get_by_text("I need the weather.").is_visible()
    seen.page.get_by_label("Its result").fill("Rain")
    seen.page.unroute("**/v1/chat/completions")
    seen.stream({"content": "It rains."})
    with seen.page.expect_request("**/v1/chat/completions") as sent:
        seen.press("Give the result")
    seen.see("It rains.")
    messages = json.loads(sent.value.post_data)["messages"]
    assert [each["role"] for each in messages] == ["user", "assistant", "tool"]
    assert messages[-1] == {"role": "tool", "tool_call_id": "c1", "content": "Rain"}


def test_a_cut_stream_keeps_what_came(visit: Visiting) -> None:
    seen = visit()
    seen.stream({"content": "The beginning"}, is_cut=True)
    seen.ask()
    seen.see("what came is kept")
    see_answers(seen, "The beginning")


def test_two_requests_are_answered_side_by_side(visit: Visiting) -> None:
    seen = visit("A fox.")
    seen.press("Settings")
    seen.page.get_by_label("Ask twice at once").check()
    seen.page.get_by_label("Second seed").fill("7")
    seen.ask()
    seen.see("Go on with this one")
    see_answers(seen, "A fox.", "A fox.")
    assert [each.params.seed for each in seen.engine.submitted].count(7) == 1


def test_a_wrong_key_is_refused_in_words_and_a_right_one_is_in_no_export(
    visit: Visiting, tmp_path: Path
) -> None:
    seen = visit(options=options(keys=ApiKeys([KEY])))
    # The browser itself logs each answer of 401.
    seen.expected_faults = ("status of 401",)
    seen.see("This server needs an API key")
    seen.page.get_by_label("Key", exact=True).fill("another-key")
    seen.press("Use it")
    seen.see("The server does not know this key.")
    seen.page.get_by_label("Key", exact=True).fill(KEY)
    seen.press("Use it")
    seen.page.locator("#message").wait_for()
    seen.ask()
    finish(seen)
    with seen.page.expect_download() as download:
        seen.press("Export all")
    download.value.save_as(tmp_path / "export.json")
    exported = (tmp_path / "export.json").read_text()
    assert "A fox" in exported
    assert KEY not in exported
    assert KEY not in seen.page.evaluate("JSON.stringify({...localStorage, ...sessionStorage})")

    seen.press("Delete Hello")
    seen.page.locator(".welcome").wait_for()
    seen.page.locator("input[type=file]").set_input_files(tmp_path / "export.json")
    seen.see("1 conversations were imported.")
    damaged = tmp_path / "damaged.json"
    damaged.write_text(json.dumps({"cadenza": 1, "conversations": [{"id": "<b>"}]}))
    seen.page.locator("input[type=file]").set_input_files(damaged)
    seen.see("Nothing was imported: a conversation in it is damaged.")


def test_a_lost_engine_is_said_and_the_answer_goes_on(visit: Visiting) -> None:
    seen = visit("word " * 25, step_s=0.02)
    seen.expected_faults = ("status of 503",)
    seen.ask()
    seen.see("word word")
    seen.engine.pause()
    seen.engine.state = "restarting"
    seen.see("The engine is being restarted; resuming")
    seen.engine.state = "ready"
    seen.engine.resume()
    finish(seen)
    see_answers(seen, seen.answer.strip())


def test_a_phone_in_the_dark_has_no_sideways_scrolling(visit: Visiting) -> None:
    size = {"width": 320, "height": 640}
    seen = visit(HOSTILE + "x" * 200, viewport=size, color_scheme="dark")
    seen.ask("y" * 200)
    finish(seen)
    for name in (None, "Menu", "Menu", "Settings"):
        if name:
            seen.press(name)
        assert seen.page.evaluate("document.documentElement.scrollWidth") == 320
        assert seen.page.evaluate("document.querySelector('.log').scrollWidth") <= 320
    dark = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert dark == "rgb(20, 23, 28)"
