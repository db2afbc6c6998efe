"""Which URLs may be fetched (`AllowedHosts`), and which addresses are public (`is_public`). A URL
is read by one strict form, so that no two readers of it differ; an address outside the public
internet is never allowed, in whatever form it is written."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, IPv6Network

from cadenza.errors import ConfigError, show
from cadenza.media.image_input import ImageFault

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
