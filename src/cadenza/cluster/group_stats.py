"""The replicas' states, bounds and figures as those of one engine."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar, cast

from cadenza.config import EngineLimits
from cadenza.engine.open_requests import EngineLoad, RequestStats
from cadenza.engine.stats import Distribution, EngineStats
from cadenza.engine.status import EngineState, EngineStatus

Figures = TypeVar("Figures")

ADDED_SECONDS = ("queued_s", "encoder_s", "scoring_s")
"""Figures that are sums; other fractional ones are settings, and alike."""

BEST_FIRST: tuple[EngineState, ...] = ("ready", "draining", "restarting", "loading", "dead")

SCALED = ("max_num_seqs", "max_num_queued_reqs", "max_num_queued_tokens", "max_num_batched_tokens")
"""Bounds of which a group has as many times more."""


def group_limits(limits: EngineLimits, num_replicas: int) -> EngineLimits:
    """Those of a group, of each replica's. A sequence has one replica's pool and context."""
    return replace(limits, **{name: getattr(limits, name) * num_replicas for name in SCALED})


def replica_limits(limits: EngineLimits, num_replicas: int) -> EngineLimits:
    """Those of each replica, of its group's."""
    return replace(limits, **{name: getattr(limits, name) // num_replicas for name in SCALED})


def group_status(found: Sequence[EngineStatus], *, is_draining: bool) -> EngineStatus:
    """It serves as long as one replica does; the heartbeat is the oldest of those that serve."""
    best = min(found, key=lambda each: BEST_FIRST.index(each.state))
    beats = [each.since_beat_s for each in found if each.is_ready and each.since_beat_s is not None]
    return replace(
        best,
        state="draining" if is_draining and best.state != "dead" else best.state,
        since_beat_s=max(beats) if beats else best.since_beat_s,
        num_restarts=sum(each.num_restarts for each in found),
        replicas=tuple(each.state for each in found),
    )


def group_load(found: Sequence[EngineLoad]) -> EngineLoad:
    return EngineLoad(
        num_open=sum(each.num_open for each in found),
        num_queued_tokens=sum(each.num_queued_tokens for each in found),
    )


def group_stats(found: Sequence[EngineStats]) -> EngineStats | None:
    """The sums; what is no count is the first one's."""
    return _added(found) if found else None


def group_request_stats(found: Sequence[RequestStats]) -> RequestStats:
    return _added(found)


def _added(found: Sequence[Figures]) -> Figures:
    first: Any = found[0]
    names = [each.name for each in fields(first)]
    values = {name: [getattr(each, name) for each in found] for name in names}
    return replace(
        first,
        **{name: _sum(own) for name, own in values.items() if name not in ADDED_SECONDS},
        **{name: _seconds(own) for name, own in values.items() if name in ADDED_SECONDS},
    )


def _seconds(values: Sequence[float | None]) -> float | None:
    known = [each for each in values if each is not None]
    return sum(known) if known else None


def _sum(values: Sequence[Any]) -> Any:
    """Of numbers, numbers by name or by place, histograms, or figures of such."""
    known = [each for each in values if each is not None]
    if not known:
        return None
    first: Any = known[0]
    if isinstance(first, int):
        return sum(known)
    if isinstance(first, Distribution):
        counts = tuple(map(sum, zip(*(each.counts for each in known), strict=True)))
        return replace(first, counts=counts, total=sum(each.total for each in known))
    if isinstance(first, dict):
        names = dict.fromkeys(name for each in known for name in each)
        return {name: sum(each.get(name, 0) for each in known) for name in names}
    if _has_counts(first):
        width = max(map(len, known))
        padded = [(*each, *(0,) * (width - len(each))) for each in known]
        return tuple(map(sum, zip(*padded, strict=True)))
    if hasattr(first, "__dataclass_fields__"):
        return _added(known)
    return first


def _has_counts(value: Any) -> bool:
    """Whether it is a tuple of counts, by place; one with names is something else."""
    return type(value) is tuple and {type(each) for each in cast(tuple[Any, ...], value)} == {int}
