"""`wanted_replicas`: how many engines a load needs, by what waits in them and by their KV. Open
requests do not count: a hundred streams that wait for a client are no reason for an engine, a
prompt of a million tokens is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from cadenza.errors import ConfigError

# Of the goal: engines whose queues are shorter are too many, once that has lasted.
QUIET_SHARE = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleOptions:
    """More engines: where the prompts that wait take longer than `ttft_goal_s` to compute, or a
    larger share of the pages than `max_kv_usage` is in use. One fewer: after `quiet_s` in which
    they took less than a fifth of it, unless the others' usage would then be above that. Raises
    ConfigError."""

    min_replicas: int
    max_replicas: int
    ttft_goal_s: float = 2.0
    quiet_s: float = 600.0
    max_kv_usage: float = 0.9

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise ConfigError(
                f"min_replicas {self.min_replicas} must be from 1 to {self.max_replicas}, which is "
                f"replicas"
            )
        for name in ("ttft_goal_s", "quiet_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} {getattr(self, name):g} must be above 0")
        if not 0 < self.max_kv_usage <= 1:
            raise ConfigError(f"max_kv_usage {self.max_kv_usage:g} must be above 0, and at most 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDemand:
    """Of one engine: the predicted seconds of the prompt tokens that wait, and its KV in use."""

    queued_s: float
    kv_usage: float


def wanted_replicas(
    options: ScaleOptions,
    demands: Sequence[EngineDemand],
    num_current: int,
    now_s: float,
    quiet_since_s: float | None,
) -> tuple[int, float | None]:
    """How many engines there are to be, and since when few would do. `demands`: of the engines that
    compute (one that still loads has none); `num_current`: engines that there are to be so far;
    `quiet_since_s`: what the last call returned, None at first."""
    bounded = min(options.max_replicas, max(options.min_replicas, num_current))
    if len(demands) < num_current:
        return bounded, None  # what the others will take on is not known yet
    queued_s = sum(each.queued_s for each in demands)
    kv_usage = sum(each.kv_usage for each in demands)
    mean_s = queued_s / len(demands)
    if mean_s > options.ttft_goal_s:
        # Work moves to new engines once they have loaded: twice as many at a time, at most.
        wanted = min(2 * num_current, max(num_current + 1, ceil(queued_s / options.ttft_goal_s)))
        return min(options.max_replicas, wanted), None
    if kv_usage / len(demands) > options.max_kv_usage:
        return min(options.max_replicas, num_current + 1), None
    is_quiet = mean_s < QUIET_SHARE * options.ttft_goal_s
    if not is_quiet or bounded <= options.min_replicas:
        return bounded, None
    if kv_usage / (len(demands) - 1) > options.max_kv_usage:
        return bounded, None
    since_s = now_s if quiet_since_s is None else quiet_since_s
    if now_s - since_s < options.quiet_s:
        return bounded, since_s
    return max(options.min_replicas, num_current - 1), now_s
