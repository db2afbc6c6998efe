"""`RequestTimeouts`: how long a request may wait and take; `StartForecast`: when one that comes now
would start, by the order of those that wait and by what was measured. Invariants: nothing is
forecast before enough has been measured; one tenant's requests delay another's by no more than
their share."""

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field
from math import ceil, exp, sqrt
from typing import Self

from cadenza.errors import ConfigError, QueueFullError
from cadenza.tenant import Tenant

MIN_TIMEOUT_S, MAX_TIMEOUT_S = 0.001, 86_400.0


MEMORY_S = 30.0  # Seconds in which requests waited, after which a measured rate counts 1/e.
MEMORY_ENDS = 128  # The same of what a request takes, in requests
# A request has to start so many times before `--request-timeout` as one takes in the mean.
LONG_RUN = 3.0

# Of `--request-timeout`: for so long a request may wait however long the others take.
LEAST_WAIT = 0.25

# Requests that have ended, and seconds in which others waited, before anything is forecast.
LEAST_ENDS, LEAST_S = 8, 1.0


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


@dataclass(slots=True, eq=False)
class _Waiting:
    """`ranks`: ascending; of two requests that with the lower one starts first."""

    weight: float
    ranks: list[float] = field(default_factory=list[float])


class StartForecast:
    """Work is counted in units: a generated token, or a request's end. `priority_s`: seconds of
    waiting that a priority smaller by 1 stands for."""

    def __init__(self, timeouts: RequestTimeouts, priority_s: float = 0.0) -> None:
        self._timeouts = timeouts
        self._priority_s = priority_s
        self._waiting: dict[str, _Waiting] = {}
        self._num_waiting = 0
        self._num_units = self._seconds = 0.0
        self._ended_units = self._ended_squares = self._num_ended = self._run_s = 0.0

    @property
    def mean_run_s(self) -> float:
        """0.0 before enough is measured."""
        return self._run_s / self._num_ended if self._num_ended >= LEAST_ENDS else 0.0

    @property
    def most_wait_s(self) -> float:
        """A request that starts later would probably not end in time."""
        queue_s, total_s = self._timeouts.queue_s, self._timeouts.total_s
        return min(queue_s, max(LEAST_WAIT * total_s, total_s - LONG_RUN * self.mean_run_s))

    @property
    def bound(self) -> str:
        most_s = self.most_wait_s
        if most_s >= self._timeouts.queue_s:
            return f"{most_s:g} are all that --queue-timeout allows"
        return (
            f"{most_s:.3g} are all that --request-timeout {self._timeouts.total_s:g} leaves, since "
            f"requests take {self.mean_run_s:.3g} in the mean"
        )

    def add(self, tenant: Tenant, priority: int, accepted_s: float) -> None:
        waiting = self._waiting.setdefault(tenant.name, _Waiting(tenant.weight))
        insort(waiting.ranks, self._rank(priority, accepted_s))
        self._num_waiting += 1

    def remove(self, tenant: Tenant, priority: int, accepted_s: float) -> None:
        ranks = self._waiting[tenant.name].ranks
        del ranks[bisect_left(ranks, self._rank(priority, accepted_s))]
        if not ranks:
            del self._waiting[tenant.name]
        self._num_waiting -= 1

    def note_work(self, num_units: int, seconds: float) -> None:
        """For all these seconds a request waited."""
        left = exp(-seconds / MEMORY_S)
        self._num_units = self._num_units * left + num_units
        self._seconds = self._seconds * left + seconds

    def note_end(self, num_units: int, run_s: float) -> None:
        left = 1 - 1 / MEMORY_ENDS
        self._ended_units = self._ended_units * left + num_units
        self._ended_squares = self._ended_squares * left + num_units * num_units
        self._run_s = self._run_s * left + run_s
        self._num_ended = self._num_ended * left + 1

    def num_ahead(self, tenant: Tenant, priority: int, accepted_s: float) -> int:
        """Of its tenant those before it, and of each other tenant as many as its weight allows."""
        own = self._waiting.get(tenant.name)
        rank = self._rank(priority, accepted_s)
        num_own = 0 if own is None else bisect_right(own.ranks, rank)
        others = [each for name, each in self._waiting.items() if name != tenant.name]
        shares = [(num_own + 1) * each.weight / tenant.weight for each in others]
        return num_own + sum(
            [min(len(each.ranks), ceil(n)) for each, n in zip(others, shares, strict=True)]
        )

    def start_in_s(self, num_ahead: int, num_free_rows: int, prompts_s: float) -> float:
        """At the latest, plus one standard deviation of what requests take; 0.0 before enough is
        measured. `prompts_s`: until all waiting prompts are computed."""
        in_prompts_s = prompts_s * num_ahead / self._num_waiting if self._num_waiting else 0.0
        num_ends = num_ahead + 1 - num_free_rows  # of requests that must make room
        if num_ends <= 0 or self._num_ended < LEAST_ENDS or self._seconds < LEAST_S:
            return in_prompts_s
        if not self._num_units:
            return in_prompts_s
        mean = self._ended_units / self._num_ended
        variance = max(0.0, self._ended_squares / self._num_ended - mean * mean)
        deviation = sqrt(variance * (1 / num_ends + 1 / self._num_ended))  # of a mean of so many
        seconds = num_ends * (mean + deviation) * self._seconds / self._num_units
        return max(in_prompts_s, seconds)

    def refusal(
        self, num_ahead: int, num_free_rows: int, prompts_s: float
    ) -> QueueFullError | None:
        """Of a request that would start too late."""
        start_s = self.start_in_s(num_ahead, num_free_rows, prompts_s)
        if start_s <= self.most_wait_s:
            return None
        return QueueFullError(
            f"the request would start in about {start_s:.3g} seconds, after {num_ahead} others; "
            f"{self.bound}: try again then, or elsewhere",
            retry_after_s=min(start_s, MAX_TIMEOUT_S),
        )

    def _rank(self, priority: int, accepted_s: float) -> float:
        return accepted_s + priority * self._priority_s
