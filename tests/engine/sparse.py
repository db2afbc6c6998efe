"""Requests whose prompts are thinned out, over the token-storing runner, and what they owe."""

import random
from dataclasses import replace
from typing import Any

from cadenza.backends.fake import FakeRunner
from cadenza.config import EngineLimits
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.request import Request, SamplingParams
from cadenza.sparse_prefill import KeptTokens, SparsePrefill, num_chunks
from tests.engine.solo import EOS_TOKEN_IDS, VOCAB_SIZE, SoloStream, solo_stream

SECRET = b"a secret of the tests of sparse prompts"
WINDOW = 40
LIMITS = EngineLimits(
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_model_len=512,
    page_size=16,
    num_pages=128,
    max_num_queued_reqs=100,
)


def fake_of(limits: EngineLimits, **given: Any) -> FakeRunner:
    return FakeRunner(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_pages_per_seq=limits.max_pages_per_seq,
        num_pages=limits.num_pages,
        page_size=limits.page_size,
        vocab_size=VOCAB_SIZE,
        is_sparse=True,
        **given,
    )


def engine_of(limits: EngineLimits = LIMITS, **options: Any) -> EngineCore:
    """An engine whose model has a window of `WINDOW` tokens."""
    given = {"eos_token_ids": EOS_TOKEN_IDS, "secret": SECRET, "window": WINDOW, **options}
    return EngineCore(fake_of(limits), limits, CoreOptions(**given))


def tokens_of(count: int, seed: int) -> tuple[int, ...]:
    return tuple(random.Random(f"prompt {seed}").choices(range(VOCAB_SIZE), k=count))


def random_kept(num_tokens: int, seed: int) -> KeptTokens:
    """Both ends of a prompt and some of its other chunks, with a gap before the last."""
    last = num_chunks(num_tokens) - 1
    rng = random.Random(f"kept {num_tokens} {seed}")
    middle = {chunk for chunk in range(1, last - 1) if rng.random() < 0.4}
    return KeptTokens(num_prompt_tokens=num_tokens, chunks=(*sorted({0, last} | middle),))


def request_of(prompt: tuple[int, ...], kept: KeptTokens | None, **params: Any) -> Request:
    """One of which it is known what is kept."""
    given = {"max_tokens": 12, "temperature": 1.0, "seed": 5, "ignore_eos": True, **params}
    sparse = None if kept is None else SparsePrefill(keep=0.3, kept=kept.mask)
    return Request(prompt_token_ids=prompt, params=SamplingParams(**given), sparse_prefill=sparse)


def owed(request: Request, kept: KeptTokens | None, limits: EngineLimits = LIMITS) -> SoloStream:
    """What a seeded request gives alone, by the fake model."""
    seed = request.params.seed
    assert seed is not None, "its stream does not follow from the request"
    plain = replace(request, sparse_prefill=None)
    return solo_stream(plain, seed, limits.max_model_len, kept=kept, window=WINDOW)
