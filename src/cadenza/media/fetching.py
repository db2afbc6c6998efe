"""`MediaFetcher`: fetches images by https from the hosts that the operator allowed, within limits.
A URL is read by one strict form; a connection goes to a public address that was resolved once,
never to a name; each redirect is checked as the first URL was; nothing of the environment (proxies,
netrc) and no cookie takes part."""

import asyncio
import contextlib
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import TYPE_CHECKING
from urllib.parse import urljoin

from cadenza.errors import ConfigError, show, show_size
from cadenza.media.headers import too_many_bytes
from cadenza.media.image_input import MAX_ENCODED_BYTES, ImageFault

if TYPE_CHECKING:
    import httpx


HTTPS_PORT = 443
MAX_URL_CHARS = 8192
_HOST = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?)*"
# without user info; a "#" and what follows is cut off before
_URL = re.compile(
    rf"https://(?P<host>{_HOST})(?::(?P<port>[1-9][0-9]{{0,4}}))?(?P<path>/[!$-~]*|\?[!$-~]*)?",
    re.IGNORECASE,
)
_ENTRY = re.compile(rf"(?P<host>{_HOST})(?::(?P<port>[1-9][0-9]{{0,4}}))?", re.IGNORECASE)

_GLOBAL_V6 = IPv6Network("2000::/3")
_NAT64 = IPv6Network("64:ff9b::/96")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpsUrl:
    """A URL of https that was read."""

    host: str
    port: int
    path: str  # with the query, as it is sent

    @property
    def text(self) -> str:
        return f"https://{self.authority}{self.path}"

    @property
    def authority(self) -> str:
        return self.host if self.port == HTTPS_PORT else f"{self.host}:{self.port}"


def read_url(text: str) -> HttpsUrl:
    """Raises ImageFault: not https, with user info, or not plain ASCII."""
    whole, _, _ = text.partition("#")
    found = _URL.fullmatch(whole) if len(whole) <= MAX_URL_CHARS else None
    if found is None:
        raise ImageFault(
            f"its URL is {show(text)}; allowed are data: URLs, and https://HOST/PATH without user "
            f"name or password"
        )
    path = found["path"] or "/"
    return HttpsUrl(
        host=found["host"].lower(),
        port=int(found["port"] or HTTPS_PORT),
        path=path if path.startswith("/") else f"/{path}",
    )


class AllowedHosts:
    """The hosts of `--allowed-media-domains`: exact names, each at port 443 or at one of its own.
    Raises ConfigError for an entry of another form."""

    def __init__(self, entries: Iterable[str]) -> None:
        self._allowed: set[tuple[str, int]] = set()
        for entry in entries:
            found = _ENTRY.fullmatch(entry)
            if found is None:
                raise ConfigError(
                    f"--allowed-media-domains has {show(entry)}; an entry is a host's name, such "
                    f"as images.example.com, or images.example.com:8443"
                )
            self._allowed.add((found["host"].lower(), int(found["port"] or HTTPS_PORT)))

    def __bool__(self) -> bool:
        return bool(self._allowed)

    def check(self, url: HttpsUrl) -> None:
        """Raises ImageFault."""
        if not self._allowed:
            raise ImageFault(
                "its URL is remote, and this server fetches none (--allowed-media-domains); send "
                "the image as a data: URL"
            )
        if (url.host, url.port) not in self._allowed:
            raise ImageFault(
                f"its URL is at {show(url.authority)}, which is not one of this server's "
                f"--allowed-media-domains; send the image as a data: URL"
            )


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Whether an address is one host of the public internet; an IPv4 address within an IPv6 one
    counts as itself."""
    if isinstance(address, IPv6Address):
        embedded = address.ipv4_mapped
        if embedded is None and address in _NAT64:
            embedded = IPv4Address(int(address) & 0xFFFF_FFFF)
        if embedded is not None:
            return is_public(embedded)
        if address not in _GLOBAL_V6 or address.sixtofour or address.teredo:
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved


MAX_REDIRECTS = 3
FETCH_S = 10.0  # of one image with its redirects
MAX_ADDRESSES = 3  # tried for one host
MAX_FETCHES = 16  # at once, of all requests
_REDIRECTS = (301, 302, 303, 307, 308)

# the addresses of a host, for a port; raises OSError
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
TryAdd = Callable[[int], bool]  # counts bytes against a budget; False when it is used up


class BudgetFullError(Exception):
    """The budget of bytes is used up."""


async def resolve_host(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[4][0]).partition("%")[0] for address in found]


class MediaFetcher:
    """For one event loop. `allowed`: without any, every fetch is refused. `may_connect`: whether an
    address may be connected to. `trust`: the certificates; None: those of the machine."""

    def __init__(
        self,
        allowed: AllowedHosts,
        *,
        resolve: Resolve = resolve_host,
        may_connect: Callable[[IPv4Address | IPv6Address], bool] = is_public,
        trust: ssl.SSLContext | None = None,
        fetch_s: float = FETCH_S,
    ) -> None:
        self._allowed = allowed
        self._resolve = resolve
        self._may_connect = may_connect
        self._trust = trust
        self._fetch_s = fetch_s
        self._slots = asyncio.Semaphore(MAX_FETCHES)

    def check(self, url: str) -> None:
        """Raises ImageFault for a URL that would not be fetched."""
        self._allowed.check(read_url(url))

    async def fetch(self, url: str, try_add: TryAdd) -> bytes:
        """The bytes at a URL. Raises ImageFault, BudgetFullError."""
        self.check(url)
        async with self._slots:
            try:
                async with asyncio.timeout(self._fetch_s):
                    return await self._follow(read_url(url), try_add)
            except TimeoutError:
                raise ImageFault(
                    f"it was not fetched within {self._fetch_s:g} s; send it as a data: URL"
                ) from None

    async def _follow(self, url: HttpsUrl, try_add: TryAdd) -> bytes:
        first_port = url.port
        for _ in range(MAX_REDIRECTS + 1):
            self._allowed.check(url)
            if url.port != first_port:
                raise ImageFault("its URL redirects to another port, which is not followed")
            found = await self._get(url, try_add)
            if isinstance(found, bytes):
                return found
            url = read_url(urljoin(url.text, found))
        raise ImageFault(f"its URL redirects more than {MAX_REDIRECTS} times")

    async def _get(self, url: HttpsUrl, try_add: TryAdd) -> bytes | str:
        """The body, or the target of a redirect."""
        import httpx

        addresses = await self._addresses(url)
        trust = ssl.create_default_context() if self._trust is None else self._trust
        # A client above it would read redirects, cookies and the environment.
        async with httpx.AsyncHTTPTransport(verify=trust, trust_env=False, retries=0) as client:
            for address in addresses[:MAX_ADDRESSES]:
                with contextlib.suppress(httpx.ConnectError):
                    try:
                        return await _read(client, url, address, try_add)
                    except httpx.ConnectError:
                        raise
                    except (httpx.HTTPError, httpx.InvalidURL):
                        raise ImageFault("the server at its URL broke off its answer") from None
        raise ImageFault("no connection, or no secure one, to the server at its URL was possible")

    async def _addresses(self, url: HttpsUrl) -> list[str]:
        """Resolved once; all of them are checked. Raises ImageFault."""
        try:
            found = [ip_address(each) for each in await self._resolve(url.host, url.port)]
        except (OSError, ValueError):
            found = []
        if not found:
            raise ImageFault("the host of its URL has no address")
        if not all(map(self._may_connect, found)):
            raise ImageFault(
                "the host of its URL has an address that is not of the public internet"
            )
        return [str(each) for each in dict.fromkeys(found)]


async def _read(
    client: "httpx.AsyncHTTPTransport", url: HttpsUrl, address: str, try_add: TryAdd
) -> bytes | str:
    """From an address, with the URL's host as the name in TLS and the request."""
    host = f"[{address}]" if ":" in address else address
    headers = {"host": url.authority, "accept": "image/*", "accept-encoding": "identity"}
    import httpx

    request = httpx.Request(
        "GET",
        f"https://{host}:{url.port}{url.path}",
        headers=headers,
        extensions={"sni_hostname": url.host},
    )
    response = await client.handle_async_request(request)
    try:
        if response.status_code in _REDIRECTS:
            return response.headers.get("location", "")
        if response.status_code != 200:
            raise ImageFault(f"the server at its URL answered {response.status_code}, not 200")
        coding = response.headers.get("content-encoding", "identity")
        if coding.strip().lower() != "identity":
            raise ImageFault("the server at its URL compressed its answer, which is not taken")
        body = bytearray()
        async for part in response.aiter_raw(64 << 10):
            if len(body) + len(part) > MAX_ENCODED_BYTES:
                raise too_many_bytes(f"over {show_size(MAX_ENCODED_BYTES)}")
            if not try_add(len(part)):
                raise BudgetFullError
            body += part
        return bytes(body)
    finally:
        await response.aclose()
