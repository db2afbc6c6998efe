"""The flags of `cadenza bench compare`: its servers, and how often each is loaded.

Imports nothing heavy, because the command line's flags follow from this class.
"""

import re
from dataclasses import dataclass

from cadenza.bench.serve_options import ServerAddress
from cadenza.bench.workloads import check_whole
from cadenza.errors import ConfigError
from cadenza.option import flag
from cadenza.server_link import CACERT_HELP

MAX_ROUNDS = 100
MAX_SERVERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """Raises ConfigError where a value is out of bounds, or a server has no name of its own."""

    url: list[str] | None = flag(
        None, "A server and its name; give two or more.", metavar="NAME=URL"
    )
    api_key: str | None = flag(None, "Sent as a bearer token to all.", has_variable=True)
    cacert: str | None = flag(None, CACERT_HELP, metavar="FILE")
    rounds: int = flag(4, "Rounds of each load on each server, in alternating order.")

    def __post_init__(self) -> None:
        check_whole("rounds", self.rounds, 1, MAX_ROUNDS)
        self.servers()

    def servers(self) -> dict[str, ServerAddress]:
        """By their names, in the order given."""
        found: dict[str, ServerAddress] = {}
        for text in self.url or ():
            name, _, url = text.partition("=")
            if not re.fullmatch(r"[A-Za-z0-9][\w.+-]*", name) or not url:
                raise ConfigError(
                    f"--url {text!r} must be a name of letters and digits, =, and a URL, such as "
                    f"a=http://127.0.0.1:8000"
                )
            if name in found:
                raise ConfigError(f"--url names {name} twice; give each server a name of its own")
            cacert = self.cacert if url.startswith("https") else None
            found[name] = ServerAddress(url=url, api_key=self.api_key, cacert=cacert)
        if not 2 <= len(found) <= MAX_SERVERS:
            raise ConfigError(
                f"--url was given {len(found)} times; give it for 2 to {MAX_SERVERS} servers, such "
                f"as --url a=http://127.0.0.1:8000 --url b=http://127.0.0.1:8001"
            )
        return found
