"""What the benchmarks play: `Workload` on an engine, `ServeOptions` on a server; their bounds.

Pure functions of a seed; imports nothing heavy, because the command line's flags follow from these
classes. Invariant: the same settings give the same requests in the same order, however many clients
send them.
"""

import random
import re
from dataclasses import dataclass
from typing import Literal

from cadenza.config import MAX_NUM_SEQS_BOUND, flag
from cadenza.errors import ConfigError

PREFILL_STEPS = 4
"""A prefill run has prompts for at least this many full steps."""

MAX_REPEATS = 1000
MAX_CONCURRENCIES = 64
MAX_CLIENTS = 1024
MAX_NUM_REQUESTS = 1_000_000
MAX_LEN = 1 << 24
MAX_DRAWN_LEN = 1 << 20
REQUESTS_PER_CLIENT = 6
LEAST_REQUESTS = 12
REQUESTS_AT_A_RATE = 192
FIRST_TOKEN_ID = 3
"""The lowest ids are often begin, end and padding."""

SampledRows = Literal["none", "one", "all"]


def check_whole(flag: str, value: int, low: int, high: int) -> None:
    """Raises ConfigError when a flag's value is out of bounds."""
    if not low <= value <= high:
        raise ConfigError(f"--{flag} {value} must be a whole number from {low} to {high}")


def check_lengths(prompts: tuple[int, int], answers: tuple[int, int]) -> None:
    """Raises ConfigError when the bounds of lengths are out of bounds."""
    for name, (low, high) in (("input-len", prompts), ("output-len", answers)):
        if not 1 <= low <= high <= MAX_DRAWN_LEN:
            raise ConfigError(
                f"--{name} {low}:{high} must be two whole numbers from 1 to {MAX_DRAWN_LEN}, the "
                f"second not below the first"
            )


def check_repeats(repeats: int) -> None:
    """Raises ConfigError when `--repeats` is out of bounds."""
    check_whole("repeats", repeats, 1, MAX_REPEATS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The runs of `cadenza bench throughput`.

    Raises:
        ConfigError: a number is out of bounds.
    """

    input_len: int = flag(128, "Tokens of each prompt.")
    output_len: int = flag(64, "Tokens of each answer, 2 or more.")
    concurrency: tuple[int, ...] = flag(
        (1, 4, 8, 32, 64),
        "Requests at the same time, one result for each number (default: 1,4,8,32,64).",
    )
    repeats: int = flag(5, "Runs of each kind; the medians are shown.")
    profile: bool = flag(False, "Also show the time and the bytes of each operation.")
    sampling: SampledRows = flag(
        "none", "Decoding rows sampled with top-p and penalties; the others are greedy."
    )

    def __post_init__(self) -> None:
        check_whole("input-len", self.input_len, 1, MAX_LEN)
        check_whole("output-len", self.output_len, 2, MAX_LEN)
        check_repeats(self.repeats)
        check_whole("concurrency (how many values)", len(self.concurrency), 1, MAX_CONCURRENCIES)
        for rows in self.concurrency:
            check_whole("concurrency", rows, 1, MAX_NUM_SEQS_BOUND)

    def num_sampled(self, rows: int) -> int:
        """How many of `rows` are sampled with top-p and penalties."""
        return {"none": 0, "one": 1, "all": rows}[self.sampling]

    @property
    def most_rows(self) -> int:
        return max(self.concurrency)

    def num_prefill_prompts(self, rows: int, token_budget: int) -> int:
        return max(rows, -(-PREFILL_STEPS * token_budget // self.input_len))

    def most_tokens(self, rows: int, token_budget: int) -> int:
        """Output tokens of the row that starts first, until the last one has its output.

        While a prompt is computed, at most `rows` - 1 rows decode beside it.
        """
        for_prompts = max(1, token_budget - rows + 1)
        return self.output_len + -(-rows * self.input_len // for_prompts) + 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One prompt and the length of its answer; `after_s` is its arrival, 0 without a rate."""

    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    after_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """How `cadenza bench serve` loads a server. Lengths are drawn evenly, both bounds included.

    Args:
        url: with or without `/v1`.
        timeout_s: for the next piece of an answer.

    Raises:
        ConfigError: a value is out of bounds.
    """

    url: str
    model: str | None = flag(
        None, "The model's name on the server (default: the first one listed)."
    )
    api_key: str | None = flag(None, "Sent as a bearer token.", has_variable=True)
    concurrency: tuple[int, ...] = flag(
        (1, 8, 32), "Clients at the same time, one load for each (default: 1,8,32)."
    )
    num_requests: int | None = flag(
        None,
        "Requests of each load (default: six for each client, at least 12; 192 at a rate).",
    )
    request_rate: float | None = flag(
        None,
        "Arrivals a second, at random intervals, in place of clients that wait for their answers.",
    )
    prompt_lens: tuple[int, int] = flag(
        (16, 512), "Tokens of each prompt (default: 16:512).", "--input-len"
    )
    output_lens: tuple[int, int] = flag(
        (16, 128), "Tokens of each answer (default: 16:128).", "--output-len"
    )
    vocab_size: int = flag(1000, "Prompts are of random token ids below this number.")
    seed: int = flag(0, "Seed of the load.")
    ignore_eos: bool = flag(
        True,
        "Whether answers have their full length, by ignore_eos, or may end early.",
        "--ignore-eos/--respect-eos",
    )
    time_tokens: bool = flag(
        False, "Time each chunk that has token ids, also without text, by return_token_ids."
    )
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        if not re.match(r"https?://[^/]", self.url):
            raise ConfigError(f"{self.url!r} is not a URL; give one such as http://127.0.0.1:8000")
        check_whole("concurrency (how many values)", len(self.concurrency), 1, MAX_CONCURRENCIES)
        for clients in self.concurrency:
            check_whole("concurrency", clients, 1, MAX_CLIENTS)
        if self.num_requests is not None:
            check_whole("num-requests", self.num_requests, 1, MAX_NUM_REQUESTS)
        check_lengths(self.prompt_lens, self.output_lens)
        if self.vocab_size <= FIRST_TOKEN_ID:
            raise ConfigError(f"--vocab-size {self.vocab_size} must be above {FIRST_TOKEN_ID}")
        if self.request_rate is not None and not 0 < self.request_rate < 1e6:
            raise ConfigError(f"--request-rate {self.request_rate} must be above 0 and below 1e6")

    @property
    def base_url(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1")

    def loads(self) -> list[tuple[int | None, tuple[PlannedRequest, ...]]]:
        """(clients, requests) of each load; one load without clients where there is a rate."""
        if self.request_rate is not None:
            return [(None, self.requests(self.num_requests or REQUESTS_AT_A_RATE, part=1))]
        sizes = [
            self.num_requests or max(LEAST_REQUESTS, REQUESTS_PER_CLIENT * clients)
            for clients in self.concurrency
        ]
        return [
            (clients, self.requests(size, part=part))
            for part, (clients, size) in enumerate(zip(self.concurrency, sizes, strict=True), 1)
        ]

    def warm_up(self) -> PlannedRequest:
        """One request of the same kind that is in no load."""
        return self.requests(1, part=0)[0]

    def requests(self, count: int, *, part: int = 0) -> tuple[PlannedRequest, ...]:
        """In the order of arrival. Different parts share no prompt, which a server might cache."""
        rng = random.Random(f"bench serve {self.seed} {part}")  # noqa: S311 - a workload, no secret
        ids = range(FIRST_TOKEN_ID, self.vocab_size)
        arrival_s = 0.0
        planned: list[PlannedRequest] = []
        for _ in range(count):
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
