"""Requests of different lengths that arrive over time, greedy and sampled; a pure function.
Invariant: some prompts share a prefix of full pages, some cross an attention block; there are more
requests than rows; if they fit, three prompts are long: with the first rows, mid-stream, and one
that shares the first's tokens."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace

from cadenza.errors import ConfigError
from cadenza.request import Request, SamplingParams
from cadenza.sparse_prefill import LOOK_AHEAD, SparsePrefill, num_chunks

NUM_LOGPROBS = 5
LONGEST_SHORT_PROMPT = 224
SHARED_PREFIX = 48

BEYOND = 215
"""Tokens by which the longest prompt exceeds spans and windows; so it is no multiple of a span, a
block or a page."""

LONGEST_PROMPT = 2 * 512 + BEYOND
"""Where the backend is not known."""


def longest_prompt(span: int, windows: Iterable[int]) -> int:
    """Tokens of the longest prompt: more than two attention spans and more than each window."""
    return max((2 * span, *windows)) + BEYOND


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadShape:
    """`num_requests` is more than `rows`, which is `--max-num-seqs` of the batched runs;
    `max_tokens`: longest output; every prompt with its output fits the `context` (`max_model_len`);
    prompt tokens are below `vocab_size`; `longest`: tokens of the longest prompt, if the context
    allows; `sampled_share`: fraction of the requests that are sampled. Raises ConfigError where one
    is out of bounds."""

    num_requests: int
    rows: int
    max_tokens: int
    context: int
    vocab_size: int
    longest: int = LONGEST_PROMPT
    sampled_share: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rows < 2:
            raise ConfigError(f"--max-num-seqs {self.rows}: a batch needs at least 2 rows")
        if self.num_requests <= self.rows:
            raise ConfigError(
                f"--num-requests {self.num_requests} must be above --max-num-seqs {self.rows}, "
                f"so that rows are reused"
            )
        if self.max_tokens < 4 or self.context < 2 * self.max_tokens:
            raise ConfigError(
                f"--max-tokens {self.max_tokens} must be from 4 to half the context of "
                f"{self.context} tokens"
            )


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request and the step before which it is submitted."""

    step: int
    request: Request


def make_workload(shape: WorkloadShape) -> tuple[Arrival, ...]:
    """Arrivals ordered by step: the first `rows` at step 0, the others over later steps."""
    rng = random.Random(shape.seed)  # noqa: S311  a workload, not a secret
    longest = min(LONGEST_SHORT_PROMPT, shape.context - shape.max_tokens)
    prefix = [rng.randrange(shape.vocab_size) for _ in range(min(SHARED_PREFIX, longest // 2))]
    arrivals: list[Arrival] = []
    step = 0
    for index in range(shape.num_requests):
        if index >= shape.rows:
            step += rng.randint(0, 4)
        arrivals.append(Arrival(step, _make_request(rng, shape, index, prefix, longest)))
    for index, prompt in _long_prompts(rng, shape).items():
        request = arrivals[index].request
        params = replace(request.params, max_tokens=shape.max_tokens, ignore_eos=True)
        request = replace(request, prompt_token_ids=prompt, params=params)
        arrivals[index] = replace(arrivals[index], request=request)
    return tuple(arrivals)


def _long_prompts(rng: random.Random, shape: WorkloadShape) -> dict[int, tuple[int, ...]]:
    longest = min(shape.longest, shape.context - shape.max_tokens)
    if longest <= LONGEST_SHORT_PROMPT:
        return {}
    tokens = tuple(rng.randrange(shape.vocab_size) for _ in range(longest))
    joining = tuple(rng.randrange(shape.vocab_size) for _ in range(longest * 3 // 5))
    shared, own = tokens[: longest * 2 // 3], joining[: longest // 4]
    return {1: tokens, shape.rows: joining, shape.num_requests - 1: shared + own}


def _make_request(
    rng: random.Random, shape: WorkloadShape, index: int, prefix: list[int], longest: int
) -> Request:
    length = rng.choice((rng.randint(1, 24), rng.randint(1, longest), longest))
    shared = prefix[: rng.choice((0, len(prefix)))][:length]
    prompt = shared + [rng.randrange(shape.vocab_size) for _ in range(length - len(shared))]
    is_sampled = (index * 0x9E3779B9 >> 7) % 1000 < shape.sampled_share * 1000
    return Request(
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(
            max_tokens=rng.randint(max(1, shape.max_tokens // 3), shape.max_tokens),
            temperature=rng.choice((1.0, 1.0, 0.7, 1.3)) if is_sampled else 0.0,
            top_k=rng.choice((0, 0, 40)),
            top_p=rng.choice((1.0, 1.0, 0.9)),
            min_p=rng.choice((0.0, 0.0, 0.02)),
            seed=rng.randrange(1 << 40),
            logprobs=NUM_LOGPROBS,
            ignore_eos=rng.random() < 0.5,
        ),
    )


EVERY = 3
"""Of the prompts that can be thinned out, one of so many is not."""


def with_sparse_prompts(arrivals: tuple[Arrival, ...], keep: float) -> tuple[Arrival, ...]:
    """Most of the prompts in which scores decide something keep so much, or as little more as
    leaves a choice."""
    found: list[Arrival] = []
    num_able = 0
    for each in arrivals:
        sparse = _sparse_of(each.request, keep)
        num_able += sparse is not None
        if sparse is not None and num_able % EVERY:
            found.append(replace(each, request=replace(each.request, sparse_prefill=sparse)))
        else:
            found.append(each)
    return tuple(found)


def _sparse_of(request: Request, keep: float) -> SparsePrefill | None:
    params, num_tokens = request.params, len(request.prompt_token_ids)
    needs_all = request.attachments or request.needs_prompt_rows or request.pooling is not None
    if needs_all or params.repetition_penalty != 1.0 or (params.max_tokens or 0) < LOOK_AHEAD:
        return None
    count = num_chunks(num_tokens)
    num_forced = len(SparsePrefill(keep=keep).forced_chunks(num_tokens))
    wanted = max(keep, (num_forced + 1) / count)
    sparse = SparsePrefill(keep=min(1.0, wanted))
    return sparse if num_forced < sparse.num_kept_chunks(num_tokens) < count else None
