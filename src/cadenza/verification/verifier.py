"""The verifier: plays a workload in several modes and compares each stream with its solo run. What
is under test is a `Player`: a `Verifier` on engines of this process, `over_http.RemotePlayer` on a
server. Invariant: it passes only if every comparison was made, all streams were equal, and every
`shows` count is above zero."""

import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, Protocol

from cadenza.backends.base import Exactness
from cadenza.batch.draw_keys import derive_seed
from cadenza.config import EngineLimits
from cadenza.engine.core import CoreOptions
from cadenza.frontend.progress import BatchProgress
from cadenza.request import Request
from cadenza.speculative_config import SpeculativeConfig
from cadenza.verification.differences import (
    INDEPENDENT,
    Mismatch,
    difference_from_reference,
    digest_of_streams,
    first_difference,
    lack_of,
)
from cadenza.verification.modes import (
    ImageSpans,
    batched_modes,
    image_modes,
    with_drafts,
    with_scores,
)
from cadenza.verification.option_matrix import OptionCoverage
from cadenza.verification.play import (
    Counts,
    MakeCore,
    OnProgress,
    Play,
    Stream,
    TokenRecord,
    play_alone,
    play_showing,
)
from cadenza.verification.reference import ReferenceEngine
from cadenza.verification.workload import Arrival

ReferenceKind = Literal["independent", "solo", "both"]

# Every comparison was made and equal; a stream differed; all were equal, and something that should
# have occurred while they were compared did not.
Verdict = Literal["PASS", "MISMATCH", "NOT SHOWN"]

# Called with a description of the current or completed stage.
ReportProgress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeResult:
    """A mode's outcome; `missing` names the counts of `Mode.shows` that are zero."""

    name: str
    num_streams: int
    num_equal: int
    counts: Counts
    tokens_per_s: float
    missing: tuple[str, ...] = ()


@dataclass(slots=True, eq=False, kw_only=True)
class VerifierResult:
    """`coverage`: of the matrix of options, if it was played; `left_out`: what of it could not be.
    `longest`: tokens of the longest stream, prompt and output; `wanted`: without the limit of the
    context. `reference_difference`: the mean that `ReferenceCheck.tolerance` limits. `digest`: of
    tokens and requested log probabilities of the solo streams, which all others must equal."""

    num_requests: int
    exactness: Exactness = "bitwise"
    longest: int = 0
    wanted: int = 0
    coverage: OptionCoverage | None = None
    left_out: tuple[str, ...] = ()
    modes: list[ModeResult] = field(default_factory=list[ModeResult])
    counts: Counts = field(default_factory=Counts)
    mismatch: Mismatch | None = None
    sequential_tokens_per_s: float = 0.0
    reference_difference: float | None = None
    digest: str = ""

    @property
    def missing(self) -> list[str]:
        counts = [f"{name} in {mode.name}" for mode in self.modes for name in mode.missing]
        return counts + list(self.coverage.missing if self.coverage else ())

    @property
    def verdict(self) -> Verdict:
        if self.mismatch is not None:
            return "MISMATCH"
        return "NOT SHOWN" if self.missing or not self.modes else "PASS"

    @property
    def passed(self) -> bool:
        return self.verdict == "PASS"

    @property
    def batched_tokens_per_s(self) -> float:
        return max((mode.tokens_per_s for mode in self.modes), default=0.0)

    @property
    def last_line(self) -> str:
        if self.mismatch is not None:
            found = self.mismatch
            return (
                f"REFERENCE-EXACT MISMATCH mode={found.mode!r} request={found.request} "
                f"sample={found.sample} index={found.index} "
                f"expected={found.expected} actual={found.actual}"
            )
        if not self.passed:
            missing = ", ".join(self.missing) or "any mode"
            return (
                f"REFERENCE-EXACT NOT SHOWN {missing}: every stream was equal, but this did not "
                f"occur; more requests or longer answers may show it"
            )
        return (
            f"REFERENCE-EXACT PASS {self.exactness} requests={self.num_requests} "
            f"modes={len(self.modes)} "
            f"admitted_midstream={self.counts.admitted_midstream} "
            f"rows_reused={self.counts.rows_reused} preempted={self.counts.preempted} "
            f"cache_hits={self.counts.cache_hits}{self._drafts_words}{self._coverage_words} "
            f"longest={self.longest}"
            f"{self._difference_words}"
        )

    @property
    def shortfall(self) -> str | None:
        """Which lengths were not compared."""
        if self.longest >= self.wanted:
            return None
        return (
            f"the longest stream has {self.longest} tokens, the most that the context allows; "
            f"longer ones were not compared ({self.wanted} would exceed two attention spans and "
            f"every window)"
        )

    @property
    def _difference_words(self) -> str:
        if self.reference_difference is None:
            return ""
        return f" reference_difference={self.reference_difference:.4f}"

    @property
    def _drafts_words(self) -> str:
        accepted = self.counts.accepted_drafts
        return f" accepted_drafts={accepted}" if accepted else ""

    @property
    def _coverage_words(self) -> str:
        if self.coverage is None:
            return ""
        return f" options={self.coverage.num_combinations} pairs={self.coverage.num_pairs}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A mode as `compare` needs it; `shows` names the counts that must be above zero. `requests`
    are those that it plays, None for all."""

    name: str
    shows: tuple[str, ...]
    play: Callable[[OnProgress], Play]
    requests: tuple[int, ...] | None = None


class Player(Protocol):
    """What is under test. A request has the same index in all that it plays. A solo stream has what
    was asked for where `has_logprobs` is true of each of its records: equal failures in all modes
    must not pass."""

    @property
    def requests(self) -> SequenceOf[Request]: ...
    def play_alone(self, request: int) -> SequenceOf[Stream]: ...
    def trials(self) -> Iterable[Trial]: ...
    @staticmethod
    def has_logprobs(record: TokenRecord, asked: int | None) -> bool: ...


def compare(
    player: Player,
    result: VerifierResult,
    report: ReportProgress,
    clock: Callable[[], float],
    *,
    bitwise: bool = True,
) -> list[Stream]:
    """Each request alone, then all modes up to the first difference; returns the solo streams."""
    start_s = clock()
    alone = streams_alone(player.play_alone, len(player.requests), report, clock)
    num_tokens = sum(len(stream.tokens) for stream in alone)
    result.sequential_tokens_per_s = num_tokens / (clock() - start_s)
    result.longest = max(
        len(player.requests[stream.request].prompt_token_ids) + len(stream.tokens)
        for stream in alone
    )
    found = (lack_of(player.requests[each.request], each, player.has_logprobs) for each in alone)
    result.mismatch = next(filter(None, found), None)
    for trial in player.trials() if result.mismatch is None else ():
        _run_trial(trial, alone, result, report, bitwise=bitwise)
        if result.mismatch is not None:
            break
    return alone


def streams_alone(
    play_alone: Callable[[int], SequenceOf[Stream]],
    num_requests: int,
    report: ReportProgress,
    clock: Callable[[], float],
) -> list[Stream]:
    alone: list[Stream] = []
    start_s = clock()
    for index in range(num_requests):
        alone += play_alone(index)
        progress = BatchProgress(
            num_done=index + 1,
            num_requests=num_requests,
            num_rows=1,
            num_tokens=sum(len(stream.tokens) for stream in alone),
            elapsed_s=clock() - start_s,
        )
        report(f"alone: {progress.text}")
    return alone


def _run_trial(
    trial: Trial,
    alone: list[Stream],
    result: VerifierResult,
    report: ReportProgress,
    *,
    bitwise: bool,
) -> None:
    played = trial.play(lambda progress: report(f"{trial.name}: {progress.text}"))
    if trial.requests is not None:
        alone = [solo for solo in alone if solo.request in trial.requests]
    num_streams = num_equal = 0
    for streams in played.rounds:
        for stream, solo in zip(streams, alone, strict=True):
            found = first_difference(trial.name, solo, stream, bitwise=bitwise)
            num_streams += 1
            num_equal += found is None
            result.mismatch = result.mismatch or found
    result.counts.add(played.counts)
    result.modes.append(
        ModeResult(
            name=trial.name,
            num_streams=num_streams,
            num_equal=num_equal,
            counts=played.counts,
            tokens_per_s=played.num_tokens / played.seconds if played.seconds else 0.0,
            missing=tuple(name for name in trial.shows if not getattr(played.counts, name)),
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceCheck:
    """The independent reference, and engines on the backend to compare with it. Without a tolerance
    the engines compute in float32 like the reference, and their tokens must be equal. Quantised
    engines choose other tokens at times; with a tolerance the reference, which has the checkpoint's
    own weights, scores their streams, and `tolerance` (nats) is the largest mean difference of the
    tokens' log probabilities."""

    engine: ReferenceEngine
    make_core: MakeCore
    tolerance: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verifier:
    """has_sparse: some of the workload's prompts are pruned by their scores."""

    make_core: MakeCore  # makes engines on the runner under test, with `limits`
    limits: EngineLimits
    arrivals: tuple[Arrival, ...]
    # Its tokens must equal those of the solo runs; None to skip that.
    reference: ReferenceCheck | None
    # Compare log probabilities with solo runs bit for bit, if `exactness` promises it.
    with_solo: bool
    # The backend's promise (`BackendTraits`); "token" compares tokens only.
    exactness: Exactness = "bitwise"
    clock: Callable[[], float]  # in seconds, for the throughput
    report: ReportProgress = lambda _: None
    coverage: OptionCoverage | None = None  # of the matrix of options, if `arrivals` come from it
    wanted: int = 0  # length in tokens that the longest stream should have
    # Drafts that all modes verify, and the solo runs do not; None for none. `drafts_show` is
    # the count of them that must be above zero.
    speculation: SpeculativeConfig | None = None
    drafts_show: str = "accepted_drafts"
    # Of the workload's images; None if it has none. Requests that the reference does not take
    # (`ReferenceEngine.takes`) are compared with their solo runs alone.
    image_spans: ImageSpans | None = None
    has_sparse: bool = False

    @property
    def requests(self) -> SequenceOf[Request]:
        return [arrival.request for arrival in self.arrivals]

    def run(self) -> VerifierResult:
        result = VerifierResult(
            num_requests=len(self.arrivals),
            exactness=self.exactness,
            wanted=self.wanted,
            coverage=self.coverage,
        )
        bitwise = self.with_solo and self.exactness == "bitwise"
        alone = compare(self, result, self.report, self.clock, bitwise=bitwise)
        result.digest = digest_of_streams(alone)
        if self.reference is None or result.mismatch is not None:
            return result
        if self.reference.tolerance is not None:
            result.mismatch = self._score_with_reference(
                self.reference, self.reference.tolerance, result
            )
        else:
            result.mismatch = self._compare_with_reference(self.reference, alone)
        return result

    def play_alone(self, request: int) -> SequenceOf[Stream]:
        return play_alone(self.make_core, self.limits, request, self.arrivals[request].request)

    def trials(self) -> Iterable[Trial]:
        modes = batched_modes(self.limits, self.arrivals)
        if self.image_spans is not None:
            modes += image_modes(self.limits, self.arrivals, self.image_spans)
        if self.speculation is not None:
            modes = with_drafts(modes, self.speculation, self.drafts_show)
        if self.has_sparse:
            modes = with_scores(modes)
        for mode in modes:
            play = partial(play_showing, self.make_core, mode, self.arrivals)
            yield Trial(name=mode.name, shows=mode.shows, play=play, requests=mode.requests)

    @staticmethod
    def has_logprobs(record: TokenRecord, asked: int | None) -> bool:
        return asked == (None if math.isnan(record[1]) else len(record[3]))

    def _play_alone(self, check: ReferenceCheck, arrivals: SequenceOf[Arrival]) -> list[Stream]:
        def play(request: int) -> SequenceOf[Stream]:
            own = arrivals[request].request
            if not check.engine.takes(own):
                return ()
            return play_alone(check.make_core, self.limits, request, own)

        return streams_alone(play, len(arrivals), self.report, self.clock)

    def _compare_with_reference(
        self, check: ReferenceCheck, alone: list[Stream]
    ) -> Mismatch | None:
        """Tokens and finish reasons of solo streams in float32; if the runner under test computes
        in it, these are the solo streams of the verifier."""
        if check.make_core is not self.make_core:
            alone = self._play_alone(check, self.arrivals)
        takes = check.engine.takes
        alone = [each for each in alone if takes(self.requests[each.request])]
        for count, solo in enumerate(alone, 1):
            expected = check.engine.run(
                self.arrivals[solo.request].request,
                seed=derive_seed(CoreOptions().seed, solo.request),
                sample=solo.sample,
            )
            self.report(f"reference {count}/{len(alone)}")
            found = difference_from_reference(expected, solo)
            if found is not None:
                return found
        return None

    def _score_with_reference(
        self, check: ReferenceCheck, tolerance: float, result: VerifierResult
    ) -> Mismatch | None:
        """The mismatch, if the mean difference is too large, is the token with the largest one."""
        alone = self._play_alone(check, [*map(_with_logprobs, self.arrivals)])
        scored: list[_ScoredToken] = []
        for count, solo in enumerate(alone, 1):
            request = self.arrivals[solo.request].request
            expected = check.engine.score_output(request, solo.token_ids)
            self.report(f"reference {count}/{len(alone)}")
            scored += [
                _ScoredToken(solo, index, logprob, solo.tokens[index][1])
                for index, logprob in enumerate(expected)
            ]
        result.reference_difference = math.fsum(each.difference for each in scored) / len(scored)
        if result.reference_difference <= tolerance:  # false for NaN
            return None
        worst = max(scored, key=lambda each: each.difference)
        return Mismatch(
            mode=INDEPENDENT,
            request=worst.stream.request,
            sample=worst.stream.sample,
            index=worst.index,
            expected=f"log probability {worst.expected:.4f}, a mean difference of at most "
            f"{tolerance}",
            actual=f"{worst.actual:.4f}, a mean difference of {result.reference_difference:.4f}",
        )


@dataclass(frozen=True, slots=True)
class _ScoredToken:
    stream: Stream
    index: int
    expected: float
    actual: float

    @property
    def difference(self) -> float:
        return abs(self.expected - self.actual)


def _with_logprobs(arrival: Arrival) -> Arrival:
    params = arrival.request.params
    return (
        arrival
        if params.logprobs is not None
        else arrival.asking(params=replace(params, logprobs=0))
    )
