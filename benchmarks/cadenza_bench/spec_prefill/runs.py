"""Requests of `cadenza bench spec-prefill` on one engine, and simpler choices of chunks. A first
token's time is from its request's submission to the idle engine. Invariants: of an answer that is
given token by token, each position has the log probabilities that it has in one answer; a choice
follows from the prompt's tokens alone."""

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, inf, log

from cadenza import EngineCore, Finished, Request, SamplingParams, Token
from cadenza.bench import Clock
from cadenza.errors import RunnerError
from cadenza.events import Started, TokenLogprobs
from cadenza.sparse_prefill import CHUNK, LAST_TOKENS, KeptTokens, SparsePrefill, num_chunks

NUM_TOP = 20  # likeliest tokens that are compared at each position

LEAST_SHARE = 1e-6  # of probability, below which sums of rounded ones say nothing

Ids = tuple[int, ...]


@dataclass(slots=True, eq=False)
class Played:
    """What came of a request. `kept` is as in `Started`."""

    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    kept: bytes | None = None
    whole_because: str | None = None


def run_all(core: EngineCore, requests: Sequence[Request]) -> list[Played]:
    """Runs the requests together. Raises RunnerError if one fails."""
    unsent, outcomes = deque(requests), list[Played]()
    running: dict[int, Played] = {}
    while unsent or running:
        while unsent and core.num_queue_slots:
            outcomes.append(Played())
            running[core.submit(unsent.popleft())] = outcomes[-1]
        for event in core.step():
            outcome = running.get(event.request_id)
            if outcome is None:
                continue
            if isinstance(event, Started):
                outcome.kept, outcome.whole_because = event.kept, event.whole_because
            elif isinstance(event, Token):
                outcome.token_ids.append(event.token_id)
                if event.logprobs is not None:
                    outcome.logprobs.append(event.logprobs)
            elif isinstance(event, Finished):
                del running[event.request_id]
                if event.finish_reason == "error":
                    raise RunnerError(f"a request of the benchmark failed: {event.error}")
    return outcomes


def first_token_s(core: EngineCore, request: Request, clock: Clock) -> float:
    """Seconds to the first token of a request that is alone. Raises RunnerError if it fails."""
    start_s, first_s = clock(), None
    request_id = core.submit(request)
    while not core.is_idle:
        for event in core.step():
            if event.request_id != request_id:
                continue
            if isinstance(event, Token) and first_s is None:
                first_s = clock() - start_s
            elif isinstance(event, Finished) and event.finish_reason == "error":
                raise RunnerError(f"a request of the benchmark failed: {event.error}")
    assert first_s is not None, "it generates a token"
    return first_s


def greedy(prompt: Ids, max_tokens: int, sparse: SparsePrefill | None = None) -> Request:
    """A request whose tokens have log probabilities."""
    params = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, logprobs=NUM_TOP, ignore_eos=True
    )
    return Request(prompt_token_ids=prompt, params=params, sparse_prefill=sparse)


def forced_requests(prompt: Ids, answer: Sequence[int], kept: KeptTokens) -> list[Request]:
    """One for each token of an answer to a pruned prompt, whose earlier tokens are given."""
    found: list[Request] = []
    for place in range(len(answer)):
        whole = (*prompt, *answer[:place])
        added = range(num_chunks(len(prompt)), num_chunks(len(whole)))
        chunks = (*kept.chunks, *added)
        mask = KeptTokens(num_prompt_tokens=len(whole), chunks=chunks).mask
        found.append(greedy(whole, 1, SparsePrefill(keep=1.0, kept=mask)))
    return found


def divergence(whole: TokenLogprobs, thinned: TokenLogprobs) -> float:
    """A lower bound of KL(whole ‖ thinned) at one position: of the tokens that are among the
    likeliest of both, with all others as one."""
    theirs = dict(zip(thinned.top_ids, thinned.top_logprobs, strict=True))
    total, rest, their_rest = 0.0, 1.0, 1.0
    for token_id, logprob in zip(whole.top_ids, whole.top_logprobs, strict=True):
        other = theirs.get(token_id, -inf)
        if logprob == -inf or other == -inf:
            continue
        share = exp(logprob)
        total += share * (logprob - other)
        rest, their_rest = rest - share, their_rest - exp(other)
    if rest > LEAST_SHARE:
        total += rest * log(rest / max(their_rest, LEAST_SHARE))
    return max(total, 0.0)


_K1, _B = 1.2, 0.75  # BM25's usual parameters

Scores = Callable[[Sequence[int]], list[float]]  # of the chunks of a prompt


def random_scores(token_ids: Sequence[int]) -> list[float]:
    """By chance, with a seed that follows from the prompt."""
    rng = random.Random(repr(tuple(token_ids)))
    return [rng.random() for _ in range(num_chunks(len(token_ids)))]


def end_scores(token_ids: Sequence[int]) -> list[float]:
    """The beginning and the end, in equal parts."""
    count = num_chunks(len(token_ids))
    return [-float(min(place, count - 1 - place)) for place in range(count)]


def bm25_scores(token_ids: Sequence[int]) -> list[float]:
    """By BM25 over tokens: each chunk is a document, the last tokens of the prompt the query."""
    chunks = [
        Counter(token_ids[start : start + CHUNK]) for start in range(0, len(token_ids), CHUNK)
    ]
    query = {*token_ids[-LAST_TOKENS:]}
    holding = Counter(token_id for chunk in chunks for token_id in chunk if token_id in query)
    mean = len(token_ids) / len(chunks)
    weights = {
        token_id: math.log(1 + (len(chunks) - number + 0.5) / (number + 0.5))
        for token_id, number in holding.items()
    }
    return [_bm25(chunk, weights, mean) for chunk in chunks]


def _bm25(chunk: Counter[int], weights: Mapping[int, float], mean: float) -> float:
    length = _K1 * (1 - _B + _B * chunk.total() / mean)
    return sum(
        weights[token_id] * chunk[token_id] * (_K1 + 1) / (chunk[token_id] + length)
        for token_id in sorted(weights.keys() & chunk.keys())
    )


BASELINES: Mapping[str, Scores] = {
    "random": random_scores,
    "first_last": end_scores,
    "bm25": bm25_scores,
}


def chosen(token_ids: Sequence[int], keep: float, scores: Scores) -> KeptTokens:
    return SparsePrefill(keep=keep).select(scores(token_ids), len(token_ids))
