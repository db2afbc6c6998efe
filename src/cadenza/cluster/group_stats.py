"""The replicas' states, bounds and figures as those of one engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

from msgspec import structs

from cadenza.config import EngineLimits
from cadenza.engine.batch_engine import EngineState, EngineStatus
from cadenza.engine.open_requests import EngineLoad
from cadenza.engine.request_stats import RequestStats
from cadenza.engine.stats import ENGINE_FIGURES, EngineStats
from cadenza.engine.step_watch import EngineChange, LiveNews, RowSummary, StepSummary
from cadenza.figures import Distribution, Reading

NOT_ADDED = frozenset(each.name for each in ENGINE_FIGURES if not each.is_added)

BEST_FIRST: tuple[EngineState, ...] = ("ready", "draining", "restarting", "loading", "dead")

# Bounds of which a group has as many times more.
SCALED = ("max_num_seqs", "max_num_queued_reqs", "max_num_queued_tokens", "max_num_batched_tokens")


def group_limits(limits: EngineLimits, num_replicas: int) -> EngineLimits:
    return replace(limits, **{name: getattr(limits, name) * num_replicas for name in SCALED})


def replica_limits(limits: EngineLimits, num_replicas: int) -> EngineLimits:
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
    """The sums; of a figure that is not added, what the first engine with it has."""
    if not found:
        return None
    by_name: dict[str, list[Reading]] = {}
    for each in found:
        for name, reading in each.readings:
            by_name.setdefault(name, []).append(reading)
    return EngineStats.of(
        (name, readings[0] if name in NOT_ADDED else _sum(readings))
        for name, readings in by_name.items()
    )


def group_request_stats(found: Sequence[RequestStats]) -> RequestStats:
    names = [each.name for each in fields(RequestStats)]
    added: dict[str, Any] = {name: _sum([getattr(each, name) for each in found]) for name in names}
    return RequestStats(**added)


def _sum(readings: Sequence[Reading]) -> Reading:
    first = readings[0]
    if isinstance(first, Distribution):
        histograms = cast(Sequence[Distribution], readings)
        counts = tuple(map(sum, zip(*(each.counts for each in histograms), strict=True)))
        return replace(first, counts=counts, total=sum(each.total for each in histograms))
    if isinstance(first, Mapping):
        labelled = cast(Sequence[Mapping[str, int | float]], readings)
        names = dict.fromkeys(name for each in labelled for name in each)
        return {name: sum(each.get(name, 0) for each in labelled) for name in names}
    return sum(cast(Sequence[int | float], readings))


@dataclass(slots=True, eq=False)
class LiveRows:
    """Of `num_replicas` engines. A label is a replica's own, times their number, plus its index."""

    num_replicas: int
    _newest: dict[int, StepSummary] = field(default_factory=dict[int, StepSummary])
    _lost: set[int] = field(default_factory=set[int])

    def take(self, index: int, news: LiveNews) -> LiveNews | None:
        if isinstance(news, StepSummary):
            self._newest[index] = self._labelled(index, news)
            return self._joined(index)
        return self._change(index, news)

    def _change(self, index: int, change: EngineChange) -> EngineChange | None:
        """The group is lost with its last engine, and ready with the first."""
        was_lost = len(self._lost) == self.num_replicas
        if change == "lost":
            self._lost.add(index)
            self._newest.pop(index, None)
        else:
            self._lost.discard(index)
        is_lost = len(self._lost) == self.num_replicas
        return change if is_lost is not was_lost else None

    def _labelled(self, index: int, summary: StepSummary) -> StepSummary:
        def row(each: RowSummary) -> RowSummary:
            return structs.replace(each, label=each.label * self.num_replicas + index)

        return structs.replace(summary, rows=tuple(map(row, summary.rows)))

    def _joined(self, index: int) -> StepSummary:
        own = self._newest[index]
        others = [each for other, each in self._newest.items() if other != index]
        both = [own, *others]
        names = tuple(dict.fromkeys(name for each in both for name in each.tenants))
        places = {name: at for at, name in enumerate(names)}
        rows = [*_rows(own, places)]
        for each in others:
            rows += [
                structs.replace(row, new=0, drafts=0, preempted=0) for row in _rows(each, places)
            ]
        return structs.replace(
            own,
            num_running=sum(each.num_running for each in both),
            num_waiting=sum(each.num_waiting for each in both),
            pages_live=sum(each.pages_live for each in both),
            pages_cached=sum(each.pages_cached for each in both),
            pages_free=sum(each.pages_free for each in both),
            tenants=names,
            rows=tuple(rows),
        )


def _rows(summary: StepSummary, places: dict[str, int]) -> Sequence[RowSummary]:
    return [
        structs.replace(row, tenant=places[summary.tenants[row.tenant]]) for row in summary.rows
    ]
