"""`Workload`: what `cadenza bench throughput` plays; requests and bounds that benchmarks share.
Imports nothing heavy, because the command line's flags follow from this class."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from cadenza.config import MAX_NUM_SEQS_BOUND
from cadenza.errors import ConfigError
from cadenza.option import flag

PREFILL_STEPS = 4  # a prefill run has prompts for at least this many full steps

WARM_TOKENS = 8  # tokens of a decode run that warms up

MAX_REPEATS = 1000
MAX_CONCURRENCIES = 64
MAX_CLIENTS = 1024
MAX_NUM_REQUESTS = 1_000_000
MAX_LEN = 1 << 24
MAX_DRAWN_LEN = 1 << 20
FIRST_TOKEN_ID = 3  # the lowest ids are often begin, end and padding

ChatMessages = tuple[Mapping[str, str], ...]
SampledRows = Literal["none", "one", "all"]


def check_whole(flag: str, value: int, low: int, high: int) -> None:
    """Raises ConfigError."""
    if not low <= value <= high:
        raise ConfigError(f"--{flag} {value} must be a whole number from {low} to {high}")


def check_lengths(prompts: tuple[int, int], answers: tuple[int, int]) -> None:
    """Raises ConfigError."""
    for name, (low, high) in (("input-len", prompts), ("output-len", answers)):
        if not 1 <= low <= high <= MAX_DRAWN_LEN:
            raise ConfigError(
                f"--{name} {low}:{high} must be two whole numbers from 1 to {MAX_DRAWN_LEN}, the "
                f"second not below the first"
            )


def check_repeats(repeats: int) -> None:
    """Raises ConfigError."""
    check_whole("repeats", repeats, 1, MAX_REPEATS)


def fitting_context(needed: int, asked: int | None, trained: int) -> int:
    """`--max-model-len` for requests of `needed` tokens, or what was `asked` for. Raises
    ConfigError where they fit neither that nor the model's `trained` positions."""
    if asked is not None and asked < needed:
        raise ConfigError(
            f"--max-model-len {asked} is below the {needed} tokens that the runs take; raise it, "
            f"or lower --input-len or --output-len"
        )
    if asked is None and needed > trained:
        raise ConfigError(
            f"the runs take {needed} tokens, and the model has {trained} positions; lower "
            f"--input-len or --output-len, or give a model with a longer context"
        )
    return asked or needed


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The runs of `cadenza bench throughput`. Raises ConfigError: a number is out of bounds."""

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
        return {"none": 0, "one": 1, "all": rows}[self.sampling]

    @property
    def most_rows(self) -> int:
        return max(self.concurrency)

    def num_prefill_prompts(self, rows: int, token_budget: int) -> int:
        return max(rows, -(-PREFILL_STEPS * token_budget // self.input_len))

    def most_tokens(self, rows: int, token_budget: int) -> int:
        """Of the row that starts first, until the last has its output: while a prompt is computed,
        at most `rows` - 1 rows decode."""
        for_prompts = max(1, token_budget - rows + 1)
        return self.output_len + -(-rows * self.input_len // for_prompts) + 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """A prompt in one of three forms. `messages`: of a chat; the others are completions. `turns`:
    what the user says after each answer. `after_s`: when it is due, from the start of the load."""

    prompt_token_ids: tuple[int, ...] = ()
    text: str = ""
    messages: ChatMessages = ()
    max_tokens: int
    turns: tuple[str, ...] = ()
    after_s: float = 0.0
