"""What `cadenza bench batching` plays: its flags, the settings A to D, and the requests of a plan.
Pure functions of a seed, without heavy imports. Invariant: the same plan gives the same requests,
whatever the mode, the load and the machine.
"""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from cadenza.bench.datasets import Arrivals
from cadenza.bench.workloads import (
    FIRST_TOKEN_ID,
    MAX_CLIENTS,
    MAX_CONCURRENCIES,
    MAX_NUM_REQUESTS,
    PlannedRequest,
    check_lengths,
    check_repeats,
    check_whole,
)
from cadenza.config import MAX_NUM_SEQS_BOUND, MAX_SEED
from cadenza.errors import ConfigError
from cadenza.option import flag

BatchingMode = Literal["continuous", "static", "static-whole", "sequential", "padded"]
Setting = Literal["A", "B", "C", "D"]

MODES: tuple[BatchingMode, ...] = get_args(BatchingMode)
MAX_RATE = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingLoad:
    """How requests arrive: from `clients` that each wait for their answers (closed loop), at
    random intervals with `rate` a second on average (open loop), or all at once (neither)."""

    clients: int | None = None
    rate: float | None = None

    @property
    def is_saturated(self) -> bool:
        return self.clients is None and self.rate is None

    @property
    def label(self) -> str:
        if self.clients is not None:
            return "1 client" if self.clients == 1 else f"{self.clients} clients"
        return "all at once" if self.rate is None else f"{self.rate:g} requests/s"


@dataclass(frozen=True, slots=True, kw_only=True)
class LongAnswers:
    """One request of each `every`, at a random place among them, has an answer of `length`."""

    every: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingPlan:
    """`rows`: requests that run at the same time, and at most in one batch; `system_len`: tokens
    that all prompts begin with, beside their own."""

    setting: Setting | None = None
    rows: int = 8
    modes: tuple[BatchingMode, ...] = MODES
    loads: tuple[BatchingLoad, ...] = ()
    num_requests: int = 16
    prompt_lens: tuple[int, int] = (16, 128)
    output_lens: tuple[int, int] = (8, 96)
    long_answers: LongAnswers | None = None
    system_len: int = 0
    repeats: int = 3
    seed: int = 0

    def within(self, context: int) -> "BatchingPlan":
        """With as much of the system prompt as a context has room for beside the rest. Raises
        ConfigError where there is room for none."""
        if not self.system_len:
            return self
        others = self.prompt_lens[1] + self.longest_answer
        if context <= others:
            raise ConfigError(
                f"--setting {self.setting} needs a context of more than the {others} tokens that "
                f"its questions and answers take, and here are {context}; raise --max-model-len, "
                f"or give a model with a longer context"
            )
        return replace(self, system_len=min(self.system_len, context - others))

    @property
    def longest_prompt(self) -> int:
        return self.system_len + self.prompt_lens[1]

    @property
    def longest_answer(self) -> int:
        long = 0 if self.long_answers is None else self.long_answers.length
        return max(long, self.output_lens[1])

    def requests(self, vocab_size: int) -> tuple[PlannedRequest, ...]:
        """In the order of arrival; no two prompts go on alike behind the common system prompt."""
        rng = random.Random(f"bench batching {self.seed}")
        ids = range(FIRST_TOKEN_ID, vocab_size)
        system = tuple(rng.choices(ids, k=self.system_len))
        answers = self._answer_lens(rng)
        return tuple(
            PlannedRequest(
                prompt_token_ids=system + tuple(rng.choices(ids, k=rng.randint(*self.prompt_lens))),
                max_tokens=answer,
            )
            for answer in answers
        )

    def arrivals_s(self, load: BatchingLoad) -> list[float]:
        """When each request of an open load arrives, from the start; at once without a rate."""
        if load.rate is None:
            return [0.0] * self.num_requests
        rng = random.Random(f"bench batching arrivals {self.seed}")
        return list(Arrivals(rate=load.rate).times(self.num_requests, rng))

    def _answer_lens(self, rng: random.Random) -> list[int]:
        lens = [rng.randint(*self.output_lens) for _ in range(self.num_requests)]
        if self.long_answers is not None:
            every = self.long_answers.every
            for first in range(0, self.num_requests - every + 1, every):
                lens[first + rng.randrange(every)] = self.long_answers.length
        return lens


_AT_ONCE = (BatchingLoad(),)
SETTINGS: Mapping[Setting, BatchingPlan] = {
    "A": BatchingPlan(
        setting="A",
        num_requests=8,
        loads=tuple(BatchingLoad(clients=clients) for clients in (1, 2, 4, 8)),
        prompt_lens=(128, 128),
        output_lens=(64, 64),
    ),
    "B": BatchingPlan(
        setting="B",
        modes=("continuous", "static", "padded"),
        num_requests=48,
        loads=_AT_ONCE,
        prompt_lens=(32, 512),
        output_lens=(16, 256),
    ),
    "C": BatchingPlan(
        setting="C",
        modes=("continuous", "static", "padded"),
        num_requests=60,
        loads=_AT_ONCE,
        prompt_lens=(8, 8),
        output_lens=(8, 16),
        long_answers=LongAnswers(every=10, length=512),
    ),
    "D": BatchingPlan(
        setting="D",
        modes=(),
        num_requests=8,
        loads=(BatchingLoad(clients=1),),
        prompt_lens=(64, 64),
        output_lens=(8, 8),
        system_len=2000,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingOptions:
    """What is given of a plan; the rest is the setting's, or the default's. Raises ConfigError
    where a value is out of bounds, or is not one of the setting's."""

    setting: Setting | None = flag(
        None,
        "A: 128 tokens in, 64 out, 1 to 8 clients. B: 32 to 512 in, 16 to 256 out, all at once. "
        "C: nine of ten answers of 8 to 16 tokens, one of 512, all at once. D: a system prompt of "
        "2,000 tokens, or as many as the model's context takes, in the prefix cache or not. Each "
        "has its bars; other flags change it.",
    )
    max_num_seqs: int | None = flag(
        None,
        "Rows: requests at the same time, and the most of a batch (default: 8).",
        *("--max-num-seqs", "--parallel", "-np", "--max-running-requests", "--decode-concurrency"),
        "--max-batch-size",
        has_variable=True,
    )
    modes: tuple[BatchingMode, ...] | None = flag(
        None,
        f"Of {', '.join(MODES)}, with commas between; each plays the same requests (default: all; "
        "continuous, static and padded in settings B and C).",
    )
    num_requests: int | None = flag(
        None, "Requests of each load (default: 16, or the setting's: 8, 48, 60, 8)."
    )
    concurrency: tuple[int, ...] | None = flag(
        None,
        "Clients that wait for their answers, one load for each number (default: as many as rows, "
        "and a load of all requests at once).",
    )
    request_rate: tuple[float, ...] | None = flag(
        None, "Arrivals a second at random (Poisson), one load for each number; inf: all at once."
    )
    prompt_lens: tuple[int, int] | None = flag(
        None, "Tokens of each prompt (default: 16:128).", "--input-len"
    )
    output_lens: tuple[int, int] | None = flag(
        None, "Tokens of each answer (default: 8:96).", "--output-len"
    )
    repeats: int | None = flag(None, "Rounds, in each of which all modes play (default: 3).")
    seed: int = flag(0, "Seed of the requests and arrivals.", "--traffic-seed")
    check: bool = flag(False, "Exit with 1 also when a bar of the setting is missed.")

    def __post_init__(self) -> None:
        self._check_numbers()
        for mode in self.modes or ():
            if mode not in MODES:
                raise ConfigError(f"--modes {mode!r} is not one of {', '.join(MODES)}")
        if self.modes is not None and self.setting == "D":
            raise ConfigError("--modes: setting D compares the prefix cache, not modes; leave it")
        if self.modes is not None and "continuous" not in self.modes:
            raise ConfigError("--modes needs continuous, with which the others are compared")
        if self.modes is not None and len(set(self.modes)) < len(self.modes):
            raise ConfigError(f"--modes {','.join(self.modes)} names a mode twice")
        if self.setting in ("B", "C", "D") and (self.concurrency or self.request_rate):
            raise ConfigError(
                f"--setting {self.setting} has its own load; leave out --concurrency and "
                f"--request-rate"
            )
        if self.check and self.setting is None:
            raise ConfigError("--check needs --setting A, B, C or D, whose bars it checks")

    def _check_numbers(self) -> None:
        counts = len(self.concurrency or ()) + len(self.request_rate or ())
        check_whole("concurrency (how many values)", counts, 0, MAX_CONCURRENCIES)
        for clients in self.concurrency or ():
            check_whole("concurrency", clients, 1, MAX_CLIENTS)
        for rate in self.request_rate or ():
            if not (0 < rate <= MAX_RATE or rate == math.inf):
                raise ConfigError(
                    f"--request-rate {rate} must be above 0 and at most {MAX_RATE:g}, or inf"
                )
        if self.num_requests is not None:
            check_whole("num-requests", self.num_requests, 1, MAX_NUM_REQUESTS)
        if self.max_num_seqs is not None:
            check_whole("max-num-seqs", self.max_num_seqs, 1, MAX_NUM_SEQS_BOUND)
        if self.repeats is not None:
            check_repeats(self.repeats)
        check_whole("traffic-seed", self.seed, 0, MAX_SEED)
        plan = SETTINGS[self.setting] if self.setting else BatchingPlan()
        check_lengths(self.prompt_lens or plan.prompt_lens, self.output_lens or plan.output_lens)

    def plan(self) -> BatchingPlan:
        names = ("modes", "num_requests", "prompt_lens", "output_lens", "repeats", "seed")
        given: dict[str, Any] = {name: getattr(self, name) for name in names}
        given["rows"] = self.max_num_seqs
        base = SETTINGS[self.setting] if self.setting else BatchingPlan()
        plan = replace(base, **{name: each for name, each in given.items() if each is not None})
        loads = self._loads() or plan.loads or (BatchingLoad(clients=plan.rows), *_AT_ONCE)
        return replace(plan, loads=loads)

    def _loads(self) -> tuple[BatchingLoad, ...]:
        closed = [BatchingLoad(clients=clients) for clients in self.concurrency or ()]
        rates = [None if rate == math.inf else rate for rate in self.request_rate or ()]
        return (*closed, *(BatchingLoad(rate=rate) for rate in rates))
