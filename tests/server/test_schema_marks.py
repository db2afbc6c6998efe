"""Answers whose grammar does not hold all of their schema are checked at their end, and marked."""

import json
from typing import Any

import pytest

from cadenza.server.fields.body import IGNORED_HEADER
from tests.server.harness import RunningServer

ASKED = [{"role": "user", "content": "Which?"}]
HOT = {"temperature": 0, "max_tokens": 40}
NOT_TRUE = {"enum": [True], "not": {"const": True}}
NOT_FALSE = {"enum": [True], "not": {"const": False}}
MARKS = [(NOT_TRUE, False), (NOT_FALSE, True)]


def chat_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}


@pytest.mark.parametrize(("schema", "is_valid"), MARKS)
def test_choices_are_marked_whole_and_at_the_end_of_a_stream(
    bundled: RunningServer, schema: Any, is_valid: bool
) -> None:
    body = {"messages": ASKED, **HOT, "n": 2, "response_format": chat_format(schema)}
    for choice in bundled.post("/v1/chat/completions", body).json()["choices"]:
        assert choice["message"]["content"] == "true"
        assert choice["x_schema_valid"] is is_valid
    events = bundled.events("/v1/chat/completions", {**body, "stream": True})[:-1]
    ends = [one for event in events for one in event["choices"] if one["finish_reason"]]
    assert [one["x_schema_valid"] for one in ends] == [is_valid] * 2
    marked = [one for event in events for one in event["choices"] if "x_schema_valid" in one]
    assert marked == ends
    body = {"prompt": "x", **HOT, "guided_json": schema}
    (choice,) = bundled.post("/v1/completions", body).json()["choices"]
    assert choice["x_schema_valid"] is is_valid


def test_an_answer_that_its_grammar_holds_is_not_marked(bundled: RunningServer) -> None:
    body = {"messages": ASKED, **HOT, "response_format": chat_format({"enum": [True]})}
    (choice,) = bundled.post("/v1/chat/completions", body).json()["choices"]
    assert "x_schema_valid" not in choice


def test_an_answer_that_is_cut_is_not_valid(bundled: RunningServer) -> None:
    schema = {"type": "array", "minItems": 50, "items": {"type": "string"}, "uniqueItems": True}
    body = {"messages": ASKED, "max_tokens": 5, "response_format": chat_format(schema)}
    (choice,) = bundled.post("/v1/chat/completions", body).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["x_schema_valid"] is False


def test_repeated_items_are_told(bundled: RunningServer) -> None:
    item = {"type": "string", "pattern": "^a$"}
    schema = {"type": "array", "minItems": 2, "maxItems": 2, "items": item, "uniqueItems": True}
    body = {"messages": ASKED, **HOT, "response_format": chat_format(schema)}
    (choice,) = bundled.post("/v1/chat/completions", body).json()["choices"]
    assert json.loads(choice["message"]["content"]) == ["a", "a"]
    assert choice["x_schema_valid"] is False


def test_formats_that_are_not_followed_are_named_in_a_header(bundled: RunningServer) -> None:
    schema = {"format": "path", "anyOf": [{"format": "x y"}, {"format": "date"}]}
    body = {"messages": ASKED, **HOT, "response_format": chat_format({**schema, "enum": [1]})}
    answer = bundled.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    assert answer.headers[IGNORED_HEADER] == "format.path, format.x%20y"
