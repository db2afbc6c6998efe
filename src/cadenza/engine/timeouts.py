"""`RequestTimeouts`: how long a request may wait, and how long it may take in all."""

from dataclasses import dataclass
from typing import Self

from cadenza.errors import ConfigError

MIN_TIMEOUT_S, MAX_TIMEOUT_S = 0.001, 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimeouts:
    """From acceptance to a request's first step (`queue_s`) and end (`total_s`). Raises
    ConfigError, which names the flag."""

    queue_s: float = 600.0
    total_s: float = 600.0

    @classmethod
    def of(cls, queue_s: float | None, total_s: float) -> Self:
        return cls(queue_s=total_s if queue_s is None else queue_s, total_s=total_s)

    def __post_init__(self) -> None:
        for flag, seconds in (("request-timeout", self.total_s), ("queue-timeout", self.queue_s)):
            if not MIN_TIMEOUT_S <= seconds <= MAX_TIMEOUT_S:
                raise ConfigError(
                    f"--{flag} {seconds:g} must be from {MIN_TIMEOUT_S:g} to {MAX_TIMEOUT_S:g} "
                    f"seconds"
                )
