"""What `bench serve` sends: prompts and answers of mixed lengths, and when they arrive.

A pure function of a seed; knows no server. Invariant: the same settings give the same requests in
the same order, however many clients send them.
"""

import random
from dataclasses import dataclass

from cadenza.errors import ConfigError

FIRST_TOKEN_ID = 3
"""The lowest ids are often begin, end and padding."""

MAX_NUM_REQUESTS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One prompt and the length of its answer; `after_s` is its arrival, 0 without a rate."""

    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    after_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeWorkload:
    """Lengths are drawn evenly between two bounds, both included.

    Args:
        vocab_size: prompts are of random token ids below.
        request_rate: arrivals a second, at exponential intervals; None sends the next request
            when a client's last one is done.
        part: loads of one seed and different parts share no prompt, which a server might keep.

    Raises:
        ConfigError: a value cannot work.
    """

    num_requests: int
    prompt_lens: tuple[int, int] = (16, 512)
    output_lens: tuple[int, int] = (16, 128)
    vocab_size: int = 1000
    request_rate: float | None = None
    seed: int = 0
    part: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.num_requests <= MAX_NUM_REQUESTS:
            raise ConfigError(
                f"{self.num_requests} requests were asked for; 1 to {MAX_NUM_REQUESTS} can be sent"
            )
        for flag, (low, high) in (
            ("input-len", self.prompt_lens),
            ("output-len", self.output_lens),
        ):
            if not 1 <= low <= high <= 1 << 20:
                raise ConfigError(
                    f"--{flag} {low}:{high} must be two whole numbers from 1 on, the second not "
                    f"below the first"
                )
        if self.vocab_size <= FIRST_TOKEN_ID:
            raise ConfigError(f"--vocab-size {self.vocab_size} must be above {FIRST_TOKEN_ID}")
        if self.request_rate is not None and not 0 < self.request_rate < 1e6:
            raise ConfigError(f"--request-rate {self.request_rate} must be above 0 and below 1e6")

    def requests(self) -> tuple[PlannedRequest, ...]:
        """All of them, in the order of their arrival."""
        rng = random.Random(f"bench serve {self.seed} {self.part}")  # noqa: S311 - a workload, no secret
        ids = range(FIRST_TOKEN_ID, self.vocab_size)
        arrival_s = 0.0
        planned: list[PlannedRequest] = []
        for _ in range(self.num_requests):
            length = rng.randint(*self.prompt_lens)
            planned.append(
                PlannedRequest(
                    prompt_token_ids=tuple(rng.choices(ids, k=length)),
                    max_tokens=rng.randint(*self.output_lens),
                    after_s=arrival_s,
                )
            )
            if self.request_rate is not None:
                arrival_s += rng.expovariate(self.request_rate)
        return tuple(planned)
