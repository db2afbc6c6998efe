"""`LiveRows`: summaries of the replicas' steps as those of one engine."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from cadenza.engine.step_watch import EngineChange, LiveNews, RowSummary, StepSummary


@dataclass(slots=True, eq=False)
class LiveRows:
    """Of `num_replicas` engines. A label is a replica's own, times their number, plus its place."""

    num_replicas: int
    _newest: dict[int, StepSummary] = field(default_factory=dict[int, StepSummary])
    _lost: set[int] = field(default_factory=set[int])

    def take(self, place: int, news: LiveNews) -> LiveNews | None:
        if isinstance(news, StepSummary):
            self._newest[place] = self._labelled(place, news)
            return self._joined(place)
        return self._change(place, news)

    def _change(self, place: int, change: EngineChange) -> EngineChange | None:
        """The group is lost with its last engine, and ready with the first."""
        was_lost = len(self._lost) == self.num_replicas
        if change == "lost":
            self._lost.add(place)
            self._newest.pop(place, None)
        else:
            self._lost.discard(place)
        is_lost = len(self._lost) == self.num_replicas
        return change if is_lost is not was_lost else None

    def _labelled(self, place: int, summary: StepSummary) -> StepSummary:
        def row(each: RowSummary) -> RowSummary:
            return replace(each, label=each.label * self.num_replicas + place)

        return replace(summary, rows=tuple(map(row, summary.rows)))

    def _joined(self, place: int) -> StepSummary:
        own = self._newest[place]
        others = [each for other, each in self._newest.items() if other != place]
        both = [own, *others]
        names = tuple(dict.fromkeys(name for each in both for name in each.tenants))
        places = {name: at for at, name in enumerate(names)}
        rows = [*_rows(own, places)]
        for each in others:
            rows += [replace(row, new=0, drafts=0, preempted=0) for row in _rows(each, places)]
        return replace(
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
    return [replace(row, tenant=places[summary.tenants[row.tenant]]) for row in summary.rows]
