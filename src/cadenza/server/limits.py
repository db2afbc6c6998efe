"""The server's bounds and waits in one table: `ServerLimits`.

Knows no HTTP. Invariant: every number that a client controls and that is not a field of a body is
here; fields have theirs in `fields`.
"""

from dataclasses import dataclass

from cadenza.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Bytes, counts and seconds.

    Args:
        max_body_bytes: of one body; `max_bodies_bytes` of all that are being read.
        body_idle_s: how long a body may stand still; `body_s` how long it may take in all.
        write_stall_s: how long a client may leave 64 KiB unread before it is dropped.
        keep_alive_s: silence in a stream after which a comment is sent.
        max_connections: open at once; None: as many as the limit of open files has room for.

    Raises:
        ConfigError: a value cannot work.
    """

    max_url_bytes: int = 8 << 10
    max_head_bytes: int = 16 << 10
    max_num_headers: int = 100
    max_body_bytes: int = 4 << 20
    max_bodies_bytes: int = 256 << 20
    head_s: float = 10.0
    body_idle_s: float = 30.0
    body_s: float = 120.0
    write_stall_s: float = 30.0
    keep_alive_s: float = 15.0
    drain_s: float = 30.0
    max_logprobs: int = 20
    max_connections: int | None = None

    def __post_init__(self) -> None:
        _check("sse-keep-alive-interval", self.keep_alive_s, 0.001, 86_400.0)
        _check("shutdown-timeout", self.drain_s, 0.0, 86_400.0)
        _check("max-logprobs", self.max_logprobs, 0, 20)
        _check("max-bodies-bytes", self.max_bodies_bytes, self.max_body_bytes, 1 << 50)


def _check(flag: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"--{flag} {value:g} must be from {low:g} to {high:g}")
