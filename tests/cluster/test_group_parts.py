"""The parts of a group that are pure: routes, views, sums, rows and CPUs."""

from pathlib import Path

from cadenza.cluster.cores import own_cpus, split_cpus
from cadenza.cluster.group_stats import group_limits, group_stats, group_status, replica_limits
from cadenza.cluster.live_rows import LiveRows
from cadenza.cluster.prefix_view import PrefixView, page_keys
from cadenza.cluster.route_choice import ReplicaLoad, order_replicas
from cadenza.config import EngineConfig
from cadenza.engine.stats import StepMeter
from cadenza.engine.status import EngineStatus
from cadenza.engine.step_watch import RowSummary, StepSummary
from cadenza.request import Request, SamplingParams
from tests.engine.process.scripted_child import limits_of, make_core


def prompt(*tokens: int, salt: str = "") -> Request:
    params = SamplingParams(max_tokens=1)
    return Request(prompt_token_ids=tokens, params=params, cache_salt=salt)


def test_a_request_goes_to_the_least_work_or_to_its_prefix_unless_that_is_crowded() -> None:
    idle, busy = ReplicaLoad(0, 0, 0), ReplicaLoad(4, 300, 0)
    assert order_replicas([busy, idle], 100) == [1, 0]
    holds = ReplicaLoad(1, 0, 1000)
    assert order_replicas([idle, holds], 1000) == [1, 0]
    assert order_replicas([idle, holds], 40) == [0, 1]  # one more in its way costs more
    crowded = ReplicaLoad(40, 9000, 20_000)
    assert order_replicas([crowded, idle, idle], 20_000)[-1] == 0


def test_a_view_knows_prefixes_by_salt_and_forgets_the_end_of_the_oldest_first() -> None:
    first = page_keys(prompt(*range(40)), 16)
    assert len(first) == 2
    assert page_keys(prompt(*range(32), 99), 16) == first
    assert page_keys(prompt(*range(40), salt="other"), 16)[0] != first[0]
    view = PrefixView(max_keys=3)
    view.add(first)
    assert view.num_held(page_keys(prompt(*range(64)), 16)) == 2
    view.add(page_keys(prompt(*range(50, 90)), 16))
    assert view.num_held(first) == 1
    view.clear()
    assert view.num_held(first) == 0


def test_a_group_has_as_many_rows_and_places_as_its_replicas() -> None:
    limits = limits_of(EngineConfig(max_num_seqs=8))
    of_group = group_limits(limits, 3)
    assert (of_group.max_num_seqs, of_group.max_num_open_reqs) == (24, 3 * 108)
    assert of_group.num_pages == limits.num_pages
    assert replica_limits(of_group, 3) == limits


def test_figures_of_a_group_are_the_sums_of_its_replicas() -> None:
    meters = [StepMeter(make_core(EngineConfig(max_num_seqs=4)), lambda: 0.0) for _ in range(2)]
    for count, meter in enumerate(meters, start=1):
        core = meter._core  # pyright: ignore[reportPrivateUsage]
        for request_id in range(count):
            core.enqueue(request_id, prompt(1, 2, 3))
        meter.step()
    found = group_stats([each.stats() for each in meters])
    assert found is not None
    assert found.num_prefix_queries == 9
    assert found.pages_free + found.pages_live + found.pages_cached == 2 * 64
    assert (found.step_tokens.count, found.step_tokens.total) == (2, 9.0)
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
