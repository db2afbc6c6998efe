"""Random traffic of sparse and whole prompts, on engines that are killed: every stream is the one
that its request gives alone.

On the token-storing runners: the engine is thrown away before a step, with that step's events, and
a new one gets every open request with what had been passed on until then. In some runs steps are
lost and sequences preempted, too; where there is work and nothing is in flight, a step computes
something.
"""

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest

from cadenza.config import EngineLimits, SchedulerLoop
from cadenza.core.turns import POLICIES
from cadenza.engine.core import EngineCore
from cadenza.engine.open_requests import OpenRequests
from cadenza.engine.timeouts import RequestTimeouts
from cadenza.errors import InvalidRequestError
from cadenza.events import Event, Finished, Started, Token
from cadenza.request import Request
from cadenza.sparse_prefill import PromptSpan
from cadenza.speculative_config import SpeculativeConfig
from cadenza.structured import ConstraintSpec
from cadenza.tenant import Tenant
from tests.by_day import by_day
from tests.engine.hashed_constraint import PHRASES, STEADY, compile_hashed
from tests.engine.simulation import LosingRunner, retried_streams
from tests.engine.solo import StreamId
from tests.engine.sparse import (
    LIMITS,
    asking,
    fake_of,
    kept_of,
    owed,
    request_of,
    scorer_of,
    scoring_engine,
    tokens_of,
)

TENANTS = (Tenant(name="a"), Tenant(name="b", weight=2.0, page_share=0.8))


def limits_of(rng: random.Random) -> EngineLimits:
    return replace(
        LIMITS,
        max_num_seqs=rng.randint(1, 5),
        max_num_batched_tokens=rng.randint(8, 80),
        num_pages=rng.choice([33, 36, 45, 80]),
        enable_prefix_caching=rng.random() < 0.85,
    )


def client(rng: random.Random, prompts: list[tuple[int, ...]]) -> Request:
    """Often a prompt that others have, too, or the beginning of one."""
    prompt = rng.choice(prompts)[: rng.choice([500, 500, rng.randint(1, 400)])]
    params = {
        "seed": rng.randint(0, 5),
        "max_tokens": rng.randint(1, 40),
        "ignore_eos": rng.random() < 0.6,
        "stop_token_ids": rng.choice([(), (rng.randrange(97),)]),
        "frequency_penalty": rng.choice([0.0, 0.0, 0.7]),
        "n": rng.choice([1, 1, 1, 2, 3]),
    }
    if rng.random() < 0.4:
        found = request_of(prompt, None, **params)
    else:
        start = rng.randrange(len(prompt))
        spans = rng.choice([(), (PromptSpan(start, start + 50),)])
        found = asking(prompt, rng.choice([0.2, 0.5, 0.7, 0.9, 1.0]), spans, **params)
    salt = rng.choice(["", "", "", "other"])
    grammar = rng.choice([None, None, None, "a", STEADY, PHRASES])
    return replace(
        found,
        tenant=rng.choice(TENANTS),
        cache_salt=salt,
        constraint=None if grammar is None else ConstraintSpec(grammar=grammar),
    )


class Relay:
    """One front end's requests, and the engines that serve them one after the other."""

    def __init__(self, seed: int, loop: SchedulerLoop) -> None:
        self.rng = random.Random(f"sparse {seed}")
        self.limits = limits_of(self.rng)
        self.loop = loop
        self.budget = self.rng.choice([4, 16, 64, 200])
        self.reserved = self.rng.choice([0.0, 0.5, 1.0])
        self.drafts = None
        if self.rng.random() < 0.5:
            self.drafts = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
        self.troubles = random.Random(f"troubles {seed}")
        self.loss = self.troubles.choice([0.0, 0.0, 0.03])
        self.policy = POLICIES[self.troubles.choice([*POLICIES])](2.0)
        self.books = OpenRequests(RequestTimeouts(), lambda: 0.0)
        self.engine = self._engine()
        self.requests: dict[int, Request] = {}
        self.tokens: dict[StreamId, list[int]] = {}
        self.ended: dict[StreamId, Finished] = {}
        self.kept: dict[int, bytes | None] = {}
        self.cancelled: set[int] = set()
        self.failed: set[StreamId] = set()
        self.num_resumed_scored = 0

    def _engine(self) -> EngineCore:
        scorer = scorer_of(self.limits, self.budget)
        seed = self.troubles.randrange(1 << 30)
        return scoring_engine(
            self.limits,
            scorer,
            runner=fake_of(self.limits, LosingRunner, loss=self.loss, seed=seed),
            policy=self.policy,
            loop=self.loop,
            reserved_output=self.reserved,
            speculation=self.drafts,
            compile_constraint=compile_hashed,
        )

    def submit(self, request: Request) -> None:
        try:
            self.engine.check(request)
        except InvalidRequestError:  # more pages than its tenant may hold
            return
        request_id = self.books.accept(request, self.limits)
        self.engine.enqueue(request_id, request)
        self.requests[request_id] = request
        self.tokens |= {(request_id, sample): [] for sample in range(request.params.n)}

    def take(self, events: Iterable[Event]) -> None:
        events = list(events)
        for event in events:
            if isinstance(event, Started):
                known = self.kept.setdefault(event.request_id, event.kept)
                assert known == event.kept, "another engine kept something else"
                assert event.whole_because is None
        for event in self.books.record(events):
            if isinstance(event, Token):
                self.tokens[event.request_id, event.sample].append(event.token_id)
            elif isinstance(event, Finished):
                self.ended[event.request_id, event.sample] = event

    def cancel(self) -> None:
        request_id = self.rng.choice([*self.requests, -1])
        if self.books.cancel(request_id):
            self.engine.cancel(request_id)
            self.cancelled.add(request_id)

    def kill(self) -> None:
        self.books.lose_engine(0.0)
        self.engine = self._engine()
        for request_id in self.books.open_ids():
            resumed = self.books.resume(request_id)
            assert resumed is not None
            self.num_resumed_scored += resumed[1].kept is not None
            self.engine.resume(request_id, *resumed)

    def run(self) -> None:
        rng = self.rng
        prompts = [tokens_of(rng.randint(150, 470), rng.randrange(1000)) for _ in range(4)]
        for _ in range(rng.randint(6, 14)):
            if rng.random() < 0.3:
                prompts.append(tokens_of(rng.randint(1, 470), rng.randrange(1000)))
            request = client(rng, prompts)
            self.submit(request)
            for _ in range(rng.choice([0, 1, 5, 20])):
                self.step()
            if rng.random() < 0.15:
                self.cancel()
            if rng.random() < 0.25:
                self.kill()
        for _ in range(20_000):
            if self.engine.is_idle:
                return
            self.step()
            if rng.random() < 0.004:
                self.kill()
        raise AssertionError("the engine does not come to rest")

    def step(self) -> None:
        scheduler = self.engine.scheduler
        if self.troubles.random() < self.loss and scheduler.running:
            scheduler._preempt(self.troubles.choice(scheduler.running))
        retried, num_failed = retried_streams(self.engine), self.engine.num_failed_steps
        events = self.engine.step()
        assert not self.engine.num_empty_steps, "nothing was computed, although there is work"
        if self.engine.num_failed_steps > num_failed + 1:  # it was lost and retried in between
            retried |= self.tokens.keys()
        self.failed |= retried & {
            (event.request_id, event.sample)
            for event in events
            if isinstance(event, Finished) and event.error_kind == "step_failed"
        }
        self.take(events)
        self.engine.check_invariants()

    def verify(self) -> None:
        for (request_id, sample), found in self.tokens.items():
            request, tokens = self.requests[request_id], tuple(found)
            kept = kept_of(request)
            solo = owed(request, kept, sample=sample)
            if request_id in self.cancelled or (request_id, sample) in self.failed:
                assert tokens == solo.token_ids[: len(tokens)]
                continue
            assert tokens == solo.token_ids
            end = self.ended[request_id, sample]
            assert end.finish_reason == solo.finish_reason
            assert end.num_prompt_tokens == len(request.prompt_token_ids)
            assert self.kept[request_id] == (None if kept is None else kept.mask)
        pool = self.engine.scheduler.kv_cache.pool.counts()
        assert (pool.live, pool.pinned) == (0, 0)


@pytest.mark.parametrize("loop", ["plain", "overlap"])
@pytest.mark.parametrize("seed", by_day(range(300), range(8)))
def test_streams_of_sparse_prompts_survive_traffic_cancels_and_kills(
    seed: int, loop: SchedulerLoop
) -> None:
    relay = Relay(seed, loop)
    relay.run()
    relay.verify()
