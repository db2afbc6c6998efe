"""Fetching images: where from, by which address, and how much."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

import pytest

from cadenza.errors import ConfigError
from cadenza.media.fetching import AllowedHosts, BudgetFullError, MediaFetcher, is_public, read_url
from cadenza.media.image_input import ImageFault
from tests.media.tls_server import TlsServer, answer, redirect, serving, trust

IMAGE = b"an image's bytes"
LOCAL = ip_address("127.0.0.1")


def any_number(_: int) -> bool:
    return True


def is_local(address: IPv4Address | IPv6Address) -> bool:
    return address == LOCAL


class FakeResolver:
    """Answers from a table, and keeps what it was asked."""

    def __init__(self, addresses: Mapping[str, list[str]]) -> None:
        self.addresses = addresses
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        if host not in self.addresses:
            raise OSError
        return self.addresses[host]


def fetcher_of(
    server: TlsServer, resolver: FakeResolver | None = None, **options: Any
) -> MediaFetcher:
    return MediaFetcher(
        AllowedHosts([f"localhost:{server.port}", f"other.test:{server.port}", "localhost:1"]),
        resolve=resolver or FakeResolver({"localhost": ["127.0.0.1"], "other.test": ["127.0.0.1"]}),
        trust=trust(),
        **{"may_connect": is_local, **options},
    )


def run(
    answers: Mapping[str, bytes | None],
    test: Callable[[TlsServer], Coroutine[Any, Any, None]],
) -> None:
    async def serve() -> None:
        async with serving(answers) as server:
            await test(server)

    asyncio.run(serve())


def fault_of(
    answers: Mapping[str, bytes | None], path: str = "/a", **options: Any
) -> tuple[str, list[str]]:
    """What is wrong with an image at a path of localhost, and the paths that were asked for."""
    faults: list[str] = []
    paths: list[str] = []

    async def test(server: TlsServer) -> None:
        url = f"https://localhost:{server.port}{path}"
        with pytest.raises(ImageFault) as raised:
            await fetcher_of(server, **options).fetch(url, any_number)
        faults.append(raised.value.problem)
        paths.extend(server.paths)

    run(answers, test)
    return faults[0], paths


def test_an_image_is_fetched_from_the_address_by_the_hosts_name():
    async def test(server: TlsServer) -> None:
        resolver = FakeResolver({"localhost": ["127.0.0.1"]})
        counted: list[int] = []
        fetcher = fetcher_of(server, resolver)
        url = f"https://LOCALHOST:{server.port}/a.png?x=1#fragment"
        found = await fetcher.fetch(url, lambda number: not counted.append(number))
        assert found == IMAGE
        assert resolver.asked == ["localhost"]
        assert sum(counted) == len(IMAGE)
        assert server.names == ["localhost"]
        head = server.heads[0].lower()
        assert f"host: localhost:{server.port}\r\n" in head
        assert "accept-encoding: identity\r\n" in head
        assert "cookie" not in head
        assert "authorization" not in head

    run({"/a.png?x=1": answer(IMAGE)}, test)


def test_proxies_and_passwords_of_the_environment_take_no_part(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
):
    netrc = tmp_path / "netrc"
    netrc.write_text("machine localhost login a password b\n")
    monkeypatch.setenv("NETRC", str(netrc))
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    async def test(server: TlsServer) -> None:
        found = await fetcher_of(server).fetch(f"https://localhost:{server.port}/a", any_number)
        assert found == IMAGE
        assert "authorization" not in server.heads[0].lower()

    run({"/a": answer(IMAGE)}, test)


def test_redirects_are_followed_within_the_allowed_hosts():
    async def test(server: TlsServer) -> None:
        found = await fetcher_of(server).fetch(f"https://localhost:{server.port}/1", any_number)
        assert found == IMAGE
        assert server.paths == ["/1", "/2", "/x/3", "/x/4"]

    hops = {"/1": redirect("/2"), "/2": redirect("x/3"), "/x/3": redirect("4")}
    run({**hops, "/x/4": answer(IMAGE)}, test)


def test_the_fourth_redirect_is_not_followed():
    hops = {f"/{n}": redirect(f"/{n + 1}") for n in range(1, 6)}
    fault, paths = fault_of(hops, "/1")
    assert "redirects more than 3 times" in fault
    assert paths == ["/1", "/2", "/3", "/4"]


@pytest.mark.parametrize(
    ("location", "problem"),
    [
        ("https://evil.test/a", "not one of this server's --allowed-media-domains"),
        ("https://localhost/a", "not one of this server's --allowed-media-domains"),
        ("https://localhost:1/a", "redirects to another port"),
        ("http://localhost/a", "allowed are data: URLs, and https"),
        ("//evil.test/a", "not one of this server's"),
        ("https://localhost@evil.test/", "allowed are data: URLs, and https"),
        ("file:///etc/passwd", "allowed are data: URLs, and https"),
        ("data:image/png;base64,AAAA", "allowed are data: URLs, and https"),
        ("ftp://localhost/", "allowed are data: URLs, and https"),
    ],
)
def test_each_redirect_is_checked_as_the_first_url_is(location: str, problem: str):
    fault, paths = fault_of({"/a": redirect(location)})
    assert problem in fault
    assert paths == ["/a"]


def test_a_redirect_to_a_host_whose_address_is_private_is_not_followed():
    async def test(server: TlsServer) -> None:
        resolver = FakeResolver({"localhost": ["127.0.0.1"], "other.test": ["10.0.0.1"]})
        with pytest.raises(ImageFault, match="not of the public internet"):
            await fetcher_of(server, resolver).fetch(
                f"https://localhost:{server.port}/a",
                any_number,
            )
        assert resolver.asked == ["localhost", "other.test"]

    async def serve() -> None:
        answers: dict[str, bytes | None] = {}
        async with serving(answers) as server:
            answers["/a"] = redirect(f"https://other.test:{server.port}/b")
            await test(server)

    asyncio.run(serve())


@pytest.mark.parametrize(
    "addresses",
    [["127.0.0.1"], ["93.184.216.34", "10.0.0.1"], ["::1"], ["::ffff:127.0.0.1"], ["junk"], []],
)
def test_no_connection_is_made_where_any_address_is_not_public(addresses: list[str]):
    async def test(server: TlsServer) -> None:
        resolver = FakeResolver({"localhost": addresses})
        fetcher = fetcher_of(server, resolver, may_connect=is_public)
        with pytest.raises(ImageFault, match=r"not of the public internet|has no address"):
            await fetcher.fetch(f"https://localhost:{server.port}/a", any_number)
        assert server.names == []

    run({"/a": answer(IMAGE)}, test)


def test_a_certificate_of_another_name_is_refused():
    async def test(server: TlsServer) -> None:
        with pytest.raises(ImageFault, match="no secure one"):
            await fetcher_of(server).fetch(f"https://other.test:{server.port}/a", any_number)
        assert server.heads == []

    run({"/a": answer(IMAGE)}, test)


def test_a_host_without_an_address_is_a_fault():
    fault, _ = fault_of({}, resolver=FakeResolver({}))
    assert "has no address" in fault


def test_an_answer_that_never_comes_ends_in_time():
    fault, _ = fault_of({"/a": None}, fetch_s=0.05)
    assert "not fetched within 0.05 s" in fault


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (answer(status="404 Not Found"), "answered 404, not 200"),
        (answer(status="206 Partial Content"), "answered 206, not 200"),
        (answer(status="500 No"), "answered 500, not 200"),
        (answer(b"x", content_encoding="gzip"), "compressed its answer"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nshort", "broke off its answer"),
        (b"not http at all\r\n\r\n", "broke off its answer"),
    ],
)
def test_other_answers_are_faults(found: bytes, problem: str):
    assert problem in fault_of({"/a": found})[0]


def test_bytes_are_counted_as_they_are_read_and_not_as_they_are_announced():
    size = (20 << 20) + 1
    endless = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + bytes(size)
    assert "over 20.0 MiB, over the 20.0 MiB" in fault_of({"/a": endless})[0]


def test_a_used_up_budget_ends_a_fetch():
    async def test(server: TlsServer) -> None:
        with pytest.raises(BudgetFullError):
            await fetcher_of(server).fetch(
                f"https://localhost:{server.port}/a", lambda number: number < 5
            )

    run({"/a": answer(IMAGE)}, test)


def test_without_allowed_hosts_no_url_is_fetched():
    fetcher = MediaFetcher(AllowedHosts([]))
    with pytest.raises(ImageFault, match=r"this server fetches none \(--allowed-media-domains\)"):
        asyncio.run(fetcher.fetch("https://images.example.com/a.png", any_number))


@pytest.mark.parametrize(
    "url",
    [
        "https://sub.images.example.com/a",
        "https://example.com/a",
        "https://images.example.com.evil.test/a",
        "https://images.example.com:8443/a",
        "https://[::1]/a",
        "https://images.example.com./a",
    ],
)
def test_only_the_exact_host_is_allowed(url: str):
    allowed = AllowedHosts(["images.example.com"])
    allowed.check(read_url("https://IMAGES.example.com/a"))
    allowed.check(read_url("https://images.example.com:443/a"))
    with pytest.raises(ImageFault):
        allowed.check(read_url(url))


@pytest.mark.parametrize(
    "url",
    [
        "http://a.example/x",
        "https://user@a.example/x",
        "https://user:word@a.example/x",
        "https://a.example\\@b.example/x",
        "https://a.example/x y",
        "https://a.example/\r\nhost: b",
        "https://ä.example/x",
        "https:///x",
        "https:a.example",
        "https://a.example:99999999/x",
        "//a.example/x",
        "file:///etc/passwd",
        "/etc/passwd",
        "",
        "https://a.example/" + "x" * 8192,
    ],
)
def test_urls_of_another_form_are_refused(url: str):
    with pytest.raises(ImageFault, match="allowed are data: URLs, and https://HOST/PATH"):
        read_url(url)


@pytest.mark.parametrize("entry", ["", "*", "*.example.com", "https://a.example", "a.example/x"])
def test_entries_of_another_form_are_refused(entry: str):
    with pytest.raises(ConfigError, match="an entry is a host's name"):
        AllowedHosts([entry])


@pytest.mark.parametrize(
    "text",
    [
        *("0.0.0.0", "10.1.2.3", "100.64.0.1", "127.0.0.1", "169.254.169.254", "172.16.0.1"),
        *("192.0.0.1", "192.168.0.1", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255"),
        *("::", "::1", "::127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254"),
        *("64:ff9b::10.0.0.1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "fc00::1", "fe80::1"),
        *("ff02::1", "2001:db8::1", "2002:7f00:1::", "2001:0:1::1", "100::1", "fec0::1"),
    ],
)
def test_addresses_that_are_not_public(text: str):
    assert not is_public(ip_address(text))


@pytest.mark.parametrize(
    "text",
    ["8.8.8.8", "93.184.216.34", "2606:2800:220:1::1", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8"],
)
def test_addresses_that_are_public(text: str):
    assert is_public(ip_address(text))
