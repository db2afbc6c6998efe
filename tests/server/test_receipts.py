"""Fingerprints and receipts in answers, streamed or not; `replay` computes them again."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from cadenza.frontend.loaded_model import LoadedModel
from cadenza.verification.replay import read_receipts, replay_receipts
from tests.server.harness import RunningServer

COMPLETION = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 1.0, "n": 2}
CHAT = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 9, "seed": 4}
CALLS = [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]


def events(server: RunningServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    lines = server.post(path, {**body, "stream": True}).text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


@pytest.mark.parametrize(("path", "body"), CALLS)
def test_every_answer_has_the_fingerprint_of_the_model_list(
    bundled: RunningServer, loaded: LoadedModel, path: str, body: dict[str, Any]
):
    expected = loaded.fingerprint.digest
    assert bundled.get("/v1/models").json()["data"][0]["system_fingerprint"] == expected
    assert bundled.post(path, body).json()["system_fingerprint"] == expected
    assert {each["system_fingerprint"] for each in events(bundled, path, body)} == {expected}


def test_the_model_list_has_the_sampling_of_requests_that_set_none(bundled: RunningServer):
    assert bundled.get("/v1/models").json()["data"][0]["default_sampling_params"] == {
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "source": "model",
    }


def test_receipts_of_an_answer_are_replayed_to_the_bit(bundled: RunningServer, tmp_path: Path):
    lines: list[str] = []
    for (path, body), stream in product(CALLS, (False, True)):
        asked = {**body, "receipt": True}
        answers = events(bundled, path, asked) if stream else [bundled.post(path, asked).json()]
        choices = [choice for answer in answers for choice in answer["choices"]]
        ended = [each for each in choices if each["finish_reason"] is not None]
        assert [each["index"] for each in choices if "receipt" in each] == [
            each["index"] for each in ended
        ]
        lines += [json.dumps(each["receipt"]) for each in ended]
        assert all("logprobs" not in each or each["logprobs"] is None for each in choices)
    assert len(lines) == 6
    assert not any("story" in line or "Once" in line for line in lines)
    file = tmp_path / "receipts.jsonl"
    file.write_text("\n".join(lines))
    verdicts = [*replay_receipts(None, read_receipts(file))]
    assert [each.differences for each in verdicts] == [()] * 6
    tokens = [tuple(json.loads(line)["token_ids"]) for line in lines]
    assert len(set(tokens)) == 5, "samples have seeds of their own; the chats have one seed"


def test_an_answer_with_tools_has_a_receipt_unless_it_has_a_call(
    bundled: RunningServer, tmp_path: Path
):
    """A call is constrained, which a receipt cannot tell."""
    parameters = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
    asked = {"tools": [tool], "receipt": True, "max_tokens": 40, "temperature": 0}

    def choice_of(question: str) -> dict[str, Any]:
        body = {**asked, "messages": [{"role": "user", "content": question}]}
        return bundled.post("/v1/chat/completions", body).json()["choices"][0]

    called = choice_of("What is the weather in Paris?")
    assert called["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    assert "receipt" not in called
    told = choice_of("Thank you.")
    assert "tool_calls" not in told["message"]
    file = tmp_path / "receipts.jsonl"
    file.write_text(json.dumps(told["receipt"]))
    assert [each.differences for each in replay_receipts(None, read_receipts(file))] == [()]


def test_an_engine_without_a_fingerprint_refuses_receipts(server: RunningServer):
    answer = server.post("/v1/completions", {"prompt": "the", "receipt": True})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "receipt"
    assert server.post("/v1/completions", {"prompt": "the", "receipt": False}).status_code == 200
