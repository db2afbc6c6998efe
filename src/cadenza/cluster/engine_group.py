"""`EngineGroup`: a `BatchEngine` over several engines of one model. A lost replica's streams go on
in another with the same bits. Invariants: an open request is in exactly one replica; all have one
fingerprint and plan. Locks: the group's is taken before a replica's; neither is held while events
are emitted."""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from msgspec import structs

from cadenza.cluster.group_stats import (
    LiveRows,
    group_limits,
    group_load,
    group_request_stats,
    group_stats,
    group_status,
)
from cadenza.cluster.router import Route, Router
from cadenza.config import EngineLimits
from cadenza.engine.batch_engine import Clock, Emit, EngineStatus
from cadenza.engine.front import SHUT_DOWN, UNAVAILABLE, EngineFront
from cadenza.engine.open_requests import EngineLoad
from cadenza.engine.process.recovery import MOST_LOSSES
from cadenza.engine.request_check import CheckedRequest, RequestCheck, request_of
from cadenza.engine.request_ids import ids_of
from cadenza.engine.request_stats import RequestStats
from cadenza.engine.route_report import RouteReport
from cadenza.engine.stats import EngineStats
from cadenza.engine.step_watch import EngineChange, LiveNews, OnNews
from cadenza.engine.timeouts import RequestTimeouts
from cadenza.errors import CadenzaError, EngineClosedError, EngineUnavailableError, QueueFullError
from cadenza.events import Event
from cadenza.fingerprint import Fingerprint
from cadenza.request import Request
from cadenza.tenant import Tenant

logger = logging.getLogger(__name__)

# Makes the engine of an index, with the sizes of the first one, and the ids of its requests.
MakeReplica = Callable[[int, EngineLimits | None, Iterator[int]], EngineFront]


@dataclass(slots=True, eq=False)
class Replica:
    """An engine of the group. `is_refused`: it would give other answers than the first one."""

    index: int
    front: EngineFront
    thread: threading.Thread | None = None
    is_dead: bool = False
    is_refused: bool = False

    @property
    def is_serving(self) -> bool:
        return not self.is_refused and self.front.is_serving


class EngineGroup:
    """A `ServedEngine` over `num_replicas` engines. The first one plans and loads; the others
    follow with its sizes, while it serves already. Request ids are the group's, whichever replica
    has the request; one that ran in two engines which were lost stays where it is, and `Recovery`
    runs it alone. `prefix_secret` keys the pages of all of them; `front`: the number of the front
    end that it is of, among those that share engines."""

    def __init__(
        self,
        make_replica: MakeReplica,
        num_replicas: int,
        prefix_secret: bytes = b"",
        clock: Clock = time.monotonic,
        front: int = 0,
    ) -> None:
        self.router = Router(prefix_secret or secrets.token_bytes(32), front)
        self._make_replica = make_replica
        self._num_replicas = num_replicas
        self._clock = clock
        self._ids = ids_of(front)
        self._lock = threading.RLock()
        self._emitting = threading.Lock()
        self._changed = threading.Event()
        self._emit: Emit | None = None
        self.replicas = [self._made(0, None)]
        self._live: LiveRows | None = None
        self._on_news: OnNews | None = None
        self._on_death: Callable[[CadenzaError], object] | None = None
        self._drained_by_s: float | None = None
        self._is_shut_down = False
        self._check: tuple[RequestCheck, RequestCheck] | None = None
        self._fingerprint: Fingerprint | None = None

    @property
    def timeouts(self) -> RequestTimeouts:
        return self.replicas[0].front.timeouts

    def submit(self, given: Request | CheckedRequest) -> int:
        for tries_left in reversed(range(self._num_replicas)):
            with self._lock:
                self._check_open()
                best, route = self._route(request_of(given))
                # The group's check differs from a replica's in what the queue holds alone.
                ours = None if self._check is None else self._check[1]
                if isinstance(given, CheckedRequest) and given.check is ours:
                    own = best.front.status().request_check
                    given = given if own is None else replace(given, check=own)
                try:
                    request_id = best.front.submit(given)
                except EngineUnavailableError:  # it was lost just now
                    if not tries_left or not any(each.is_serving for each in self.replicas):
                        raise
                    continue
                if route is not None:
                    self.router.sent(route, request_id, self._clock())
                return request_id
        raise AssertionError("the last try returns or raises")

    def cancel(self, request_id: int, sample: int | None = None) -> None:
        with self._lock:
            for each in self.replicas:
                each.front.cancel(request_id, sample)
        if self._drained_by_s is not None:
            self._changed.set()

    def serve(self, emit: Emit) -> None:
        self._emit = emit
        try:
            self._start(self.replicas[0])
            while not self._is_done:
                self._changed.wait(self._wait_s())
                self._changed.clear()
                self._start_others()
        finally:
            self._end()

    def watch(self, on_news: OnNews | None) -> None:
        with self._lock:
            self._on_news = on_news
            self._live = None if on_news is None else LiveRows(self._num_replicas)
            for each in self.replicas:
                self._watch(each)

    def drain(self, within_s: float) -> None:
        with self._lock:
            if self._drained_by_s is None:
                self._drained_by_s = self._clock() + within_s
        self._changed.set()

    def shutdown(self) -> None:
        self._is_shut_down = True
        self._changed.set()

    def wait_ready(self, timeout_s: float) -> None:
        """With the first engine the group is ready."""
        self.replicas[0].front.wait_ready(timeout_s)

    def call_at_death(self, on_death: Callable[[CadenzaError], object]) -> None:
        """When the last engine is given up. To be called before `serve`."""
        self._on_death = on_death

    def status(self) -> EngineStatus:
        found = [each.front.status() for each in self.replicas if not each.is_refused]
        status = group_status(found, is_draining=self._drained_by_s is not None)
        return status if status.request_check is None else self._with_check(status)

    def stats(self) -> EngineStats | None:
        found = [each.front.stats() for each in self.replicas]
        return group_stats([each for each in found if each is not None])

    def load(self) -> EngineLoad:
        return group_load([each.front.load() for each in self.replicas])

    def refusal(self, tenant: Tenant, priority: int) -> QueueFullError | None:
        """That of the replica in which the request would start first, if all refuse it."""
        serving = [each.front for each in self.replicas if each.is_serving]
        found = [each.refusal(tenant, priority) for each in serving]
        refusals = [each for each in found if each is not None]
        if not refusals or len(refusals) < len(found):
            return None
        return min(refusals, key=lambda each: each.retry_after_s or 0.0)

    def request_stats(self) -> RequestStats:
        return group_request_stats([each.front.request_stats() for each in self.replicas])

    def _made(self, index: int, limits: EngineLimits | None) -> Replica:
        replica = Replica(index, self._make_replica(index, limits, self._ids))
        replica.front.call_at_changes(lambda change: self._take_change(replica, change))
        replica.front.call_at_death(lambda failure: self._take_death(replica, failure))
        replica.front.call_at_reports(lambda report: self._take_report(replica, report))
        return replica

    def _check_open(self) -> None:
        if self._is_shut_down:
            raise EngineClosedError(SHUT_DOWN)
        if self._drained_by_s is not None:
            raise EngineUnavailableError(UNAVAILABLE["draining"])

    def _route(self, request: Request) -> tuple[Replica, Route | None]:
        """The replica for a request; any replica if none serves, whose refusal tells why."""
        serving = [each for each in self.replicas if each.is_serving]
        status = self.replicas[0].front.status()
        if not serving or status.request_check is None:
            left = [each for each in self.replicas if not each.is_dead] or self.replicas
            return left[0], None
        loads = {each.index: each.front.load() for each in serving}
        route = self.router.choose(request, loads, status.request_check.limits, self._clock())
        return self.replicas[route.replica], route

    def _with_check(self, status: EngineStatus) -> EngineStatus:
        own = status.request_check
        assert own is not None
        with self._lock:
            if self._check is None or self._check[0] is not own:
                limits = group_limits(own.limits, self._num_replicas)
                self._check = own, replace(own, limits=limits)
            return replace(status, request_check=self._check[1])

    def _start(self, replica: Replica) -> None:
        replica.thread = threading.Thread(
            target=self._serve_one, args=(replica,), name=f"cadenza-replica-{replica.index}"
        )
        replica.thread.daemon = True
        replica.thread.start()

    def _serve_one(self, replica: Replica) -> None:
        try:
            replica.front.serve(self._emit_events)
        except Exception:
            logger.exception("replica %d stopped", replica.index)
        finally:
            replica.is_dead = True
            self._changed.set()

    def _start_others(self) -> None:
        if len(self.replicas) == self._num_replicas or self._is_done:
            return
        check = self.replicas[0].front.status().request_check
        if check is None:
            return
        for index in range(1, self._num_replicas):
            replica = self._made(index, check.limits)
            with self._lock:
                self.replicas.append(replica)
                self._watch(replica)
            self._start(replica)

    @property
    def _is_done(self) -> bool:
        if self._is_shut_down or self._drained_by_s is None:
            return self._is_shut_down
        return not self.load().num_open or self._clock() >= self._drained_by_s

    def _wait_s(self) -> float | None:
        if self._drained_by_s is None:
            return None
        return max(0.0, self._drained_by_s - self._clock())

    def _end(self) -> None:
        self._is_shut_down = True
        for each in self.replicas:
            each.front.shutdown()
        for each in self.replicas:
            if each.thread is not None:
                each.thread.join()

    def _emit_events(self, events: list[Event]) -> None:
        assert self._emit is not None, "emitted while it serves"
        with self._emitting:
            self._emit(events)
        if self._drained_by_s is not None:
            self._changed.set()

    def _take_change(self, replica: Replica, change: EngineChange) -> None:
        if change == "ready":
            with self._lock:
                self.router.forget(replica.index)
            self._compare(replica)
        self._changed.set()
        self._move_lost()

    def _take_report(self, replica: Replica, report: RouteReport) -> None:
        with self._lock:
            self.router.take(replica.index, report, self._clock())

    def _take_death(self, replica: Replica, failure: CadenzaError) -> None:
        replica.is_dead = True
        if all(each.is_dead for each in self.replicas) and self._on_death is not None:
            on_death, self._on_death = self._on_death, None
            on_death(failure)

    def _compare(self, replica: Replica) -> None:
        own = replica.front.status().fingerprint
        if self._fingerprint is None or own is None or own == self._fingerprint:
            self._fingerprint = self._fingerprint or own
            return
        first = structs.asdict(self._fingerprint)
        unlike = [
            f"{name} {value or 'none'}, not {first[name] or 'none'}"
            for name, value in structs.asdict(own).items()
            if value != first[name]
        ]
        logger.error(
            "replica %d is not used: its answers would differ from the others' (%s); start all "
            "with the same model, flags and instruction set",
            replica.index,
            "; ".join(unlike),
        )
        replica.is_refused = True
        replica.front.shutdown()

    def _move_lost(self) -> None:
        with self._lock:
            for replica in self.replicas:
                if replica.is_serving:
                    continue
                requests = replica.front.requests
                movable = [
                    each for each in requests.open_ids() if requests.num_losses(each) < MOST_LOSSES
                ]
                num_moved = sum([self._move(replica, each) for each in movable])
                if num_moved:
                    logger.warning(
                        "%d requests of replica %d go on in others", num_moved, replica.index
                    )

    def _move(self, replica: Replica, request_id: int) -> bool:
        if not any(each.is_serving for each in self.replicas):
            return False
        entry = replica.front.release(request_id)
        if entry is None:
            return False
        best, route = self._route(entry.request)
        try:
            best.front.adopt(entry)
        except EngineUnavailableError:
            replica.front.requests.adopt(entry)  # its own next engine goes on with it
            return False
        if route is not None:
            self.router.sent(route, request_id, self._clock())
        return True

    def _watch(self, replica: Replica) -> None:
        """The lock is held."""
        live, on_news = self._live, self._on_news
        if live is None or on_news is None:
            replica.front.watch(None)
            return

        def tell(news: LiveNews) -> None:
            with self._emitting:
                joined = live.take(replica.index, news)
                if joined is not None:
                    on_news(joined)

        replica.front.watch(tell)
