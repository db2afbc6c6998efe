"""Fields and members that nothing declares: typing errors are refused, the rest is ignored and
told."""

import json
import logging
from typing import Any

import pytest

from cadenza.frontend.text_frontend import TextFrontend
from cadenza.server.errors import ApiError
from cadenza.server.ignored_names import IGNORED_HEADER, IgnoredNames
from cadenza.server.schemas.unknown_members import MAX_NEAR_CHECKS, near_name
from cadenza.text.notices import MAX_NOTICES
from tests.server.bodies import BODIES
from tests.server.harness import RunningServer, options, running_server
from tests.server.scripted_engine import ScriptedEngine

MESSAGES = [{"role": "user", "content": "the fox"}]
NEEDED: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "the fox"},
    "chat": {"messages": MESSAGES},
    "responses": {"input": "the fox"},
    "messages": {"messages": MESSAGES, "max_tokens": 6},
    "embeddings": {"input": "the fox"},
    "rerank": {"query": "the fox", "documents": ["the dog"]},
    "ollama_chat": {"messages": MESSAGES, "options": {"num_predict": 1}},
    "ollama_generate": {"prompt": "the fox", "options": {"num_predict": 1}},
    "ollama_embed": {"input": "the fox"},
    "count_tokens": {"messages": MESSAGES},
    "tokenize": {"prompt": "the fox"},
    "detokenize": {"tokens": [5]},
}
PATHS = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "embeddings": "/v1/embeddings",
    "rerank": "/v1/rerank",
    "ollama_chat": "/api/chat",
    "ollama_generate": "/api/generate",
    "ollama_embed": "/api/embed",
    "count_tokens": "/v1/messages/count_tokens",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
}
NEAR = {
    "completions": ("maxtokens", "max_tokens"),
    "chat": ("repetition_penality", "repetition_penalty"),
    "responses": ("Temperature", "temperature"),
    "messages": ("tool-choice", "tool_choice"),
    "embeddings": ("dimension", "dimensions"),
    "rerank": ("document", "documents"),
    "ollama_chat": ("mesages", "messages"),
    "ollama_generate": ("promt", "prompt"),
    "ollama_embed": ("dimension", "dimensions"),
    "count_tokens": ("sytem", "system"),
    "tokenize": ("promt", "prompt"),
    "detokenize": ("token", "tokens"),
}


@pytest.mark.parametrize("endpoint", BODIES)
def test_a_name_near_a_known_one_is_refused_with_that_name(endpoint: str) -> None:
    misspelt, meant = NEAR[endpoint]
    given = {**NEEDED[endpoint], misspelt: 1}
    for policy in ("suggest", "refuse"):
        with pytest.raises(ApiError, match=rf"did you mean {meant}\?") as refused:
            BODIES[endpoint].check(given, policy)
        assert (refused.value.code, refused.value.param) == ("unknown_field", misspelt)
    assert BODIES[endpoint].check(given, "ignore") == BODIES[endpoint].check(NEEDED[endpoint])


@pytest.mark.parametrize("endpoint", BODIES)
def test_any_other_name_is_ignored_and_told_in_a_header(
    scripted: RunningServer, endpoint: str
) -> None:
    given = {**NEEDED[endpoint], "x_trace": {"a": [1]}, "provider, or": True, "later": None}
    answer = scripted.post(PATHS[endpoint], given)
    assert answer.status_code == 200, answer.text
    assert answer.headers[IGNORED_HEADER] == "x_trace, provider%2C%20or"
    assert IGNORED_HEADER not in scripted.post(PATHS[endpoint], NEEDED[endpoint]).headers
    with pytest.raises(ApiError, match="there is no field 'x_trace' here; there are"):
        BODIES[endpoint].check(given, "refuse")


def test_the_header_is_on_streams_and_on_errors_too(scripted: RunningServer) -> None:
    for changes in ({"stream": True}, {"model": "another"}, {"allowed_token_ids": [99_999]}):
        answer = scripted.post(PATHS["chat"], {**NEEDED["chat"], **changes, "frob": 1})
        assert answer.headers[IGNORED_HEADER] == "frob"


MEMBERS: list[tuple[str, dict[str, Any], str]] = [
    ("chat", {"messages": [{**MESSAGES[0], "frob": 1, "contents": 2}]}, "messages.frob"),
    (
        "chat",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "frob": 1}]}]},
        "messages.frob",
    ),
    ("responses", {"input": [{**MESSAGES[0], "frob": 1}]}, "input.frob"),
    ("messages", {"messages": [{**MESSAGES[0], "frob": 1}]}, "messages.frob"),
    (
        "messages",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "frob": 1}]}]},
        "messages.frob",
    ),
    (
        "chat",
        {"tools": [{"type": "function", "function": {"name": "f", "frob": 1}}]},
        "tools.frob",
    ),
    ("chat", {"stream": True, "stream_options": {"frob": 1}}, "stream_options.frob"),
    ("responses", {"reasoning": {"frob": 1}}, "reasoning.frob"),
]


@pytest.mark.parametrize(("endpoint", "changes", "shown"), MEMBERS, ids=str)
def test_members_that_are_not_known_are_ignored_and_told(
    endpoint: str, changes: dict[str, Any], shown: str
) -> None:
    body = json.dumps({**NEEDED[endpoint], **changes}).encode()
    request = BODIES[endpoint].read(body)
    assert request.ignored[0] == shown
    with pytest.raises(ApiError, match="frob"):
        BODIES[endpoint].read(body, "refuse")


@pytest.mark.parametrize(
    ("endpoint", "changes", "meant"),
    [
        ("chat", {"stream": True, "stream_options": {"include_usge": True}}, "include_usage"),
        ("chat", {"structured_outputs": {"regexp": "x"}}, "regex"),
        ("responses", {"reasoning": {"efort": "low"}}, "effort"),
        ("messages", {"thinking": {"type": "enabled", "budget_token": 5}}, "budget_tokens"),
        ("messages", {"tools": [{"name": "f", "input_shema": {}}]}, "input_schema"),
    ],
)
def test_a_misspelt_option_within_a_field_is_refused(
    endpoint: str, changes: dict[str, Any], meant: str
) -> None:
    (field,) = changes.keys() - {"stream"}
    with pytest.raises(ApiError, match=rf"did you mean {meant}\?") as refused:
        BODIES[endpoint].check({**NEEDED[endpoint], **changes})
    assert refused.value.param == field


def test_names_in_a_conversation_are_no_typing_errors() -> None:
    message = {**MESSAGES[0], "tool_call": 1, "rol": "x"}
    assert BODIES["chat"].check({"messages": [message]}) == BODIES["chat"].check(NEEDED["chat"])


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_token", "max_tokens"),
        ("MaxTokens", "max_tokens"),
        ("max-tokens", "max_tokens"),
        ("mxa_tokens", "max_tokens"),
        ("maxx_tokenss", "max_tokens"),
        ("steam", "stream"),
        ("seeds", "seed"),
        ("seeda", "seed"),
        ("sed", None),
        ("topp", "top_p"),
        ("top_x", None),
        ("ttl", None),
        ("metadata_filter", None),
        ("x" * 100_000, None),
        ("", None),
        ("\ud800", None),
    ],
)
def test_near_is_one_edit_or_two_in_long_names(name: str, meant: str | None) -> None:
    known = ("n", "seed", "top_p", "top_k", "max_tokens", "min_tokens", "stream", "metadata")
    assert near_name(name, known) == meant


def test_more_unknown_names_than_can_be_compared_soon_are_refused() -> None:
    few = {f"frob_{place}": 1 for place in range(MAX_NEAR_CHECKS)}
    assert BODIES["chat"].check({**NEEDED["chat"], **few}) == BODIES["chat"].check(NEEDED["chat"])
    with pytest.raises(ApiError, match=f"over {MAX_NEAR_CHECKS} unknown fields"):
        BODIES["chat"].check({**NEEDED["chat"], **few, "frob": 1})
    tool = {"type": "function", "function": {"name": "f"}, "annotations": {}}
    tools = [{**tool, "function": {"name": f"f{place}"}} for place in range(2 * MAX_NEAR_CHECKS)]
    request = BODIES["chat"].read(json.dumps({**NEEDED["chat"], "tools": tools}).encode())
    assert request.ignored == ("tools.annotations",)


def test_a_name_is_logged_once_and_the_number_of_names_is_bounded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    names = IgnoredNames()
    with caplog.at_level(logging.INFO):
        assert names.headers(()) == ()
        assert names.headers(("frob", "a\nb")) == ((IGNORED_HEADER, "frob, a%0Ab"),)
        names.headers(("frob",))
        assert [record.args for record in caplog.records] == [("frob",), ("a%0Ab",)]
        for place in range(2 * MAX_NOTICES):
            names.headers((f"name_{place}",))
    assert len(caplog.records) == MAX_NOTICES


def test_strict_fields_are_strict_everywhere(engine: ScriptedEngine, text: TextFrontend) -> None:
    with running_server(engine, text, options(unknown_fields="refuse")) as server:
        for endpoint, path in PATHS.items():
            refused = server.post(path, {**NEEDED[endpoint], "frob": 1})
            assert refused.status_code == 400, endpoint
            assert "frob" in refused.text
        described = server.get("/openapi.json").json()
    content = described["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]
    schema = content["application/json"]["schema"]
    assert schema["additionalProperties"] == {"type": "null"}
    message = schema["properties"]["messages"]["items"]
    assert message["additionalProperties"] == {"type": "null"}
