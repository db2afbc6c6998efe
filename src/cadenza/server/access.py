"""API keys (`ApiKeys`), origins of pages (`Cors`, the Fetch standard 3.3), the server's names
(`Hosts`). Invariants: without a valid key a request has no tenant, unless no key was configured;
only digests of keys are kept, compared in constant time; a disallowed origin gets no
`Access-Control-*`."""

import hmac
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path

from cadenza.errors import ConfigError
from cadenza.request import show
from cadenza.server.errors import ApiError, Headers, invalid_host
from cadenza.server.tenants import hash_in

RawHeaders = Sequence[tuple[bytes, bytes]]

MIN_KEY_CHARS = 8
_BEARER = re.compile(rb"[Bb]earer +([!-~]+)")

ANY_ORIGIN = "*"
PREFLIGHT_MAX_AGE_S = 600  # how long a browser may reuse a preflight's answer
CORS_METHODS = "GET, POST, DELETE"
EXPOSED_HEADERS = (
    *("x-request-id", "retry-after", "x-should-retry", "www-authenticate", "allow"),
    *("x-cadenza-ignored", "x-cadenza-spec-prefill"),
)
"""Response headers that a page may read; some client libraries read them."""

ANY_HOST = "*"
_LOCAL_ENDS = (".localhost", ".internal")
"""Names that nobody can register (RFC 6761, ICANN): the second is that of containers' hosts."""
_PORT = re.compile(r":\d+$")

_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([^/?#@\s,]+)")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
_HEADER_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # a token of RFC 9110, 5.6.2


class ApiKeys:
    """The keys that this server accepts. Each is a tenant of its own, named by its digest, unless
    `named` has its tenant's name; a key there may be `sha256:` and its digest. Raises ConfigError:
    a key is too short, or has characters that no header can carry."""

    def __init__(self, keys: Iterable[str] = (), named: Mapping[str, str] | None = None) -> None:
        listed = list(dict.fromkeys(keys))
        for key in listed:
            if len(key) < MIN_KEY_CHARS or not re.fullmatch(r"[!-~]+", key):
                raise ConfigError(
                    f"an API key has {len(key)} characters; give at least {MIN_KEY_CHARS}, "
                    f"visible ASCII characters only"
                )
        own = [sha256(key.encode()).digest() for key in listed]
        self._tenant_of = {digest: digest.hex() for digest in own}
        for key, name in (named or {}).items():
            self._tenant_of[hash_in(key) or sha256(key.encode()).digest()] = name

    @property
    def is_open(self) -> bool:
        """No key was configured: all requests are of one tenant."""
        return not self._tenant_of

    def tenant_of(self, authorization: bytes | None, api_key: bytes | None = None) -> str | None:
        """From `Authorization`, else `x-api-key`; None without a valid key in either."""
        if self.is_open:
            return ""
        matched = _BEARER.fullmatch(authorization or b"")
        keys = [matched.group(1) if matched else None, api_key]
        found = [None if key is None else self._tenant_of_key(key) for key in keys]
        return found[1] if found[0] is None else found[0]

    def _tenant_of_key(self, key: bytes) -> str | None:
        presented = sha256(key).digest()
        found: str | None = None
        # All of them, so that the time does not depend on the key.
        for digest, tenant in self._tenant_of.items():
            if hmac.compare_digest(presented, digest):
                found = tenant
        return found


def read_keys(given: Iterable[str], file: Path | None) -> list[str]:
    """Keys of flags and of a file, one a line; a line that begins with `#` is a comment. An empty
    key, as of a variable that is not set, is an error and never an open server. Raises ConfigError:
    the file cannot be read or holds no key."""
    keys = list(given)
    if file is None:
        return keys
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise ConfigError(f"--api-key-file {file} cannot be read; give a text file") from None
    lines = (line.strip() for line in text.splitlines())
    keys += [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"--api-key-file {file} holds no key; one a line")
    return keys


class Cors:
    """The allowed origins of one server; without any, CORS is off. `origins`:
    `scheme://host[:port]`, `null` (pages without an origin, such as files), or `*`. Raises
    ConfigError: an origin has another form, which no browser sends."""

    def __init__(self, origins: Iterable[str] = ()) -> None:
        self._origins = frozenset(_normal(origin) for origin in origins)

    def response_headers(self, headers: RawHeaders) -> Headers:
        """The headers of every answer, errors included; without them a page cannot read it."""
        if not self._origins:
            return ()
        origin = self._allowed_origin(headers)
        if origin is None:
            return (("vary", "origin"),)
        return (
            ("vary", "origin"),
            ("access-control-allow-origin", origin),
            ("access-control-expose-headers", ", ".join(EXPOSED_HEADERS)),
        )

    def preflight_headers(self, headers: RawHeaders) -> Headers | None:
        """The further headers of the answer to an OPTIONS request; None where it is no preflight of
        an allowed origin. A browser sends no key with a preflight, so none is required. Raises
        ApiError (400) where a requested header has no valid name."""
        is_preflight = bool(_values(headers, b"access-control-request-method"))
        if not is_preflight or self._allowed_origin(headers) is None:
            return None
        answer = [
            ("vary", "access-control-request-method, access-control-request-headers"),
            ("access-control-allow-methods", CORS_METHODS),
            ("access-control-max-age", str(PREFLIGHT_MAX_AGE_S)),
        ]
        names = _requested_names(headers)
        if names:
            answer.append(("access-control-allow-headers", ", ".join(names)))
        if _values(headers, b"access-control-request-private-network") == [b"true"]:
            answer.append(("access-control-allow-private-network", "true"))
        return tuple(answer)

    def _allowed_origin(self, headers: RawHeaders) -> str | None:
        found = [value.decode("latin-1") for value in _values(headers, b"origin")]
        if len(found) != 1 or not (found[0] in self._origins or ANY_ORIGIN in self._origins):
            return None
        return found[0]


class Hosts:
    """The names under which requests may call a server that is open to everybody on its machine.

    A web page of any site can have its own name lead to 127.0.0.1 after it was loaded (DNS
    rebinding), and is then of one origin with the server. Its name is in the Host header, so other
    names than these are refused. An address in place of a name cannot be made to lead elsewhere.

    Args:
        names: None or `*` among them: any name.
    """

    def __init__(self, names: Iterable[str] | None = None) -> None:
        listed = None if names is None else frozenset(name.lower() for name in names)
        self._names = None if listed is None or ANY_HOST in listed else listed

    @staticmethod
    def of_loopback(host: str, names: Iterable[str]) -> "Hosts":
        """Only where `host` is a loopback address are names restricted, to this machine's and
        `names`."""
        return Hosts((host, socket.gethostname(), *names)) if is_loopback(host) else Hosts()

    def check(self, headers: RawHeaders) -> None:
        """Raises ApiError (400)."""
        if self._names is None:
            return
        for value in _values(headers, b"host"):
            name = value.decode("latin-1").strip().lower()
            if not self._allows(_PORT.sub("", name)):
                raise invalid_host(name=show(name[:64]))

    def _allows(self, name: str) -> bool:
        assert self._names is not None, "any name is allowed"
        is_reserved = name in ("", "localhost") or name.endswith(_LOCAL_ENDS)
        return is_reserved or name in self._names or _is_address(name.strip("[]"))


def is_open_to_others(keys: ApiKeys, host: str) -> bool:
    """Whether other machines may reach a server at `host`, and need no key."""
    return keys.is_open and not is_loopback(host)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens at `host`."""
    return host.lower() == "localhost" or (_is_address(host) and ip_address(host).is_loopback)


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def _normal(origin: str) -> str:
    """As browsers write it: in lower case, without the scheme's own port."""
    if origin in (ANY_ORIGIN, "null"):
        return origin
    matched = _ORIGIN.fullmatch(origin.lower())
    if matched is None:
        raise ConfigError(
            f"--allowed-origins {origin!r} is no origin; give scheme://host or "
            f"scheme://host:port without a path, or * for any; repeat the flag for several"
        )
    scheme, host = matched.groups()
    return f"{scheme}://{host.removesuffix(_DEFAULT_PORTS.get(scheme, ''))}"


def _requested_names(headers: RawHeaders) -> list[str]:
    listed = b",".join(_values(headers, b"access-control-request-headers")).split(b",")
    names = [name for name in (name.strip(b" \t") for name in listed) if name]
    for name in names:
        if not _HEADER_NAME.fullmatch(name):
            raise ApiError(
                400,
                "invalid_header",
                f"access-control-request-headers holds {show(name.decode('latin-1'))}; it must be "
                f"header names with commas between them",
            )
    return list(dict.fromkeys(name.decode("ascii").lower() for name in names))


def _values(headers: RawHeaders, name: bytes) -> list[bytes]:
    return [value for key, value in headers if key == name]
