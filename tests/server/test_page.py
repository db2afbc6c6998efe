"""The page at /docs: what it tells whom, and that no text of others becomes part of it."""

import re
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser

import httpx
import pytest

from cadenza.frontend.text_frontend import TextFrontend
from cadenza.server.access import ApiKeys
from cadenza.server.operations.pages import PageFacts, render_page
from tests.server.harness import RunningServer, options, running_server
from tests.server.scripted_engine import ScriptedEngine

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</title></style><style>*{display:none}</style>",
    "a'b\\\"; rm -rf /; '",
    "javascript:alert(1)",
    "&lt;b&gt;\u202ename",
)
KEY = "a-key-of-eight"


class Reader(HTMLParser):
    """The tags with their attributes, and the texts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, tuple[tuple[str, str | None], ...]]] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, tuple(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return "".join(self.texts)


def page_of(server: RunningServer, **headers: str) -> httpx.Response:
    answer = server.get("/docs", headers={**BROWSER, **headers})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    return answer


def test_a_browser_gets_a_page_that_names_what_is_here(scripted: RunningServer) -> None:
    reader = Reader(page_of(scripted).text)
    links = {dict(attrs)["href"] for tag, attrs in reader.tags if tag == "a"}
    assert links == {"/health", "/openapi.json", "/metrics", "/v1/models"}
    for link in links:
        assert scripted.get(link).status_code == 200
    for words in (
        "scripted",
        "ready",
        "256 tokens",
        f"{scripted.url}/v1",
        "POST /v1/chat/completions",
        "POST /v1/messages",
        "POST /api/chat",
        "docs/serving.md",
    ):
        assert words in reader.text, words


def test_others_get_a_few_words(scripted: RunningServer) -> None:
    for path in ("/", "/docs"):
        found = scripted.get(path).json()
        assert found["status"] == "ready"
        assert (found["health"], found["openapi"]) == ("/health", "/openapi.json")
    with scripted.client() as client:
        assert client.head("/").status_code == 200  # by which Ollama's clients find a server


def test_the_policy_allows_the_pages_own_style_and_nothing_else(scripted: RunningServer) -> None:
    answer = page_of(scripted)
    (style,) = re.findall(r"<style>(.*?)</style>", answer.text, re.DOTALL)
    digest = b64encode(sha256(style.encode()).digest()).decode()
    assert answer.headers["content-security-policy"] == (
        f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'; "
        f"frame-ancestors 'none'"
    )
    assert answer.headers["x-content-type-options"] == "nosniff"
    tags = {tag for tag, _ in Reader(answer.text).tags}
    assert not tags & {"script", "img", "iframe", "link", "form", "object", "svg", "base"}


def shape_of(page: bytes) -> list[tuple[str, tuple[tuple[str, str | None], ...]]]:
    return Reader(page.decode()).tags


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_becomes_part_of_the_page(text: str) -> None:
    def page_with(word: str) -> bytes:
        return render_page(
            PageFacts(
                version=word,
                state=word,
                models=(word, word),
                needs_key=False,
                facts={word: word},
                address=word,
                endpoints={word: [(word, word)]},
            )
        )

    page = page_with(text)
    assert shape_of(page) == shape_of(page_with("plain"))
    assert Reader(page.decode()).text.count(text) >= 9


def test_a_hostile_name_is_shown_as_it_is(script: tuple[int, ...], text: TextFrontend) -> None:
    with running_server(ScriptedEngine(script), text, names=HOSTILE) as server:
        answer = page_of(server)
        assert "<script" not in answer.text
        assert "<img" not in answer.text
        assert HOSTILE[0] in Reader(answer.text).text


def test_a_host_that_is_no_address_is_not_repeated(scripted: RunningServer) -> None:
    with scripted.client() as client:
        answer = client.get("/docs", headers={**BROWSER, "host": "<script>"})
    assert "<script" not in answer.text
    assert "http://HOST:PORT/v1" in answer.text


def test_with_keys_the_model_is_shown_to_who_sends_one(
    script: tuple[int, ...], text: TextFrontend
) -> None:
    settings = options(keys=ApiKeys([KEY]))
    names = ("secret-model",)
    with running_server(ScriptedEngine(script), text, settings, names=names) as server:
        for headers in ({}, {"authorization": "Bearer another-key"}):
            shown = page_of(server, **headers).text
            assert "secret-model" not in shown
            assert "256 tokens" not in shown
            assert "API keys" in shown
        assert "secret-model" in page_of(server, authorization=f"Bearer {KEY}").text
        assert "secret-model" not in server.get("/").text


def test_the_page_says_why_nothing_is_served(server: RunningServer, engine: ScriptedEngine) -> None:
    engine.state = "restarting"
    assert "engine restarting" in Reader(page_of(server).text).text
    assert server.get("/").json()["status"] == "engine restarting"
    engine.state = "loading"
    assert "loading" in Reader(page_of(server).text).text
