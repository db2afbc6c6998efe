"""Classes of errors: status, type, code, param, headers, advice; what the official client does."""

import json
import re
from collections.abc import Callable
from typing import Any

import openai
import pytest

from cadenza.errors import FormNotCheckedError
from cadenza.events import ErrorKind
from cadenza.server.errors import ApiError, error_of, none_allowed
from cadenza.server.fields.types import read_json
from cadenza.server.routes import base_url_advice
from tests.server.bodies import NEEDED, PATHS
from tests.server.dialects import check_error, form_of, told_error, tools_of
from tests.server.harness import MODEL, TIMEOUT_S, RunningServer, raw_post, wait_until
from tests.server.scripted_engine import ScriptedEngine

BODY = {"prompt": "the fox", "max_tokens": 4}


def test_a_token_id_that_the_model_lacks_is_a_400(scripted: RunningServer) -> None:
    answer = scripted.post("/v1/completions", {"prompt": [1, 100_000]})
    check_error(answer, 400, "invalid_value", "prompt")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "the body is empty"),
        (b"  \n", "the body is empty"),
        (b"[1]", "the body is a list, and no JSON object"),
        (b'"x"', "is a text, and no"),
        (b"5", "is a number, and no"),
        (b"null", "is null, and no"),
        (b'{"prompt": "x"', "line 1, column 15 has the end of the body; a comma or a closing"),
        (b'{\n  "prompt": "x"\n  "n": 2}', "line 3, column 3 has '\"n\": 2}'; a comma or a"),
        (b'{"a": 1,\n }', "line 2, column 2 has '}'; a name in double quotes is needed"),
        (b"{'a': 1}", "line 1, column 2 has \"'a': 1}\"; a name in double quotes is needed"),
        (b'{"a" 1}', "line 1, column 6 has '1}'; a colon is needed"),
        (b'{"a": tru}', "line 1, column 7 has 'tru}'; a value is needed"),
        (b'{"a": "x}', "line 1, column 7 has '\"x}'; the text that begins there does not end"),
        (b'{"a": "x\ny"}', "line 1, column 9 has '\\ny\"}'; in texts control characters"),
        (b'{"a": "\\x"}', "line 1, column 8 has '\\\\x\"}'; that is no escape of JSON"),
        (b'{"a": 1} {}', "line 1, column 10 has '{}'; the object has ended"),
        ('{"ä": \u00fc}'.encode(), "line 1, column 7 has 'ü}'; a value is needed"),
        (b'{"a": "\xff"}', "line 1, column 8 has the byte 0xff, which is no UTF-8"),
        (
            b'{\n"a": "' + b"x" * 70_000 + b'",\n"b": }',
            "line 3, column 6 has '}'; that is not JSON",
        ),
        (b'{"a": "' + b"x" * 70_000, "line 1, column 70008 has the end of the body"),
        (b'{"a": ' + b"1" * 5000 + b"}", "has a number of too many digits"),
    ],
    ids=lambda each: repr(each)[:40],
)
def test_json_that_is_none_is_refused_at_its_line_and_column(body: bytes, said: str) -> None:
    with pytest.raises(ApiError) as refused:
        read_json(body)
    assert (refused.value.status, refused.value.code) == (400, "invalid_json")
    assert said in refused.value.message


def test_a_body_may_begin_with_a_byte_order_mark() -> None:
    assert read_json(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}


TOO_LONG = "the fox " * 300
"""Some 600 tokens, of 256 that the context holds; and fewer characters than 256 tokens can have."""
FAR_TOO_LONG = "x" * 100_000


@pytest.mark.parametrize(
    ("changes", "param", "length"),
    [
        ({"prompt": [5] * 300, "max_tokens": 4}, "prompt", "300 tokens and max_tokens is 4"),
        ({"prompt": [5] * 250, "max_tokens": 7}, "max_tokens", "250 tokens and max_tokens is 7"),
        ({"prompt": [[5], [5] * 256], "max_tokens": 1}, "prompt", "256 tokens"),
        ({"prompt": [5] * 257, "max_tokens": 0}, "prompt", "257 tokens"),
        ({"prompt": TOO_LONG}, "prompt", r"\d{3} tokens"),
        ({"prompt": FAR_TOO_LONG}, "prompt", r"at least \d+ tokens \(100000 characters\)"),
        ({"messages": TOO_LONG}, "messages", r"\d{3} tokens"),
        ({"messages": TOO_LONG, "max_tokens": 0}, "messages", r"\d{3} tokens"),
        ({"messages": FAR_TOO_LONG}, "messages", r"at least \d+ tokens \(100\d{3} characters\)"),
        ({"messages": "x", "max_tokens": 256}, "max_tokens", r"\d+ tokens"),
    ],
)
def test_whatever_is_beyond_the_context_is_told_its_length_in_the_words_that_clients_match(
    scripted: RunningServer, changes: dict[str, Any], param: str, length: str
) -> None:
    path = "/v1/chat/completions" if "messages" in changes else "/v1/completions"
    if "messages" in changes:
        changes = {**changes, "messages": [{"role": "user", "content": changes["messages"]}]}
    answer = scripted.post(path, changes)
    words = "This model's maximum context length is 256 tokens"
    check_error(answer, 400, "context_length_exceeded", param, words)
    assert re.search(f"the prompt has {length}", answer.json()["error"]["message"])


def test_one_prompt_too_long_starts_none_of_the_others(
    server: RunningServer, engine: ScriptedEngine
) -> None:
    engine.pause()
    answer = server.post("/v1/completions", {"prompt": [[5], [5] * 300], "max_tokens": 4})
    assert answer.status_code == 400
    assert not engine.submitted
    assert engine.num_open == 0


def test_ids_that_the_model_lacks_have_no_text(scripted: RunningServer) -> None:
    for token_id in (331, 2**31 - 1):
        answer = scripted.post("/detokenize", {"tokens": [5, token_id]})
        check_error(answer, 400, "invalid_value", "tokens")
    assert scripted.post("/detokenize", {"tokens": [5, 330]}).status_code == 200


def test_what_is_not_here_is_refused(scripted: RunningServer) -> None:
    check_error(scripted.get("/v2/completions"), 404, "unknown_url")
    with scripted.client() as client:
        answer = client.delete("/ping")
    check_error(answer, 405, "method_not_allowed")
    assert answer.headers["allow"] == "GET, HEAD, POST"


def test_the_load_is_the_number_of_open_calls(
    server: RunningServer, engine: ScriptedEngine
) -> None:
    assert server.get("/load").json() == {"server_load": 0}
    engine.pause()
    posts = [
        server.posting("/v1/completions", {**BODY, **more}) for more in ({}, {"prompt": [[5]] * 3})
    ]
    wait_until(lambda: engine.num_open == 4)
    assert server.get("/load").json() == {"server_load": 2}
    engine.resume()
    assert [post.result().status_code for post in posts] == [200, 200]
    wait_until(lambda: server.get("/load").json() == {"server_load": 0})


FUNCTION = {"name": "f", "parameters": {"type": "object"}}
FORMS: list[tuple[str, dict[str, Any]]] = [
    ("completions", {"guided_regex": "a*"}),
    *((name, form_of(name, {})) for name in ("chat", "responses", "messages")),
    *((name, {"tools": tools_of(name, FUNCTION)}) for name in ("chat", "responses", "messages")),
]


@pytest.mark.parametrize(("name", "fields"), FORMS, ids=str)
def test_an_error_of_a_form_names_the_field_that_asked_for_it(
    server: RunningServer, engine: ScriptedEngine, name: str, fields: dict[str, Any]
) -> None:
    """Of one that is given up, and of one that the engine cannot follow at all."""
    (param,) = fields
    if param == "tools":
        engine.failing, choice = "constraint_failed", "none"
        fields = {**fields, "tool_choice": {"type": choice} if name == "messages" else choice}
    answer = server.post(PATHS[name], {**NEEDED[name], **fields})
    error = told_error(name, answer.json())
    words = "too complex" if param == "tools" else "not supported by this engine"
    assert words in error.message
    if name == "messages" or param == "tools":  # errors of messages have no member for it
        assert error.message.startswith(f"{param}: ")
    assert error.param == (None if name == "messages" else param)


def test_one_field_that_leaves_no_token_is_named_alone() -> None:
    error = none_allowed(("min_tokens",))
    assert error.message == "no token may follow: min_tokens rules out every one; lower min_tokens"
    assert (error.status, error.param) == (400, "min_tokens")
    assert none_allowed(()).param is None


def test_a_form_that_cannot_be_checked_just_now_may_be_sent_again() -> None:
    answer = error_of(FormNotCheckedError("no process"), "ready")
    assert (answer.status, answer.code) == (503, "form_not_checked")
    assert "retry-after" in dict(answer.headers)
    assert "x-should-retry" not in dict(answer.headers)


def test_every_answer_has_the_id_that_was_sent_or_a_new_one(scripted: RunningServer) -> None:
    for path in ("/live", "/nowhere", "/v1/models"):
        assert (
            scripted.get(path, headers={"x-request-id": "mine-1"}).headers["x-request-id"]
            == "mine-1"
        )
        made = {scripted.get(path).headers["x-request-id"] for _ in range(2)}
        assert len(made) == 2
        odd = scripted.get(path, headers={"x-request-id": "not an id"})
        assert odd.headers["x-request-id"] != "not an id"


def test_what_is_no_http_is_a_400(scripted: RunningServer) -> None:
    head, _, body = scripted.raw(b"NONSENSE\r\n\r\n").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"\r\nx-request-id: " in head
    assert told_error("", json.loads(body)).code == "invalid_http"


def test_a_long_url_and_long_heads_are_400(scripted: RunningServer) -> None:
    for request, code in (
        (
            b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
            "url_too_long",
        ),
        (
            b"GET /live HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx: "
            + b"a" * 17_000
            + b"\r\n\r\n",
            "headers_too_large",
        ),
        (
            b"GET /live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n" + b"x: y\r\n" * 101 + b"\r\n",
            "headers_too_large",
        ),
        (b"GET /live HTTP/1.1\r\nx: " + b"a" * 30_000, "headers_too_large"),
    ):
        head, _, body = scripted.raw(request).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 "), head
        assert told_error("", json.loads(body)).code == code


# --- the official client --------------------------------------------------------------------------


def make_client(server: RunningServer, retries: int = 0) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=retries, timeout=TIMEOUT_S
    )


def complete(client: openai.OpenAI, **changes: Any) -> Any:
    return client.completions.create(model=MODEL, prompt="the fox", max_tokens=4, **changes)


def test_the_client_completes_chats_streams_and_lists(scripted: RunningServer) -> None:
    with make_client(scripted) as client:
        completion = complete(client)
        assert completion.choices[0].text
        assert completion.usage.completion_tokens == 4
        parts = [part.choices[0].text for part in complete(client, stream=True)]
        assert "".join(parts) == completion.choices[0].text
        messages: Any = [{"role": "user", "content": "hello"}]
        chat = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4)
        chunks = list(
            client.chat.completions.create(
                model=MODEL,
                messages=messages,
                max_tokens=4,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == chat.choices[0].message.content
        assert chunks[-1].usage == chat.usage
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).id == MODEL


@pytest.mark.parametrize(
    ("break_it", "kind"),
    [
        (lambda client: complete(client, temperature=-1), openai.BadRequestError),
        (lambda client: client.models.retrieve("gpt"), openai.NotFoundError),
        (lambda client: complete(client, extra_body={"model": "gpt"}), openai.NotFoundError),
    ],
)
def test_the_client_raises_its_own_errors(
    scripted: RunningServer, break_it: Callable[[openai.OpenAI], Any], kind: type[Exception]
) -> None:
    with make_client(scripted) as client, pytest.raises(kind):
        break_it(client)


def test_the_client_and_what_wraps_it_know_a_prompt_that_is_too_long(
    scripted: RunningServer,
) -> None:
    with make_client(scripted) as client, pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt=[5] * 300)
    assert refused.value.code == "context_length_exceeded"
    assert "This model's maximum context length is 256 tokens" in str(refused.value)


def test_the_client_continues_a_message_and_finds_what_is_told_of_the_prompt(
    scripted: RunningServer,
) -> None:
    messages: Any = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "the quick"},
    ]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    extra |= {"return_token_ids": True, "prompt_logprobs": 0}
    with make_client(scripted) as client:

        def ask(**changes: Any) -> Any:
            return client.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=3, extra_body=extra, **changes
            )

        chat, chunks = ask(), list(ask(stream=True))
    assert chat.system_fingerprint is None
    assert len(chat.prompt_logprobs) == len(chat.prompt_token_ids) == chat.usage.prompt_tokens
    told = [chunk.prompt_token_ids for chunk in chunks if chunk.prompt_token_ids is not None]
    assert told == [chat.prompt_token_ids]
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == (
        chat.choices[0].message.content
    )


@pytest.mark.parametrize(
    ("failing", "num_tries"), [("not_finite", 1), ("engine_failed", 1), ("step_failed", 3)]
)
def test_the_client_tries_again_unless_it_is_told_not_to(
    server: RunningServer, engine: ScriptedEngine, failing: ErrorKind, num_tries: int
) -> None:
    engine.failing = failing
    with make_client(server, retries=2) as client, pytest.raises(openai.InternalServerError):
        complete(client)
    assert len(engine.submitted) == num_tries


def test_the_client_raises_what_failed_in_mid_stream(
    server: RunningServer, engine: ScriptedEngine
) -> None:
    engine.failing = "step_failed"
    with make_client(server) as client, pytest.raises(openai.APIError, match="computation"):
        list(complete(client, stream=True))


def test_a_pipelined_second_request_is_answered_too(scripted: RunningServer) -> None:
    one = raw_post("/v1/completions", json.dumps(BODY).encode())
    two = b"GET /live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    assert scripted.raw(one + two).count(b"HTTP/1.1 200 ") == 2


HERE = "http://here:1"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/chat/completions", "/v1/chat/completions is there: set the client's base URL to {}/v1"),
        ("/completions", "base URL to {}/v1"),
        ("/models", "base URL to {}/v1"),
        ("/embeddings", "base URL to {}/v1"),
        ("/responses", "base URL to {}/v1"),
        ("/v1/v1/chat/completions", "base URL to {}/v1"),
        ("/openai/v1/chat/completions", "base URL to {}/v1"),
        ("/api/v1/chat/completions", "base URL to {}/v1"),
        ("/api/chat/completions", "base URL to {}/v1"),
        ("/v1/v1/messages", "/v1/messages is there: set the client's base URL to {}"),
        ("/v1/api/chat", "/api/chat is there: set the client's base URL to {}"),
        ("/v1/api/tags", "base URL to {}"),
        ("/v1/chat/completions/", "the path is /v1/chat/completions, without a slash"),
        ("/api/tags/", "the path is /api/tags, without a slash"),
        ("/v1", "the base URL of OpenAI's clients is {}/v1"),
        ("/api/experimental", "its base URL is {}, and that of OpenAI's clients {}/v1"),
        ("/api", "its base URL is {}"),
    ],
)
def test_the_advice_names_the_base_url(path: str, words: str) -> None:
    advice = base_url_advice(path, HERE)
    assert advice is not None
    assert words.replace("{}", HERE) in advice
    if "base URL to" in words:
        assert advice.endswith(words[words.index("{}") :].replace("{}", HERE)), advice


@pytest.mark.parametrize("path", ["/favicon.ico", "/v1/nothing", "/apis", "/chat", "/v1/chat"])
def test_other_paths_get_none(path: str) -> None:
    assert base_url_advice(path, HERE) is None


@pytest.mark.parametrize(
    "host", [None, b"", b"a b", b"x/../y", b"<script>", b"x" * 300, b"a@b", b"\xff"]
)
def test_only_an_address_is_repeated(scripted: RunningServer, host: bytes | None) -> None:
    sent = [] if host is None else [b"host: " + host]
    head = b"\r\n".join([b"GET /v1 HTTP/1.0", *sent, b"", b""])
    assert b"OpenAI's clients is http://HOST:PORT/v1" in scripted.raw(head)


def test_over_http_the_address_is_the_one_that_was_called(scripted: RunningServer) -> None:
    error = scripted.post("/chat/completions", {}).json()["error"]
    assert error["code"] == "unknown_url"
    assert error["message"].endswith(f"base URL to {scripted.url}/v1")
    text = scripted.get("/api/experimental").json()["error"]
    assert f"its base URL is {scripted.url}," in text
    assert "openapi.json" in scripted.get("/favicon.ico").json()["error"]["message"]
    assert scripted.get("/x" * 400).status_code == 404
