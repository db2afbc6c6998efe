"""What a client's base URL should have been, told by the path that it asked for in vain.

Knows what clients add to a base URL. Invariant: what is advised is a base URL with which the client
asks for a path that exists.
"""

import re
from collections.abc import Iterable

_HOST = re.compile(r"[A-Za-z0-9._:\[\]-]{1,255}")
"""As a Host header has it, and nothing that could be more than an address."""
_ROOTED = ("/v1/messages", "/api/")
"""Paths that clients add to an address as a whole; to all others under /v1 they add the rest."""


def address_of(scheme: str, host: bytes | None) -> str:
    """This server's, as the client called it."""
    name = "" if host is None else host.decode("latin-1")
    return f"{scheme}://{name}" if _HOST.fullmatch(name) else "http://HOST:PORT"


def base_url_advice(path: str, known: Iterable[str], address: str) -> str | None:
    """A sentence, or None for a path that is like none of the APIs'.

    Args:
        known: the paths of all routes.
    """
    asked = path.rstrip("/")
    for each in sorted((each for each in known if "{" not in each), key=len, reverse=True):
        if each.startswith(_ROOTED):
            if asked.endswith(each):
                return _advice(asked, each, address)
        elif each.startswith("/v1/") and asked.endswith(each.removeprefix("/v1")):
            return _advice(asked, each, f"{address}/v1")
    if asked == "/api" or asked.startswith("/api/"):
        listed = ", ".join(
            sorted(each for each in known if each.startswith("/api/") and "{" not in each)
        )
        return (
            f"of Ollama's API there is {listed}; its base URL is {address}, and that of OpenAI's "
            f"clients {address}/v1"
        )
    if asked == "/v1":
        return f"the base URL of OpenAI's clients is {address}/v1"
    return None


def _advice(asked: str, path: str, base_url: str) -> str:
    if asked == path:  # with a slash behind it
        return f"the path is {path}, without a slash at its end"
    return f"{path} is there: set the client's base URL to {base_url}"
