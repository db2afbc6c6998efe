"""`ServerLink`: how a command reaches a server: its address, key, certificate and proxy, and what
is said of a failed connection. Invariants: a loopback address is never asked through a proxy; no
message has a key or a proxy's password. Imports what is needed only when it is."""

import re
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import urlsplit

from cadenza.errors import ConfigError, show

if TYPE_CHECKING:
    import ssl

    import httpx

Client = TypeVar("Client")

CACERT_HELP = (
    "Of https: a file with the server's certificate or that of its authority, in PEM (default: the "
    "authorities that are known anyway)."
)
EXAMPLE = "http://127.0.0.1:8000"
_URL = re.compile(r"https?://[^/\s]\S*", re.IGNORECASE)

# OpenSSL's X509_V_ERR_…
_HOSTNAME_MISMATCH, _IP_ADDRESS_MISMATCH, _EXPIRED, _NOT_YET_VALID = 62, 64, 10, 9


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLink:
    """Raises ConfigError: the URL is none, or the file cannot be used."""

    url: str  # with or without /v1
    api_key: str | None = None  # sent as a bearer token
    # A file with the certificate, or with that of its authority, in PEM; None: the authorities
    # that are known anyway.
    cacert: str | None = None
    is_direct: bool = False  # no proxy is asked, whatever the environment says

    def __post_init__(self) -> None:
        if not _URL.fullmatch(self.url) or not self.host:
            raise ConfigError(f"{show(self.url)} is no URL; give one such as {EXAMPLE}")
        if self.cacert is not None and not self.is_secure:
            raise ConfigError(
                f"--cacert {self.cacert} is for https, and the URL is {self.base_url}; correct it, "
                f"or leave --cacert out"
            )
        if self.cacert is not None:
            self.tls()

    @property
    def base_url(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1").rstrip("/")

    @property
    def host(self) -> str:
        """ "" where the URL has none."""
        try:
            parts = urlsplit(self.url)
            _ = parts.port  # raises where it is no number
            return parts.hostname or ""
        except ValueError:
            return ""

    @property
    def is_secure(self) -> bool:
        return urlsplit(self.url).scheme.lower() == "https"

    @property
    def is_loopback(self) -> bool:
        from ipaddress import ip_address

        host = self.host.lower().rstrip(".")
        if host == "localhost" or host.endswith(".localhost"):
            return True
        try:
            return ip_address(host).is_loopback
        except ValueError:
            return False

    @property
    def proxy(self) -> str | None:
        """As the environment says."""
        return None if self.is_direct else self._environment_proxy

    @property
    def headers(self) -> Mapping[str, str]:
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}

    def tls(self) -> "ssl.SSLContext | None":
        """None without TLS. Raises ConfigError."""
        if not self.is_secure:
            return None
        if self.cacert is None:
            import httpx

            return httpx.create_ssl_context()
        import ssl

        try:
            return ssl.create_default_context(cafile=self.cacert)
        except ssl.SSLError as error:
            raise ConfigError(f"--cacert {self.cacert} holds no certificate in PEM") from error
        except OSError as error:
            raise ConfigError(f"--cacert {self.cacert} cannot be read: {error.strerror}") from error

    def client(self, **settings: Any) -> "httpx.Client":
        """Of this server alone; settings are httpx's. Raises ConfigError."""
        import httpx

        return self._made(httpx.Client, settings)

    def async_client(self, **settings: Any) -> "httpx.AsyncClient":
        import httpx

        return self._made(httpx.AsyncClient, settings)

    @property
    def way(self) -> str:
        """What a message on a failure says of a proxy."""
        if self.proxy is not None:
            proxy = _without_password(self.proxy)
            return f"; it is asked through the proxy {proxy}, which NO_PROXY={self.host} leaves out"
        if self.is_direct and self._environment_proxy is not None:
            return "; it is asked without the proxy that the environment names"
        return ""

    def explain(self, error: BaseException) -> str:
        """A sentence that names the server and the cause."""
        return f"{self.base_url} does not answer: {self._cause(error)}{self.way}"

    def _made(self, make: Callable[..., Client], settings: Mapping[str, Any]) -> Client:
        tls = self.tls()
        try:
            return make(
                base_url=self.base_url,
                headers=self.headers,
                verify=False if tls is None else tls,  # http:// has no TLS
                proxy=self.proxy,
                trust_env=False,  # what is taken of the environment is said here
                **settings,
            )
        except (ImportError, ValueError) as error:  # a kind of proxy that httpx has not
            proxy = _without_password(self.proxy or "")
            raise ConfigError(
                f"the proxy {proxy} of the environment cannot be used: {error}; NO_PROXY="
                f"{self.host} leaves it out"
            ) from error

    @property
    def _environment_proxy(self) -> str | None:
        from urllib.request import getproxies, proxy_bypass

        if self.is_loopback or proxy_bypass(self.host):
            return None
        named = getproxies()
        found = named.get("https" if self.is_secure else "http") or named.get("all")
        return found if found is None or "://" in found else f"http://{found}"

    def _cause(self, error: BaseException) -> str:
        found = [text for each in _chain(error) if (text := self._meaning(each)) is not None]
        # The innermost error is the cause of the others.
        return found[-1] if found else f"{type(error).__name__}: {error}".rstrip(": ")

    def _meaning(self, error: BaseException) -> str | None:
        import socket
        import ssl

        import httpx

        match error:
            case ssl.SSLCertVerificationError():
                return self._of_certificate(error)
            case ssl.SSLError():
                return "no TLS connection can be made; a server without TLS has http:// in its URL"
            case socket.gaierror():
                return f"the name {self.host} is not known"
            case ConnectionRefusedError():
                return "the connection is refused; is the server there?"
            case TimeoutError() | httpx.TimeoutException():
                return "nothing comes in time; is the server there?"
            case httpx.RemoteProtocolError() | ConnectionResetError():
                how = "" if self.is_secure else "; a server with TLS has https:// in its URL"
                return f"the connection is closed without an answer{how}"
            case OSError() if error.errno and error.strerror:
                return f"{error.strerror[0].lower()}{error.strerror[1:]}"
            case httpx.ProxyError():
                return str(error)
            case _:
                return None

    def _of_certificate(self, error: "ssl.SSLCertVerificationError") -> str:
        """With OpenSSL's own words, for those who search for them."""
        said = error.verify_message
        match error.verify_code:
            case code if code in (_HOSTNAME_MISMATCH, _IP_ADDRESS_MISMATCH):
                return f"its certificate is for another name ({said})"
            case code if code in (_EXPIRED, _NOT_YET_VALID):
                return f"its certificate is not valid now ({said})"
            case _:
                return (
                    f"its certificate is of no authority that is known here ({said}); name that "
                    f"authority's, or a self-signed one itself, by --cacert FILE"
                )


def _chain(error: BaseException) -> Generator[BaseException]:
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop(0)
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        if isinstance(each, BaseExceptionGroup):
            left += cast("BaseExceptionGroup[BaseException]", each).exceptions
        left.append(each.__cause__ or each.__context__)


def _without_password(proxy: str) -> str:
    parts = urlsplit(proxy)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
