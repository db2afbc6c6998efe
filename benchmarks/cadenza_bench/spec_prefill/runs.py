"""Requests of `cadenza bench spec-prefill` on one engine. A first token's time is from its
request's submission to the idle engine. Invariant: of an answer that is given token by token, each
position has the log probabilities that it has in one answer.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, inf, log

from cadenza import EngineCore, Finished, Request, SamplingParams, Token
from cadenza.bench import Clock
from cadenza.errors import RunnerError
from cadenza.events import Started, TokenLogprobs
from cadenza.sparse_prefill import KeptTokens, SparsePrefill, num_chunks

NUM_TOP = 20
"""Likeliest tokens that are compared at each position."""

LEAST_SHARE = 1e-6
"""Of probability, below which sums of rounded ones say nothing."""

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
    """One for each token of an answer to a thinned prompt, whose earlier tokens are given."""
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
