"""Fields that nothing declares: typing errors are refused, others ignored and named in a header.
Those of other engines have the meaning of ours, or are refused where they would change answers."""

import json
import logging
from typing import Any

import pytest

from cadenza.frontend.text_frontend import TextFrontend
from cadenza.request import SamplingParams
from cadenza.server.errors import ApiError
from cadenza.server.fields.body import (
    IGNORED_HEADER,
    MAX_NEAR_CHECKS,
    IgnoredNames,
    UnknownFields,
    near_name,
)
from cadenza.structured import StructuredOutput
from cadenza.text.templates.notices import MAX_NOTICES
from tests.server.bodies import BODIES, NEEDED, PATHS, USER, checked, read, refusal
from tests.server.harness import RunningServer, Serve

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
    ("chat", {"tools": [{"type": "function", "function": {"name": "f", "frob": 1}}]}, "tools.frob"),
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


def test_strict_fields_are_strict_everywhere(serve: Serve) -> None:
    server = serve(unknown_fields="refuse")
    for name, path in PATHS.items():
        refused = server.post(path, {**NEEDED[name], "frob": 1})
        assert refused.status_code == 400, name
        assert "frob" in refused.text
    schema = chat_schema(server)
    for each in (schema, schema["properties"]["messages"]["items"]):
        assert each["additionalProperties"] == {"type": "null"}


def test_a_server_for_gateways_ignores_fields_that_it_does_not_know(serve: Serve) -> None:
    unknown = {"maxtokens": 1, "provider": {"order": ["x"]}, "frob": [None]}
    server = serve(unknown_fields="ignore")
    for name, path in PATHS.items():
        assert server.post(path, {**NEEDED[name], **unknown}).status_code == 200, name
    plain, other = (
        server.post(PATHS["chat"], {**NEEDED["chat"], **more}) for more in ({}, unknown)
    )
    assert plain.json()["choices"] == other.json()["choices"]
    refused = server.post(PATHS["chat"], {**NEEDED["chat"], **unknown, "mirostat": 2})
    assert refused.json()["error"]["param"] == "mirostat"
    assert chat_schema(server)["additionalProperties"] is True


NAMES = ("completions", "chat", "responses", "messages")
ALIASES: list[tuple[str, Any, str, Any]] = [
    ("n_predict", 5, "max_tokens", 5),
    ("num_predict", 5, "max_tokens", 5),
    ("max_new_tokens", 5, "max_tokens", 5),
    ("max_output_tokens", 5, "max_tokens", 5),
    ("max_completion_tokens", 5, "max_tokens", 5),
    ("min_new_tokens", 2, "min_tokens", 2),
    ("repeat_penalty", 1.5, "repetition_penalty", 1.5),
    ("stop_sequences", ["zz"], "stop", ("zz",)),
    ("truncate", 1, "truncate_prompt_tokens", 1),
    ("top_p", 0, "top_p", 1e-6),
    ("seed", -1, "seed", None),
    ("stop", "", "stop", ()),
    ("stop", ["", "zz", ""], "stop", ("zz",)),
    ("max_tokens", -1, "max_tokens", None),
    ("n_predict", -1, "max_tokens", None),
    ("options", {"num_predict": 5, "num_ctx": 4096}, "max_tokens", 5),
    ("extra_body", {"repeat_penalty": 1.5}, "repetition_penalty", 1.5),
]
JSON_FORM = StructuredOutput(json_object=True)
FORMS: list[tuple[str, Any, StructuredOutput | None]] = [
    ("format", "json", JSON_FORM),
    ("format", {"type": "object"}, StructuredOutput(json={"type": "object"})),
    ("format", "", None),
    ("json_schema", {"type": "object"}, StructuredOutput(json={"type": "object"})),
    ("json_schema", {}, None),
    ("grammar", 'root ::= "a"', StructuredOutput(grammar='root ::= "a"')),
    ("grammar", "", None),
    ("ebnf", 'root ::= "a"', StructuredOutput(grammar='root ::= "a"')),
    ("regex", "a+", StructuredOutput(regex="a+")),
    (
        "response_format",
        {"type": "json_object", "value": {"type": "object"}},
        StructuredOutput(json={"type": "object"}),
    ),
    ("response_format", {"type": "json", "value": True}, StructuredOutput(json=True)),
    ("response_format", {"type": "regex", "value": "a+"}, StructuredOutput(regex="a+")),
]
ASKS: dict[str, Any] = {
    "mirostat": 2,
    "dry_multiplier": 0.8,
    "xtc_probability": 0.5,
    "typical_p": 0.9,
    "lora": [{"id": 0, "scale": 1.0}],
    "lora_path": "x",
    "dynatemp_range": 0.5,
    "banned_strings": ["x"],
    "banned_tokens": [1],
    "custom_token_bans": "1,2",
    "ban_eos_token": True,
    "response_prefix": "x",
    "samplers": ["top_k", "temperature"],
    "custom_logit_processor": "x",
    "input_ids": [1],
    "structural_tag": "x",
}


@pytest.mark.parametrize("name", NAMES)
def test_an_alias_is_the_field_that_it_names(text: TextFrontend, name: str) -> None:
    for alias, value, own, kept in ALIASES:
        if name == "messages" and own == "max_tokens" and alias != "max_tokens":
            continue  # it has that field already, which it needs
        params = read(name, **{alias: value}).sampling(text)
        assert getattr(params, own) == kept, (alias, value)


@pytest.mark.parametrize("name", NAMES)
def test_two_names_of_one_field_agree_or_are_refused(name: str) -> None:
    same = {"repeat_penalty": 1.5, "repetition_penalty": 1.5}
    assert checked(name, **same)["repetition_penalty"] == 1.5
    error = refusal(name, **{**same, "repeat_penalty": 1.1})
    assert "two names of one field" in error.message
    assert error.param == "repetition_penalty"
    error = refusal(name, **same, options={"repetition_penalty": 1.1})
    assert "repetition_penalty and options.repetition_penalty" in error.message
    assert checked(name, top_k=7, options={"top_k": None})["top_k"] == 7
    error = refusal(name, extra_body={"top_k": 7}, options={"top_k": 8})
    assert "extra_body.top_k and options.top_k differ" in error.message


@pytest.mark.parametrize("name", ["completions", "chat"])
def test_a_form_may_be_asked_for_by_the_names_of_others(name: str, text: TextFrontend) -> None:
    for field, value, form in FORMS:
        request = read(name, **{field: value})
        assert request.sampling(text).structured == form, (field, value)
        assert request.has_form == (form is not None)
    with pytest.raises(ApiError, match="grammar both ask for a form"):
        read(name, grammar="start: A", guided_regex="x")


@pytest.mark.parametrize("name", ["responses", "messages"])
def test_where_such_a_name_is_not_taken_nothing_is_answered_without_the_form(name: str) -> None:
    for field in {"response_format", "guided_json", *(field for field, _, form in FORMS if form)}:
        value = "x" if field == "grammar" else {"type": "object"}
        error = refusal(name, **{field: value})
        assert "a form by this field at this endpoint" in error.message
        assert error.param == field


@pytest.mark.parametrize("name", NAMES)
def test_what_would_change_an_answer_is_refused_by_name(name: str) -> None:
    for field, value in ASKS.items():
        for given in ({field: value}, {"options": {field: value}}):
            error = refusal(name, **given)
            assert "is not built yet" in error.message
            assert error.param == field


@pytest.mark.parametrize("name", NAMES)
def test_a_window_of_penalties_is_refused_where_there_is_a_penalty(name: str) -> None:
    for harmless in ({}, {"repeat_penalty": 1}, {"presence_penalty": 0.0}):
        assert checked(name, repeat_last_n=64, **harmless)
    assert checked(name, repeat_penalty=1.5, repeat_last_n=-1)["repetition_penalty"] == 1.5
    for penalty in ({"repeat_penalty": 1.5}, {"presence_penalty": 0.5}, {"frequency_penalty": 1}):
        error = refusal(name, repeat_last_n=64, **penalty)
        assert "the whole of prompt and output" in error.message
        assert error.param == "repeat_last_n"


def test_the_top_token_is_that_of_top_p_zero() -> None:
    assert SamplingParams(top_p=0).top_p == SamplingParams(top_p=1e-9).top_p == 1e-6
