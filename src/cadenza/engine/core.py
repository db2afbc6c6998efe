"""`EngineCore`: the synchronous heart. submit / step / cancel, token ids in, events out.

Owns the scheduler, the packer and the loop over one runner. Knows no text, no HTTP, no clock: the
step is a function of what was submitted. Invariants: ids only grow; an invalid submit changes
nothing; each accepted request that is not cancelled gets exactly one `Finished`.
"""

import secrets
from dataclasses import dataclass

from cadenza.backends.base import Runner
from cadenza.config import EngineLimits, SchedulerLoop
from cadenza.core.admission import RESERVED_OUTPUT, Admission
from cadenza.core.kv_cache_manager import KVCacheManager
from cadenza.core.packing import Packer
from cadenza.core.randomness import derive_seed
from cadenza.core.scheduler import Scheduler
from cadenza.core.sequence import Sequence
from cadenza.engine.loop import LOOP_DEPTHS, StepLoop, StepRunner
from cadenza.errors import EngineClosedError, InvalidRequestError, QueueFullError
from cadenza.request import Event, Finished, Request, show


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreOptions:
    """How an engine runs; of these only `eos_token_ids` and `seed` change any stream.

    Args:
        eos_token_ids: tokens that end a stream unless its request ignores them.
        loop: "overlap" launches a step before the previous one is read; "plain" does not.
        reserved_output: share of a request's remaining output that admission keeps pages for.
        seed: from which the seeds of requests that name none are derived.
        secret: keys the prefix cache; random when None.
    """

    eos_token_ids: frozenset[int] = frozenset()
    loop: SchedulerLoop = "overlap"
    reserved_output: float = RESERVED_OUTPUT
    seed: int = 0
    secret: bytes | None = None


class EngineCore:
    """Continuous batching over `runner` within `limits`."""

    def __init__(
        self, runner: Runner, limits: EngineLimits, options: CoreOptions | None = None
    ) -> None:
        options = options or CoreOptions()
        self.runner = runner
        self.limits = limits
        self.eos_token_ids = options.eos_token_ids
        self.scheduler = Scheduler(
            limits,
            KVCacheManager(
                num_pages=limits.num_pages,
                page_size=limits.page_size,
                enable_prefix_caching=limits.enable_prefix_caching,
                secret=options.secret or secrets.token_bytes(32),
            ),
            Admission(page_size=limits.page_size, reserved_output=options.reserved_output),
        )
        packer = Packer(max_num_seqs=limits.max_num_seqs, page_size=limits.page_size)
        self._loop = StepLoop(
            self.scheduler, StepRunner(runner, packer), depth=LOOP_DEPTHS[options.loop]
        )
        self._sequences: dict[int, Sequence] = {}
        self._seed = options.seed
        self._next_request_id = 0
        self._is_closed = False

    @property
    def is_idle(self) -> bool:
        """True when no request is open and no step is in flight."""
        return not self.scheduler.has_work and not self._loop.in_flight

    @property
    def num_steps(self) -> int:
        """Steps scheduled so far."""
        return self.scheduler.num_steps

    @property
    def num_queue_slots(self) -> int:
        """How many more requests may be submitted now."""
        return max(0, self.limits.max_num_queued_reqs - len(self.scheduler.waiting))

    def submit(self, request: Request) -> int:
        """Accepts a request and returns its id.

        Raises:
            InvalidRequestError: it cannot be served as written.
            QueueFullError: too many requests wait.
            EngineClosedError: after `close`.
        """
        self.check(request)
        request_id = self.new_request_id()
        self.enqueue(request_id, request)
        return request_id

    def check(self, request: Request) -> None:
        """Raises what `submit` would; changes nothing."""
        if self._is_closed:
            raise EngineClosedError("the engine is closed; make a new one")
        self._check_tokens(request)
        self._check_lengths(request)
        if request.params.logprobs is not None and "logprobs" not in self.runner.capabilities:
            raise InvalidRequestError(
                f"logprobs are not supported by the {self.runner.name} backend", param="logprobs"
            )
        if not self.num_queue_slots:
            raise QueueFullError(
                f"{len(self.scheduler.waiting)} requests wait already, the most "
                f"--max-num-queued-reqs allows; try again when some have finished"
            )

    def new_request_id(self) -> int:
        self._next_request_id += 1
        return self._next_request_id - 1

    def enqueue(self, request_id: int, request: Request) -> None:
        """Queues a request that `check` has let through under an id from `new_request_id`."""
        params = request.params
        seed = derive_seed(self._seed, request_id) if params.seed is None else params.seed
        stop = frozenset(params.stop_token_ids)
        sequence = Sequence(
            request_id=request_id,
            request=request,
            seed=seed,
            max_num_tokens=self._max_num_tokens(request),
            stop_token_ids=stop if params.ignore_eos else stop | self.eos_token_ids,
            token_ids=list(request.prompt_token_ids),
        )
        self._sequences[request_id] = sequence
        self.scheduler.add(sequence)

    def cancel(self, request_id: int) -> bool:
        """Frees a waiting or running request, after which it has no events; False when unknown."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return False
        self.scheduler.cancel(sequence)
        return True

    def step(self) -> list[Event]:
        """Advances the running batch; returns at once when there is nothing to do."""
        if self._is_closed:
            raise EngineClosedError("the engine is closed; make a new one")
        events = self._loop.step()
        for event in events:
            if isinstance(event, Finished):
                del self._sequences[event.request_id]
        return events

    def close(self) -> None:
        """Drops all requests without events and gives back the device's memory. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        for request_id in list(self._sequences):
            self.cancel(request_id)
        self._loop.drop_in_flight()
        self.runner.close()

    def check_invariants(self) -> None:
        """Raises AssertionError when the engine's books do not balance."""
        self.scheduler.check_invariants()
        open_ids = {s.request_id for s in [*self.scheduler.waiting, *self.scheduler.running]}
        assert open_ids == set(self._sequences), "open requests and scheduled ones differ"

    def _max_num_tokens(self, request: Request) -> int:
        if request.params.max_tokens is None:
            return self.limits.max_model_len
        return len(request.prompt_token_ids) + request.params.max_tokens

    def _check_tokens(self, request: Request) -> None:
        if not request.prompt_token_ids:
            raise InvalidRequestError("the prompt is empty; give one token or more", param="prompt")
        vocab_size = self.runner.vocab_size
        for name, ids in (
            ("prompt", request.prompt_token_ids),
            ("stop_token_ids", request.params.stop_token_ids),
        ):
            for token_id in ids:
                if not 0 <= token_id < vocab_size:
                    raise InvalidRequestError(
                        f"{name} holds the token id {show(token_id)}; this model's ids go "
                        f"from 0 to {vocab_size - 1}",
                        param=name,
                    )

    def _check_lengths(self, request: Request) -> None:
        num_prompt_tokens = len(request.prompt_token_ids)
        wanted = max(self._max_num_tokens(request), num_prompt_tokens + 1)
        if wanted > self.limits.max_model_len:
            raise InvalidRequestError(
                f"the prompt has {num_prompt_tokens} tokens and {wanted - num_prompt_tokens} more "
                f"are asked for, {wanted} in all; the context holds "
                f"{self.limits.max_model_len} (--max-model-len): shorten the prompt or max_tokens",
                param="max_tokens",
            )
        num_pages = -(-(wanted - 1) // self.limits.page_size)
        if num_pages > self.limits.num_pages:
            raise InvalidRequestError(
                f"the request needs {num_pages} KV pages and the pool has "
                f"{self.limits.num_pages}; shorten it, or give the engine more "
                f"--kv-cache-memory-bytes",
                param="max_tokens",
            )
