"""Requests sent to a running server alone and together: token ids, log probabilities to the last
digit, and finish reasons, over the HTTP API alone, so that all between client and model is
compared. Invariant: it passes only if requests overlapped and every response was equal.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from secrets import token_hex

from cadenza.errors import ConfigError
from cadenza.frontend.progress import BatchProgress
from cadenza.request import Request
from cadenza.server_link import ServerLink
from cadenza.verification.modes import Counts, OnProgress, Play, Stream, TokenRecord
from cadenza.verification.option_matrix import OptionMatrix
from cadenza.verification.remote_matrix import apply_matrix
from cadenza.verification.remote_server import Answer, RemoteApi, RemoteServer
from cadenza.verification.verifier import ReportProgress, Trial, VerifierResult, compare
from cadenza.verification.workload import LONGEST_PROMPT, WorkloadShape, make_workload

ROWS = 4
NUM_REQUESTS = 32

MAX_OPEN = 16
"""Requests of a matrix that are sent at once: a server's queue counts each of their samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UrlOptions:
    """The server and the workload. With a `matrix` each of its rows is a request; `num_requests` is
    ignored."""

    url: str
    api_key: str | None = None
    cacert: str | None = None
    num_requests: int = NUM_REQUESTS
    max_tokens: int = 48
    seed: int = 0
    matrix: OptionMatrix | None = None
    clock: Callable[[], float] = time.perf_counter


def verify_url(options: UrlOptions, report: ReportProgress) -> VerifierResult:
    """Sends each request alone, then with others: cold, with cached prefixes, in reverse order.
    Raises ConfigError if the server cannot be reached, is not a Cadenza server, or refuses a
    request."""
    link = ServerLink(url=options.url, api_key=options.api_key, cacert=options.cacert)
    with closing(RemoteApi(link)) as api:
        server = RemoteServer(api, options.clock)
        result = VerifierResult(num_requests=0, wanted=LONGEST_PROMPT + options.max_tokens)
        requests = _requests(options, server, result)
        result.num_requests = len(requests)
        num_open = len(requests) if options.matrix is None else MAX_OPEN
        player = RemotePlayer(
            server=server, requests=requests, num_open=num_open, clock=options.clock
        )
        compare(player, result, report, options.clock)
        return result


def _requests(
    options: UrlOptions, server: RemoteServer, result: VerifierResult
) -> tuple[Request, ...]:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePlayer:
    """A `verifier.Player` on a server, to which at most `num_open` requests are sent at once."""

    server: RemoteServer
    requests: Sequence[Request]
    num_open: int
    clock: Callable[[], float]
    salt: str = field(default_factory=lambda: token_hex(8))

    def play_alone(self, request: int) -> Sequence[Stream]:
        return self._streams(request, self.server.play(self.requests[request], token_hex(8)))

    def trials(self) -> Iterable[Trial]:
        forwards = range(len(self.requests))
        for name, order in (
            ("together, cold", forwards),
            ("together, hot", forwards),
            ("together, in reverse", forwards[::-1]),
        ):
            play = partial(self._play_together, order)
            yield Trial(name=name, shows=("admitted_midstream",), play=play)

    @staticmethod
    def has_logprobs(record: TokenRecord, asked: int | None) -> bool:
        """Those of the likeliest tokens include the chosen one's, or have it beside them."""
        *_, tops = record
        return not tops if asked is None else max(1, asked) <= len(tops) <= asked + 1

    def _play_together(self, order: Sequence[int], report: OnProgress) -> Play:
        """Sends requests in this order. Raises the first failure."""
        start_s, num_done, num_tokens = self.clock(), 0, 0
        with ThreadPoolExecutor(max_workers=self.num_open) as threads:
            send = self.server.play
            sent = {at: threads.submit(send, self.requests[at], self.salt) for at in order}
            try:
                for each in as_completed(sent.values()):
                    num_done, num_tokens = num_done + 1, num_tokens + each.result().num_tokens
                    report(
                        BatchProgress(
                            num_done=num_done,
                            num_requests=len(sent),
                            num_rows=min(self.num_open, len(sent) - num_done),
                            num_tokens=num_tokens,
                            elapsed_s=self.clock() - start_s,
                        )
                    )
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise
        answers = [sent[at].result() for at in sorted(sent)]
        counts = Counts(
            # Sent while another one was open.
            admitted_midstream=sum(
                any(other.start_s < each.start_s < other.end_s for other in answers)
                for each in answers
            ),
            cache_hits=sum(answer.num_cached_tokens > 0 for answer in answers),
        )
        streams = [each for at, one in enumerate(answers) for each in self._streams(at, one)]
        return Play(rounds=(tuple(streams),), counts=counts, seconds=self.clock() - start_s)

    def _streams(self, request: int, answer: Answer) -> list[Stream]:
        """One for each sample; without tokens where the answer lacks it. Raises ConfigError for an
        answer with more samples than were asked for."""
        asked, given = self.requests[request].params.n, len(answer.streams)
        if given > asked:
            raise ConfigError(f"--url: an answer has {given} choices for n={asked}")
        found = dict(enumerate(answer.streams))
        return [
            replace(found.get(sample, Stream()), request=request, sample=sample)
            for sample in range(asked)
        ]
