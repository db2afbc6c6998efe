"""Fields and members that nothing declares: typing errors are refused, the rest is ignored and
named in a header."""

import json
import logging
from typing import Any

import pytest

from cadenza.frontend.text_frontend import TextFrontend
from cadenza.server.fields.body import (
    IGNORED_HEADER,
    MAX_NEAR_CHECKS,
    IgnoredNames,
    UnknownFields,
    near_name,
)
from cadenza.text.templates.notices import MAX_NOTICES
from tests.server.bodies import BODIES, NEEDED, PATHS, USER, checked, refusal
from tests.server.harness import RunningServer, options, running_server
from tests.server.scripted_engine import ScriptedEngine

STRICT: tuple[UnknownFields, ...] = ("suggest", "refuse")
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


@pytest.mark.parametrize("name", BODIES)
def test_a_name_near_a_known_one_is_refused_with_that_name(name: str) -> None:
    misspelt, meant = NEAR[name]
    for policy in STRICT:
        error = refusal(name, policy, **{misspelt: 1})
        assert f"did you mean {meant}?" in error.message
        assert (error.code, error.param) == ("unknown_field", misspelt)
    assert checked(name, "ignore", **{misspelt: 1}) == checked(name)


@pytest.mark.parametrize("name", BODIES)
def test_any_other_name_is_refused_where_fields_are_strict(name: str) -> None:
    for value in (False, 0, "", [], {}):
        error = refusal(name, "refuse", frob=value)
        assert (error.code, error.param) == ("unknown_field", "frob")
        assert error.message.startswith("there is no field 'frob' here; there are")


def test_any_other_name_is_else_ignored_and_named_in_a_header(scripted: RunningServer) -> None:
    for name in BODIES:
        given = {**NEEDED[name], "x_trace": {"a": [1]}, "provider, or": True, "later": None}
        answer = scripted.post(PATHS[name], given)
        assert answer.status_code == 200, answer.text
        assert answer.headers[IGNORED_HEADER] == "x_trace, provider%2C%20or"
        assert IGNORED_HEADER not in scripted.post(PATHS[name], NEEDED[name]).headers
    for changes in ({"stream": True}, {"model": "another"}, {"allowed_token_ids": [99_999]}):
        answer = scripted.post(PATHS["chat"], {**NEEDED["chat"], **changes, "frob": 1})
        assert answer.headers[IGNORED_HEADER] == "frob", "on streams and errors, too"


PART = {"type": "text", "text": "x", "frob": 1}
MEMBERS: list[tuple[str, dict[str, Any], str]] = [
    ("chat", {"messages": [{**USER, "frob": 1, "contents": 2}]}, "messages.frob"),
    ("chat", {"messages": [{**USER, "content": [PART]}]}, "messages.frob"),
    ("responses", {"input": [{**USER, "frob": 1}]}, "input.frob"),
    ("messages", {"messages": [{**USER, "frob": 1}]}, "messages.frob"),
    ("messages", {"messages": [{**USER, "content": [PART]}]}, "messages.frob"),
    (
        "chat",
        {"tools": [{"type": "function", "function": {"name": "f", "frob": 1}}]},
        "tools.frob",
    ),
    ("chat", {"stream": True, "stream_options": {"frob": 1}}, "stream_options.frob"),
    ("responses", {"reasoning": {"frob": 1}}, "reasoning.frob"),
]


@pytest.mark.parametrize(("name", "changes", "shown"), MEMBERS, ids=str)
def test_members_that_are_not_known_are_ignored_and_named(
    name: str, changes: dict[str, Any], shown: str
) -> None:
    request = BODIES[name].read(json.dumps({**NEEDED[name], **changes}).encode())
    assert request.ignored[0] == shown
    assert "frob" in refusal(name, "refuse", **changes).message


@pytest.mark.parametrize(
    ("name", "changes", "meant"),
    [
        ("chat", {"stream": True, "stream_options": {"include_usge": True}}, "include_usage"),
        ("chat", {"structured_outputs": {"regexp": "x"}}, "regex"),
        ("responses", {"reasoning": {"efort": "low"}}, "effort"),
        ("messages", {"thinking": {"type": "enabled", "budget_token": 5}}, "budget_tokens"),
        ("messages", {"tools": [{"name": "f", "input_shema": {}}]}, "input_schema"),
    ],
)
def test_a_misspelt_option_within_a_field_is_refused(
    name: str, changes: dict[str, Any], meant: str
) -> None:
    (field,) = changes.keys() - {"stream"}
    error = refusal(name, **changes)
    assert f"did you mean {meant}?" in error.message
    assert error.param == field


def test_names_in_a_conversation_are_no_typing_errors() -> None:
    message = {**USER, "tool_call": 1, "rol": "x"}
    assert checked("chat", messages=[message]) == checked("chat")


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
    assert checked("chat", **few) == checked("chat")
    assert f"over {MAX_NEAR_CHECKS} unknown fields" in refusal("chat", **few, frob=1).message
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


def chat_schema(server: RunningServer) -> dict[str, Any]:
    route = server.get("/openapi.json").json()["paths"]["/v1/chat/completions"]["post"]
    return route["requestBody"]["content"]["application/json"]["schema"]


def test_strict_fields_are_strict_everywhere(engine: ScriptedEngine, text: TextFrontend) -> None:
    with running_server(engine, text, options(unknown_fields="refuse")) as server:
        for name, path in PATHS.items():
            refused = server.post(path, {**NEEDED[name], "frob": 1})
            assert refused.status_code == 400, name
            assert "frob" in refused.text
        schema = chat_schema(server)
    for each in (schema, schema["properties"]["messages"]["items"]):
        assert each["additionalProperties"] == {"type": "null"}


def test_a_server_for_gateways_ignores_fields_that_it_does_not_know(
    engine: ScriptedEngine, text: TextFrontend
) -> None:
    unknown = {"maxtokens": 1, "provider": {"order": ["x"]}, "frob": [None]}
    with running_server(engine, text, options(unknown_fields="ignore")) as server:
        for name, path in PATHS.items():
            assert server.post(path, {**NEEDED[name], **unknown}).status_code == 200, name
        plain, other = (
            server.post(PATHS["chat"], {**NEEDED["chat"], **more}) for more in ({}, unknown)
        )
        assert plain.json()["choices"] == other.json()["choices"]
        refused = server.post(PATHS["chat"], {**NEEDED["chat"], **unknown, "mirostat": 2})
        assert refused.json()["error"]["param"] == "mirostat"
        assert chat_schema(server)["additionalProperties"] is True
