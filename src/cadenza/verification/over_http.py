"""Requests sent to a running server alone and together, and the matrix of sampling options as far
as it can be sent: token ids, log probabilities to the last digit, and finish reasons. Invariants:
it passes only if requests overlapped and every response was equal; what is not played is in
`RemoteMatrix.left_out`."""

import random
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from secrets import token_hex

from cadenza.errors import ConfigError
from cadenza.frontend.progress import BatchProgress
from cadenza.request import Request, SamplingParams
from cadenza.server_link import ServerLink
from cadenza.structured import StructuredOutput
from cadenza.verification.option_matrix import (
    BAD_WORD_FIELD,
    CHARACTERS,
    FORM_FIELD,
    OPTIONS,
    MatrixVocabulary,
    Option,
    OptionMatrix,
)
from cadenza.verification.play import Counts, OnProgress, Play, Stream, TokenRecord
from cadenza.verification.remote_server import (
    SENT_OPTIONS,
    Answer,
    RefusedError,
    RemoteApi,
    RemoteServer,
)
from cadenza.verification.verifier import ReportProgress, Trial, VerifierResult, compare
from cadenza.verification.workload import LONGEST_PROMPT, Arrival, WorkloadShape, make_workload

NUM_WORDS = 24
MAX_TRIES = 1000

# Letters of JSON's keywords. Bad words end with another one, so that no keyword is ruled out.
OF_KEYWORDS = frozenset("truefalsn")

# Options under another name than that of their field.
SENT_AS = {BAD_WORD_FIELD: "bad_words", FORM_FIELD: "structured"}

UNSEEDED = "requests without a seed: the server draws another one for each"


def remote_options() -> tuple[Option, ...]:
    return tuple(
        replace(option, levels=option.levels[1:]) if option.name == "seed" else option
        for option in OPTIONS
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteMatrix:
    """What is played, and in words what is not."""

    matrix: OptionMatrix
    requests: tuple[Request, ...]
    left_out: tuple[str, ...]


def apply_matrix(
    server: RemoteServer, matrix: OptionMatrix, arrivals: Sequence[Arrival]
) -> RemoteMatrix:
    """As far as the options can be sent. Raises ConfigError if the server cannot be reached."""
    left_out = [UNSEEDED]
    for option in matrix.options:
        if SENT_AS.get(option.name, option.name) not in SENT_OPTIONS:
            matrix = matrix.without(option.name)
            left_out.append(f"{option.name}: the API has no field for it")
    words = _find_words(server)
    if len(words) < 2:
        matrix = matrix.without(BAD_WORD_FIELD)
        left_out.append("bad_words: no tokens were found that are words of letters")
    try:
        going_on = {character: _token_of(server, character) for character in CHARACTERS}
    except RefusedError as error:
        going_on, matrix = {}, matrix.without(FORM_FIELD)
        left_out.append(f"structured outputs: {error}")
    ends = _find_end(server, going_on.get("a"))
    if not ends:
        left_out.append("allowing the token that ends a text: it was not found")
    vocabulary = MatrixVocabulary(
        size=server.vocab_size,
        eos_token_ids=ends,
        going_on=frozenset(going_on.values()),
        words=words,
    )
    played = matrix.apply(arrivals, vocabulary)
    requests: list[Request] = []
    for each in played:  # the API takes bad words as texts
        texts = tuple(map(server.text_of, each.request.bad_word_token_ids))
        params = replace(each.request.params, bad_words=texts)
        requests.append(replace(each.request, params=params))
    return RemoteMatrix(matrix=matrix, requests=tuple(requests), left_out=tuple(left_out))


def _find_words(server: RemoteServer) -> tuple[int, ...]:
    """Tokens that are two letters or more, and what the tokenizer makes of their own text."""
    rng = random.Random(NUM_WORDS)  # noqa: S311  a workload, not a secret
    found: list[int] = []
    for token_id in rng.sample(range(server.vocab_size), min(MAX_TRIES, server.vocab_size)):
        text = server.text_of([token_id])
        is_word = len(text) > 1 and text.isascii() and text.isalpha()
        if is_word and text[-1] not in OF_KEYWORDS and server.tokens_of(text) == [token_id]:
            found.append(token_id)
            if len(found) == NUM_WORDS:
                break
    return tuple(found)


def _token_of(server: RemoteServer, character: str) -> int:
    """What the server chooses where only the character may follow. Raises RefusedError: the
    character is no token by itself, or there are no forms."""
    params = SamplingParams(
        max_tokens=2, temperature=0.0, structured=StructuredOutput(choice=[character])
    )
    token_ids = _play(server, params)
    if len(token_ids) != 1:
        raise RefusedError(f"the character {character!r} is not a token by itself")
    return token_ids[0]


def _find_end(server: RemoteServer, letter: int | None) -> tuple[int, ...]:
    """The token that ends a text: what is chosen where it or a letter may follow, but not that."""
    if letter is None:
        return ()
    params = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        ignore_eos=True,
        logit_bias={letter: -100.0},
        structured=StructuredOutput(regex="a?"),
    )
    token_ids = _play(server, params)
    return token_ids if server.text_of(token_ids) != "a" else ()


def _play(server: RemoteServer, params: SamplingParams) -> tuple[int, ...]:
    (stream,) = server.play(Request(prompt_token_ids=(1,), params=params)).streams
    return stream.token_ids


ROWS = 4
NUM_REQUESTS = 32

# Requests of a matrix that are sent at once: a server's queue counts each of their samples.
MAX_OPEN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class UrlOptions:
    """With a `matrix` each of its rows is a request; `num_requests` is ignored."""

    url: str
    api_key: str | None = None
    cacert: str | None = None
    num_requests: int = NUM_REQUESTS
    max_tokens: int = 48
    seed: int = 0
    matrix: OptionMatrix | None = None
    clock: Callable[[], float] = time.perf_counter


def verify_url(options: UrlOptions, report: ReportProgress) -> VerifierResult:
    """Each request alone, then with others: cold, with cached prefixes, in reverse order. Raises
    ConfigError."""
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
        """Raises the first failure."""
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
        """Without tokens where the answer lacks a sample. Raises ConfigError for one with more
        samples than were asked for."""
        asked, given = self.requests[request].params.n, len(answer.streams)
        if given > asked:
            raise ConfigError(f"--url: an answer has {given} choices for n={asked}")
        found = dict(enumerate(answer.streams))
        return [
            replace(found.get(sample, Stream()), request=request, sample=sample)
            for sample in range(asked)
        ]
