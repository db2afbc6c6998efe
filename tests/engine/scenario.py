"""The random traffic of a simulation: limits, policies, tenants and clients, each from a seed.

Knows no engine. Invariant: a scenario is a function of its seed.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

from cadenza.batch.step_cost import StepBound, StepCost
from cadenza.config import Batching, EngineLimits
from cadenza.request import Request, SamplingParams
from cadenza.scheduler.turns import POLICIES, TurnPolicy
from cadenza.structured import ConstraintSpec
from cadenza.tenant import Tenant
from tests.engine.hashed_constraint import PHRASES, STEADY
from tests.engine.solo import VOCAB_SIZE, solo_stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """Somebody who sends a request, and may hang up `cancel_after` steps later.

    Then `cancelled_sample` is given up, or all of them.
    """

    request: Request
    cancel_after: int | None
    cancelled_sample: int | None


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Random traffic for `num_steps` steps on random limits; then the engine drains.

    `arrival` is the chance that clients come before a step, `hang_up` that a client cancels, and
    no prompt or output is longer than `max_len`. A step is lost with the chance `loss`, with
    `preemption` a running sequence loses its pages before it, and its time may be bounded
    (`is_bounded`).
    """

    seed: int
    num_steps: int
    arrival: float = 0.35
    hang_up: float = 0.15
    max_len: int = 120
    loss: float = 0.0
    preemption: float = 0.0
    is_bounded: bool = False

    @cached_property
    def limits(self) -> EngineLimits:
        rng = random.Random(f"limits {self.seed}")
        max_model_len = rng.randint(min(40, self.max_len), self.max_len)
        max_num_seqs = rng.randint(1, 6)
        is_dense = rng.random() < 0.1
        page_size = -(-max_model_len // 16) * 16 if is_dense else rng.choice([16, 16, 16, 64])
        worst_case = -(-max_model_len // page_size)
        spare = (
            0 if is_dense else rng.choice([-1, 0, 1, worst_case, worst_case * 2, worst_case * 3])
        )
        return EngineLimits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=rng.randint(max_num_seqs, 40),
            max_model_len=max_model_len,
            page_size=page_size,
            num_pages=max_num_seqs if is_dense else max(1, worst_case + spare),
            max_num_queued_reqs=rng.randint(2, 6),
            enable_prefix_caching=rng.random() < 0.85,
            slot_unit=(None, 1, 16)[self.seed % 3] if is_dense else None,
            prefix_cache_memory_share=(1.0, 1.0, 1.0, 0.6, 0.3, 0.0)[self.seed % 6],
        )

    @cached_property
    def reserved_output(self) -> float:
        return random.Random(f"reserved {self.seed}").choice([0.0, 0.0, 0.5, 1.0])

    @cached_property
    def policy(self) -> TurnPolicy:
        rng = random.Random(f"policy {self.seed}")
        return POLICIES[rng.choice(["fcfs", "fcfs", "shortest_first", "priority"])](
            rng.choice([0.2, 2.0, 20.0])
        )

    @cached_property
    def batching(self) -> Batching:
        is_static = random.Random(f"batching {self.seed}").random() < 0.125
        return "static" if is_static else "continuous"

    def step_bound(self) -> StepBound | None:
        """A new one, for it learns from the steps of a run."""
        if not self.is_bounded:
            return None
        cost = StepCost(fixed_ms=1.0, token_ms=0.25, logit_ms=0.2, key_ms=0.002)
        max_ms = random.Random(f"bound {self.seed}").choice([0.5, 2.0, 4.0, 10.0])
        return StepBound(max_ms=max_ms, cost=cost)

    @cached_property
    def tenants(self) -> tuple[Tenant, ...]:
        rng = random.Random(f"tenants {self.seed}")
        weights = [rng.choice([0.5, 1.0, 3.0]) for _ in range(rng.choice([1, 1, 2, 4]))]
        return tuple(
            Tenant(
                name=f"t{at}",
                weight=weight,
                page_share=rng.choice([1.0, 1.0, 0.8, 0.5]),
                cache_share=rng.choice([1.0, 0.4, 0.2, 0.0]),
            )
            for at, weight in enumerate(weights)
        )

    @cached_property
    def shared_prefix(self) -> tuple[int, ...]:
        return _random_tokens(random.Random(f"prefix {self.seed}"), self.max_len)

    def client(self, index: int) -> Client:
        """The `index`-th client; one in a few asks for more than the engine can ever hold."""
        return self._clients(index)

    @cached_property
    def _clients(self) -> Callable[[int], Client]:
        """Each is made once for all runs, and for all times that it finds the queue full."""
        return cache(self._make_client)

    def _make_client(self, index: int) -> Client:
        rng = random.Random(f"client {self.seed} {index}")
        kind = rng.choice(["opens a chat", *["goes on with it"] * 2, *["asks once"] * 5])
        if kind == "opens a chat":
            request = self._chat(index // 8)[0]
        elif kind == "goes on with it":
            request = self._request(rng, self._continued(rng, self._chat(index // 8)))
        else:
            request = self._request(rng, self._prompt(rng))
        hangs_up = rng.random() < self.hang_up
        return Client(
            request=request,
            cancel_after=rng.randint(0, 25) if hangs_up else None,
            cancelled_sample=rng.choice([None, rng.randrange(request.params.n)]),
        )

    def _request(self, rng: random.Random, prompt: tuple[int, ...]) -> Request:
        most = max(1, self.limits.max_model_len - len(prompt))
        lengths = [None, rng.randint(1, most), rng.randint(1, most + 1)]
        params = SamplingParams(
            max_tokens=rng.choice([*lengths, *lengths, 0]),
            temperature=rng.choice([0.0, 0.7, 1.0]),
            seed=rng.choice([None, rng.randint(0, 3)]),
            ignore_eos=rng.random() < 0.7,
            stop_token_ids=rng.choice([(), (rng.randrange(VOCAB_SIZE),)]),
            logprobs=rng.choice([None, 0, 3]),
            n=rng.choice([*[1] * 7, 2, 3, 5]),
            presence_penalty=rng.choice([*[0.0] * 3, 0.5, 1.5]),
        )
        salt = rng.choice([*[""] * 5, "another tenant"])
        priority = rng.randint(-2, 2) if self.policy.priority_s else 0
        grammar = random.Random(f"grammar {rng.random()}").choice([*[None] * 5, "a", STEADY])
        if grammar == "a" and random.Random(f"{prompt}").random() < 0.5:
            grammar = PHRASES
        tenant = random.Random(f"tenant {prompt} {priority}").choice(self.tenants)
        return Request(
            prompt_token_ids=prompt,
            params=params,
            cache_salt=salt,
            priority=priority,
            tenant=tenant,
            constraint=None if grammar is None else ConstraintSpec(grammar=grammar),
        )

    def _prompt(self, rng: random.Random) -> tuple[int, ...]:
        """Often some of the prefix that all share, and then something of its own."""
        longest = self.limits.max_model_len
        num_shared = rng.choice([0, 0, 16, 32, 48, rng.randint(0, longest)])
        most = rng.choice([longest, longest // 2, longest // 2, 8])
        tail = _random_tokens(rng, max(1, rng.randint(1, most) - num_shared))
        return (*self.shared_prefix[:num_shared], *tail)[:longest]

    def _chat(self, index: int) -> tuple[Request, tuple[int, ...]]:
        """A greedy request that ends at or near a page's end, and all its tokens."""
        rng = random.Random(f"chat {self.seed} {index}")
        longest = self.limits.max_model_len
        num_tokens = min(rng.choice([16, 32, 48, 64, 33]), longest)
        prompt = _random_tokens(rng, rng.randint(1, num_tokens - 1))
        params = SamplingParams(
            temperature=0.0, max_tokens=num_tokens - len(prompt), ignore_eos=True
        )
        request = Request(prompt_token_ids=prompt, params=params)
        return request, prompt + solo_stream(request, 0, longest).token_ids

    def _continued(
        self, rng: random.Random, chat: tuple[Request, tuple[int, ...]]
    ) -> tuple[int, ...]:
        tail = _random_tokens(rng, rng.randint(0, 20))
        return (*chat[1], *tail)[: self.limits.max_model_len - 1]


def _random_tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.choices(range(VOCAB_SIZE), k=count))
