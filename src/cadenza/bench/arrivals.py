"""When the requests of an open loop are due: a rate, its burstiness, and its ramp. As in vLLM's
`bench serve`, gaps follow a gamma distribution whose shape is the burstiness, and a ramp follows
the request's index. Invariant: times are a function of the seed, fixed before the first request is
sent."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

RampStrategy = Literal["linear", "exponential"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """Requests a second, from `rate` to `end_rate` where they differ. `burstiness`: the gamma
    distribution's shape. 1 is a Poisson process; the variance of the gaps is the square of their
    mean, divided by this."""

    rate: float
    end_rate: float | None = None
    strategy: RampStrategy = "linear"
    burstiness: float = 1.0

    @property
    def highest_rate(self) -> float:
        return max(self.rate, self.end_rate or 0.0)

    def rate_at(self, index: int, count: int) -> float:
        """The rate at which the request at `index` of `count` follows its predecessor."""
        if self.end_rate is None:
            return self.rate
        progress = index / max(1, count - 1)
        if self.strategy == "linear":
            return self.rate + (self.end_rate - self.rate) * progress
        return self.rate * (self.end_rate / self.rate) ** progress

    def times(self, count: int, rng: random.Random) -> Iterator[float]:
        """Seconds from the start to each request; the first is due at once."""
        due_s = 0.0
        for index in range(count):
            if index:
                mean_s = 1 / self.rate_at(index, count)
                due_s += rng.gammavariate(self.burstiness, mean_s / self.burstiness)
            yield due_s
