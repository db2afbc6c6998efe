"""How a server is reached: its certificate, a proxy, and what is said where it cannot be."""

import asyncio
import socket
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest

from cadenza.errors import ConfigError
from cadenza.server_link import ServerLink
from tests.echo_server import CERTIFICATE, echoing
from tests.ports import refusing_port

PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


def failure(link: ServerLink) -> str:
    """What is said where it cannot be reached."""
    with link.client(timeout=5.0) as client, pytest.raises(httpx.HTTPError) as raised:
        client.get("/a")
    return link.explain(raised.value)


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.mark.parametrize(
    "url", ["x", "ftp://x", "http://", "http:///v1", "http://x:port", "http://[::1"]
)
def test_a_text_that_is_no_url_is_refused(url: str):
    with pytest.raises(ConfigError, match="is no URL; give one such as"):
        ServerLink(url=url)


def test_the_base_is_the_url_without_the_apis_version():
    for url in ("http://x:1", "http://x:1/", "http://x:1/v1", "http://x:1/v1/"):
        assert ServerLink(url=url).base_url == "http://x:1"
    assert ServerLink(url="https://x/a/v1").base_url == "https://x/a"


LOOPBACK = ("localhost", "LOCALHOST", "a.localhost", "127.0.0.1", "127.9.9.9", "[::1]")


def test_loopback_is_never_asked_through_a_proxy(monkeypatch: pytest.MonkeyPatch):
    for name in PROXIES[:3]:
        monkeypatch.setenv(name, "http://me:secret@proxy:3128")
    for host in LOOPBACK:
        assert ServerLink(url=f"http://{host}:8000").proxy is None
    for host in ("localhost.example", "128.0.0.1", "example.org"):
        assert ServerLink(url=f"http://{host}").proxy == "http://me:secret@proxy:3128"
    with echoing() as server:
        link = ServerLink(url=f"http://127.0.0.1:{server.port}/v1", api_key="k")
        with link.client(timeout=5.0) as client:
            assert client.get("/a").text == "/a Bearer k"


def test_a_proxy_that_fails_is_named_without_its_password(monkeypatch: pytest.MonkeyPatch):
    with refusing_port() as port:
        monkeypatch.setenv("http_proxy", f"http://me:secret@127.0.0.1:{port}")
        link = ServerLink(url="http://example.org")
        said = failure(link)
    assert f"through the proxy http://127.0.0.1:{port}, which NO_PROXY=example.org" in said
    assert "the connection is refused" in said
    assert "secret" not in said
    monkeypatch.setenv("no_proxy", "example.org")
    assert (link.proxy, link.way) == (None, "")


def test_a_kind_of_proxy_that_there_is_not_is_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("all_proxy", "gopher://me:secret@p:1")
    with pytest.raises(ConfigError, match=r"the proxy gopher://p:1 of the environment cannot"):
        ServerLink(url="http://example.org").client()


def test_a_bench_says_that_it_asks_no_proxy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    link = ServerLink(url="http://example.org", is_direct=True)
    assert link.proxy is None
    assert link.way == "; it is asked without the proxy that the environment names"
    assert ServerLink(url="http://127.0.0.1", is_direct=True).way == ""


def test_a_certificate_that_signs_itself_is_named_and_cacert_trusts_it():
    with echoing(is_secure=True) as server:
        url = f"https://127.0.0.1:{server.port}"
        said = failure(ServerLink(url=url))
        assert said.startswith(f"{url} does not answer: its certificate is of no authority that")
        assert "self-signed certificate" in said
        assert "by --cacert FILE" in said
        link = ServerLink(url=url, cacert=str(CERTIFICATE))
        with link.client(timeout=5.0) as client:
            assert client.get("/a").status_code == 200


def test_a_certificate_for_another_name_is_said_to_be_one():
    with echoing("127.0.0.2", is_secure=True) as server:
        link = ServerLink(url=f"https://127.0.0.2:{server.port}", cacert=str(CERTIFICATE))
        assert "its certificate is for another name" in failure(link)


def test_tls_on_one_side_alone_is_said():
    with echoing() as server:
        assert "a server without TLS has http://" in failure(
            ServerLink(url=f"https://127.0.0.1:{server.port}")
        )
    with echoing(is_secure=True) as server:
        assert "a server with TLS has https://" in failure(
            ServerLink(url=f"http://127.0.0.1:{server.port}")
        )


def test_a_port_without_a_server_and_an_unknown_name_are_said():
    with refusing_port() as port:
        link = ServerLink(url=f"http://127.0.0.1:{port}")
        assert "the connection is refused; is the server there?" in failure(link)
    assert "the name no-such-name.invalid is not known" in failure(
        ServerLink(url="http://no-such-name.invalid")
    )


def test_a_server_that_says_nothing_is_said_to_be_silent():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        link = ServerLink(url=f"http://127.0.0.1:{silent.getsockname()[1]}")
        with link.client(timeout=0.05) as client, pytest.raises(httpx.HTTPError) as raised:
            client.get("/a")
    assert "nothing comes in time" in link.explain(raised.value)


def test_the_client_of_an_event_loop_names_the_same_cause():
    async def ask() -> None:
        async with link.async_client(timeout=5.0) as client:
            await client.get("/a")

    with echoing(is_secure=True) as server:
        link = ServerLink(url=f"https://127.0.0.1:{server.port}")
        with pytest.raises(httpx.HTTPError) as raised:
            asyncio.run(ask())
    assert "self-signed certificate" in link.explain(raised.value)


WRONG: Mapping[str, str] = {
    "absent.pem": "cannot be read: No such file",
    "key.pem": "no certificate",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_file_without_a_certificate_is_refused_before_anything_is_asked(
    tmp_path: Path, name: str
):
    (tmp_path / "key.pem").write_text("nothing")
    with pytest.raises(ConfigError, match=f"--cacert .*{WRONG[name]}"):
        ServerLink(url="https://x", cacert=str(tmp_path / name))


def test_a_certificate_for_a_url_without_tls_is_refused():
    with pytest.raises(ConfigError, match=r"--cacert .* is for https"):
        ServerLink(url="http://x", cacert=str(CERTIFICATE))
