"""A path that does not exist tells which base URL the client should have."""

import pytest

from cadenza.server.routes import base_url_advice
from tests.server.harness import RunningServer

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
