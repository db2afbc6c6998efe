"""The gate against a running server: compares requests sent alone with requests sent together.

Uses only the HTTP API, so that the comparison includes everything between a client and the model:
token ids, log probabilities to the last digit, and finish reasons. Invariant: it passes only if
requests overlapped and every response was equal.
"""

import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import zip_longest

from cadenza.frontend.progress import BatchProgress
from cadenza.request import Request
from cadenza.verification.gate import GateResult, Mismatch, ModeResult, ReportProgress
from cadenza.verification.modes import Counts
from cadenza.verification.option_matrix import OptionMatrix
from cadenza.verification.remote_matrix import apply_matrix
from cadenza.verification.remote_server import Answer, HttpTokenRecord, RemoteServer, Sample
from cadenza.verification.workload import LONGEST_PROMPT, WorkloadShape, make_workload

ROWS = 4
NUM_REQUESTS = 32

MAX_OPEN = 16
"""Requests of a matrix that are sent at once: a server's queue counts each of their samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UrlOptions:
    """The server, and the shape of the workload.

    With a `matrix` of sampling options each of its rows is a request, and `num_requests` is
    ignored.
    """

    url: str
    api_key: str | None = None
    num_requests: int = NUM_REQUESTS
    max_tokens: int = 48
    seed: int = 0
    matrix: OptionMatrix | None = None
    clock: Callable[[], float] = time.perf_counter


def verify_url(options: UrlOptions, report: ReportProgress) -> GateResult:
    """Sends each request alone, then with others: cold, with cached prefixes, in reverse order.

    Raises:
        ConfigError: the server cannot be reached, is not a Cadenza server, or refuses a request.
    """
    with closing(RemoteServer(options.url, options.api_key, options.clock)) as server:
        return _verify(options, server, report)


def _verify(options: UrlOptions, server: RemoteServer, report: ReportProgress) -> GateResult:
    result = GateResult(num_requests=0, wanted=LONGEST_PROMPT + options.max_tokens)
    requests = _requests(options, server, result)
    result.num_requests = len(requests)
    alone = _play_alone(options, server, requests, result, report)
    result.mismatch = find_error(requests, alone)
    salt, forwards = secrets.token_hex(8), list(range(len(requests)))
    for name, order in (
        ("together, cold", forwards),
        ("together, hot", forwards),
        ("together, in reverse", forwards[::-1]),
    ):
        if result.mismatch is not None:
            break
        start_s = options.clock()
        num_open = len(requests) if options.matrix is None else MAX_OPEN
        reports = _Reports(name, len(requests), num_open, report, options.clock)
        answers = _play_together(
            server, [(index, requests[index]) for index in order], salt, reports
        )
        _compare(result, name, alone, answers, options.clock() - start_s)
    return result


def _requests(options: UrlOptions, server: RemoteServer, result: GateResult) -> tuple[Request, ...]:
    """The workload; of a matrix, the result gets what is played and what is not."""
    matrix = options.matrix
    arrivals = make_workload(
        WorkloadShape(
            num_requests=options.num_requests if matrix is None else len(matrix.rows),
            rows=ROWS,
            max_tokens=options.max_tokens,
            context=server.context,
            vocab_size=server.vocab_size,
            seed=options.seed,
        )
    )
    if matrix is None:
        return tuple(arrival.request for arrival in arrivals)
    played = apply_matrix(server, matrix, arrivals)
    result.coverage, result.left_out = played.matrix.coverage(), played.left_out
    return played.requests


def _play_alone(
    options: UrlOptions,
    server: RemoteServer,
    requests: Sequence[Request],
    result: GateResult,
    report: ReportProgress,
) -> list[Answer]:
    """Sends one request after the other, each with a salt of its own."""
    start_s = options.clock()
    alone: list[Answer] = []
    reports = _Reports("alone", len(requests), 1, report, options.clock)
    for request in requests:
        alone.append(server.play(request, secrets.token_hex(8)))
        reports.add(alone[-1])
    tokens = sum(answer.num_tokens for answer in alone)
    result.sequential_tokens_per_s = tokens / (options.clock() - start_s)
    result.longest = max(
        len(request.prompt_token_ids) + len(sample.records)
        for request, answer in zip(requests, alone, strict=True)
        for sample in answer.samples
    )
    return alone


def find_error(requests: Sequence[Request], alone: Sequence[Answer]) -> Mismatch | None:
    """The first answer that lacks something it was asked for: lacking it always must not pass."""
    for index, (request, answer) in enumerate(zip(requests, alone, strict=True)):
        if len(answer.samples) != request.params.n:
            return _mismatch_alone(index, f"{request.params.n} choices", str(len(answer.samples)))
        for number, sample in enumerate(answer.samples):
            found = _error_of(request, sample)
            if found is not None:
                return _mismatch_alone(index, *found, sample=number)
    return None


def _error_of(request: Request, sample: Sample) -> tuple[str, str] | None:
    """What was expected of a choice and what came; None if nothing is amiss."""
    params = request.params
    if sample.finish_reason not in ("stop", "length"):
        return "stop or length", sample.finish_reason
    for asked, records, skipped in (
        (params.logprobs, sample.records, 0),
        (params.prompt_logprobs, sample.prompt, 1),
    ):
        for record in records[skipped:]:
            if not _has_logprobs(record, asked):
                return f"{asked} log probabilities", str(record)
    if params.prompt_logprobs is not None and len(sample.prompt) != len(request.prompt_token_ids):
        return "log probabilities of the prompt", f"those of {len(sample.prompt)} tokens"
    return None


def _has_logprobs(record: HttpTokenRecord, asked: int | None) -> bool:
    """Those of the likeliest tokens include the chosen one's, or have it beside them."""
    *_, tops = record
    return not tops if asked is None else max(1, asked) <= len(tops) <= asked + 1


def _mismatch_alone(request: int, expected: str, actual: str, sample: int = 0) -> Mismatch:
    return Mismatch(
        mode="alone", request=request, sample=sample, index=0, expected=expected, actual=actual
    )


class _Reports:
    """Reports the progress of a mode with each answer; at most `num_open` requests are open."""

    def __init__(
        self,
        mode: str,
        num_requests: int,
        num_open: int,
        report: ReportProgress,
        clock: Callable[[], float],
    ) -> None:
        self.num_open = num_open
        self._mode, self._num_requests, self._report = mode, num_requests, report
        self._clock, self._start_s = clock, clock()
        self._num_done = self._num_tokens = 0

    def add(self, answer: Answer) -> None:
        self._num_done += 1
        self._num_tokens += answer.num_tokens
        progress = BatchProgress(
            num_done=self._num_done,
            num_requests=self._num_requests,
            num_rows=min(self.num_open, self._num_requests - self._num_done),
            num_tokens=self._num_tokens,
            elapsed_s=self._clock() - self._start_s,
        )
        self._report(f"{self._mode}: {progress.text}")


def _play_together(
    server: RemoteServer, requests: Sequence[tuple[int, Request]], salt: str, reports: _Reports
) -> list[Answer]:
    """Sends requests in their order, so many at once; the answers by index. Raises a failure."""
    with ThreadPoolExecutor(max_workers=reports.num_open) as threads:
        sent = {index: threads.submit(server.play, each, salt) for index, each in requests}
        try:
            for each in as_completed(sent.values()):
                reports.add(each.result())
            return [sent[index].result() for index in sorted(sent)]
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def _compare(
    result: GateResult, name: str, alone: list[Answer], answers: list[Answer], seconds: float
) -> None:
    num_streams = num_equal = 0
    for request, (solo, answer) in enumerate(zip(alone, answers, strict=True)):
        for sample, expected in enumerate(solo.samples):
            found = _first_difference(expected, answer.samples[sample : sample + 1])
            num_streams += 1
            num_equal += found is None
            if found is not None and result.mismatch is None:
                result.mismatch = replace(found, mode=name, request=request, sample=sample)
    counts = Counts(
        admitted_midstream=_num_overlapping(answers),
        cache_hits=sum(answer.num_cached_tokens > 0 for answer in answers),
    )
    result.counts.add(counts)
    result.modes.append(
        ModeResult(
            name=name,
            num_streams=num_streams,
            num_equal=num_equal,
            counts=counts,
            tokens_per_s=sum(answer.num_tokens for answer in answers) / seconds,
            missing=() if counts.admitted_midstream else ("admitted_midstream",),
        )
    )


def _num_overlapping(answers: list[Answer]) -> int:
    """How many requests were sent while another one was open."""
    return sum(
        any(other.start_s < answer.start_s < other.end_s for other in answers) for answer in answers
    )


def _first_difference(solo: Sample, found: Sequence[Sample]) -> Mismatch | None:
    """The first difference of a choice, which may be missing, from that of the request alone."""
    left = _compared(solo)
    right = _compared(found[0]) if found else []
    for index, (one, other) in enumerate(zip_longest(left, right, fillvalue="(ended)")):
        if one != other:
            return Mismatch(
                mode="together",
                request=0,
                index=index - len(solo.prompt),
                expected=str(one),
                actual=str(other),
            )
    return None


def _compared(sample: Sample) -> list[object]:
    ends = (sample.finish_reason, sample.stop_reason)
    return [*sample.prompt, *sample.records, ends]
