"""The bars of the settings: a measured ratio of two medians of the rounds, with two decimals, and
the least that is asked for. A ratio below by less than two standard errors of the rounds' ratios,
three at least, meets the bar within the noise, and the report says so.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from cadenza.bench.workloads import PlannedRequest
from cadenza_bench.batching.figures import ModeFigures, PlayedRun
from cadenza_bench.batching.plan import BatchingLoad, BatchingMode, BatchingPlan


def groups(requests: Sequence[PlannedRequest], rows: int) -> list[Sequence[PlannedRequest]]:
    """The static batches, where enough requests wait."""
    return [requests[at : at + rows] for at in range(0, len(requests), rows)]


def waiting(
    mode: BatchingMode, requests: Sequence[PlannedRequest], rows: int
) -> Sequence[PlannedRequest]:
    """Those that `mode` has answered while others wait for a row: all but its last batch."""
    batches = groups(requests, 1 if mode == "sequential" else rows)
    return [each for batch in batches[:-1] for each in batch]


def static_steps(lens: Sequence[int], rows: int) -> int:
    """Steps of all batches, each as long as its longest answer."""
    return sum(max(lens[at : at + rows]) for at in range(0, len(lens), rows))


def ideal_gain(mode: BatchingMode, lens: Sequence[int], rows: int) -> float:
    """By how much rows that are always full have more tokens a second than `mode`, by the lengths
    alone: its steps over the tokens of all answers divided by the rows."""
    if mode == "continuous":
        return 1.0
    return static_steps(lens, 1 if mode == "sequential" else rows) * rows / sum(lens)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRates:
    """Measured rates; `decode_step_s` by the number of rows, with that of one row among them."""

    prefill_tok_s: float
    decode_step_s: Mapping[int, float]

    def step_s(self, rows: int) -> float:
        """Of a decode step, between the numbers of rows that were measured by interpolation."""
        known = sorted(self.decode_step_s)
        return float(np.interp(rows, known, [self.decode_step_s[each] for each in known]))

    def prefill_s(self, requests: Sequence[PlannedRequest]) -> float:
        return sum(len(each.prompt_token_ids) for each in requests) / self.prefill_tok_s

    def batch_s(self, batch: Sequence[PlannedRequest], *, is_padded: bool) -> float:
        """A batch from its start to the end of its longest answer. Rows leave when they have
        finished, unless the batch is padded; a prompt's last step gives the first token."""
        lens = sorted(each.max_tokens - 1 for each in batch)
        if is_padded:
            return self.prefill_s(batch) + lens[-1] * self.step_s(len(lens))
        decode_s, done = 0.0, 0
        for left, length in zip(range(len(lens), 0, -1), lens, strict=True):
            decode_s += (length - done) * self.step_s(left)
            done = length
        return self.prefill_s(batch) + decode_s

    def run_s(self, mode: BatchingMode, requests: Sequence[PlannedRequest], rows: int) -> float:
        """All requests, that are there from the start; with rows that are always full where
        requests start at any time."""
        if mode == "continuous":
            steps = sum(each.max_tokens - 1 for each in requests) / rows
            return self.prefill_s(requests) + steps * self.step_s(rows)
        batches = groups(requests, 1 if mode == "sequential" else rows)
        return sum(self.batch_s(each, is_padded=mode == "padded") for each in batches)

    def allowed_gain(
        self, mode: BatchingMode, requests: Sequence[PlannedRequest], rows: int
    ) -> float:
        """As `ideal_gain`, with the time of prompts, and of steps with fewer rows."""
        return self.run_s(mode, requests, rows) / self.run_s("continuous", requests, rows)

    def burst_ttft_s(self, requests: Sequence[PlannedRequest], clients: int) -> float:
        """Mean time to the first token where `clients` requests come at the same time and their
        prompts are computed in order."""
        total_s = 0.0
        for burst in groups(requests, clients):
            total_s += sum(self.prefill_s(burst[: at + 1]) for at in range(len(burst)))
        return total_s / len(requests)

    def whole_ttft_s(self, requests: Sequence[PlannedRequest], clients: int) -> float:
        """The same where the answers to `clients` requests are handed over when all have ended."""
        batches = groups(requests, clients)
        total_s = sum(len(each) * self.batch_s(each, is_padded=False) for each in batches)
        return total_s / len(requests)


Verdict = Literal["pass", "pass within noise", "miss"]

MIN_ROUNDS = 3
# A normal distribution's standard deviation over its median absolute deviation.
NORMAL_DEVIATION = 1.4826

SHARE_OF_ALLOWED = 0.9
SHARE_OF_OFFLINE = 0.95
TTFT_CLIENTS = 4
# For continuous batching in mlx-lm (its pull request 629), with this setting.
CLAIMED_TTFT_RATIO = "6 to 9"

LEAST_HIT_RATIO = 7.0  # as others claim of prefix caches

LEAST_PADDED_IDEAL = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """The ratio of two values, measured in each round, and the least that is `required`; `ideal`,
    `allowed`: by lengths (or tokens computed) alone, and by the measured rates; `claim`: what
    others have stated."""

    what: str
    over: Sequence[float]
    under: Sequence[float]
    required: float
    ideal: float | None = None
    allowed: float | None = None
    claim: str | None = None

    @property
    def value(self) -> float:
        return statistics.median(self.over)

    @property
    def base(self) -> float:
        return statistics.median(self.under)

    @property
    def ratio(self) -> float:
        return self.value / self.base

    @property
    def ratios(self) -> list[float]:
        return [a / b for a, b in zip(self.over, self.under, strict=True)]

    @property
    def error(self) -> float:
        """Two standard errors, by the median absolute deviation, in which a round that another
        program disturbed does not count; 0 of fewer than three rounds."""
        count = len(self.over)
        if count < MIN_ROUNDS:
            return 0.0
        middle = statistics.median(self.ratios)
        deviation = statistics.median(abs(each - middle) for each in self.ratios)
        return 2 * NORMAL_DEVIATION * deviation / count**0.5

    @property
    def verdict(self) -> Verdict:
        if round(self.ratio, 2) >= round(self.required, 2):
            return "pass"
        return "pass within noise" if self.ratio + self.error >= self.required else "miss"

    @property
    def is_met(self) -> bool:
        return self.verdict != "miss"

    @property
    def share_of_allowed(self) -> float | None:
        return None if self.allowed is None else self.ratio / self.allowed


_RATES: Mapping[str, Callable[[PlayedRun], float]] = {
    "tok/s": lambda run: run.tok_s,
    "tokens a step": lambda run: run.tokens_a_step,
}
_FULL_RATES: Mapping[str, Callable[[PlayedRun], float]] = {
    "tok/s": lambda run: run.full_tok_s,
    "tokens a step": lambda run: run.full_tokens_a_step,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What bars are computed from."""

    plan: BatchingPlan
    requests: Sequence[PlannedRequest]
    figures: Mapping[tuple[str, BatchingLoad], ModeFigures]
    rates: StepRates | None

    def values(
        self,
        over: tuple[str, BatchingLoad],
        under: tuple[str, BatchingLoad],
        of: Callable[[PlayedRun], float],
    ) -> dict[str, Any]:
        """Of each round, as `Bar` has them."""
        return {
            "over": [of(each) for each in self.figures[over].runs],
            "under": [of(each) for each in self.figures[under].runs],
        }


def bars_of(found: Measured) -> list[Bar]:
    """The bars of the plan's setting; none where it lacks the modes or the loads for them."""
    match found.plan.setting:
        case "A":
            return _bars_of_clients(found)
        case "B":
            return _bars_of_ideal(found, "static")
        case "C":
            return _bars_of_ideal(found, "padded")
        case "D":
            return [_bar_of_hits(found)]
        case None:
            return []


def _bars_of_clients(found: Measured) -> list[Bar]:
    plan, closed = found.plan, [load for load in found.plan.loads if load.clients is not None]
    whole = ("static-whole", BatchingLoad(clients=plan.num_requests))
    bars: list[Bar] = []
    for load in closed:
        ours, clients = ("continuous", load), load.clients or 1
        if clients == TTFT_CLIENTS:
            bars += _bars_of_ttft(found, load)
        is_all = clients == plan.num_requests
        other = whole if is_all else ("static", load)
        if other in found.figures:
            required, where = 1.0 if is_all else SHARE_OF_OFFLINE, f"{other[0]}, {load.label}"
            for what, of in _RATES.items():
                values = found.values(ours, other, of)
                bars.append(Bar(what=f"{what} over {where}", required=required, **values))
    return bars


def _bars_of_ttft(found: Measured, load: BatchingLoad) -> Iterator[Bar]:
    """The first token of whole batches over that of continuous batching: of one batch of all
    requests, as others publish it, and of as many clients in both modes."""
    rates, count, clients = found.rates, found.plan.num_requests, load.clients or 1
    whats = {clients: f"mean TTFT, static-whole over continuous, {load.label} each"}
    if clients != count:
        published = f"one batch of {count} against {load.label}, as published elsewhere"
        whats = {count: f"mean TTFT, {published}", **whats}
    for size, what in whats.items():
        whole = ("static-whole", BatchingLoad(clients=size))
        if rates is None or whole not in found.figures:
            continue
        first_s = rates.burst_ttft_s(found.requests, clients)
        allowed = rates.whole_ttft_s(found.requests, size) / first_s
        yield Bar(
            what=what,
            required=SHARE_OF_ALLOWED * allowed,
            allowed=allowed,
            claim=None if size == clients else CLAIMED_TTFT_RATIO,
            **found.values(whole, ("continuous", load), lambda run: run.mean_ttft_s),
        )


def _bars_of_ideal(found: Measured, mode: str) -> list[Bar]:
    """Tokens while requests wait, over those of a mode: a second, and a step."""
    (load,) = found.plan.loads
    other = found.figures.get((mode, load))
    if other is None or other.ideal_gain is None:
        return []
    bars = [
        Bar(
            what=f"{what} over {mode}, while requests wait",
            required=SHARE_OF_ALLOWED * other.ideal_gain,
            ideal=other.ideal_gain,
            allowed=other.allowed_gain if what == "tok/s" else None,
            **found.values(("continuous", load), (mode, load), of),
        )
        for what, of in _FULL_RATES.items()
    ]
    if mode != "padded":
        return bars
    least = Bar(
        what="the ideal over padded, by the lengths",
        over=[other.ideal_gain],
        under=[1.0],
        required=LEAST_PADDED_IDEAL,
    )
    return [least, *bars]


def _bar_of_hits(found: Measured) -> Bar:
    (load,) = found.plan.loads
    hits = found.figures["hit", load]
    computed = hits.num_prompt_tokens / (hits.num_prompt_tokens - hits.num_cached_tokens)
    return Bar(
        what="mean TTFT of a miss over that of a hit",
        required=min(LEAST_HIT_RATIO, computed),
        ideal=computed,
        claim=f"{LEAST_HIT_RATIO:g}",
        **found.values(("miss", load), ("hit", load), lambda run: run.mean_ttft_s),
    )
