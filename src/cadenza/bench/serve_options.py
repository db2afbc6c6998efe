"""How `cadenza bench serve` and `compare` load a server: flags (vLLM's names where it has them) and
bounds. Imports nothing heavy, as flags follow from it. Invariant: what cannot work is refused
before anything is sent."""

import itertools
import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from cadenza.bench.datasets import (
    DEFAULT_FILE_LENS,
    Arrivals,
    DatasetName,
    DrawnPrompts,
    PromptFile,
    PromptSource,
    RampStrategy,
)
from cadenza.bench.workloads import (
    FIRST_TOKEN_ID,
    MAX_CLIENTS,
    MAX_CONCURRENCIES,
    MAX_DRAWN_LEN,
    MAX_NUM_REQUESTS,
    PlannedRequest,
    check_lengths,
    check_whole,
)
from cadenza.errors import ConfigError
from cadenza.option import flag
from cadenza.server_link import CACERT_HELP, ServerLink

PromptForm = Literal["auto", "ids", "text"]
GoodputMetric = Literal["ttft", "tpot", "e2el"]

REQUESTS_PER_CLIENT = 6
LEAST_REQUESTS = 12
REQUESTS_AT_A_RATE = 192
MAX_RATE = 1e6
MIN_BURSTINESS, MAX_BURSTINESS = 0.001, 1e6
MAX_TURNS = 1000
MAX_PREFIXES = 10_000
MAX_SWEEP = 64
DEFAULT_INPUT_LENS = (16, 512)
DEFAULT_OUTPUT_LENS = (16, 128)
_FILES = ("sharegpt", "custom")


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """The most milliseconds of a good request; None bounds nothing."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2el_ms: float | None = None


def parse_goodput(text: str) -> Goodput:
    """Reads `ttft:200,tpot:50`. Raises ConfigError."""
    bounds: dict[str, float] = {}
    for part in re.split(r"[,\s]+", text.strip()):
        name, _, value = part.partition(":")
        try:
            bound = float(value)
        except ValueError:
            bound = math.nan
        if name not in get_args(GoodputMetric) or not 0 < bound < math.inf:
            raise ConfigError(
                f"--goodput {text!r}: {part!r} must be ttft, tpot or e2el, a colon and "
                f"milliseconds above 0, such as ttft:200,tpot:50"
            )
        bounds[f"{name}_ms"] = bound
    return Goodput(**bounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """`url` with or without `/v1`. Raises ConfigError."""

    url: str
    model: str | None = flag(
        None, "The model's name on the server (default: the first one listed)."
    )
    api_key: str | None = flag(None, "Sent as a bearer token.", has_variable=True)
    cacert: str | None = flag(None, CACERT_HELP, metavar="FILE")

    def __post_init__(self) -> None:
        _ = self.link

    @property
    def link(self) -> ServerLink:
        key, file = self.api_key, self.cacert
        return ServerLink(url=self.url, api_key=key, cacert=file, is_direct=True)

    @property
    def base_url(self) -> str:
        return self.link.base_url


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLoad:
    """One load: so many clients that wait for their answers, or arrivals."""

    clients: int | None = None
    arrivals: Arrivals | None = None
    requests: tuple[PlannedRequest, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Lengths are drawn evenly, both bounds included. `timeout_s`: for the next piece of an answer.
    Raises ConfigError."""

    concurrency: tuple[int, ...] = flag(
        (1, 8, 32),
        "Closed loop: clients that send their next request when the last one is answered, one load "
        "for each number (default: 1,8,32).",
        *("--concurrency", "--max-concurrency"),
    )
    num_requests: int | None = flag(
        None,
        "Requests (or conversations) of each load (default: six for each client, at least 12; 192 "
        "at a rate).",
        *("--num-requests", "--num-prompts"),
    )
    request_rate: tuple[float, ...] | None = flag(
        None,
        "Open loop: arrivals a second at random intervals, however many answers are open, in place "
        "of clients; one load for each rate.",
    )
    burstiness: float = flag(
        1.0,
        "Shape of the gamma distribution of the intervals: 1 is a Poisson process, less comes in "
        "bursts, more is more even.",
    )
    ramp_up_strategy: RampStrategy | None = flag(
        None, "How the rate rises over the requests, in place of --request-rate."
    )
    ramp_up_start_rps: float | None = flag(None, "The rate of the first request.")
    ramp_up_end_rps: float | None = flag(None, "The rate of the last request.")
    sweep: int | None = flag(
        None,
        "Find the capacity: one client, then as many as the largest --concurrency, then this many "
        "rates between what these two reached.",
    )
    probe_request_rate: float = flag(
        0.0, "Also send so many requests a second for one token, timed apart (0: none)."
    )
    dataset: DatasetName = flag(
        "random",
        "The prompts: random; those of a file (sharegpt, or custom: JSON lines with prompt or "
        "messages, and output_tokens); random ones that share prefixes; conversations, random or "
        "of a ShareGPT file.",
        *("--dataset", "--dataset-name"),
    )
    dataset_path: str | None = flag(
        None, "The file of sharegpt, custom or multi-turn.", metavar="FILE"
    )
    prompts: PromptForm = flag(
        "auto",
        "Random prompts as token ids, or as text of common words, whose lengths are then in words; "
        "auto: as ids, and as text where servers are compared.",
    )
    prompt_lens: tuple[int, int] = flag(
        DEFAULT_INPUT_LENS,
        "Tokens of each random prompt, or of a user's turn (default: 16:512).",
        "--input-len",
    )
    output_lens: tuple[int, int] | None = flag(
        None, "Tokens of each answer (default: 16:128; of a file: as it says).", "--output-len"
    )
    prefix_repetition_num_prefixes: int = flag(10, "Prefixes of prefix-repetition.")
    prefix_repetition_prefix_len: int = flag(256, "Tokens of such a prefix.")
    num_turns: int = flag(4, "Turns of a random conversation.")
    vocab_size: int = flag(1000, "Prompts are of random token ids below this number.")
    seed: int = flag(0, "Seed of the load.")
    ignore_eos: bool = flag(
        True,
        "Whether answers have their full length, by ignore_eos, or may end early.",
        "--ignore-eos/--respect-eos",
    )
    num_warmups: int = flag(
        1, "Requests that are sent at once before the first load and are in no figure."
    )
    goodput: Goodput | None = flag(
        None,
        "Count the requests that keep bounds in milliseconds, such as ttft:200,tpot:50,e2el:5000.",
        metavar="NAME:MS,…",
        parser=parse_goodput,
    )
    metric_percentiles: tuple[float, ...] = flag(
        (50.0, 95.0, 99.0), "Percentiles of each latency, in JSON (default: 50,95,99)."
    )
    max_client_share: float = flag(
        0.05,
        "The largest share of processor time or of latency that this client may have; above it a "
        "run is void.",
    )
    time_tokens: bool = flag(
        False, "Time each chunk that has token ids, also without text, by return_token_ids."
    )
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        check_whole("concurrency (how many values)", len(self.concurrency), 1, MAX_CONCURRENCIES)
        for clients in self.concurrency:
            check_whole("concurrency", clients, 1, MAX_CLIENTS)
        if self.num_requests is not None:
            check_whole("num-requests", self.num_requests, 1, MAX_NUM_REQUESTS)
        check_lengths(self.prompt_lens, self.output_lens or DEFAULT_FILE_LENS)
        if self.vocab_size <= FIRST_TOKEN_ID:
            raise ConfigError(f"--vocab-size {self.vocab_size} must be above {FIRST_TOKEN_ID}")
        check_whole("num-warmups", self.num_warmups, 0, MAX_CLIENTS)
        for percentile in self.metric_percentiles:
            if not 0 <= percentile <= 100:
                raise ConfigError(f"--metric-percentiles {percentile:g} must be from 0 to 100")
        if not 0 < self.max_client_share <= 1:
            raise ConfigError(
                f"--max-client-share {self.max_client_share} must be above 0 and at most 1"
            )
        self._check_rates()
        self._check_dataset()

    def _check_rates(self) -> None:
        rates = self.request_rate or ()
        check_whole("request-rate (how many values)", len(rates), 0, MAX_CONCURRENCIES)
        for rate in rates:
            _check_rate("request-rate", rate)
        if self.probe_request_rate:
            _check_rate("probe-request-rate", self.probe_request_rate)
        if not MIN_BURSTINESS <= self.burstiness <= MAX_BURSTINESS:
            raise ConfigError(
                f"--burstiness {self.burstiness} must be from {MIN_BURSTINESS} to "
                f"{MAX_BURSTINESS:g}"
            )
        if self.sweep is not None:
            check_whole("sweep", self.sweep, 1, MAX_SWEEP)
        ramp = (self.ramp_up_strategy, self.ramp_up_start_rps, self.ramp_up_end_rps)
        if any(each is not None for each in ramp):
            if None in ramp:
                raise ConfigError(
                    "--ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps go together; "
                    "give all three or none"
                )
            for name in ("start", "end"):
                _check_rate(f"ramp-up-{name}-rps", getattr(self, f"ramp_up_{name}_rps"))
        ways = [self.request_rate is not None, None not in ramp, self.sweep is not None]
        if sum(ways) > 1:
            raise ConfigError(
                "--request-rate, --ramp-up-strategy and --sweep each set the rate; give one of them"
            )

    def _check_dataset(self) -> None:
        check_whole("num-turns", self.num_turns, 1, MAX_TURNS)
        prefixes = self.prefix_repetition_num_prefixes
        check_whole("prefix-repetition-num-prefixes", prefixes, 1, MAX_PREFIXES)
        length = self.prefix_repetition_prefix_len
        check_whole("prefix-repetition-prefix-len", length, 1, MAX_DRAWN_LEN)
        if self.dataset in _FILES and self.dataset_path is None:
            raise ConfigError(f"--dataset {self.dataset} needs --dataset-path FILE")
        if self.dataset_path is not None and self.dataset not in (*_FILES, "multi-turn"):
            raise ConfigError(
                f"--dataset {self.dataset} draws its prompts; --dataset-path goes with sharegpt, "
                f"custom or multi-turn"
            )

    def source(self, *, as_text: bool = False) -> PromptSource:
        """`as_text`: what "auto" stands for. Raises ConfigError where a file cannot be read."""
        if self.dataset_path is not None:
            return PromptFile(
                path=Path(self.dataset_path),
                name=self.dataset,
                output_lens=self.output_lens,
                seed=self.seed,
            ).read()
        drawn = DrawnPrompts(
            seed=self.seed,
            prompt_lens=self.prompt_lens,
            output_lens=self.output_lens or DEFAULT_OUTPUT_LENS,
            vocab_size=self.vocab_size,
            as_text=as_text if self.prompts == "auto" else self.prompts == "text",
        )
        if self.dataset == "prefix-repetition":
            return replace(
                drawn,
                num_prefixes=self.prefix_repetition_num_prefixes,
                prefix_len=self.prefix_repetition_prefix_len,
            )
        return replace(drawn, num_turns=self.num_turns) if self.dataset == "multi-turn" else drawn

    def warm_ups(self, source: PromptSource) -> list[PlannedRequest]:
        return source.take(self.num_warmups, 0)

    def loads(self, source: PromptSource, round_: int = 0) -> Iterator[PlannedLoad]:
        """Of a sweep only the two from which its rates follow. `round_`: each has prompts and
        arrivals of its own."""
        parts = itertools.count(1 + round_ * MAX_CONCURRENCIES)
        if self.request_rate is not None:
            for rate in self.request_rate:
                arrivals = Arrivals(rate=rate, burstiness=self.burstiness)
                yield self.at_rate(arrivals, source, next(parts))
        elif self.ramp_up_strategy is not None:
            assert self.ramp_up_start_rps is not None
            arrivals = Arrivals(
                rate=self.ramp_up_start_rps,
                end_rate=self.ramp_up_end_rps,
                strategy=self.ramp_up_strategy,
                burstiness=self.burstiness,
            )
            yield self.at_rate(arrivals, source, next(parts))
        else:
            numbers = self.concurrency if self.sweep is None else (1, max(self.concurrency))
            for clients in numbers:
                size = self.num_requests or max(LEAST_REQUESTS, REQUESTS_PER_CLIENT * clients)
                yield PlannedLoad(clients=clients, requests=tuple(source.take(size, next(parts))))

    def at_rate(self, arrivals: Arrivals, source: PromptSource, part: int) -> PlannedLoad:
        size = self.num_requests or REQUESTS_AT_A_RATE
        rng = random.Random(f"bench serve arrivals {self.seed} {part}")  # noqa: S311 - no secret
        requests = zip(source.take(size, part), arrivals.times(size, rng), strict=True)
        planned = tuple(replace(each, after_s=due_s) for each, due_s in requests)
        return PlannedLoad(arrivals=arrivals, requests=planned)


def _check_rate(name: str, rate: float) -> None:
    if not 0 < rate < MAX_RATE:
        raise ConfigError(f"--{name} {rate:g} must be above 0 and below {MAX_RATE:g}")
