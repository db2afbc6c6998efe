"""`ModelPool`: the model that a name means, calls waiting for one, and load and unload tasks, as
`ModelTurns` decides. On one event loop. Invariants: a call's model is loaded from admission to end;
every wait is bounded in number, bytes and time; a failed load refuses its model's calls only."""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from cadenza.engine.batch_engine import EngineStatus
from cadenza.errors import CadenzaError, ConfigError, DeviceUnavailableError
from cadenza.server.errors import (
    RETRY_LOADING_S,
    ApiError,
    model_failed,
    model_not_found,
    models_full,
    queue_timeout,
    unavailable,
)
from cadenza.server.model_turns import ModelState, ModelTurns, WaitingCall
from cadenza.server.served_model import MAX_LOAD_S, LoadFailure, ServedModel, spellings
from cadenza.tenant import Tenant

logger = logging.getLogger(__name__)

RETRY_S, MAX_RETRY_S = 30.0, 3600.0
"""After a failed load; doubles each time. Each attempt may unload another model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOptions:
    """How many models are loaded, and for how long. Raises ConfigError: a value cannot work."""

    max_loaded: int = 1  # at the same time
    # a model that was not used for so long is unloaded; None: never
    idle_unload_s: float | None = None
    max_waiting: int = 64  # calls that wait for one model
    max_waiting_bytes: int = 256 << 20  # of all bodies that wait; an empty queue takes any

    def __post_init__(self) -> None:
        if self.max_loaded < 1:
            raise ConfigError(f"--max-loaded-models {self.max_loaded} must be 1 or more")
        if self.idle_unload_s is not None and not 0 < self.idle_unload_s < float("inf"):
            raise ConfigError(
                f"--idle-unload {self.idle_unload_s:g} must be a number of seconds above 0; leave "
                f"it out to keep models loaded"
            )


class ModelPool:
    """The first model is loaded at the start, and means a request that names none."""

    def __init__(
        self, models: Sequence[ServedModel], options: PoolOptions, clock: Callable[[], float]
    ) -> None:
        """Raises ConfigError where two models have a name in common."""
        self._options = options
        self._clock = clock
        self.models = tuple(models)
        self._by_name = _by_name(models)
        self._switches = self.is_several or options.idle_unload_s is not None
        self._turns = ModelTurns(
            [each.turn for each in models], options.max_loaded, options.idle_unload_s
        )
        self._num_arrived = 0
        self._num_waiting_bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    @property
    def first(self) -> ServedModel:
        return self.models[0]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for each in self.models for name in each.names.listed)

    @property
    def is_several(self) -> bool:
        return len(self.models) > 1

    @property
    def switches(self) -> bool:
        """Whether models are loaded when they are asked for: there are several, or idle ones are
        unloaded."""
        return self._switches

    @property
    def num_calls(self) -> int:
        """Calls that have not ended, with those that wait for a model to be loaded."""
        return self._num_waiting + sum(each.turn.num_calls for each in self.models)

    def find(self, name: str | None) -> ServedModel:
        """The model that a name means. Raises ApiError (404)."""
        if name is None:
            return self.first
        for each in spellings(name):
            if each in self._by_name:
                return self._by_name[each]
        if self.first.names.takes_any:
            return self.first
        raise model_not_found(model=name, listed=", ".join(self.names))

    def state_of(self, model: ServedModel) -> ModelState:
        """Always ready where models are not unloaded."""
        return model.turn.state if self._switches else "ready"

    def idle_left_s(self, model: ServedModel) -> float | None:
        """Seconds until a model that is loaded is unloaded, if nobody uses it; None: it stays."""
        if self._options.idle_unload_s is None:
            return None
        turn = model.turn
        since_s = turn.used_s if turn.is_idle else self._clock()
        return since_s + self._options.idle_unload_s - self._clock()

    def status(self) -> EngineStatus:
        """Ready where a model is, or can be loaded on request; otherwise as the loaded ones."""
        if not self._switches:
            return self.first.engine.status()
        found = [each.engine.status() for each in self.models if each.turn.is_loaded]
        ready = next((each for each in found if each.is_ready), None)
        if ready is not None or found:
            return ready or found[0]
        if not any(each.num_loads for each in self.models):
            return self.first.engine.status()
        return EngineStatus(state="ready")

    def check_open(self) -> int:
        """Returns the most open requests. Raises ApiError (429, 503) where a call to any model is
        refused."""
        self.first.check_accepting()
        if not self._switches:
            limits = self.first.check_ready().limits
            self.first.check_room()
            return limits.max_num_open_reqs
        known = [each.limits for each in self.models]
        places = sum(limits.max_num_open_reqs for limits in known if limits is not None)
        return places + self._options.max_waiting

    def check_turn(self, tenant: Tenant) -> None:
        """Raises ApiError (429) where any call of the tenant would start too late."""
        check = None if self._switches else self.first.request_check
        if check is not None and not check.has_priorities:
            self.first.check_turn(tenant, 0)

    def start(self) -> None:
        if not self._switches:
            self.first.start()
            return
        self.first.turn.began(self._clock())
        self._run(self._load(self.first))

    async def wait_loaded(self) -> None:
        """Waits until the first model has been loaded. Raises CadenzaError if it cannot be."""
        await asyncio.to_thread(self.first.engine.wait_ready, MAX_LOAD_S)

    def call_at_death(self, on_death: Callable[[CadenzaError], object]) -> None:
        """`on_death` runs on some thread when the only model's engine is given up, if no load may
        follow."""
        if not self._switches:
            self.first.engine.call_at_death(on_death)

    def drain(self) -> None:
        """Refuses new calls from now on. Those that wait for a model go on."""
        for model in self.models:
            model.is_refusing = True

    async def stop(self) -> None:
        self._is_closed = True
        self.drain()
        if self._timer is not None:
            self._timer.cancel()
        for each in self.models:
            _end_waiting(each, unavailable("draining"))
        await asyncio.gather(*(model.stop() for model in self.models))
        if self._tasks:
            await asyncio.wait(self._tasks)

    @asynccontextmanager
    async def using(self, model: ServedModel, num_bytes: int) -> AsyncGenerator[None]:
        """Keeps the model loaded in the block, after waiting. Raises ApiError: 503 if it cannot be
        loaded or too many wait, 504 after the queue's timeout."""
        if self._switches:
            await self._enter(model, num_bytes)
        else:
            model.turn.entered()
        try:
            yield
        finally:
            self._leave(model)

    def advance(self) -> None:
        """Loads, unloads and admits as `ModelTurns` decides now."""
        if self._is_closed:
            return
        moves = self._turns.advance(self._clock())
        by_turn = {id(each.turn): each for each in self.models}
        for turn in moves.load:
            self._run(self._load(by_turn[id(turn)]))
        for turn in moves.unload:
            self._run(self._unload(by_turn[id(turn)], "another model is asked for"))
        for turn in moves.idle:
            reason = f"not used for {self._options.idle_unload_s:g} seconds"
            self._run(self._unload(by_turn[id(turn)], reason))
        for each in self.models:
            while each.turn.state == "ready" and each.turn.waiting:
                each.turn.entered()
                each.turn.waiting.popleft().end(None)
        self._look_again(moves.look_at_s)

    async def _enter(self, model: ServedModel, num_bytes: int) -> None:
        turn = model.turn
        self._check_failed(model)
        if turn.state == "ready" and not turn.waiting:
            turn.entered()
            return
        self._check_waiting(model, num_bytes)
        self._num_arrived += 1
        admitted: asyncio.Future[ApiError | None] = asyncio.get_running_loop().create_future()
        waiting = WaitingCall(self._num_arrived, partial(_set_result, admitted))
        turn.waiting.append(waiting)
        self._num_waiting_bytes += num_bytes
        timeouts = model.engine.timeouts
        self.advance()
        try:
            await asyncio.wait({admitted}, timeout=timeouts.queue_s)
        except asyncio.CancelledError:
            if admitted.done() and admitted.result() is None:
                self._leave(model)
            raise
        finally:
            self._num_waiting_bytes -= num_bytes
            if waiting in turn.waiting:
                turn.waiting.remove(waiting)
                self.advance()  # nobody may need the place any more
        if not admitted.done():
            raise queue_timeout(queue_s=timeouts.queue_s, total_s=timeouts.total_s)
        error = admitted.result()
        if error is not None:
            raise error

    def _leave(self, model: ServedModel) -> None:
        model.turn.left(self._clock())
        if self._switches:
            self.advance()

    def _check_failed(self, model: ServedModel) -> None:
        if model.turn.is_loaded and model.engine.status().state == "dead":
            self._retire(model)
        failure = model.failure
        if failure is not None and failure.until_s > self._clock():
            model.counts.reject("unavailable")
            raise _failed(model, failure.reason, failure.until_s - self._clock())

    def _check_waiting(self, model: ServedModel, num_bytes: int) -> None:
        most = self._options.max_waiting
        has_bytes = self._num_waiting_bytes + num_bytes > self._options.max_waiting_bytes
        if len(model.turn.waiting) < most and not (self._num_waiting_bytes and has_bytes):
            return
        model.counts.reject("queue_full")
        raise models_full(
            name=model.name,
            num_waiting=self._num_waiting,
            seconds=max(RETRY_LOADING_S, math.ceil(model.turn.load_s)),
        )

    @property
    def _num_waiting(self) -> int:
        return sum(len(each.turn.waiting) for each in self.models)

    async def _load(self, model: ServedModel) -> None:
        turn = model.turn
        if turn.waiting:  # of the first load at the start the command tells
            logger.info("loading %s: %d requests wait for it", model.name, len(turn.waiting))
        try:
            await self._load_in_some_size(model)
        except CadenzaError as error:
            await model.stop()
            turn.gone()
            self._take_failure(model, error)
        else:
            model.num_loads, model.failure = model.num_loads + 1, None
            turn.loaded(self._clock())
            logger.info("%s is loaded, in %.1f s", model.name, turn.load_s)
        self.advance()

    async def _load_in_some_size(self, model: ServedModel) -> None:
        """In the size of its first load, if that still fits. Raises CadenzaError."""
        is_again = model.limits is not None
        model.start()
        try:
            await asyncio.to_thread(model.engine.wait_ready, MAX_LOAD_S)
        except ConfigError:
            if not is_again or self._is_closed:
                raise
            await model.stop()
            model.keeps_limits = False
            model.start()
            await asyncio.to_thread(model.engine.wait_ready, MAX_LOAD_S)

    async def _unload(self, model: ServedModel, reason: str) -> None:
        await model.stop()
        model.turn.gone()
        logger.info("%s is unloaded: %s", model.name, reason)
        self.advance()

    def _take_failure(self, model: ServedModel, error: CadenzaError) -> None:
        if self._is_closed:
            return
        num_failed = 1 if model.failure is None else model.failure.num_failed + 1
        again_s = min(MAX_RETRY_S, RETRY_S * 2.0 ** (num_failed - 1))
        model.failure = LoadFailure(_reason_of(error), self._clock() + again_s, num_failed)
        if any(each.num_loads for each in self.models):  # else `wait_loaded` raises it
            logger.error(
                "%s could not be loaded, and is not tried again for %.0f seconds: %s",
                model.name,
                again_s,
                error,
            )
        _end_waiting(model, _failed(model, model.failure.reason, again_s))

    def _retire(self, model: ServedModel) -> None:
        """Unloads a model whose engine has ended for good; after a while it may be loaded anew."""
        model.turn.state = "unloading"
        self._take_failure(model, CadenzaError(model.engine.status().error or "it ended"))
        self._run(self._unload(model, "its engine failed too often"))

    def _look_again(self, at_s: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if at_s is not None:
            delay_s = max(0.0, at_s - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.advance)

    def _run(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _set_result(admitted: asyncio.Future[ApiError | None], error: ApiError | None) -> None:
    if not admitted.done():
        admitted.set_result(error)


def _end_waiting(model: ServedModel, error: ApiError) -> None:
    while model.turn.waiting:
        model.turn.waiting.popleft().end(error)


def _by_name(models: Sequence[ServedModel]) -> dict[str, ServedModel]:
    found: dict[str, ServedModel] = {}
    for model in models:
        for name in model.names.listed:
            if name in found:
                raise ConfigError(
                    f"two models have the name {name!r}; give --served-model-name once for each "
                    f"model, in the order of the models"
                )
            found[name] = model
    for model in models:
        for alias in model.names.aliases:
            found.setdefault(alias, model)
    return found


def _failed(model: ServedModel, reason: str, retry_after_s: float) -> ApiError:
    return model_failed(name=model.name, reason=reason, seconds=max(1, math.ceil(retry_after_s)))


def _reason_of(error: CadenzaError) -> str:
    """The reason as clients may see it: without a path of this machine."""
    if isinstance(error, ConfigError | DeviceUnavailableError):
        return str(error)
    return "the server's log has the cause"
