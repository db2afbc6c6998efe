"""Several front ends over the same engines: each has its own streams, as if it were alone.

On hosts of this machine, with token-storing engines in processes of their own.
"""

import json
import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import cache
from itertools import islice
from typing import Any

import pytest

from cadenza.cluster.engine_host import EngineHost, HostOptions
from cadenza.cluster.remote_engine import RemoteChild, remote_opener
from cadenza.cluster.shared_engine import differences
from cadenza.config import EngineConfig
from cadenza.engine.batch_engine import Cancel, Submit
from cadenza.engine.front import EngineFront, InProcessLink
from cadenza.engine.process.launch import Execute
from cadenza.engine.process.messages import (
    EngineOutputs,
    FromEngine,
    Ready,
    Start,
    Stop,
    ToEngine,
    encode,
)
from cadenza.engine.process.supervision import WatchdogTimeouts
from cadenza.engine.request_ids import MAX_FRONT, front_of, ids_of
from cadenza.engine.step_watch import Watch
from cadenza.events import Event, Token
from tests.cluster.conftest import Group, OpenGroup
from tests.cluster.test_engine_host import COMMAND, SECRET, wait_for
from tests.engine.process.conftest import TIMEOUT_S, request
from tests.engine.process.scripted_child import limits_of, make_core
from tests.engine.process.test_recovery import CONFIG, StreamId, content_of, workload

SLOW = {"step_s": 0.002}
OpenHost = Callable[..., EngineHost]
Speak = Callable[[EngineHost, int], "Speaker"]


@pytest.fixture
def open_host(execute_scripted: Execute) -> Iterator[OpenHost]:
    with ExitStack() as stack:

        def open_one(**options: Any) -> EngineHost:
            told = HostOptions(command=COMMAND, execute=execute_scripted, **options)
            return stack.enter_context(closing(EngineHost(("127.0.0.1", 0), SECRET, told)))

        yield open_one


@pytest.fixture
def open_front(open_group: OpenGroup) -> OpenGroup:
    """Groups of front ends by their numbers, over hosts."""

    def open_one(front: int, hosts: list[EngineHost], config: EngineConfig = CONFIG) -> Group:
        openers = [remote_opener(each.address, SECRET, front) for each in hosts]
        return open_group(len(hosts), config, [SLOW], openers, front=front)

    return open_one


@cache
def alone(front: int) -> dict[StreamId, list[object]]:
    """The workload of a front end, with nothing else."""
    core = make_core(CONFIG)
    service, events = EngineFront(InProcessLink(core), ids_of(front)), list[Event]()
    for each in workload():
        service.submit(each)
    service.drain(TIMEOUT_S)
    service.serve(events.extend)
    return content_of(events)


def begin(group: Group) -> None:
    group.wait_replicas("ready", "ready")
    for each in workload():
        group.engine.submit(each)


def test_two_front_ends_get_their_own_streams_of_engines_that_are_killed(
    open_host: OpenHost, open_front: OpenGroup
) -> None:
    hosts = [open_host(), open_host()]
    first, second = (open_front(front, hosts) for front in (1, MAX_FRONT))
    begin(first)
    begin(second)
    assert [each.num_engines for each in hosts] == [1, 1]
    assert [each.num_fronts for each in hosts] == [2, 2]
    for place in range(2):
        second.wait(lambda place=place: len(second.events) >= 300 * (place + 1))
        pid = first.links[place].pid
        assert pid == second.links[place].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        second.wait(lambda place=place: second.engine.status().num_restarts > place)
        first.wait_replicas("ready", "ready")
        second.wait_replicas("ready", "ready")
    first.wait_all()
    second.wait_all()
    assert content_of(first.events) == alone(1)
    assert content_of(second.events) == alone(MAX_FRONT)


def test_a_front_end_that_comes_later_goes_to_where_others_prefixes_are(
    open_host: OpenHost, open_front: OpenGroup
) -> None:
    hosts = [open_host(), open_host()]
    first = open_front(1, hosts)
    first.wait_replicas("ready", "ready")
    prompts = [tuple((start + at) % 80 for at in range(64)) for start in (0, 40)]
    for prompt in prompts:
        first.engine.submit(request(*prompt, max_tokens=2))
        first.wait_all()
    second = open_front(2, hosts)
    second.wait_replicas("ready", "ready")
    second.wait(lambda: [second.engine.router.num_pages(place) for place in range(2)] == [4, 4])
    for prompt in reversed(prompts):
        second.engine.submit(request(*prompt, max_tokens=2))
        second.wait_all()
    second.wait(lambda: (s := second.engine.stats()) and s.numbers["prefix_cache_hits"] == 2 * 48)


class Speaker:
    """A front end that says what the test has it say."""

    def __init__(self, host: EngineHost, front: int) -> None:
        self.child = RemoteChild(host.address, SECRET, front)
        self.heard: list[FromEngine] = []

    def say(self, *messages: ToEngine) -> None:
        for each in messages:
            self.child.frames.send(encode(each))

    def hear(self, until: Callable[[list[FromEngine]], object]) -> None:
        """Until what has been heard is enough, or nothing more comes."""
        while not until(self.heard):
            if self.child.frames.has_hung_up:
                return
            select.select([self.child.frames], [], [], TIMEOUT_S)
            self.heard += self.child.frames.receive()

    def start(self, config: EngineConfig = CONFIG, step_s: float = 0.002) -> None:
        start = Start(model=json.dumps({"step_s": step_s}), config=config, log_level=20)
        self.say(start)
        self.hear(lambda heard: any(map(is_ready, heard)))

    def is_cut_off(self) -> bool:
        self.hear(lambda heard: False)
        return self.child.frames.has_hung_up


@pytest.fixture
def speak() -> Iterator[Callable[[EngineHost, int], Speaker]]:
    with ExitStack() as stack:

        def open_one(host: EngineHost, front: int) -> Speaker:
            speaker = Speaker(host, front)
            stack.callback(speaker.child.close, within_s=0.0)
            return speaker

        yield open_one


def is_ready(message: FromEngine) -> bool:
    return isinstance(message, Ready)


def test_a_lost_front_end_leaves_no_request_and_finds_its_engine_again(
    open_host: OpenHost, speak: Speak
) -> None:
    host = open_host(keep_s=TIMEOUT_S)
    lost = speak(host, 7)
    lost.start(step_s=0.02)
    lost.say(Submit(7 << 32, request(max_tokens=250)))
    wait_for(lambda: (stats := host.stats) and stats.numbers["num_requests_running"] == 1)
    lost.child.close(within_s=0.0)
    wait_for(lambda: (stats := host.stats) and stats.numbers["num_requests_running"] == 0)
    stats = host.stats
    assert stats is not None
    assert stats.histograms["iteration_tokens_total"].count < 200
    assert host.num_fronts == 0
    again = speak(host, 7)
    again.start(step_s=0.02)
    assert again.child.pid == lost.child.pid
    again.child.close(within_s=0.0)
    wait_for(lambda: host.num_fronts == 0)
    other = speak(host, 8)
    other.start(EngineConfig(max_num_seqs=4))
    assert other.is_cut_off()  # by an engine that nobody else needs, and is started anew
    wait_for(lambda: host.num_engines == 0)
    newer = speak(host, 8)
    newer.start(EngineConfig(max_num_seqs=4))
    assert is_ready(newer.heard[-1])
    newer.say(Stop())
    wait_for(lambda: host.num_engines == 0)


def test_a_front_end_that_wants_another_engine_is_refused_with_both_values(
    open_host: OpenHost, open_front: OpenGroup
) -> None:
    hosts = [open_host()]
    first = open_front(1, hosts)
    first.wait_replicas("ready")
    second = open_front(2, hosts, EngineConfig(max_num_seqs=4))
    second.wait(lambda: second.engine.status().state == "dead")
    assert "serves other front ends with max_num_seqs 8, not 4" in str(second.engine.status().error)
    first.engine.submit(request())
    first.wait_all()


def test_a_front_end_can_neither_be_another_one_nor_touch_its_requests(
    open_host: OpenHost, speak: Speak
) -> None:
    host = open_host()
    first = speak(host, 1)
    first.start()
    first.say(Submit(1 << 32, request(max_tokens=200)))
    assert speak(host, 1).is_cut_off()
    other = speak(host, 2)
    other.start()
    other.say(Cancel(1 << 32, None))
    assert other.is_cut_off()
    early = speak(host, 3)
    early.say(Submit(3 << 32, request()))
    assert early.is_cut_off()
    first.hear(lambda heard: num_tokens(heard) == 200)
    assert num_tokens(first.heard) == 200


def num_tokens(heard: list[FromEngine]) -> int:
    outputs = [each for each in heard if isinstance(each, EngineOutputs)]
    return sum(isinstance(event, Token) for each in outputs for event in each.events)


def test_summaries_reach_those_who_watch_until_the_last_one_does_not(
    open_host: OpenHost, speak: Speak
) -> None:
    def has_summary(heard: list[FromEngine]) -> bool:
        return any(isinstance(each, EngineOutputs) and each.summary for each in heard)

    host = open_host()
    first, second = speak(host, 1), speak(host, 2)
    for each in (first, second):
        each.start()
        each.say(Watch(1))
    second.say(Watch(None))
    first.say(Submit(1 << 32, request(max_tokens=200)))
    first.hear(has_summary)
    assert has_summary(first.heard)
    second.say(Submit(2 << 32, request(max_tokens=100)))
    second.hear(lambda heard: num_tokens(heard) == 100)
    assert not has_summary(second.heard)


def test_an_engine_that_hangs_is_killed_by_its_host(open_host: OpenHost, speak: Speak) -> None:
    host = open_host(watchdog=WatchdogTimeouts(hung_after_s=1.5), keep_s=TIMEOUT_S)
    speaker = speak(host, 1)
    speaker.start()
    os.kill(speaker.child.pid, signal.SIGSTOP)
    assert speaker.is_cut_off()
    wait_for(lambda: host.num_engines == 0)


def test_settings_that_differ_are_named_with_both_values() -> None:
    limits = limits_of(EngineConfig(max_num_seqs=8))
    running = Start(model="/m", config=EngineConfig(), log_level=20)

    def unlike(model: str = "/m", **given: Any) -> list[str]:
        asked = Start(model=model, config=EngineConfig(**given), log_level=10, is_restart=True)
        return differences(running, limits, asked)

    assert unlike() == unlike(max_num_seqs=8, max_model_len=256) == []
    assert unlike(max_num_seqs=4) == ["max_num_seqs 8, not 4"]
    assert unlike("/other", seed=5) == ["model '/m', not '/other'", "seed 0, not 5"]
    given = Start(model="/m", config=EngineConfig(max_model_len=256), log_level=20)
    assert differences(given, limits, running) == []


def test_ids_tell_whose_they_are() -> None:
    assert list(islice(ids_of(0), 2)) == [0, 1]
    assert {front_of(each) for each in islice(ids_of(MAX_FRONT), 3)} == {MAX_FRONT}
    assert max(islice(ids_of(MAX_FRONT), 3)) < 2**52
