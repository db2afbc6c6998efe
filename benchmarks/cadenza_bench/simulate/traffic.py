"""`TrafficOptions`: the requests of `cadenza bench simulate`, and when each of them arrives. Pure
functions of a seed, without heavy imports. Invariant: the same settings give the same requests,
whatever the policy.
"""

import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal, get_args

from cadenza.bench.workloads import MAX_DRAWN_LEN, MAX_NUM_REQUESTS, check_lengths, check_whole
from cadenza.config import MAX_SEED, SchedulingPolicy
from cadenza.errors import ConfigError
from cadenza.option import flag

Arrivals = Literal["poisson", "bursty"]
Lengths = Literal["uniform", "tailed"]

VOCAB_SIZE = 1000
BURST_REQUESTS = 20  # requests of a burst, on average
BURST_RATE = 10.0  # the rate within a burst, as a multiple of the average rate
# Standard deviations of a normal distribution between its median and its 95th percentile.
TAIL_QUANTILE = 1.645
MAX_TAIL = 10  # the longest length of a long tail, as a multiple of the upper bound
NUM_COSTS = 4
MAX_COST_MS = 1e9
MAX_TENANTS = 100
MAX_REPLICAS = 64
MAX_PREFIXES = 10_000
_RANDOM_TOKENS = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficArrival:
    """A request, `after_s` the start; `tenant` counts from 0."""

    after_s: float
    tenant: int
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    priority: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficOptions:
    """The traffic, on what server, and what is reported of it. Raises ConfigError where a value is
    out of bounds."""

    step_cost: tuple[float, ...] | None = flag(
        None,
        "Milliseconds of a step, a token, a logit row and a key attended to, in place of those of "
        "a model, which is loaded to measure them.",
        metavar="MS,MS,MS,MS",
    )
    policies: tuple[SchedulingPolicy, ...] = flag(
        get_args(SchedulingPolicy),
        "Policies with commas between; each plays the same requests (default: all).",
    )
    replicas: int = flag(1, "Engines that serve as one, each as it is described here.")
    num_requests: int = flag(2000, "Requests of all tenants.")
    request_rate: float = flag(2.0, "Arrivals a second of each tenant.")
    arrivals: Arrivals = flag(
        "poisson", "poisson, or bursty: some 20 requests at ten times the rate, then none."
    )
    prompt_lens: tuple[int, int] = flag(
        (16, 512), "Tokens of each prompt, beside its prefix (default: 16:512).", "--input-len"
    )
    output_lens: tuple[int, int] = flag(
        (16, 128), "Tokens of each answer (default: 16:128).", "--output-len"
    )
    lengths: Lengths = flag(
        "uniform",
        "uniform between the bounds, or tailed: log-normal, with them as 5th and 95th percentile, "
        "up to ten times the upper one.",
    )
    num_tenants: int = flag(1, "API keys that share the server.")
    flood: float = flag(
        1.0, "The first tenant's rate, as a multiple of the others'; 0 leaves it out."
    )
    num_prefixes: int = flag(0, "Prefixes of which each prompt of a tenant begins with one.")
    prefix_len: int = flag(256, "Tokens of such a prefix.")
    max_ttft_s: float = flag(2.0, "Goodput: the latest first token, in seconds.")
    max_tpot_ms: float = flag(200.0, "Goodput: the longest average time of a further token, in ms.")
    seed: int = flag(0, "Seed of the traffic.", "--traffic-seed")

    def __post_init__(self) -> None:
        costs = (1.0,) * NUM_COSTS if self.step_cost is None else self.step_cost
        if len(costs) != NUM_COSTS or not all(0 < cost < MAX_COST_MS for cost in costs):
            raise ConfigError(
                f"--step-cost {','.join(f'{cost:g}' for cost in costs)} must be {NUM_COSTS} "
                f"numbers of milliseconds above 0: of a step, a token, a logit row and a key"
            )
        for policy in self.policies:
            _check_choice("policies", policy, get_args(SchedulingPolicy))
        if not self.policies:
            raise ConfigError("--policies is empty; give one or more, with commas between them")
        _check_choice("arrivals", self.arrivals, get_args(Arrivals))
        _check_choice("lengths", self.lengths, get_args(Lengths))
        check_whole("num-requests", self.num_requests, 1, MAX_NUM_REQUESTS)
        check_whole("replicas", self.replicas, 1, MAX_REPLICAS)
        check_whole("num-tenants", self.num_tenants, 1, MAX_TENANTS)
        check_whole("num-prefixes", self.num_prefixes, 0, MAX_PREFIXES)
        check_whole("prefix-len", self.prefix_len, 1, MAX_DRAWN_LEN)
        check_whole("seed", self.seed, 0, MAX_SEED)
        check_lengths(self.prompt_lens, self.output_lens)
        _check_positive("request-rate", self.request_rate, 1e6)
        _check_positive("max-ttft-s", self.max_ttft_s, 1e6)
        _check_positive("max-tpot-ms", self.max_tpot_ms, 1e9)
        least = 0.0 if self.num_tenants > 1 else 1e-3
        if not least <= self.flood <= 1e6:
            raise ConfigError(
                f"--flood {self.flood} must be from {least:g} to 1e6; 0 needs --num-tenants 2 or "
                f"more"
            )

    def traffic(self, max_model_len: int) -> Iterator[TrafficArrival]:
        """The arrivals in order; lengths are cut so that each request fits the context."""
        rates = [self.request_rate * self.flood, *[self.request_rate] * (self.num_tenants - 1)]
        sources = [self._source(at, rate, max_model_len) for at, rate in enumerate(rates) if rate]
        merged = heapq.merge(*sources, key=lambda arrival: arrival.after_s)
        return islice(merged, self.num_requests)

    def _source(self, tenant: int, rate: float, max_model_len: int) -> Iterator[TrafficArrival]:
        rng = random.Random(f"simulate {self.seed} {tenant}")
        tokens = tuple(rng.choices(range(VOCAB_SIZE), k=_RANDOM_TOKENS))
        prefixes = [self._cut(rng, tokens, self.prefix_len) for _ in range(self.num_prefixes)]
        after_s = 0.0
        while True:
            after_s += self._interval_s(rng, rate)
            prefix = rng.choice(prefixes) if prefixes else ()
            prompt = prefix + self._cut(rng, tokens, self._length(rng, self.prompt_lens))
            prompt = prompt[: max_model_len - 1]
            most = max_model_len - len(prompt)
            yield TrafficArrival(
                after_s=after_s,
                tenant=tenant,
                prompt_token_ids=prompt,
                max_tokens=min(most, self._length(rng, self.output_lens)),
                priority=rng.randrange(2),
            )

    def _interval_s(self, rng: random.Random, rate: float) -> float:
        if self.arrivals == "poisson":
            return rng.expovariate(rate)
        if rng.randrange(BURST_REQUESTS):
            return rng.expovariate(rate * BURST_RATE)
        pause = BURST_REQUESTS - (BURST_REQUESTS - 1) / BURST_RATE
        return rng.expovariate(rate / pause)

    def _length(self, rng: random.Random, bounds: tuple[int, int]) -> int:
        low, high = bounds
        if self.lengths == "uniform" or low == high:
            return rng.randint(low, high)
        sigma = math.log(high / low) / (2 * TAIL_QUANTILE)
        drawn = rng.lognormvariate(math.log(low * high) / 2, sigma)
        return max(1, min(round(drawn), MAX_TAIL * high))

    @staticmethod
    def _cut(rng: random.Random, tokens: tuple[int, ...], count: int) -> tuple[int, ...]:
        start = rng.randrange(len(tokens))
        found = tokens[start : start + count]
        while len(found) < count:
            found += tokens[: count - len(found)]
        return found


def _check_choice(flag: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"--{flag} {value!r} is not one of {', '.join(allowed)}")


def _check_positive(flag: str, value: float, high: float) -> None:
    if not 0 < value <= high:
        raise ConfigError(f"--{flag} {value} must be above 0 and at most {high:g}")
