"""An engine process to speak to, its serving thread, and what it has said."""

import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cadenza.config import EngineConfig
from cadenza.engine.batch_engine import Clock
from cadenza.engine.front import EngineFront
from cadenza.engine.process.child_process import ChildProcess
from cadenza.engine.process.launch import Execute, execute
from cadenza.engine.process.process_link import OnEngineFailure, ProcessLink, ProcessOptions
from cadenza.engine.process.supervision import WatchdogTimeouts
from cadenza.engine.timeouts import RequestTimeouts
from cadenza.events import Event, Finished, Token
from cadenza.request import Request, SamplingParams
from tests.engine.process.fork_server import ForkServer

SCRIPT = Path(__file__).with_name("scripted_child.py")
TIMEOUT_S = 120.0
"""Where only a hang is meant."""
QUICK = WatchdogTimeouts(hung_after_s=TIMEOUT_S, backoff_s=0.05, stop_s=1.0)
"""Restarts at once. A machine that computes other things too must not look like a hang."""
IMPATIENT = WatchdogTimeouts(hung_after_s=1.0, load_hung_after_s=1.0, backoff_s=0.05, stop_s=1.0)
"""Takes for hung what does not move; with a `HandClock`, for a machine may stand still as long."""


def request(*prompt: int, max_tokens: int = 8, n: int = 1) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, n=n, temperature=0.7)
    return Request(prompt_token_ids=prompt or (1, 2, 3), params=params)


class HandClock:
    """Seconds that pass when the test lets them, for a front end that serves on another thread."""

    def __init__(self) -> None:
        self._now_s = 1000.0
        self._seen_s = 0.0
        self._owner = threading.get_ident()

    def __call__(self) -> float:
        now_s = self._now_s
        if threading.get_ident() != self._owner:
            self._seen_s = now_s
        return now_s

    def let_pass(self, seconds: float, wake: Callable[[], object] = lambda: None) -> None:
        """Returns when the front end has seen the new time, for which `wake` may wake it."""
        self._now_s += seconds
        wake()
        end_s = time.monotonic() + TIMEOUT_S
        while self._seen_s < self._now_s:
            assert time.monotonic() < end_s, "nobody looked at the clock"
            time.sleep(0.001)

    def let_pass_until(self, look: Callable[[], object], step_s: float = 0.9) -> None:
        """Until there is something to see. A step is shorter than what a new engine is allowed,
        which may have started before the last one.
        """
        end_s = time.monotonic() + TIMEOUT_S
        while not look():
            assert time.monotonic() < end_s, f"not by {self._now_s}"
            self.let_pass(step_s)


class Front:
    """One `EngineFront` served on a thread; collects its events."""

    def __init__(self, link: ProcessLink) -> None:
        self.link = link
        self.engine = EngineFront(link)
        self.events: list[Event] = []
        self._ends: dict[int, Finished] = {}
        self._num_seen = 0
        self.is_stalled = threading.Event()
        self._arrived = threading.Condition()
        self.thread = threading.Thread(target=self.engine.serve, args=(self._emit,), daemon=True)
        self.thread.start()

    def wait(self, until: Callable[[], object], timeout_s: float = TIMEOUT_S) -> float:
        """Waits for something; the seconds that it took."""
        start_s = time.monotonic()
        with self._arrived:
            while not until():
                waited_s = time.monotonic() - start_s
                assert waited_s < timeout_s, f"not within {timeout_s} s: {self.engine.status()}"
                self._arrived.wait(0.005)
        return time.monotonic() - start_s

    def wait_restarts(self, count: int) -> float:
        """Until the engine was lost and another process took its place so often."""
        return self.wait(lambda: self.engine.status().num_restarts >= count)

    def wait_state(self, state: str) -> float:
        return self.wait(lambda: self.engine.status().state == state)

    def streams(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = defaultdict(list)
        for event in list(self.events):
            if isinstance(event, Token):
                assert event.index == len(found[event.request_id])
                found[event.request_id].append(event.token_id)
        return dict(found)

    def ends(self) -> dict[int, Finished]:
        """Each request's one terminal event. Looks only at events that came since the last call:
        who waits for an end asks often, under the lock that `_emit` needs.
        """
        with self._arrived:
            for event in self.events[self._num_seen :]:
                if isinstance(event, Finished):
                    assert event.request_id not in self._ends, "a request ended twice"
                    self._ends[event.request_id] = event
            self._num_seen = len(self.events)
            return dict(self._ends)

    def wait_ends(self, count: int) -> dict[int, Finished]:
        self.wait(lambda: len(self.ends()) >= count)
        return self.ends()

    def stop(self) -> None:
        self.engine.shutdown()
        self.thread.join(TIMEOUT_S)
        assert not self.thread.is_alive()

    def _emit(self, events: list[Event]) -> None:
        with self._arrived:
            self.events += events
            self._arrived.notify_all()


OpenFront = Callable[..., Front]


@pytest.fixture(scope="session")
def execute_scripted() -> Iterator[Execute]:
    """Starts a scripted engine with what it imports already imported, where processes fork so."""
    if sys.platform != "linux":
        yield execute
        return
    server = ForkServer()
    yield server.execute
    server.close()


@pytest.fixture
def open_front(execute_scripted: Execute) -> Iterator[OpenFront]:
    """Opens scripted engines; keywords that are not named here are the script's.

    With `open_child=ChildProcess` an engine is a child of this process and imports while it starts.
    """
    fronts: list[Front] = []
    forked = partial(ChildProcess, execute=execute_scripted)

    def open_one(
        config: EngineConfig | None = None,
        watchdog: WatchdogTimeouts = QUICK,
        timeouts: RequestTimeouts | None = None,
        max_unsent_bytes: int = 64 << 20,
        clock: Clock = time.monotonic,
        open_child: Callable[[Sequence[str]], ChildProcess] = forked,
        on_failure: OnEngineFailure = "resume",
        count_oom_kills: Callable[[], int | None] = lambda: 0,
        **script: Any,
    ) -> Front:
        options = ProcessOptions(
            command=(sys.executable, str(SCRIPT)),
            watchdog=watchdog,
            timeouts=timeouts or RequestTimeouts(),
            max_unsent_bytes=max_unsent_bytes,
            open_child=open_child,
            on_failure=on_failure,
            count_oom_kills=count_oom_kills,
        )
        config = config or EngineConfig(max_num_seqs=8)
        told = json.dumps(script, default=str)
        front = Front(ProcessLink(told, config, options, clock))
        fronts.append(front)
        return front

    yield open_one
    for front in fronts:
        front.stop()
