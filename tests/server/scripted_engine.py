"""A `BatchEngine` without a model: it says what its script says, when the test lets it.

Owns states and failures that a real engine has seldom. Invariant: as of any engine, each accepted
request ends exactly once.
"""

import queue
import struct
import threading
import time
from collections.abc import Callable, Sequence

from cadenza.backends.base import Capability
from cadenza.config import EngineLimits, ImageLimits
from cadenza.engine.batch_engine import Emit, EngineState, EngineStatus
from cadenza.engine.open_requests import EngineLoad, OpenRequests
from cadenza.engine.request_check import CheckedRequest, RequestCheck
from cadenza.engine.request_stats import RequestStats
from cadenza.engine.stats import EngineStats
from cadenza.engine.step_watch import OnNews
from cadenza.engine.timeouts import RequestTimeouts
from cadenza.errors import CadenzaError, EngineClosedError, EngineUnavailableError, QueueFullError
from cadenza.events import (
    ErrorKind,
    Event,
    Finished,
    PromptLogprobs,
    Started,
    Token,
    TokenLogprobs,
    WholePromptReason,
)
from cadenza.request import Request
from cadenza.sparse_prefill import num_chunks
from cadenza.tenant import Tenant

WAIT_S = 300.0
TIMEOUTS = RequestTimeouts(queue_s=61.5, total_s=602.0)
HIDDEN_SIZE = 4
CAPABILITIES: frozenset[Capability] = frozenset({"logprobs", "drafts"})


def scripted_logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    """Something that can be told apart: -id/8 for the token, and ids after it as the likeliest."""
    return TokenLogprobs(
        logprob=-token_id / 8,
        rank=1,
        top_ids=tuple(token_id + place for place in range(num_top)),
        top_logprobs=tuple(-(token_id + place) / 8 for place in range(num_top)),
    )


def scripted_embedding(request: Request) -> bytes:
    """Of `HIDDEN_SIZE` numbers at most: its length, its first and last token, 1 for a mean."""
    assert request.pooling is not None
    ids, is_mean = request.prompt_token_ids, request.pooling.pooling == "mean"
    values = (len(ids), ids[0], ids[-1], is_mean)[: request.pooling.dimensions]
    return struct.pack(f"<{len(values)}f", *values)


class ScriptedEngine:
    """Every request gets `script` over and over, one token a step, up to its `max_tokens`.

    A step takes at least `step_s` seconds.
    """

    def __init__(
        self,
        script: Sequence[int],
        *,
        vocab_size: int = 331,
        max_model_len: int = 256,
        max_num_queued_reqs: int = 64,
        max_num_queued_tokens: int = 1 << 40,
        hidden_size: int | None = HIDDEN_SIZE,
        step_s: float = 0.0,
        timeouts: RequestTimeouts = TIMEOUTS,
        capabilities: frozenset[Capability] = CAPABILITIES,
        images: ImageLimits | None = None,
    ) -> None:
        self.script = tuple(script)
        self.state: EngineState = "ready"
        self.cancelled: list[int] = []
        self.submitted: list[Request] = []
        self.failing: ErrorKind | None = None
        self.late: QueueFullError | None = None
        self.whole_because: WholePromptReason | None = None
        self.on_news: OnNews | None = None
        self.watched = threading.Event()
        self._limits = EngineLimits(
            max_num_seqs=4,
            max_num_batched_tokens=64,
            max_model_len=max_model_len,
            page_size=16,
            num_pages=max_model_len // 16,
            max_num_queued_reqs=max_num_queued_reqs,
            max_num_queued_tokens=max_num_queued_tokens,
            images=images,
        )
        self._check = RequestCheck(
            limits=self._limits,
            vocab_size=vocab_size,
            backend="scripted",
            capabilities=capabilities,
            hidden_size=hidden_size,
            scored_tokens=max_model_len if "sparse_prompts" in capabilities else None,
        )
        self._requests = OpenRequests(timeouts, time.monotonic)
        self._inbox: queue.SimpleQueue[tuple[int, Request] | int | None] = queue.SimpleQueue()
        self._running: dict[int, tuple[Request, int]] = {}
        self._may_go = threading.Event()
        self._may_go.set()
        self.is_shut_down = False
        self._step_s = step_s
        self._ending = threading.Event()

    def pause(self) -> None:
        """No request gets anything until `resume`."""
        self._may_go.clear()

    def resume(self) -> None:
        self._may_go.set()

    @property
    def num_open(self) -> int:
        return self._requests.num_open

    @property
    def timeouts(self) -> RequestTimeouts:
        return self._requests.timeouts

    def submit(self, given: Request | CheckedRequest) -> int:
        if self.is_shut_down:
            raise EngineClosedError("the engine was shut down")
        if self.state != "ready":
            raise EngineUnavailableError("not now")
        checked = self._check.checked(given)
        request = checked.request
        request_id = self._requests.accept(request, self._limits, checked.times)
        self.submitted.append(request)
        self._inbox.put((request_id, request))
        return request_id

    def cancel(self, request_id: int, sample: int | None = None) -> None:
        if sample is None and self._requests.cancel(request_id):
            self.cancelled.append(request_id)
            self._inbox.put(request_id)

    def watch(self, on_news: OnNews | None) -> None:
        self.on_news = on_news
        if on_news is not None:
            self.watched.set()

    def drain(self, within_s: float) -> None:
        self.state = "draining"

    def shutdown(self) -> None:
        self.is_shut_down = True
        self._ending.set()
        self._may_go.set()
        self._inbox.put(None)

    def serve(self, emit: Emit) -> None:
        while not self.is_shut_down:
            self._take_messages()
            self._may_go.wait(WAIT_S)
            self._ending.wait(self._step_s)
            events = self._requests.record([*self._starts(), *self._step()])
            if events:
                emit(events)
        emit([*self._requests.end_all("engine_closed", "the engine was shut down")])

    def wait_ready(self, timeout_s: float) -> None:
        del timeout_s  # it is ready from the start

    def call_at_death(self, on_death: Callable[[CadenzaError], object]) -> None:
        del on_death  # it is never given up

    def status(self) -> EngineStatus:
        return EngineStatus(
            state=self.state, request_check=self._check, startup_s={"load": 0.5, "compile": 0.25}
        )

    def stats(self) -> EngineStats | None:
        return None

    def load(self) -> EngineLoad:
        return self._requests.load()

    def refusal(self, tenant: Tenant, priority: int) -> QueueFullError | None:
        return self.late or self._requests.refusal(tenant, priority, self._limits, 0.0)

    def request_stats(self) -> RequestStats:
        return self._requests.stats()

    def _take_messages(self) -> None:
        while True:
            try:
                message = self._inbox.get(block=not self._running, timeout=WAIT_S)
            except queue.Empty:
                return
            if message is None:
                return
            if isinstance(message, tuple):
                self._running[message[0]] = (message[1], 0)
            else:
                self._running.pop(message, None)

    def _step(self) -> list[Event]:
        events: list[Event] = []
        for request_id, (request, count) in list(self._running.items()):
            if self.failing is not None:
                events.append(self._finished(request_id, request, count, self.failing))
                continue
            if count == 0 and request.params.prompt_logprobs is not None:
                events.append(_prompt_logprobs(request_id, request))
            if not self._max_tokens(request):
                events += self._ends(request_id, request, 0)
                continue
            events += self._tokens(request_id, request, count)
            self._running[request_id] = (request, count + 1)
            if count + 1 == self._max_tokens(request):
                events += self._ends(request_id, request, count + 1)
        return events

    def _starts(self) -> list[Started]:
        """Of the running requests; of prompts that are thinned out the earliest chunks are kept, or
        all where `whole_because` says why."""
        return [
            Started(
                request_id=request_id,
                kept=None if self.whole_because else earliest_kept(request),
                whole_because=self.whole_because if request.sparse_prefill else None,
            )
            for request_id, (request, _) in self._running.items()
        ]

    def _max_tokens(self, request: Request) -> int:
        room = self._limits.max_model_len - len(request.prompt_token_ids)
        most = request.params.max_tokens
        return room if most is None else min(most, room)

    def _tokens(self, request_id: int, request: Request, count: int) -> list[Event]:
        token_id = self.script[count % len(self.script)]
        wanted = request.params.logprobs
        logprobs = None if wanted is None else scripted_logprobs(token_id, wanted)
        return [
            Token(
                request_id=request_id,
                token_id=token_id,
                index=count,
                sample=sample,
                logprobs=logprobs,
            )
            for sample in range(request.params.n)
        ]

    def _ends(self, request_id: int, request: Request, count: int) -> list[Event]:
        del self._running[request_id]
        return [
            Finished(
                request_id=request_id,
                finish_reason="length" if request.pooling is None else "stop",
                stop_token_id=None,
                num_prompt_tokens=len(request.prompt_token_ids),
                num_generated_tokens=count,
                num_cached_tokens=0,
                sample=sample,
                embedding=None if request.pooling is None else scripted_embedding(request),
            )
            for sample in range(request.params.n)
        ]

    def _finished(self, request_id: int, request: Request, count: int, kind: ErrorKind) -> Finished:
        del self._running[request_id]
        return Finished(
            request_id=request_id,
            finish_reason="error",
            stop_token_id=None,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_generated_tokens=count,
            num_cached_tokens=0,
            error="secret words of the engine",
            error_kind=kind,
        )


def earliest_kept(request: Request) -> bytes | None:
    """The mask of the chunks that are kept where all score alike; None of a whole prompt."""
    sparse, num_tokens = request.sparse_prefill, len(request.prompt_token_ids)
    if sparse is None:
        return None
    return sparse.select([0.0] * num_chunks(num_tokens), num_tokens).mask


def _prompt_logprobs(request_id: int, request: Request) -> PromptLogprobs:
    num_top = request.params.prompt_logprobs or 0
    entries = tuple(scripted_logprobs(each, num_top) for each in request.prompt_token_ids[1:])
    return PromptLogprobs(request_id=request_id, start=1, entries=entries)
