"""The figures of runs; pure arithmetic. TTFT is counted from when a request was due; ITL are the
pooled gaps of tokens handed over; TPOT is (last token - first) / (tokens - 1) of a request. A mode
that hands over whole batches has neither ITL nor TPOT.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from cadenza.bench.serve_figures import Spread, spread_of
from cadenza_bench.batching.plan import BatchingLoad
from cadenza_bench.batching.player import PlayedRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedRun:
    """One run: a mode, or what stands in its place, a load and a round."""

    mode: str
    load: BatchingLoad
    round: int
    requests: Sequence[PlayedRequest]
    num_steps: int

    @property
    def duration_s(self) -> float:
        return max(each.content_s[-1] for each in self.requests)

    @property
    def num_output_tokens(self) -> int:
        return sum(len(each.token_ids) for each in self.requests)

    @property
    def tok_s(self) -> float:
        return self.num_output_tokens / self.duration_s

    @property
    def full_tok_s(self) -> float:
        """Output tokens a second until the last request gets its row: while requests wait."""
        return self._num_full_tokens / self._full_s

    @property
    def tokens_a_step(self) -> float:
        return self.num_output_tokens / self.num_steps

    @property
    def full_tokens_a_step(self) -> float:
        """As `full_tok_s`."""
        return self._num_full_tokens / max(each.start_step for each in self.requests)

    @property
    def _full_s(self) -> float:
        return max(each.start_s for each in self.requests)

    @property
    def _num_full_tokens(self) -> int:
        until_s = self._full_s
        return sum(time_s <= until_s for each in self.requests for time_s in each.content_s)

    @property
    def mean_ttft_s(self) -> float:
        return statistics.fmean(self.ttfts_s)

    @property
    def ttfts_s(self) -> list[float]:
        return [each.content_s[0] - each.due_s for each in self.requests]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeFigures:
    """All rounds of a mode under a load; times of requests are pooled, rates are medians. What is
    "full" is of the time in which requests wait for a row, and None where none has to.
    `continuous`: the figures of continuous batching under the same load, None of that one itself; a
    gain is the ratio of two median rates, or of median numbers of steps, which no other program can
    disturb. `has_waits`: more requests than rows are there from the start. `ideal_gain`,
    `allowed_gain`: what `full_gain` can be by lengths alone, and by measured rates."""

    mode: str
    load: BatchingLoad
    runs: Sequence[PlayedRun]
    continuous: "ModeFigures | None" = None
    has_waits: bool = False
    ideal_gain: float | None = None
    allowed_gain: float | None = None
    is_whole: bool = False

    @property
    def gain(self) -> float | None:
        return None if self.continuous is None else self.continuous.tok_s / self.tok_s

    @property
    def step_gain(self) -> float | None:
        return None if self.continuous is None else self.num_steps / self.continuous.num_steps

    @property
    def full_gain(self) -> float | None:
        return self._full_ratio("full_tok_s")

    @property
    def full_step_gain(self) -> float | None:
        return self._full_ratio("full_tokens_a_step")

    def _full_ratio(self, name: str) -> float | None:
        if self.continuous is None or not self.has_waits:
            return None
        return getattr(self.continuous, name) / getattr(self, name)

    @property
    def gains(self) -> list[float]:
        ours = () if self.continuous is None else self.continuous.runs
        return [a.tok_s / b.tok_s for a, b in zip(ours, self.runs, strict=False)]

    @property
    def middle_run(self) -> PlayedRun:
        """That of the median duration, or the shorter of two."""
        return sorted(self.runs, key=lambda run: run.duration_s)[(len(self.runs) - 1) // 2]

    @property
    def num_steps(self) -> int:
        return round(statistics.median(each.num_steps for each in self.runs))

    @property
    def tok_s(self) -> float:
        return statistics.median(self.tok_s_runs)

    @property
    def tok_s_runs(self) -> list[float]:
        return [each.tok_s for each in self.runs]

    @property
    def full_tok_s(self) -> float | None:
        return statistics.median(self.full_tok_s_runs) if self.has_waits else None

    @property
    def full_tok_s_runs(self) -> list[float]:
        return [each.full_tok_s for each in self.runs] if self.has_waits else []

    @property
    def full_tokens_a_step(self) -> float | None:
        if not self.has_waits:
            return None
        return statistics.median(each.full_tokens_a_step for each in self.runs)

    @property
    def duration_s(self) -> float:
        return statistics.median(each.duration_s for each in self.runs)

    @property
    def num_output_tokens(self) -> int:
        return self.runs[0].num_output_tokens

    @property
    def num_prompt_tokens(self) -> int:
        return sum(each.num_prompt_tokens for each in self.runs[0].requests)

    @property
    def num_cached_tokens(self) -> int:
        return sum(each.num_cached_tokens for each in self.runs[0].requests)

    @property
    def ttft(self) -> Spread | None:
        return spread_of([time_s for run in self.runs for time_s in run.ttfts_s])

    @property
    def itl(self) -> Spread | None:
        if self.is_whole:
            return None
        return spread_of([b - a for each in self._requests for a, b in pairwise(each.content_s)])

    @property
    def tpot(self) -> Spread | None:
        if self.is_whole:
            return None
        return spread_of(
            [
                (each.content_s[-1] - each.content_s[0]) / (len(each.content_s) - 1)
                for each in self._requests
                if len(each.content_s) > 1
            ]
        )

    @property
    def e2e(self) -> Spread | None:
        return spread_of([each.content_s[-1] - each.due_s for each in self._requests])

    @property
    def _requests(self) -> list[PlayedRequest]:
        return [each for run in self.runs for each in run.requests]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first token in which a run is not as `expected_of`, the first run; `position` counts the
    tokens of the answer from 0."""

    mode: str
    load: str
    round: int
    request: int
    position: int
    found: int
    expected: int
    expected_of: str


def first_token_difference(runs: Sequence[PlayedRun]) -> Difference | None:
    """None if all runs have the tokens of the first one."""
    first = runs[0]
    for run in runs[1:]:
        for expected, found in zip(first.requests, run.requests, strict=True):
            pairs = zip(expected.token_ids, found.token_ids, strict=True)
            for position, (a, b) in enumerate(pairs):
                if a != b:
                    return Difference(
                        mode=run.mode,
                        load=run.load.label,
                        round=run.round,
                        request=found.index,
                        position=position,
                        found=b,
                        expected=a,
                        expected_of=f"{first.mode}, {first.load.label}, round {first.round}",
                    )
    return None
