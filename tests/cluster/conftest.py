"""Groups of scripted engines, each in a process of its own, and what they have said."""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pytest

from cadenza.cluster.engine_group import EngineGroup
from cadenza.config import EngineConfig, EngineLimits
from cadenza.engine.front import EngineFront
from cadenza.engine.process.child_process import ChildProcess, EngineChild
from cadenza.engine.process.launch import Execute
from cadenza.engine.process.process_link import ProcessLink, ProcessOptions, pinned
from cadenza.events import Event, Finished
from tests.engine.process.conftest import QUICK, SCRIPT, TIMEOUT_S, execute_scripted

__all__ = ["execute_scripted"]


SECRET = b"a secret of page keys"


class Group:
    """An `EngineGroup` served on a thread; collects its events."""

    def __init__(self, engine: EngineGroup, links: list[ProcessLink]) -> None:
        self.engine = engine
        self.links = links
        self.events: list[Event] = []
        self._arrived = threading.Condition()
        self.thread = threading.Thread(target=engine.serve, args=(self._emit,), daemon=True)
        self.thread.start()

    def wait(self, until: Callable[[], object]) -> None:
        end_s = time.monotonic() + TIMEOUT_S
        with self._arrived:
            while not until():
                assert time.monotonic() < end_s, self.engine.status()
                self._arrived.wait(0.005)

    def wait_replicas(self, *states: str) -> None:
        self.wait(lambda: self.engine.status().replicas == states)

    def wait_all(self) -> None:
        """Until no request is open and the last events have come."""
        self.wait(lambda: self.engine.load().num_open == 0)
        ends = self.engine.request_stats().ends
        num_ends = sum(count for reason, count in ends.items() if reason != "abort")
        self.wait(lambda: sum(isinstance(each, Finished) for each in self.events) == num_ends)

    def stop(self) -> None:
        self.engine.shutdown()
        self.thread.join(TIMEOUT_S)
        assert not self.thread.is_alive()

    def _emit(self, events: list[Event]) -> None:
        with self._arrived:
            self.events += events
            self._arrived.notify_all()


OpenGroup = Callable[..., Group]
OpenChild = Callable[[Sequence[str]], EngineChild]
MakeFront = Callable[[ProcessLink, Iterator[int], int], EngineFront]


@pytest.fixture
def open_group(execute_scripted: Execute) -> Iterator[OpenGroup]:
    """Opens groups; `scripts` are those of the replicas, the last one for all that follow."""
    groups: list[Group] = []
    forked = partial(ChildProcess, execute=execute_scripted)

    def open_one(
        num_replicas: int = 2,
        config: EngineConfig | None = None,
        scripts: Sequence[Mapping[str, Any]] = ({},),
        open_children: Sequence[OpenChild] = (),
        front: int = 0,
        make_front: MakeFront = EngineFront,
    ) -> Group:
        given = config or EngineConfig(max_num_seqs=8)
        links: list[ProcessLink] = []

        def make_replica(
            place: int, limits: EngineLimits | None, ids: Iterator[int]
        ) -> EngineFront:
            told = json.dumps(scripts[min(place, len(scripts) - 1)], default=str)
            options = ProcessOptions(
                command=(sys.executable, str(SCRIPT)),
                watchdog=QUICK,
                open_child=open_children[place] if open_children else forked,
                prefix_secret=SECRET,
                count_oom_kills=lambda: 0,
            )
            own = given if limits is None else pinned(given, limits)
            links.append(ProcessLink(told, own, options))
            return make_front(links[-1], ids, given.seed)

        group = Group(EngineGroup(make_replica, num_replicas, SECRET, front=front), links)
        groups.append(group)
        return group

    yield open_one
    for group in groups:
        group.stop()
