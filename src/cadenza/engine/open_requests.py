"""`OpenRequests`: open requests with their tokens and deadlines, and the queue's bounds.
Thread-safe. Invariants: each sample ends exactly once, by `Finished`, `cancel`, its deadline or
`end_all`, unless the request is released; later events are dropped, and so is a token passed on
before."""

import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile

from msgspec.structs import replace

from cadenza.batch.draw_keys import derive_seed
from cadenza.config import EngineLimits
from cadenza.engine.new_sequences import ResumedSample, Resumption
from cadenza.engine.request_stats import (
    RejectionReason,
    RequestStats,
    RequestTallies,
    RequestTimes,
)
from cadenza.engine.timeouts import RequestTimeouts, StartForecast
from cadenza.errors import QueueFullError
from cadenza.events import (
    ErrorKind,
    Event,
    Finished,
    FinishReason,
    Preparing,
    PromptLogprobs,
    Report,
    Started,
    Token,
    WholePromptReason,
)
from cadenza.request import Request
from cadenza.tenant import Tenant

# Where the oldest waiting request has waited for so long, the engine computes all that it can.
LONG_WAIT_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """All bounds on accepting requests are checked against it. `num_queued_tokens`: of prompts
    waiting for their first step."""

    num_open: int
    num_queued_tokens: int

    def has_room(self, max_num_open: int) -> bool:
        return self.num_open < max_num_open

    def has_tokens(self, num_tokens: int, max_num_queued: int) -> bool:
        """An empty queue accepts any prompt."""
        queued = self.num_queued_tokens
        return not queued or queued + num_tokens <= max_num_queued


@dataclass(slots=True, eq=False, kw_only=True)
class OpenRequest:
    """As those who release and adopt it hand it over; times are clock readings."""

    request_id: int
    request: Request
    accepted_s: float
    token_ids: dict[int, list[int]]  # of each sample that has not ended, the tokens so far
    # of each sample that has reported
    num_cached_tokens: dict[int, int] = field(default_factory=dict[int, int])
    num_prompt_logprobs: int = 0
    times: RequestTimes = field(default_factory=RequestTimes)
    is_running: bool = False  # the engine has given it a row, or scores its prompt
    is_lost: bool = False  # the engine that had it is gone, and no other has it yet
    lost_s: float | None = None  # when an engine was lost in which it ran; None once it has gone on
    has_progress: bool = False  # something of it was passed on from the engine that has it
    num_losses: int = 0  # engines in a row that were lost while it ran in them without progress
    num_ended_units: int = 0  # of its samples that have ended, as in `StartForecast`
    kept: bytes | None = None  # of one that has started, as in `Started`
    whole_reason: WholePromptReason | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)


class OpenRequests:
    """Accepts requests within the queue's bounds, and filters their events. `ids`: increasing.
    `engine_seed`: of requests without a seed, so that they draw the same whichever engine has them;
    None leaves it to the engine."""

    def __init__(
        self,
        timeouts: RequestTimeouts,
        clock: Callable[[], float],
        ids: Iterator[int] | None = None,
        engine_seed: int | None = None,
        priority_s: float = 0.0,
    ) -> None:
        self._timeouts = timeouts
        self._clock = clock
        self._ids = count() if ids is None else ids
        self._engine_seed = engine_seed
        self._lock = threading.RLock()
        self._open: dict[int, OpenRequest] = {}
        self._queued: dict[int, OpenRequest] = {}
        self._num_queued_tokens = 0
        self._forecast = StartForecast(timeouts, priority_s)
        self._recorded_s: float | None = None
        self._tallies = RequestTallies()

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def timeouts(self) -> RequestTimeouts:
        return self._timeouts

    def accept(
        self,
        request: Request,
        limits: EngineLimits,
        times: RequestTimes | None = None,
        prompts_s: float = 0.0,
    ) -> int:
        """Returns the id. `times` is filled in as it gets on; `prompts_s`: until all waiting
        prompts are computed. Raises QueueFullError and counts the rejection."""
        with self._lock:
            self._check_room(len(request.prompt_token_ids), limits)
            self._check_start(request, limits, prompts_s)
            request_id = next(self._ids)
            self._tallies.num_accepted += 1
            entry = OpenRequest(
                request_id=request_id,
                request=self._seeded(request, request_id),
                accepted_s=self._clock(),
                token_ids={sample: [] for sample in range(request.params.n)},
                times=RequestTimes() if times is None else times,
            )
            entry.times.accepted_s = entry.accepted_s
            self._open[request_id] = entry
            self._queue(entry)
        return request_id

    def refusal(
        self, tenant: Tenant, priority: int, limits: EngineLimits, prompts_s: float
    ) -> QueueFullError | None:
        """A request that comes now would start too late."""
        with self._lock:
            num_running = len(self._open) - len(self._queued)
            num_ahead = self._forecast.num_ahead(tenant, priority, self._clock())
            return self._forecast.refusal(num_ahead, limits.max_num_seqs - num_running, prompts_s)

    def request_of(self, request_id: int) -> Request | None:
        """As it is to be computed."""
        with self._lock:
            entry = self._open.get(request_id)
            return None if entry is None else entry.request

    def release(self, request_id: int) -> OpenRequest | None:
        """To be adopted by others; None if it is not open. It has not ended; its later events are
        dropped."""
        with self._lock:
            entry = self._open.pop(request_id, None)
            if entry is not None:
                self._dequeue(entry)
            return entry

    def adopt(self, entry: OpenRequest) -> None:
        """Whatever the queue's bounds, with its deadlines."""
        with self._lock:
            entry.is_running = entry.has_progress = False
            # Deadlines are looked for at the front: entries stay in the order of acceptance.
            self._open = _by_acceptance([*self._open.values(), entry])
            if entry.times.started_s is None:
                self._queue(entry)
                self._queued = _by_acceptance(self._queued.values())

    def count_rejection(self, reason: RejectionReason) -> None:
        with self._lock:
            self._tallies.rejections[reason] += 1

    def record(self, events: Iterable[Report]) -> list[Event]:
        """Returns what is to be passed on: no `Started`, but of a sparse prefill, whose output says
        what was kept; no events of ended samples; no repeated ones: an engine that resumes a
        request may repeat tokens, with the same bits."""
        with self._lock:
            now_s = self._clock()
            recorded = [self._record(event, now_s) for event in events]
            passed = [event for event in recorded if event is not None]
            self._measure(passed, now_s)
        return passed

    def cancel(self, request_id: int, sample: int | None = None) -> bool:
        """False if it is not open."""
        with self._lock:
            entry = self._open.get(request_id)
            if entry is None or sample not in {None, *entry.token_ids}:
                return False
            for each in [*entry.token_ids] if sample is None else [sample]:
                self._end(entry, each, "abort", self._clock())
            return True

    def end_overdue(self) -> list[Finished]:
        with self._lock:
            now_s, timeouts = self._clock(), self._timeouts
            deadline_s = self.next_deadline_s()
            if deadline_s is None or now_s < deadline_s:
                return []
            most_s = self._forecast.most_wait_s
            unstarted = _older(self._queued, now_s - most_s)
            error = (
                f"the request waited {most_s:.6g} seconds in the queue and was not started; "
                f"{self._forecast.bound}"
            )
            ended = self._fail_each(unstarted, "queue_timeout", error, now_s)
            late = _older(self._open, now_s - timeouts.total_s)
            error = (
                f"the request took {timeouts.total_s:g} seconds, all that --request-timeout allows"
            )
            return ended + self._fail_each(late, "request_timeout", error, now_s)

    def end_all(self, kind: ErrorKind, error: str) -> list[Finished]:
        with self._lock:
            now_s = self._clock()
            return self._fail_each(list(self._open.values()), kind, error, now_s)

    def next_deadline_s(self) -> float | None:
        """None if no request is open."""
        with self._lock:
            deadlines = [
                next(iter(entries.values())).accepted_s + timeout_s
                for entries, timeout_s in (
                    (self._open, self._timeouts.total_s),
                    (self._queued, self._forecast.most_wait_s),
                )
                if entries
            ]
        return min(deadlines, default=None)

    def load(self) -> EngineLoad:
        with self._lock:
            return EngineLoad(num_open=len(self._open), num_queued_tokens=self._num_queued_tokens)

    def stats(self) -> RequestStats:
        with self._lock:
            return self._tallies.stats()

    def lose_engine(self, now_s: float) -> None:
        """What it had not sent is to be computed again. Each request that ran counts the loss, from
        0 if it has progressed."""
        with self._lock:
            self._recorded_s = None
            for entry in self._open.values():
                entry.is_lost = True
                if entry.is_running:
                    entry.num_losses = 0 if entry.has_progress else entry.num_losses + 1
                    entry.is_running = entry.has_progress = False
                    entry.lost_s = now_s if entry.lost_s is None else entry.lost_s

    def open_ids(self) -> list[int]:
        with self._lock:
            return list(self._open)

    def num_tokens_of(self, request_id: int) -> dict[int, int]:
        """Of each sample that has not ended."""
        with self._lock:
            entry = self._open.get(request_id)
            return {} if entry is None else {k: len(ids) for k, ids in entry.token_ids.items()}

    def is_running(self, request_id: int) -> bool:
        with self._lock:
            entry = self._open.get(request_id)
            return entry is not None and entry.is_running

    def withdraw(self, request_id: int) -> None:
        """It is taken from the engine, to be resumed later; its losses are forgotten."""
        with self._lock:
            if request_id in self._open:
                entry = self._open[request_id]
                entry.is_running = entry.has_progress = False
                entry.num_losses = 0

    def num_losses(self, request_id: int) -> int:
        """Engines in a row that were lost while it ran in them without progress."""
        with self._lock:
            return self._open[request_id].num_losses if request_id in self._open else 0

    def reset_losses(self) -> None:
        """What was lost so far says nothing more about any request."""
        with self._lock:
            for entry in self._open.values():
                entry.num_losses = 0

    def resume(self, request_id: int) -> tuple[Request, Resumption] | None:
        """None if it is not open."""
        with self._lock:
            entry = self._open.get(request_id)
            if entry is None:
                return None
            self._tallies.num_resumed += entry.is_lost
            entry.is_lost = False
            samples = tuple(
                ResumedSample(
                    sample=sample,
                    token_ids=tuple(token_ids),
                    num_cached_tokens=entry.num_cached_tokens.get(sample),
                )
                for sample, token_ids in entry.token_ids.items()
            )
            return entry.request, Resumption(
                samples=samples,
                num_prompt_logprobs=entry.num_prompt_logprobs,
                kept=entry.kept,
                whole_reason=entry.whole_reason,
            )

    def fail(self, request_id: int, kind: ErrorKind, error: str) -> list[Finished]:
        with self._lock:
            return self._fail_each([self._open[request_id]], kind, error, self._clock())

    def _seeded(self, request: Request, request_id: int) -> Request:
        params = request.params
        if self._engine_seed is None or params.seed is not None or not params.temperature:
            return request
        seed = derive_seed(self._engine_seed, request_id)
        return dataclasses.replace(request, params=dataclasses.replace(params, seed=seed))

    def _check_room(self, num_tokens: int, limits: EngineLimits) -> None:
        load = self.load()
        if not load.has_room(limits.max_num_open_reqs):
            self._tallies.rejections["queue_full"] += 1
            raise QueueFullError(
                f"{load.num_open} requests are open, the most that --max-num-queued-reqs "
                f"{limits.max_num_queued_reqs} and --max-num-seqs {limits.max_num_seqs} allow; "
                f"try again when some have finished"
            )
        if not load.has_tokens(num_tokens, limits.max_num_queued_tokens):
            self._tallies.rejections["queue_tokens_full"] += 1
            raise QueueFullError(
                f"{load.num_queued_tokens} prompt tokens wait already and {num_tokens} more were "
                f"sent; --max-num-queued-tokens allows {limits.max_num_queued_tokens}; try again "
                f"when some have been read"
            )

    def _check_start(self, request: Request, limits: EngineLimits, prompts_s: float) -> None:
        refusal = self.refusal(request.tenant, request.priority, limits, prompts_s)
        if refusal is not None:
            self._tallies.rejections["queue_too_long"] += 1
            try:
                raise refusal
            finally:
                del refusal  # which would refer to itself through this frame

    def _queue(self, entry: OpenRequest) -> None:
        self._queued[entry.request_id] = entry
        self._num_queued_tokens += entry.num_prompt_tokens
        self._forecast.add(entry.request.tenant, entry.request.priority, entry.accepted_s)

    def _dequeue(self, entry: OpenRequest) -> bool:
        if self._queued.pop(entry.request_id, None) is None:
            return False
        self._num_queued_tokens -= entry.num_prompt_tokens
        self._forecast.remove(entry.request.tenant, entry.request.priority, entry.accepted_s)
        return True

    def _measure(self, events: Sequence[Event], now_s: float) -> None:
        """Counts the events since the last ones as work, if requests waited for all of it."""
        last_s, self._recorded_s = self._recorded_s, now_s
        oldest = next(iter(self._queued.values()), None)
        if last_s is None or oldest is None or oldest.accepted_s > last_s - LONG_WAIT_S:
            return
        num_units = sum([isinstance(each, Token | Finished) for each in events])
        self._forecast.note_work(num_units, now_s - last_s)

    def _start(self, entry: OpenRequest, now_s: float) -> None:
        if self._dequeue(entry):
            entry.times.started_s = now_s
            self._tallies.queue.add(now_s - entry.accepted_s)

    def _record(self, event: Report, now_s: float) -> Event | None:
        entry = self._open.get(event.request_id)
        if entry is None:
            return None
        if isinstance(event, Token):
            return event if self._record_token(entry, event, now_s) else None
        if isinstance(event, Preparing):
            entry.is_running = True  # it may be why the engine is lost
            self._start(entry, now_s)
            return None
        if isinstance(event, Started):
            entry.is_running = True
            entry.kept, entry.whole_reason = event.kept, event.whole_because
            self._start(entry, now_s)
            return None if entry.request.sparse_prefill is None else event
        if isinstance(event, Finished):
            if event.sample not in entry.token_ids:
                return None
            is_read = event.finish_reason in ("stop", "length") and len(entry.token_ids) == 1
            if is_read and entry.times.first_token_s is None:  # a prompt alone
                self._take_prefill(entry, now_s)
            self._end(entry, event.sample, event.finish_reason, now_s)
            return event
        return _new_logprobs(entry, event)

    def _record_token(self, entry: OpenRequest, event: Token, now_s: float) -> bool:
        token_ids = entry.token_ids.get(event.sample)
        if token_ids is None or event.index < len(token_ids):
            return False
        token_ids.append(event.token_id)
        entry.has_progress = True
        if event.num_cached_tokens is not None:
            entry.num_cached_tokens[event.sample] = event.num_cached_tokens
        if entry.times.first_token_s is None:
            self._take_first_token(entry, now_s)
        if entry.lost_s is not None:
            self._end_pause(entry, now_s)
        return True

    def _take_first_token(self, entry: OpenRequest, now_s: float) -> None:
        entry.times.first_token_s = now_s
        self._take_prefill(entry, now_s)

    def _take_prefill(self, entry: OpenRequest, now_s: float) -> None:
        self._start(entry, now_s)
        assert entry.times.started_s is not None
        self._tallies.prefill.add(now_s - entry.times.started_s)

    def _end_pause(self, entry: OpenRequest, now_s: float) -> None:
        assert entry.lost_s is not None
        self._tallies.resume.add(now_s - entry.lost_s)
        entry.times.pauses.append((entry.lost_s, now_s))
        entry.lost_s = None

    def _end(self, entry: OpenRequest, sample: int, reason: FinishReason, now_s: float) -> None:
        entry.num_ended_units += len(entry.token_ids.pop(sample)) + 1
        self._tallies.ends[reason] += 1
        if entry.token_ids:
            return
        del self._open[entry.request_id]
        self._dequeue(entry)
        if entry.times.started_s is not None:
            self._forecast.note_end(entry.num_ended_units, now_s - entry.times.started_s)
        if entry.lost_s is not None:
            entry.times.pauses.append((entry.lost_s, now_s))
        entry.times.ended_s = now_s
        if entry.times.first_token_s is not None:
            self._tallies.decode.add(now_s - entry.times.first_token_s)

    def _fail_each(
        self, entries: Iterable[OpenRequest], kind: ErrorKind, error: str, now_s: float
    ) -> list[Finished]:
        ended: list[Finished] = []
        for entry in entries:
            for sample, token_ids in list(entry.token_ids.items()):
                self._end(entry, sample, "error", now_s)
                ended.append(
                    Finished(
                        request_id=entry.request_id,
                        sample=sample,
                        finish_reason="error",
                        stop_token_id=None,
                        num_prompt_tokens=entry.num_prompt_tokens,
                        num_generated_tokens=len(token_ids),
                        num_cached_tokens=0,
                        error=error,
                        error_kind=kind,
                    )
                )
        return ended


def _new_logprobs(entry: OpenRequest, event: PromptLogprobs) -> PromptLogprobs | None:
    """Without the positions that were passed on before; None if it has no other."""
    start = 1 + entry.num_prompt_logprobs
    fresh = event.entries[max(0, start - event.start) :]
    if not fresh:
        return None
    entry.num_prompt_logprobs += len(fresh)
    entry.has_progress = True
    return event if len(fresh) == len(event.entries) else replace(event, start=start, entries=fresh)


def _by_acceptance(entries: Iterable[OpenRequest]) -> dict[int, OpenRequest]:
    return {each.request_id: each for each in sorted(entries, key=lambda each: each.request_id)}


def _older(entries: dict[int, OpenRequest], accepted_s: float) -> list[OpenRequest]:
    return list(takewhile(lambda entry: entry.accepted_s <= accepted_s, entries.values()))
