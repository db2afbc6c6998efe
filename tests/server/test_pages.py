"""The pages at / and /docs: their files, headers and policies, what they tell whom, who may call,
and that no text of others becomes part of them."""

import gzip
import re
from base64 import b64encode
from collections.abc import Iterator
from hashlib import sha256
from html.parser import HTMLParser

import httpx
import pytest

from cadenza.frontend.text_frontend import TextFrontend
from cadenza.server.access import ApiKeys, Hosts
from cadenza.server.errors import ApiError
from cadenza.server.operations.pages import (
    FOLDER,
    INDEX,
    UI_FILES,
    UI_PATHS,
    PageFacts,
    render_page,
)
from tests.server.harness import RunningServer, Serve, options, running_server
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


def test_a_hostile_name_is_shown_as_it_is(serve: Serve) -> None:
    server = serve(names=HOSTILE)
    answer = page_of(server)
    assert "<script" not in answer.text
    assert "<img" not in answer.text
    assert HOSTILE[0] in Reader(answer.text).text


def test_a_host_that_is_no_address_is_not_repeated(scripted: RunningServer) -> None:
    with scripted.client() as client:
        answer = client.get("/docs", headers={**BROWSER, "host": "<script>"})
    assert "<script" not in answer.text
    assert "http://HOST:PORT/v1" in answer.text


def test_with_keys_the_model_is_shown_to_who_sends_one(serve: Serve) -> None:
    names = ("secret-model",)
    server = serve(keys=ApiKeys([KEY]), names=names)
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


POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
LARGEST_BYTES = 290_000
"""Of all files together, as they lie in a wheel."""


@pytest.fixture(scope="module")
def plain(script: tuple[int, ...], text: TextFrontend) -> Iterator[RunningServer]:
    """A server without the page, and open to names of this machine only."""
    chosen = options(has_ui=False, hosts=Hosts.of_loopback("127.0.0.1", ["my.proxy"]))
    with running_server(ScriptedEngine(script), text, chosen) as running:
        yield running


def test_every_file_of_the_folder_is_served_and_no_other() -> None:
    found = {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*") if path.is_file()}
    assert found == {INDEX, *UI_FILES}
    assert sum((FOLDER / name).stat().st_size for name in found) < LARGEST_BYTES


def test_what_a_file_asks_for_is_served() -> None:
    """Imports, and what the page itself names; no address of another server."""
    for name in (INDEX, *UI_FILES):
        if name.startswith("vendor/") or not name.endswith((".js", ".html", ".css")):
            continue
        content = (FOLDER / name).read_text()
        assert "https://" not in content, name
        named = re.findall(r'from "\./([\w/.]+)"', content)
        named += [each.removeprefix("ui/") for each in re.findall(r'"(ui/[^"]+)"', content)]
        assert set(named) <= set(UI_FILES), name


def test_a_browser_gets_the_page_and_everybody_else_the_old_answer(scripted: RunningServer) -> None:
    page = scripted.get("/", headers=BROWSER)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.content == (FOLDER / INDEX).read_bytes()
    assert "accept" in page.headers["vary"]
    for accept in ("application/json", "*/*"):
        assert scripted.get("/", headers={"accept": accept}).json()["docs"] == "/docs"


@pytest.mark.parametrize("path", ["/", *sorted(UI_PATHS)])
def test_every_file_has_the_strict_headers(scripted: RunningServer, path: str) -> None:
    answer = scripted.get(path, headers=BROWSER)
    assert answer.status_code == 200
    expected = {
        "content-security-policy": POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "no-cache",
    }
    assert {name: answer.headers[name] for name in expected} == expected
    with scripted.client() as client:
        head = client.head(path, headers=BROWSER)
    assert head.content == b""
    assert head.headers["content-length"] == answer.headers["content-length"]


def test_a_file_that_is_known_is_not_sent_again(scripted: RunningServer) -> None:
    etag = scripted.get("/ui/app.js").headers["etag"]
    for known in (etag, f'"other", {etag}', "*"):
        answer = scripted.get("/ui/app.js", headers={"if-none-match": known})
        assert (answer.status_code, answer.content) == (304, b"")
        assert answer.headers["etag"] == etag
    assert scripted.get("/ui/app.js", headers={"if-none-match": '"other"'}).status_code == 200


def test_a_file_is_compressed_for_who_takes_it(scripted: RunningServer) -> None:
    plain = (FOLDER / "app.js").read_bytes()
    with (
        scripted.client() as client,
        client.stream("GET", "/ui/app.js", headers={"accept-encoding": "br, gzip;q=0.5"}) as sent,
    ):
        assert sent.headers["content-encoding"] == "gzip"
        assert gzip.decompress(b"".join(sent.iter_raw())) == plain
    for coding in ("gzip;q=0", "br", "identity"):
        answer = scripted.get("/ui/app.js", headers={"accept-encoding": coding})
        assert "content-encoding" not in answer.headers
        assert answer.content == plain


@pytest.mark.parametrize(
    "path",
    [
        "/ui",
        "/ui/",
        "/ui/index.html",
        "/ui/__init__.py",
        "/ui/../access.py",
        "/ui/..%2faccess.py",
        "/ui/vendor",
        "/ui//app.js",
        "/ui/vendor/../app.js",
        "/ui/%2e%2e/%2e%2e/errors.py",
        "/ui/app.js%00",
        "/UI/app.js",
    ],
)
def test_no_path_leads_to_another_file(scripted: RunningServer, path: str) -> None:
    request = f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    assert scripted.raw(request.encode()).split(b" ", 2)[1] in (b"404", b"400")


def test_a_server_without_the_page_says_so_and_names_what_is_there(plain: RunningServer) -> None:
    for path in UI_PATHS:
        assert plain.get(path).status_code == 404
    answer = plain.get("/", headers=BROWSER)
    assert "<script" not in answer.text
    assert "POST /v1/chat/completions" in answer.text


def asked_as(server: RunningServer, host: str) -> httpx.Response:
    return server.get("/v1/models", headers={"host": host})


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:8000",
        "LOCALHOST:8000",
        "127.0.0.1:8000",
        "[::1]:8000",
        "192.168.1.7",
        "cadenza.localhost:80",
        "host.docker.internal:8000",
        "my.proxy",
    ],
)
def test_names_of_this_machine_are_answered(plain: RunningServer, host: str) -> None:
    assert asked_as(plain, host).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "x"],
)
def test_a_name_that_a_web_page_may_have_is_refused(plain: RunningServer, host: str) -> None:
    answer = asked_as(plain, host)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_host"
    assert "--allowed-hosts" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("host", "names", "is_checked"),
    [
        ("127.0.0.1", [], True),
        ("127.3.2.1", [], True),
        ("::1", [], True),
        ("localhost", [], True),
        ("0.0.0.0", [], False),
        ("10.1.2.3", [], False),
        ("127.0.0.1", ["*"], False),
    ],
)
def test_names_are_checked_at_a_loopback_address_only(
    host: str, names: list[str], is_checked: bool
) -> None:
    hosts = Hosts.of_loopback(host, names)
    if is_checked:
        with pytest.raises(ApiError):
            hosts.check([(b"host", b"evil.example")])
    else:
        hosts.check([(b"host", b"evil.example")])


@pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data; boundary=x", ""])
def test_a_body_that_another_sites_page_may_send_unasked_is_refused(
    scripted: RunningServer, kind: str
) -> None:
    with scripted.client() as client:
        answer = client.post(
            "/v1/chat/completions",
            content=b'{"messages": [{"role": "user", "content": "x"}]}',
            headers={"content-type": kind, "origin": "https://evil.example"},
        )
    assert answer.status_code == 415
