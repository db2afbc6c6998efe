"""Streams move between replicas with the same bits, and a lost one is a pause for nobody.

On token-storing engines in processes of their own. What a stream should be is what one engine in
this process gives that nothing happens to.
"""

import os
import signal
from pathlib import Path

import pytest

from cadenza.engine.process.recovery import ENGINE_FAILED
from cadenza.engine.timeouts import RequestTimeouts
from cadenza.errors import EngineUnavailableError
from cadenza.events import Finished, Token
from tests.cluster.conftest import Group, OpenGroup
from tests.engine.process.conftest import TIMEOUT_S, request
from tests.engine.process.scripted_child import KILL_LATE
from tests.engine.process.test_recovery import CONFIG, content_of, undisturbed, workload


def kill(group: Group, place: int) -> None:
    pid = group.links[place].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def num_accepted(group: Group) -> list[int]:
    return [each.front.request_stats().num_accepted for each in group.engine.replicas]


def begin(group: Group, num_replicas: int = 2) -> None:
    group.wait_replicas(*["ready"] * num_replicas)
    for each in workload():
        group.engine.submit(each)


def test_replicas_share_the_work_and_change_no_stream(open_group: OpenGroup) -> None:
    group = open_group(3, CONFIG)
    begin(group, 3)
    shares = [each.front.load().num_open for each in group.engine.replicas]
    group.wait_all()
    assert content_of(group.events) == undisturbed()
    assert min(shares) > 0.5 * max(shares)


def test_streams_of_a_killed_replica_go_on_in_the_other_before_it_is_back(
    open_group: OpenGroup, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    group = open_group(2, CONFIG, [{"step_s": 0.002, "gate": gate}, {"step_s": 0.002}])
    begin(group)
    group.wait(lambda: len(group.events) >= 300)
    gate.unlink()  # the killed one cannot load before the streams have ended
    kill(group, 0)
    group.wait_all()
    assert content_of(group.events) == undisturbed()
    assert group.engine.status().replicas == ("restarting", "ready")
    assert group.engine.request_stats().num_resumed > 0
    gate.touch()
    group.wait_replicas("ready", "ready")


def test_replicas_killed_again_and_again_change_no_stream(open_group: OpenGroup) -> None:
    group = open_group(2, CONFIG, [{"step_s": 0.002}])
    begin(group)
    for turn in range(8):
        most = len(group.events) + 150
        group.wait(lambda most=most: len(group.events) >= most or not group.engine.load().num_open)
        kill(group, turn % 2)
        group.wait(lambda turn=turn: group.engine.status().num_restarts == turn + 1)
        group.wait_replicas("ready", "ready")
    group.wait_all()
    assert content_of(group.events) == undisturbed()


def test_a_loss_of_all_replicas_is_a_pause(open_group: OpenGroup) -> None:
    group = open_group(2, CONFIG, [{"step_s": 0.002}])
    begin(group)
    group.wait(lambda: len(group.events) >= 300)
    for place in range(2):
        kill(group, place)
    group.wait_all()
    assert content_of(group.events) == undisturbed()


def test_a_request_that_kills_engines_fails_alone_and_takes_nobody_along(
    open_group: OpenGroup, caplog: pytest.LogCaptureFixture
) -> None:
    group, poison = open_group(4, CONFIG), 20
    group.wait_replicas(*["ready"] * 4)
    for index, each in enumerate(workload()):
        is_poison = index == poison
        group.engine.submit(request(KILL_LATE, 1, max_tokens=100) if is_poison else each)
    group.wait_all()
    (end,) = [each for each in group.events if isinstance(each, Finished) and each.error]
    assert (end.request_id, end.error_kind) == (poison, "engine_failed")
    found = content_of(group.events)
    expected = {key: own for key, own in undisturbed().items() if key[0] != poison}
    assert {key: own for key, own in found.items() if key[0] != poison} == expected
    group.wait(lambda: f"request {poison} is ended: {ENGINE_FAILED}" in caplog.text)


def test_a_draining_group_refuses_and_still_moves_streams(open_group: OpenGroup) -> None:
    group = open_group(2, CONFIG, [{"step_s": 0.002}])
    begin(group)
    group.engine.drain(TIMEOUT_S)
    with pytest.raises(EngineUnavailableError, match="shutting down"):
        group.engine.submit(request())
    kill(group, 1)
    group.thread.join(TIMEOUT_S)
    assert not group.thread.is_alive()
    assert content_of(group.events) == undisturbed()


def test_a_cancelled_request_is_gone_wherever_it_is(open_group: OpenGroup) -> None:
    group = open_group(2, CONFIG, [{"step_s": 0.002}])
    group.wait_replicas("ready", "ready")
    ids = [group.engine.submit(request(at, max_tokens=200)) for at in range(1, 9)]
    group.wait(lambda: len(group.events) >= 20)
    kill(group, 0)
    group.wait(lambda: group.engine.status().num_restarts == 1)
    for each in ids:
        group.engine.cancel(each)
    assert group.engine.load().num_open == 0
    assert group.engine.request_stats().ends == {"abort": 8}


def test_the_first_replica_serves_while_others_load_with_its_sizes(
    open_group: OpenGroup, tmp_path: Path
) -> None:
    group = open_group(2, CONFIG, [{}, {"gate": tmp_path / "gate"}])
    group.engine.wait_ready(TIMEOUT_S)
    group.wait_replicas("ready", "loading")
    group.engine.submit(request())
    group.wait_all()
    (tmp_path / "gate").touch()
    group.wait_replicas("ready", "ready")
    check = group.engine.status().request_check
    assert check is not None
    assert check.limits.max_num_seqs == 16
    assert check.limits.max_num_open_reqs == 2 * (8 + 100)
    assert group.engine.timeouts == RequestTimeouts()


def test_a_prompt_goes_where_its_prefix_is(open_group: OpenGroup) -> None:
    group = open_group(2, CONFIG)
    group.wait_replicas("ready", "ready")
    prompts = [tuple((first + at) % 80 for at in range(64)) for first in (0, 40)]
    for _ in range(4):
        for prompt in prompts:
            group.engine.submit(request(*prompt, max_tokens=2))
            group.wait_all()
    assert num_accepted(group) == [4, 4]
    group.wait(lambda: (s := group.engine.stats()) and s.numbers["prefix_cache_hits"] >= 6 * 48)


def test_a_session_goes_to_its_replica_even_where_nobody_sent_the_answers_pages(
    open_group: OpenGroup,
) -> None:
    """The pages of an answer are known by the replica's reports alone."""
    group = open_group(2, CONFIG)
    group.wait_replicas("ready", "ready")
    for first in (0, 40):
        group.engine.submit(request(*range(first, first + 4), max_tokens=92))
    group.wait_all()
    assert num_accepted(group) == [1, 1]
    group.wait(lambda: [group.engine.router.num_pages(place) for place in range(2)] == [5, 5])
    for request_id, first in ((1, 40), (0, 0)):
        answer = [
            each.token_id
            for each in group.events
            if isinstance(each, Token) and each.request_id == request_id
        ]
        group.engine.submit(request(*range(first, first + 4), *answer, max_tokens=2))
        group.wait_all()
    assert num_accepted(group) == [2, 2]
    group.wait(lambda: (s := group.engine.stats()) and s.numbers["prefix_cache_hits"] == 2 * 80)
