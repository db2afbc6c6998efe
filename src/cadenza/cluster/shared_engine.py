"""`SharedEngine`: an engine process of several front ends, each as if it were its own; all work is
one thread's. Invariants: events reach the front end whose request they are of, and no other; no
front end makes another wait; a connection ends with the process.
"""

import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields

from msgspec.structs import replace

from cadenza.config import EngineConfig, EngineLimits
from cadenza.engine.batch_engine import Cancel, Clock, Resume, Submit
from cadenza.engine.process.child_process import ChildProcess
from cadenza.engine.process.frame_socket import FrameSocket, Wakeup
from cadenza.engine.process.messages import (
    EngineOutputs,
    Failed,
    FromEngine,
    Loading,
    Ready,
    Start,
    Stop,
    WireError,
    decode_from_engine,
    decode_to_engine,
    encode,
    framed,
)
from cadenza.engine.process.process_link import pinned
from cadenza.engine.process.supervision import Supervision, WatchdogTimeouts
from cadenza.engine.request_ids import front_of
from cadenza.engine.route_report import HeldChange
from cadenza.engine.stats import EngineStats
from cadenza.engine.step_watch import Watch
from cadenza.engine.stored_pages import CLOSE_WITHIN_S
from cadenza.errors import ConfigError, show
from cadenza.events import Finished, Report
from cadenza.kv.page_keys import split_keys

# What an engine chooses by its memory where it is not given.
PLANNED = ("max_num_seqs", "max_model_len", "num_pages")


def differences(running: Start, limits: EngineLimits, asked: Start) -> list[str]:
    """What of `asked` differs from an engine that was started with `running` and has planned
    `limits`, with both values. What is left to the plan may be anything."""
    found: list[str] = []
    if running.model != asked.model:
        found.append(f"model {show(running.model)}, not {show(asked.model)}")
    planned = pinned(running.config, limits)
    for each in fields(EngineConfig):
        has = getattr(running.config, each.name), getattr(planned, each.name)
        wants = getattr(asked.config, each.name)
        is_left = wants is None and each.name in PLANNED
        if wants not in has and not is_left:
            found.append(f"{each.name} {show(has[-1])}, not {show(wants)}")
    return found


logger = logging.getLogger(__name__)

MOST_UNSENT_BYTES = 64 << 20  # a front end that has not read more than this is given up

_LOOK_EVERY_S = 1.0
_EXIT_S = 1.0


@dataclass(slots=True, eq=False)
class _Client:
    """A front end: its connection, and of each of its open requests the samples."""

    front: int
    frames: FrameSocket
    start: Start | None = None
    is_serving: bool = False
    is_watching: bool = False
    is_refused: bool = False
    open: dict[int, set[int]] = field(default_factory=dict[int, set[int]])
    events: int = 0

    def register(self, selector: selectors.BaseSelector) -> None:
        has_unsent = self.frames.num_unsent_bytes > 0
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if has_unsent else 0)
        if events != self.events:
            change = selector.modify if self.events else selector.register
            change(self.frames, events, self)
            self.events = events


@dataclass(slots=True, eq=False)
class _HeldPrefixes:
    """The prefixes that the engine has reported as held, for front ends that come later."""

    newest: EngineOutputs | None = None
    secret: bytes | None = None
    keys: dict[bytes, None] = field(default_factory=dict[bytes, None])

    def take(self, outputs: EngineOutputs) -> None:
        if outputs.route is None:
            return
        self.newest, change = outputs, outputs.route.held
        if change is not None:
            self.secret = change.secret
            for key in split_keys(change.removed):
                self.keys.pop(key, None)
            self.keys.update(dict.fromkeys(split_keys(change.added)))

    def whole(self) -> EngineOutputs | None:
        """All of it at once; None where it has reported nothing."""
        newest = self.newest
        if newest is None or newest.route is None or self.secret is None:
            return None
        held = HeldChange(secret=self.secret, added=b"".join(self.keys), removed=b"")
        route = replace(newest.route, held=held)
        return replace(newest, events=(), stats=None, summary=None, route=route)


class SharedEngine:
    """A front end that leaves has its requests cancelled; the process ends with the last one, or
    `keep_s` later where that was lost. Settings are the first front end's: another one whose
    settings differ is refused with both values. A process that makes no progress is killed, whoever
    waits for it. `open_child` starts the process, on the thread that it ends with."""

    def __init__(
        self,
        open_child: Callable[[], ChildProcess],
        keep_s: float = 0.0,
        watchdog: WatchdogTimeouts | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.stats: EngineStats | None = None
        self._open_child, self._keep_s, self._clock = open_child, keep_s, clock
        self._supervision = Supervision(watchdog or WatchdogTimeouts(), clock())
        self._start: Start | None = None
        self._ready: Ready | None = None
        self._clients: dict[int, _Client] = {}
        self._held = _HeldPrefixes()
        self._lock = threading.Lock()
        self._arrived: list[tuple[socket.socket, int]] = []
        self._is_ending = self.has_ended = False
        self._end_by_s: float | None = None
        self._wakeup = Wakeup()
        self._started = threading.Event()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="cadenza-shared-engine", daemon=True)

    def serve(self, on_end: Callable[[], object] = lambda: None) -> None:
        """The thread calls `on_end` last. Raises OSError."""
        self._on_end = on_end
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            raise self._error

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def num_fronts(self) -> int:
        return len(self._clients)

    def join(self, connection: socket.socket, front: int) -> bool:
        """False where the process has ended."""
        with self._lock:
            if self.has_ended or self._is_ending:
                return False
            self._arrived.append((connection, front))
            self._wakeup.set()
        return True

    def end(self) -> None:
        with self._lock:
            if not self.has_ended:
                self._is_ending = True
                self._wakeup.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._child = self._open_child()
        except OSError as error:
            self._error, self.has_ended = error, True
            self._wakeup.close()
            return
        finally:
            self._started.set()
        self._supervision.started(self._clock())
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._wakeup.reader, selectors.EVENT_READ, "wakeup")
                while not (self._child.frames.has_hung_up or self._is_over):
                    self._turn(selector)
        except Exception:
            logger.exception("the host of engine process %d stopped", self.pid)
        finally:
            self._close()
            self._on_end()

    @property
    def _is_over(self) -> bool:
        return self._is_ending or (self._end_by_s is not None and self._clock() >= self._end_by_s)

    def _close(self) -> None:
        with self._lock:
            self.has_ended = True
            connections = [connection for connection, _ in self._arrived]
            self._wakeup.close()
        for each in self._clients.values():
            each.frames.close()
        for each in connections:
            each.close()
        self._clients.clear()
        is_orderly = self._ready is not None and not self._is_hung
        if is_orderly:
            self._child.frames.send(encode(Stop()))
        else:
            self._child.frames.close()
        code = self._child.close(within_s=CLOSE_WITHIN_S if is_orderly else _EXIT_S)
        logger.info("engine process %d ended (exit status %d)", self.pid, code)

    def _turn(self, selector: selectors.BaseSelector) -> None:
        self._child.register(selector)
        for client in self._clients.values():
            client.register(selector)
        ready = [key.data for key, _ in selector.select(self._wait_s())]
        if "wakeup" in ready:
            self._take_arrived()
        if "output" in ready:
            self._child.log_output()
        if "messages" in ready:
            self._child.frames.flush()
            for payload in self._child.frames.payloads():
                self._take(payload)
        for client in [each for each in ready if isinstance(each, _Client)]:
            self._serve_client(client, selector)
        self._look(selector)

    def _wait_s(self) -> float:
        if self._end_by_s is None:
            return _LOOK_EVERY_S
        return max(0.0, min(_LOOK_EVERY_S, self._end_by_s - self._clock()))

    def _take_arrived(self) -> None:
        with self._lock:
            self._wakeup.clear()
            arrived, self._arrived = self._arrived, []
        for connection, front in arrived:
            if front in self._clients:
                logger.warning("a second front end with the number %d is refused", front)
                connection.close()
                continue
            self._end_by_s = None
            self._clients[front] = _Client(front, FrameSocket(connection))

    def _look(self, selector: selectors.BaseSelector) -> None:
        """Gives up front ends that are refused or read nothing, and the process if it makes no
        progress."""
        for client in list(self._clients.values()):
            if client.is_refused:
                self._leave(client, selector)
                continue
            if client.frames.num_unsent_bytes > MOST_UNSENT_BYTES:
                logger.warning("front end %d does not read what it is sent", client.front)
                self._leave(client, selector)
        now_s = self._clock()
        read_usage_at_s = self._supervision.read_usage_at_s()
        if read_usage_at_s is not None and now_s >= read_usage_at_s:
            self._supervision.record_usage(now_s, self._child.usage())
        if self._is_hung:
            logger.error("process %d: %s", self.pid, self._supervision.hang(now_s).error)
            self._end_by_s = now_s

    @property
    def _is_hung(self) -> bool:
        return self._supervision.is_hung(self._clock())

    def _serve_client(self, client: _Client, selector: selectors.BaseSelector) -> None:
        try:
            client.frames.flush()
            for payload in client.frames.payloads():
                self._take_from(client, payload, selector)
        except WireError as error:
            logger.warning("front end %d: %s", client.front, error)
            self._leave(client, selector)
        if client.frames.has_hung_up and client.front in self._clients:
            self._leave(client, selector)

    def _take_from(self, client: _Client, payload: bytes, selector: selectors.BaseSelector) -> None:
        """Raises WireError."""
        message = decode_to_engine(payload)
        if isinstance(message, Start):
            self._take_start(client, message, payload)
            return
        if isinstance(message, Stop):
            self._stop(client, selector)
            return
        if not client.is_serving:
            raise WireError(f"a {type(message).__name__} came before the engine was ready")
        if isinstance(message, Watch):
            client.is_watching = message.first_label is not None
            if client.is_watching or not any(each.is_watching for each in self._clients.values()):
                self._child.frames.send(framed(payload))
            return
        if front_of(message.request_id) != client.front:
            raise WireError(f"request {message.request_id} is another front end's")
        if isinstance(message, Submit):
            client.open[message.request_id] = set(range(message.request.params.n))
        elif isinstance(message, Resume):
            samples = {each.sample for each in message.resumption.samples}
            client.open[message.request_id] = samples
        else:
            _ended(client, message.request_id, message.sample)
        self._child.frames.send(framed(payload))

    def _take_start(self, client: _Client, start: Start, payload: bytes) -> None:
        if client.start is not None:
            raise WireError("a second start")
        client.start = start
        if self._start is None:
            self._start = start
            self._child.frames.send(framed(payload))
        elif self._ready is not None:
            self._admit(client)
        elif self._supervision.phase is not None:
            client.frames.send(encode(Loading(self._supervision.phase)))

    def _admit(self, client: _Client) -> None:
        ready, running = self._ready, self._start
        assert ready is not None
        assert running is not None
        assert client.start is not None
        unlike = differences(running, ready.request_check.limits, client.start)
        if not unlike:
            client.is_serving = True
            stats = ready.stats if self.stats is None else self.stats
            client.frames.send(encode(replace(ready, stats=stats)))
            held = self._held.whole()
            if held is not None:
                client.frames.send(encode(held))
        elif any(each.is_serving for each in self._clients.values()):
            text = f"the engine at this host serves other front ends with {'; '.join(unlike)}"
            logger.error("front end %d is refused: %s", client.front, text)
            client.frames.send(encode(Failed(ConfigError.__name__, text)))
            client.is_refused = True
        else:
            logger.info("the engine is started again, since it has %s", "; ".join(unlike))
            self._end_by_s = self._clock()

    def _take(self, payload: bytes) -> None:
        message, now_s = decode_from_engine(payload), self._clock()
        if isinstance(message, EngineOutputs):
            self._supervision.beat(
                now_s, message.num_steps, message.predicted_s, is_idle=message.is_idle
            )
            self.stats = message.stats or self.stats
            self._held.take(message)
            self._share(message, payload)
            return
        if isinstance(message, Loading):
            self._supervision.entered(now_s, message.phase)
        elif isinstance(message, Ready):
            self._ready, self.stats = message, message.stats
            self._supervision.loaded(now_s, message.startup_s)
            for client in self._clients.values():
                if client.start is not None:
                    self._admit(client)
            return
        self._tell_all(message)

    def _tell_all(self, message: FromEngine) -> None:
        for client in self._clients.values():
            client.frames.send(encode(message))

    def _share(self, outputs: EngineOutputs, payload: bytes) -> None:
        by_front: dict[int, list[Report]] = {}
        for event in outputs.events:
            by_front.setdefault(front_of(event.request_id), []).append(event)
        for client in self._clients.values():
            if not client.is_serving:
                continue
            own = by_front.get(client.front, [])
            for event in own:
                if isinstance(event, Finished):
                    _ended(client, event.request_id, event.sample)
            has_all = client.is_watching or outputs.summary is None
            if has_all and len(own) == len(outputs.events):
                client.frames.send(framed(payload))
                continue
            summary = outputs.summary if client.is_watching else None
            client.frames.send(encode(replace(outputs, events=tuple(own), summary=summary)))

    def _stop(self, client: _Client, selector: selectors.BaseSelector) -> None:
        """The last front end sees the process end, which may write pages to a disk before."""
        if len(self._clients) > 1 or self._ready is None:
            self._leave(client, selector, may_keep=False)
            return
        client.is_serving = False
        self._child.frames.send(encode(Stop()))
        self._end_by_s = self._clock() + CLOSE_WITHIN_S

    def _leave(
        self, client: _Client, selector: selectors.BaseSelector, *, may_keep: bool = True
    ) -> None:
        if client.events:
            selector.unregister(client.frames)
        client.frames.close()
        del self._clients[client.front]
        for request_id in client.open:
            self._child.frames.send(encode(Cancel(request_id, None)))
        if self._clients:
            return
        keep_s = self._keep_s if may_keep and self._ready is not None else 0.0
        if self._end_by_s is None:
            self._end_by_s = self._clock() + keep_s


def _ended(client: _Client, request_id: int, sample: int | None) -> None:
    samples = client.open.get(request_id)
    if samples is None:
        return
    samples.discard(-1 if sample is None else sample)
    if sample is None or not samples:
        del client.open[request_id]
