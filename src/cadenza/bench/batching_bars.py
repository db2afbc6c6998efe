"""The bars of the settings: a measured ratio beside the least that is asked for.

Pure arithmetic. Ratios are of runs of the same round; their median counts, as it is shown, with two
decimals. Where it is below the bar by less than two standard errors of the rounds, three at least,
the bar is met within the noise, and stated so. Invariant: a bar that cannot be met is stated as
missed, beside what the measured rates allow.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from cadenza.bench.batching_figures import ModeFigures, PlayedRun
from cadenza.bench.batching_ideal import StepRates
from cadenza.bench.batching_plan import BatchingLoad, BatchingPlan
from cadenza.bench.workloads import PlannedRequest

Verdict = Literal["pass", "pass within noise", "miss"]

MIN_ROUNDS = 3
NORMAL_DEVIATION = 1.4826
"""A normal distribution's standard deviation over its median absolute deviation."""

SHARE_OF_ALLOWED = 0.9
SHARE_OF_OFFLINE = 0.95
TTFT_CLIENTS = 4
CLAIMED_TTFT_RATIO = "6 to 9"
"""For continuous batching in mlx-lm (its pull request 629), with this setting."""

LEAST_HIT_RATIO = 7.0
"""As others claim of prefix caches."""

LEAST_PADDED_IDEAL = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One ratio; `of` is what `required` is a share of, and `claim` what others have stated.

    `ideal` is by lengths (or tokens computed) alone, `allowed` by the measured rates.
    """

    what: str
    ratios: Sequence[float]
    required: float
    ideal: float | None = None
    allowed: float | None = None
    claim: str | None = None

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def error(self) -> float:
        """Two standard errors, by the median absolute deviation, in which a round that another
        program disturbed does not count; 0 of fewer than three rounds."""
        count, middle = len(self.ratios), self.ratio
        if count < MIN_ROUNDS:
            return 0.0
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What bars are computed from."""

    plan: BatchingPlan
    requests: Sequence[PlannedRequest]
    figures: Mapping[tuple[str, BatchingLoad], ModeFigures]
    rates: StepRates | None

    def ratios(
        self,
        over: tuple[str, BatchingLoad],
        under: tuple[str, BatchingLoad],
        of: Callable[[PlayedRun], float],
    ) -> list[float]:
        """In each round."""
        pairs = zip(self.figures[over].runs, self.figures[under].runs, strict=True)
        return [of(a) / of(b) for a, b in pairs]


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
    """The first token, beside a batch that is handed over whole, and tokens a second."""
    plan, closed = found.plan, [load for load in found.plan.loads if load.clients is not None]
    whole = ("static-whole", BatchingLoad(clients=plan.num_requests))
    bars: list[Bar] = []
    for load in closed:
        ours, clients = ("continuous", load), load.clients or 1
        if clients == TTFT_CLIENTS and whole in found.figures and found.rates is not None:
            rates = found.rates
            batch_s = rates.batch_s(found.requests, is_padded=False)
            allowed = batch_s / rates.burst_ttft_s(found.requests, clients)
            bars.append(
                Bar(
                    what=f"mean TTFT of static-whole over that of continuous, {load.label}",
                    ratios=found.ratios(whole, ours, lambda run: run.mean_ttft_s),
                    required=SHARE_OF_ALLOWED * allowed,
                    allowed=allowed,
                    claim=CLAIMED_TTFT_RATIO,
                )
            )
        is_all = clients == plan.num_requests
        other = whole if is_all else ("static", load)
        if other in found.figures:
            required, where = 1.0 if is_all else SHARE_OF_OFFLINE, f"{other[0]}, {load.label}"
            for what, of in _RATES.items():
                ratios = found.ratios(ours, other, of)
                bars.append(Bar(what=f"{what} over {where}", ratios=ratios, required=required))
    return bars


def _bars_of_ideal(found: Measured, mode: str) -> list[Bar]:
    """Tokens while requests wait, over those of a mode: a second, and a step."""
    (load,) = found.plan.loads
    other = found.figures.get((mode, load))
    if other is None or other.ideal_gain is None:
        return []
    required = SHARE_OF_ALLOWED * other.ideal_gain
    bars = [
        Bar(
            what=f"tok/s over {mode}",
            ratios=other.gains,
            required=required,
            ideal=other.ideal_gain,
            allowed=other.allowed_gain,
        ),
        Bar(
            what=f"tokens a step over {mode}",
            ratios=other.step_gains,
            required=required,
            ideal=other.ideal_gain,
        ),
    ]
    if mode != "padded":
        return bars
    least = Bar(
        what="the ideal over padded, by the lengths",
        ratios=[other.ideal_gain],
        required=LEAST_PADDED_IDEAL,
    )
    return [least, *bars]


def _bar_of_hits(found: Measured) -> Bar:
    (load,) = found.plan.loads
    hits = found.figures["hit", load]
    computed = hits.num_prompt_tokens / (hits.num_prompt_tokens - hits.num_cached_tokens)
    return Bar(
        what="mean TTFT of a miss over that of a hit",
        ratios=found.ratios(("miss", load), ("hit", load), lambda run: run.mean_ttft_s),
        required=min(LEAST_HIT_RATIO, computed),
        ideal=computed,
        claim=f"{LEAST_HIT_RATIO:g}",
    )
