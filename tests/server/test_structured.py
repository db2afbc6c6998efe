"""Forms of answers over HTTP, on the bundled model: followed exactly, or checked at their end and
marked, or a 400 that names why."""

import json
import re
from typing import Any, Literal

import openai
import pydantic
import pytest

from cadenza.server.fields.body import IGNORED_HEADER
from tests.server.bodies import NEEDED, PATHS
from tests.server.dialects import check_error, form_of, told_error
from tests.server.harness import RunningServer

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "Where is Paris?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}, "size": {"enum": [1, 2]}},
    "required": ["city", "size"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "c", "schema": SCHEMA, "strict": True}}
HOT = {"temperature": 1.5, "seed": 4, "max_tokens": 60}


class Place(pydantic.BaseModel):
    """What the official client makes of an answer."""

    kind: Literal["city", "town"]
    is_large: bool


def content_of(server: RunningServer, **fields: Any) -> str:
    answer = server.post(CHAT, {"messages": MESSAGES, **HOT, **fields})
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "stop"
    return choice["message"]["content"]


def test_a_schema_is_followed_streamed_and_whole(bundled: RunningServer) -> None:
    found = content_of(bundled, response_format=FORMAT)
    parsed = json.loads(found)
    assert set(parsed) == {"city", "size"}
    assert parsed["size"] in (1, 2)
    body = {"messages": MESSAGES, **HOT, "response_format": FORMAT, "stream": True}
    events = bundled.events(CHAT, body)[:-1]
    pieces = [event["choices"][0]["delta"].get("content", "") for event in events]
    assert "".join(pieces) == found


@pytest.mark.parametrize(
    ("fields", "regex"),
    [
        ({"structured_outputs": {"regex": "[0-9]{3}"}}, "[0-9]{3}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"json": {"type": "boolean"}}}, "true|false"),
        ({"structured_outputs": {"grammar": 'root ::= "<" [a-z] ">"'}}, "<[a-z]>"),
        ({"guided_json": {"enum": ["a", "b"]}}, '"a"|"b"'),
        ({"guided_regex": "^x+y$"}, "x+y"),
        ({"guided_choice": ["one"]}, "one"),
        ({"guided_grammar": 'start: "(" /[a-z]/ ")"'}, r"\([a-z]\)"),
    ],
    ids=lambda fields: next(iter(fields)) if isinstance(fields, dict) else "",
)
def test_every_field_that_asks_for_a_form_is_followed(
    bundled: RunningServer, fields: dict[str, Any], regex: str
) -> None:
    assert re.fullmatch(regex, content_of(bundled, **fields), re.DOTALL)


@pytest.mark.parametrize(
    ("beside", "regex"),
    [
        ({}, r'\{( |\n[ \t]*)?"a": ?1( |\n[ \t]*)?\}'),
        ({"whitespace": "compact"}, r'\{"a":1\}'),
        ({"disable_any_whitespace": True}, r'\{"a":1\}'),
        ({"whitespace": "any"}, r'\{\s*"a"\s*:\s*1\s*\}'),
    ],
    ids=str,
)
def test_a_request_says_how_much_blank_its_json_has(
    bundled: RunningServer, beside: dict[str, Any], regex: str
) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    found = content_of(bundled, structured_outputs={"json": schema, **beside})
    assert re.fullmatch(regex, found)


def test_a_json_object_may_have_a_schema(bundled: RunningServer) -> None:
    found = content_of(bundled, response_format={"type": "json_object", "schema": SCHEMA})
    assert set(json.loads(found)) == {"city", "size"}


def test_any_json_object_is_one(bundled: RunningServer) -> None:
    body = {"messages": MESSAGES, **HOT, "max_tokens": 20}
    answer = bundled.post(CHAT, {**body, "response_format": {"type": "json_object"}})
    (choice,) = answer.json()["choices"]
    content = choice["message"]["content"]
    assert content.startswith("{")
    assert choice["finish_reason"] == "length" or isinstance(json.loads(content), dict)


def test_the_official_client_parses_answers_into_models(bundled: RunningServer) -> None:
    client = openai.OpenAI(base_url=f"{bundled.url}/v1", api_key="none", max_retries=0)
    with client:
        parsed = client.chat.completions.parse(
            model=bundled.get("/v1/models").json()["data"][0]["id"],
            messages=[{"role": "user", "content": "Paris"}],
            response_format=Place,
            temperature=0,
        )
    assert isinstance(parsed.choices[0].message.parsed, Place)


def test_a_form_goes_with_samples_penalties_and_log_probabilities(bundled: RunningServer) -> None:
    options = {"n": 3, "logprobs": True, "top_logprobs": 2, "frequency_penalty": 0.5}
    body = {"messages": MESSAGES, **HOT, **options, "response_format": FORMAT}
    choices = bundled.post(CHAT, body).json()["choices"]
    assert len({choice["message"]["content"] for choice in choices}) > 1
    for choice in choices:
        assert set(json.loads(choice["message"]["content"])) == {"city", "size"}
        for entry in choice["logprobs"]["content"]:
            # Of the distribution before the mask: the likeliest tokens need not be allowed.
            assert entry["logprob"] <= entry["top_logprobs"][0]["logprob"]


RULED_OUT: list[tuple[str, dict[str, Any], tuple[str, ...], str]] = [
    (
        "chat",
        {"allowed_token_ids": [5], "guided_regex": "[0-9]"},
        ("allowed_token_ids", "guided_regex"),
        "add tokens to allowed_token_ids or widen what guided_regex asks for",
    ),
    (
        "completions",
        {"guided_choice": ["zebra"], "bad_words": [*"zebra", "ze", "zebra"]},
        ("bad_words", "guided_choice"),
        "leave out some of bad_words or widen what guided_choice asks for",
    ),
    (
        "completions",
        {"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 2},
        ("allowed_token_ids", "min_tokens"),
        "add tokens to allowed_token_ids or lower min_tokens",
    ),
    (
        "responses",
        {"allowed_token_ids": [5], **form_of("responses", {"const": 7}), "min_tokens": 2},
        ("allowed_token_ids", "min_tokens", "text"),
        "add tokens to allowed_token_ids or lower min_tokens or widen what text asks for",
    ),
    (
        "messages",
        {"allowed_token_ids": [5], **form_of("messages", {"const": 7})},
        ("allowed_token_ids", "output_config"),
        "add tokens to allowed_token_ids or widen what output_config asks for",
    ),
]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(("name", "asked", "fields", "remedies"), RULED_OUT)
def test_fields_that_rule_out_every_token_are_named_and_no_others(
    bundled: RunningServer,
    name: str,
    asked: dict[str, Any],
    fields: tuple[str, ...],
    remedies: str,
    *,
    is_streamed: bool,
) -> None:
    """Biases and penalties rule out no token, and the word of two tokens is not begun."""
    harmless = {"logit_bias": {"7": -100}, "frequency_penalty": 2.0}
    if name == "messages":
        del harmless["frequency_penalty"]
    body = {**NEEDED[name], **asked, **harmless, "stream": is_streamed}
    answer = bundled.post(PATHS[name], body)
    named = " and ".join(fields)
    message = f"no token may follow: {named} together rule out every one; {remedies}"
    if is_streamed:
        assert message in answer.text
        return
    check_error(answer, 400, "invalid_value", fields[0], name=name)
    assert told_error(name, answer.json()).message == message


ASKED = [{"role": "user", "content": "Which?"}]
GREEDY = {"temperature": 0, "max_tokens": 40}
NOT_TRUE = {"enum": [True], "not": {"const": True}}
NOT_FALSE = {"enum": [True], "not": {"const": False}}
MARKS = [(NOT_TRUE, False), (NOT_FALSE, True)]


def chat_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}


@pytest.mark.parametrize(("schema", "is_valid"), MARKS)
def test_choices_are_marked_whole_and_at_the_end_of_a_stream(
    bundled: RunningServer, schema: Any, is_valid: bool
) -> None:
    body = {"messages": ASKED, **GREEDY, "n": 2, "response_format": chat_format(schema)}
    for choice in bundled.post("/v1/chat/completions", body).json()["choices"]:
        assert choice["message"]["content"] == "true"
        assert choice["x_schema_valid"] is is_valid
    events = bundled.events("/v1/chat/completions", {**body, "stream": True})[:-1]
    ends = [one for event in events for one in event["choices"] if one["finish_reason"]]
    assert [one["x_schema_valid"] for one in ends] == [is_valid] * 2
    marked = [one for event in events for one in event["choices"] if "x_schema_valid" in one]
    assert marked == ends
    body = {"prompt": "x", **GREEDY, "guided_json": schema}
    (choice,) = bundled.post("/v1/completions", body).json()["choices"]
    assert choice["x_schema_valid"] is is_valid


def test_an_answer_that_its_grammar_holds_is_not_marked(bundled: RunningServer) -> None:
    body = {"messages": ASKED, **GREEDY, "response_format": chat_format({"enum": [True]})}
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
    body = {"messages": ASKED, **GREEDY, "response_format": chat_format(schema)}
    (choice,) = bundled.post("/v1/chat/completions", body).json()["choices"]
    assert json.loads(choice["message"]["content"]) == ["a", "a"]
    assert choice["x_schema_valid"] is False


def test_formats_that_are_not_followed_are_named_in_a_header(bundled: RunningServer) -> None:
    schema = {"format": "path", "anyOf": [{"format": "x y"}, {"format": "date"}]}
    body = {"messages": ASKED, **GREEDY, "response_format": chat_format({**schema, "enum": [1]})}
    answer = bundled.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    assert answer.headers[IGNORED_HEADER] == "format.path, format.x%20y"
