"""The parts of a group that are pure: routes, views, sums, rows and CPUs."""

from collections.abc import Sequence
from pathlib import Path

from cadenza.cluster.cores import own_cpus, split_cpus
from cadenza.cluster.group_stats import (
    LiveRows,
    group_limits,
    group_stats,
    group_status,
    replica_limits,
)
from cadenza.cluster.router import PrefixView, ReplicaLoad, Route, Router, order_replicas, page_keys
from cadenza.config import EngineConfig
from cadenza.engine.batch_engine import EngineStatus
from cadenza.engine.open_requests import EngineLoad
from cadenza.engine.route_report import HeldChange, RouteReport, Seen
from cadenza.engine.stats import StepMeter
from cadenza.engine.step_watch import RowSummary, StepSummary
from cadenza.request import Request, SamplingParams
from tests.engine.process.scripted_child import limits_of, make_core

SECRET = b"a secret of page keys"


def prompt(*tokens: int, salt: str = "") -> Request:
    params = SamplingParams(max_tokens=1)
    return Request(prompt_token_ids=tokens, params=params, cache_salt=salt)


def load(num_open: int = 0, queued: int = 0, **tokens: int) -> ReplicaLoad:
    """With a token a second."""
    found = {f"num_{name}_tokens": count for name, count in tokens.items()}
    return ReplicaLoad(num_open=num_open, queued_s=float(queued), token_s=1.0, **found)


def test_a_request_goes_to_the_least_work_or_to_its_prefix_unless_that_is_crowded() -> None:
    idle, busy = load(), load(4, 300)
    assert order_replicas([busy, idle], 100) == [1, 0]
    holds = load(1, held=1000)
    assert order_replicas([idle, holds], 1000) == [1, 0]
    assert order_replicas([idle, load(1, held=8)], 40) == [0, 1]  # one more in its way costs more
    assert order_replicas([idle, load(9, held=200)], 400) == [0, 1]  # nine would wait for the rest
    crowded = load(40, 9000, held=20_000)
    assert order_replicas([crowded, idle, idle], 20_000)[-1] == 0
    assert order_replicas([idle, crowded], 20_000)[-1] == 1


def test_a_prefix_that_one_replica_computes_is_waited_for_there_unless_it_is_crowded() -> None:
    computes = load(1, 2000, held=2000, coming=2000)
    assert order_replicas([load(), computes, load()], 2048) == [1, 0, 2]
    follows = load(4, 2200, held=2000, coming=2000)
    assert order_replicas([load(), follows, load()], 2048) == [1, 0, 2]
    crowded = load(20, 5000, held=2000, coming=2000)
    assert order_replicas([load(), crowded, load()], 2048) == [0, 2, 1]
    short = load(1, 200, held=200, coming=200)
    assert order_replicas([load(), short], 248)[0] == 0


def test_equal_replicas_are_chosen_by_where_the_session_was() -> None:
    assert order_replicas([load(), load(seen=64)], 40) == [1, 0]
    assert order_replicas([load(), load(1, seen=64)], 40) == [0, 1]


def keys_of(*tokens: int, salt: str = "") -> tuple[bytes, ...]:
    return page_keys(prompt(*tokens, salt=salt), 16, SECRET)


def told(*added: bytes, removed: Sequence[bytes] = ()) -> HeldChange:
    return HeldChange(secret=SECRET, added=b"".join(added), removed=b"".join(removed))


def test_a_view_knows_prefixes_by_salt_and_forgets_the_end_of_the_oldest_first() -> None:
    first = keys_of(*range(40))
    assert len(first) == 2
    assert keys_of(*range(32), 99) == first
    assert keys_of(*range(40), salt="other")[0] != first[0]
    view = PrefixView(max_keys=3)
    view.add(first, 0)
    assert view.num_held(keys_of(*range(64))) == 2
    view.add(keys_of(*range(50, 90)), 1)
    assert view.num_held(first) == 1
    view.clear()
    assert view.num_held(first) == 0


def test_what_was_sent_counts_until_the_replica_has_reported_behind_it() -> None:
    first, second = keys_of(*range(40)), keys_of(*range(50, 90))
    view = PrefixView()
    view.add(first, 7)
    view.take(told(), 7)  # it has the request, and computes it
    assert (view.num_held(first), view.num_coming(first)) == (2, 2)
    view.take(told(*first), 8)
    assert (view.num_held(first), view.num_coming(first)) == (2, 0)
    view.take(told(removed=first[1:]), 8)
    assert view.num_held(first) == 1
    view.add(second, 8)
    view.take(told(), 9)  # it ended, and nothing is left of it
    assert (view.num_held(second), view.num_seen(second), len(view)) == (0, 2, 1)


def test_a_view_knows_a_prefix_whose_beginning_was_dropped_for_being_old() -> None:
    keys = keys_of(*range(64))
    view = PrefixView()
    view.take(told(*keys[2:]), 0)
    assert view.num_held(keys) == 4


def report(newest_id: int, held: HeldChange | None = None, queued_s: float = 0.0) -> RouteReport:
    """Nothing of what it has received is still to be computed."""
    seen = {0: Seen(newest_id=newest_id, first_pending_id=newest_id + 1)} if newest_id >= 0 else {}
    return RouteReport(queued_s=queued_s, prompt_token_s=0.01, seen=seen, held=held)


LOADS = {0: EngineLoad(num_open=0, num_queued_tokens=0)}
LOADS[1] = LOADS[0]


def place_of(router: Router, asked: Request, now_s: float = 0.0) -> int:
    limits = limits_of(EngineConfig(max_num_seqs=8))
    return router.choose(asked, LOADS, limits, now_s).replica


def test_a_router_adds_what_it_has_sent_to_what_replicas_report() -> None:
    router, other = Router(SECRET), prompt(*range(40, 90))
    for place in LOADS:
        router.take(place, report(-1), 0.0)
    router.sent(Route(0, num_new_tokens=60), 3, 0.0)
    assert place_of(router, other) == 1
    router.take(0, report(2), 0.0)  # it has not received the request
    assert place_of(router, other) == 1
    router.take(0, report(3), 0.0)
    router.take(1, report(-1, queued_s=0.2), 0.0)  # another front end's
    assert place_of(router, other) == 0


def test_a_queue_gets_shorter_while_nothing_is_reported() -> None:
    router, other = Router(SECRET), prompt(*range(40, 90))
    for place, queued_s in ((0, 2.0), (1, 1.0)):
        router.take(place, report(-1, queued_s=queued_s), 10.0)
    assert place_of(router, other, 10.9) == 1
    router.sent(Route(1, num_new_tokens=300), 0, 11.5)
    assert place_of(router, other, 11.6) == 0
    assert place_of(router, other, 20.0) == 0


def test_a_router_uses_the_secret_that_a_replica_reports() -> None:
    """It is that of a folder of pages, under which the replica has its keys."""
    router, asked, own = Router(SECRET), prompt(*range(60)), b"of a folder"
    keys = page_keys(asked, 16, own)
    held = HeldChange(secret=own, added=b"".join(keys), removed=b"")
    router.take(0, report(-1), 0.0)
    router.take(1, report(-1, held), 0.0)
    route = router.choose(asked, LOADS, limits_of(EngineConfig(max_num_seqs=8)), 0.0)
    assert route == Route(1, keys, 60 - 48)
    router.forget(1)
    router.take(1, report(-1), 0.0)
    assert place_of(router, asked) == 0


def test_a_group_has_as_many_rows_and_places_as_its_replicas() -> None:
    limits = limits_of(EngineConfig(max_num_seqs=8))
    of_group = group_limits(limits, 3)
    assert (of_group.max_num_seqs, of_group.max_num_open_reqs) == (24, 3 * 108)
    assert of_group.num_pages == limits.num_pages
    assert replica_limits(of_group, 3) == limits


def test_figures_of_a_group_are_the_sums_of_its_replicas() -> None:
    meters = [StepMeter(make_core(EngineConfig(max_num_seqs=4)), lambda: 0.0) for _ in range(2)]
    for count, meter in enumerate(meters, start=1):
        for request_id in range(count):
            meter.core.enqueue(request_id, prompt(1, 2, 3))
        meter.step()
    found = group_stats([each.stats() for each in meters])
    assert found is not None
    assert found.numbers["prefix_cache_queries"] == 9
    assert sum(found.by_label["pages"].values()) == 2 * 64
    tokens = found.histograms["iteration_tokens_total"]
    assert (tokens.count, tokens.total) == (2, 9.0)
    assert group_stats([]) is None


def test_a_group_is_ready_while_one_replica_is() -> None:
    found = [
        EngineStatus(state="restarting", num_restarts=2),
        EngineStatus(state="ready", since_beat_s=0.5, num_restarts=1),
    ]
    status = group_status(found, is_draining=False)
    assert (status.state, status.num_restarts, status.since_beat_s) == ("ready", 3, 0.5)
    assert status.replicas == ("restarting", "ready")
    assert group_status(found, is_draining=True).state == "draining"
    assert group_status([EngineStatus(state="dead")], is_draining=True).state == "dead"


def summary(tenant: str, label: int, new: int) -> StepSummary:
    row = RowSummary(label, 0, "decode", 8, 9, 0, new, 0, 0)
    return StepSummary(
        num_steps=1,
        seconds=0.1,
        longest_s=0.1,
        num_tokens=new,
        num_sampled=new,
        num_running=1,
        num_waiting=0,
        pages_live=1,
        pages_cached=2,
        pages_free=3,
        tenants=(tenant,),
        rows=(row,),
    )


def test_viewers_see_the_rows_of_all_replicas_under_labels_of_their_own() -> None:
    live = LiveRows(2)
    live.take(0, summary("a", 1, new=4))
    joined = live.take(1, summary("b", 1, new=2))
    assert isinstance(joined, StepSummary)
    assert (joined.num_running, joined.pages_free, joined.num_sampled) == (2, 6, 2)
    rows = [(row.label, joined.tenants[row.tenant], row.new) for row in joined.rows]
    assert rows == [(3, "b", 2), (2, "a", 0)]
    assert live.take(0, "lost") is None
    assert live.take(1, "lost") == "lost"
    assert live.take(0, "ready") == "ready"


def test_cpus_are_split_by_memory_node(tmp_path: Path) -> None:
    assert split_cpus([0, 1, 2, 3, 4], 2) == [(0, 1), (2, 3, 4)]
    assert split_cpus([0], 2) == [(0,), (0,)]
    allowed = own_cpus()
    for node, cpus in ((0, allowed[1:]), (1, allowed[:1])):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(",".join(map(str, cpus)) + "\n")
    assert own_cpus(tmp_path) == [*allowed[1:], *allowed[:1]]
    assert own_cpus(tmp_path / "absent") == sorted(allowed)
