"""`prediction` and `speculative` over HTTP: the answer is the same, its usage counts the drafts."""

from typing import Any

import pytest

from tests.server.harness import RunningServer

CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 24,
    "ignore_eos": True,
    "temperature": 0,
}


def told(server: RunningServer, **fields: Any) -> tuple[str, int, int]:
    """The content, and the drafts that were accepted and rejected."""
    answer = server.post(CHAT, {**ASKED, **fields})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    details = found["usage"]["completion_tokens_details"]
    content = found["choices"][0]["message"]["content"]
    return content, details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


def predicted(content: Any) -> dict[str, Any]:
    return {"prediction": {"type": "content", "content": content}}


def test_a_right_prediction_is_accepted_and_changes_nothing(bundled: RunningServer) -> None:
    content, accepted, rejected = told(bundled)
    assert accepted == rejected == 0
    for given in (content, [{"type": "text", "text": content}]):
        same, accepted, _ = told(bundled, **predicted(given))
        assert same == content
        assert accepted >= 8
    assert told(bundled, speculative=False, **predicted(content)) == (content, 0, 0)


def test_the_usage_of_a_stream_counts_drafts(bundled: RunningServer) -> None:
    content, _, _ = told(bundled)
    body = {
        **ASKED,
        **predicted(content),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    events = bundled.events(CHAT, body)
    usage = events[-2]["usage"]
    assert 8 <= usage["completion_tokens_details"]["accepted_prediction_tokens"] < 24


def test_a_wrong_prediction_changes_nothing(bundled: RunningServer) -> None:
    content, _, _ = told(bundled)
    words = content.split()
    wrong = " ".join(
        word for pair in zip(words, words[2:] + words[:2], strict=True) for word in pair
    )
    assert told(bundled, **predicted(wrong))[0] == content
    assert told(bundled, **predicted(""))[0] == content
    assert (
        told(bundled, temperature=1.2, seed=3, **predicted(wrong))[0]
        == told(bundled, temperature=1.2, seed=3)[0]
    )


def test_a_prediction_beyond_the_context_is_refused_by_name(bundled: RunningServer) -> None:
    answer = bundled.post(CHAT, {**ASKED, **predicted("far too long " * 4000)})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prediction")


@pytest.mark.parametrize("speculative", [True, {"num_speculative_tokens": 2}])
def test_a_request_may_ask_for_drafts(bundled: RunningServer, speculative: Any) -> None:
    fields = {"repetition_penalty": 0.5, "max_tokens": 60}
    plain, accepted, _ = told(bundled, **fields)
    assert accepted == 0
    same, accepted, _ = told(bundled, speculative=speculative, **fields)
    assert same == plain
    assert accepted > 0
