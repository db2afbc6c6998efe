"""The gate: runs a workload in every mode and compares each stream with its solo run.

Knows the runner under test through `Gate.make_core`, and the independent reference through
`Gate.witness`. Invariant: it passes only if every comparison was made, all streams were equal, and
every mode's `shows` counts are above zero.
"""

import hashlib
import math
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from cadenza.backends.base import Exactness
from cadenza.config import EngineLimits
from cadenza.core.draw_keys import derive_seed
from cadenza.engine.core import CoreOptions
from cadenza.frontend.progress import BatchProgress
from cadenza.request import Request
from cadenza.speculative_config import SpeculativeConfig
from cadenza.verification.modes import (
    Counts,
    MakeCore,
    Mode,
    Play,
    Stream,
    TokenRecord,
    batched_modes,
    play,
    play_alone,
    with_drafts,
)
from cadenza.verification.option_matrix import OptionCoverage
from cadenza.verification.reference import ReferenceEngine, ReferenceResult
from cadenza.verification.workload import Arrival

WITNESS = "independent reference"

ReferenceKind = Literal["independent", "solo", "both"]

ReportProgress = Callable[[str], None]
"""Called with a description of the current or completed stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """The first difference of a stream from what was expected.

    `index` is that of the token in the output; prompt tokens with logprobs have negative indices.
    """

    mode: str
    request: int
    sample: int = 0
    index: int
    expected: str
    actual: str


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
class GateResult:
    """The gate's outcome; `coverage` is set if the matrix of options was played.

    `longest` is the length of the longest stream in tokens, prompt and output; `wanted` is the
    length that it would have without the limit of the context. `witness_difference` is the mean
    difference that `Witness.tolerance` limits. `digest` is of the streams alone, which all others
    must equal: of tokens, and of the bits of the log probabilities that requests asked for.
    `left_out` says in words what of the matrix could not be played.
    """

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
    witness_difference: float | None = None
    digest: str = ""

    @property
    def missing(self) -> list[str]:
        """Counts and pairs of options that should have occurred but did not."""
        counts = [f"{name} in {mode.name}" for mode in self.modes for name in mode.missing]
        return counts + list(self.coverage.missing if self.coverage else ())

    @property
    def passed(self) -> bool:
        return self.mismatch is None and not self.missing and bool(self.modes)

    @property
    def batched_tokens_per_s(self) -> float:
        return max((mode.tokens_per_s for mode in self.modes), default=0.0)

    @property
    def last_line(self) -> str:
        """The verdict as one line, for people and scripts."""
        if self.mismatch is not None:
            found = self.mismatch
            return (
                f"REFERENCE-EXACT MISMATCH mode={found.mode!r} request={found.request} "
                f"sample={found.sample} index={found.index} "
                f"expected={found.expected} actual={found.actual}"
            )
        if self.missing:
            return f"REFERENCE-EXACT MISMATCH not shown: {', '.join(self.missing)}"
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
        """Which lengths were not compared; None if the longest stream is as long as wanted."""
        if self.longest >= self.wanted:
            return None
        return (
            f"the longest stream has {self.longest} tokens, the most that the context allows; "
            f"longer ones were not compared ({self.wanted} would exceed two attention spans and "
            f"every window)"
        )

    @property
    def _difference_words(self) -> str:
        if self.witness_difference is None:
            return ""
        return f" reference_difference={self.witness_difference:.4f}"

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
class Witness:
    """The independent reference, and engines on the backend to compare with it.

    Without a tolerance the engines compute in float32 like the reference, and their tokens must be
    equal. Quantised engines choose other tokens at times; with a tolerance the reference, which has
    the checkpoint's own weights, scores their streams, and `tolerance` (nats) is the largest mean
    difference of the tokens' log probabilities.
    """

    reference: ReferenceEngine
    make_core: MakeCore
    tolerance: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """The inputs of a gate.

    Args:
        make_core: makes engines on the runner under test.
        limits: of those engines.
        arrivals: the workload.
        witness: its tokens must equal those of the solo runs; None to skip that.
        with_solo: compare log probabilities with solo runs bit for bit, if `exactness` promises it.
        exactness: the backend's promise (`BackendTraits`); "token" compares tokens only.
        clock: in seconds, for the throughput.
        report: called with each stage.
        coverage: of the matrix of options, if `arrivals` come from it.
        wanted: length in tokens that the longest stream should have.
        speculation: drafts that all modes verify, and the solo runs do not; None for none.
    """

    make_core: MakeCore
    limits: EngineLimits
    arrivals: tuple[Arrival, ...]
    witness: Witness | None
    with_solo: bool
    exactness: Exactness = "bitwise"
    clock: Callable[[], float]
    report: ReportProgress = lambda _: None
    coverage: OptionCoverage | None = None
    wanted: int = 0
    speculation: SpeculativeConfig | None = None

    def run(self) -> GateResult:
        """Runs and compares all modes; stops at the first difference."""
        result = GateResult(
            num_requests=len(self.arrivals),
            exactness=self.exactness,
            wanted=self.wanted,
            coverage=self.coverage,
        )
        start = self.clock()
        alone = self._play_alone(self.make_core, self.arrivals)
        tokens = sum(len(stream.tokens) for stream in alone)
        result.sequential_tokens_per_s = tokens / (self.clock() - start)
        result.longest = max(map(self._length, alone))
        result.digest = _digest_of(alone)
        result.mismatch = self._find_error(alone)
        if result.mismatch is not None:
            return result
        modes = batched_modes(self.limits, self.arrivals)
        if self.speculation is not None:
            modes = with_drafts(modes, self.speculation)
        for mode in modes:
            self._run_mode(mode, alone, result)
            if result.mismatch is not None:
                return result
        if self.witness is not None and self.witness.tolerance is not None:
            result.mismatch = self._score_with_witness(self.witness, self.witness.tolerance, result)
        elif self.witness is not None:
            result.mismatch = self._compare_with_witness(self.witness, alone)
        return result

    def _play_alone(self, make_core: MakeCore, arrivals: tuple[Arrival, ...]) -> list[Stream]:
        alone: list[Stream] = []
        start_s = self.clock()
        for streams in play_alone(make_core, self.limits, arrivals):
            alone += streams
            progress = BatchProgress(
                num_done=streams[0].request + 1,
                num_requests=len(arrivals),
                num_rows=1,
                num_tokens=sum(len(stream.tokens) for stream in alone),
                elapsed_s=self.clock() - start_s,
            )
            self.report(f"alone: {progress.text}")
        return alone

    def _length(self, stream: Stream) -> int:
        prompt = self.arrivals[stream.request].request.prompt_token_ids
        return len(prompt) + len(stream.tokens)

    def _find_error(self, alone: list[Stream]) -> Mismatch | None:
        """The first failed or incomplete solo stream: equal failures in all modes must not pass."""
        for stream in alone:
            found = _error_of(self.arrivals[stream.request].request, stream)
            if found is not None:
                return found
        return None

    def _play(self, mode: Mode) -> Play:
        """Plays a mode, then its alternatives until all counts of `shows` are above zero."""

        def report(progress: BatchProgress) -> None:
            self.report(f"{mode.name}: {progress.text}")

        played = play(self.make_core, mode, self.arrivals, report)
        for limits in mode.alternatives:
            if all(getattr(played.counts, name) for name in mode.shows):
                break
            played = play(self.make_core, replace(mode, limits=limits), self.arrivals, report)
        return played

    def _run_mode(self, mode: Mode, alone: list[Stream], result: GateResult) -> None:
        played = self._play(mode)
        bitwise = self.with_solo and self.exactness == "bitwise"
        num_streams = num_equal = 0
        for streams in played.rounds:
            for stream, solo in zip(streams, alone, strict=True):
                found = first_difference(mode.name, solo, stream, bitwise=bitwise)
                num_streams += 1
                num_equal += found is None
                result.mismatch = result.mismatch or found
        result.counts.add(played.counts)
        result.modes.append(
            ModeResult(
                name=mode.name,
                num_streams=num_streams,
                num_equal=num_equal,
                counts=played.counts,
                tokens_per_s=_rate(played),
                missing=tuple(name for name in mode.shows if not getattr(played.counts, name)),
            )
        )

    def _compare_with_witness(self, witness: Witness, alone: list[Stream]) -> Mismatch | None:
        """Compares tokens and finish reasons of solo streams in float32 with the reference.

        If the runner under test computes in float32, these are the solo streams of the gate.
        """
        if witness.make_core is not self.make_core:
            alone = self._play_alone(witness.make_core, self.arrivals)
        for count, solo in enumerate(alone, 1):
            expected = witness.reference.run(
                self.arrivals[solo.request].request,
                seed=derive_seed(CoreOptions().seed, solo.request),
                sample=solo.sample,
            )
            self.report(f"reference {count}/{len(alone)}")
            found = _difference_from_reference(expected, solo)
            if found is not None:
                return found
        return None

    def _score_with_witness(
        self, witness: Witness, tolerance: float, result: GateResult
    ) -> Mismatch | None:
        """Compares the log probabilities of solo streams with the reference's for the same tokens.

        The mismatch, if the mean difference is too large, is the token with the largest one.
        """
        alone = self._play_alone(witness.make_core, tuple(map(_with_logprobs, self.arrivals)))
        scored: list[_ScoredToken] = []
        for count, solo in enumerate(alone, 1):
            prompt = self.arrivals[solo.request].request.prompt_token_ids
            expected = witness.reference.score_output(prompt, solo.token_ids)
            self.report(f"reference {count}/{len(alone)}")
            scored += [
                _ScoredToken(solo, index, logprob, solo.tokens[index][1])
                for index, logprob in enumerate(expected)
            ]
        result.witness_difference = math.fsum(each.difference for each in scored) / len(scored)
        if result.witness_difference <= tolerance:  # false for NaN
            return None
        worst = max(scored, key=lambda each: each.difference)
        return Mismatch(
            mode=WITNESS,
            request=worst.stream.request,
            sample=worst.stream.sample,
            index=worst.index,
            expected=f"log probability {worst.expected:.4f}, a mean difference of at most "
            f"{tolerance}",
            actual=f"{worst.actual:.4f}, a mean difference of {result.witness_difference:.4f}",
        )


def _digest_of(streams: Iterable[Stream]) -> str:
    """A SHA-256, in hex."""
    state = hashlib.sha256()
    for stream in streams:
        state.update(f"{stream.request} {stream.sample} {stream.finish}\n".encode())
        for token, logprob, rank, top_ids, top_logprobs in (*stream.prompt, *stream.tokens):
            count = len(top_ids)
            numbers = (token, logprob, rank, *top_ids, *top_logprobs)
            state.update(struct.pack(f"<qfq{count}q{count}f", *numbers))
    return state.hexdigest()


@dataclass(frozen=True, slots=True)
class _ScoredToken:
    """A token of a solo stream, with the log probabilities of the reference and of the engine."""

    stream: Stream
    index: int
    expected: float
    actual: float

    @property
    def difference(self) -> float:
        return abs(self.expected - self.actual)


def _with_logprobs(arrival: Arrival) -> Arrival:
    """The arrival, with log probabilities of its tokens if it asks for none."""
    params = arrival.request.params
    if params.logprobs is not None:
        return arrival
    request = replace(arrival.request, params=replace(params, logprobs=0))
    return replace(arrival, request=request)


def first_difference(
    mode: str, expected: Stream, actual: Stream, *, bitwise: bool
) -> Mismatch | None:
    """The first difference of two streams: in tokens, or if `bitwise` in any bit of logprobs."""
    pick = _bits if bitwise else _token_only
    for left, right, start in (
        (expected.prompt, actual.prompt, -len(expected.prompt)),
        (expected.tokens, actual.tokens, 0),
    ):
        index = _first_unequal(map(pick, left), map(pick, right))
        if index is not None:
            return Mismatch(
                mode=mode,
                request=expected.request,
                sample=expected.sample,
                index=start + index,
                expected=_at(left, index),
                actual=_at(right, index),
            )
    return _difference_at_end(mode, expected.finish, actual)


def _difference_from_reference(expected: ReferenceResult, actual: Stream) -> Mismatch | None:
    index = _first_unequal(expected.token_ids, actual.token_ids)
    if index is None:
        return _difference_at_end(WITNESS, expected.finish_reason, actual)
    return Mismatch(
        mode=WITNESS,
        request=actual.request,
        sample=actual.sample,
        index=index,
        expected=_at(expected.token_ids, index),
        actual=_at(actual.token_ids, index),
    )


def _difference_at_end(mode: str, finish: str, actual: Stream) -> Mismatch | None:
    if finish == actual.finish:
        return None
    return Mismatch(
        mode=mode,
        request=actual.request,
        sample=actual.sample,
        index=len(actual.tokens),
        expected=finish,
        actual=actual.error or actual.finish,
    )


def _error_of(request: Request, alone: Stream) -> Mismatch | None:
    if alone.finish not in ("stop", "length"):
        return _difference_at_end("alone", "stop or length", alone)
    params = request.params
    asks_prompt = params.prompt_logprobs is not None and alone.sample == 0
    described = [params.logprobs] * len(alone.tokens)
    prompt = [params.prompt_logprobs] * (len(request.prompt_token_ids) - 1) if asks_prompt else []
    for asked, records, start in (
        (prompt, alone.prompt, -len(prompt)),
        (described, alone.tokens, 0),
    ):
        index = _first_unequal(asked, map(_num_top_logprobs, records))
        if index is not None:
            return Mismatch(
                mode="alone",
                request=alone.request,
                sample=alone.sample,
                index=start + index,
                expected=f"{_at(asked, index)} log probabilities",
                actual=_at(records, index),
            )
    return None


def _num_top_logprobs(record: TokenRecord) -> int | None:
    """The number of top logprobs of a token; None if it has no logprobs at all."""
    return None if math.isnan(record[1]) else len(record[3])


def _bits(record: TokenRecord) -> bytes:
    token, logprob, rank, top_ids, top_logprobs = record
    floats = struct.pack(f"<{1 + len(top_logprobs)}d", logprob, *top_logprobs)
    return struct.pack(f"<{2 + len(top_ids)}q", token, rank, *top_ids) + floats


def _token_only(record: TokenRecord) -> bytes:
    return struct.pack("<q", record[0])


def _first_unequal(left: Iterable[object], right: Iterable[object]) -> int | None:
    one, other = list(left), list(right)
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


def _at(items: Iterable[object], index: int) -> str:
    found = list(items)
    return str(found[index]) if index < len(found) else "(ended)"


def _rate(played: Play) -> float:
    return played.num_tokens / played.seconds if played.seconds else 0.0
