"""Requests whose prompts are thinned out, over the token-storing runner, and what they owe."""

import hashlib
import random
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from cadenza.backends.base import Capability
from cadenza.backends.fake import FakeRunner, FakeStepHandle, next_token
from cadenza.batch.draw_keys import derive_sample_seed
from cadenza.batch.step_schema import ModelInputs
from cadenza.config import EngineLimits
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.engine.scoring_steps import PromptScorerModel
from cadenza.engine.step_works import WorkOptions
from cadenza.request import Request, SamplingParams
from cadenza.scheduler.scoring_queue import MAX_SCORINGS
from cadenza.sparse_prefill import (
    LOOK_AHEAD,
    KeptTokens,
    PromptSpan,
    SparsePrefill,
    chunk_scores,
    num_chunks,
)
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


def fake_of(limits: EngineLimits, kind: type[FakeRunner] = FakeRunner, **given: Any) -> FakeRunner:
    return kind(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_pages_per_seq=limits.max_pages_per_seq,
        num_pages=limits.num_pages,
        page_size=limits.page_size,
        vocab_size=VOCAB_SIZE,
        is_sparse=True,
        **given,
    )


def engine_of(
    limits: EngineLimits = LIMITS, runner: FakeRunner | None = None, **options: Any
) -> EngineCore:
    """An engine whose model has a window of `WINDOW` tokens."""
    given = {"eos_token_ids": EOS_TOKEN_IDS, "secret": SECRET, "window": WINDOW, **options}
    return EngineCore(runner or fake_of(limits), limits, CoreOptions(**given))


@dataclass(kw_only=True, eq=False)
class FakeScorer(FakeRunner):
    """Scores a prompt by a hash of all tokens up to the query, read back through the page table.

    A step with a row of one of `fails_at` raises when it is read, as often as that says; the
    scores of prompts of `nan_at` tokens are NaN. `rows` lists the rows of each step.
    """

    fails_at: dict[int, int] = field(default_factory=dict[int, int])
    nan_at: frozenset[int] = frozenset()
    rows: list[list[int]] = field(default_factory=list[list[int]])
    _sums: dict[int, npt.NDArray[np.float32]] = field(
        default_factory=dict[int, npt.NDArray[np.float32]]
    )

    @property
    def capabilities(self) -> frozenset[Capability]:
        return frozenset({"scores"})

    def launch(self, inputs: ModelInputs) -> FakeStepHandle:
        handle = super().launch(inputs)
        starts, lens = inputs.rows.query_starts, inputs.rows.score_lens.tolist()
        self.rows.append(np.flatnonzero(np.diff(starts)).tolist())
        for row in np.flatnonzero(lens).tolist():
            count = lens[row]
            last = int(inputs.rows.kv_lens[row])
            scores = query_scores(tuple(self._stored(row, last)), count)
            self._sums[row] = scores if last == count else self._sums[row] + scores
        lengths = set(inputs.rows.kv_lens.tolist())
        for length in lengths & set(self.fails_at):
            if self.fails_at[length]:
                self.fails_at[length] -= 1
                return FakeStepHandle(handle.output, self._fail)
        return handle

    def read_scores(self, row: int, num_tokens: int, num_queries: int) -> npt.NDArray[np.float32]:
        sums = self._sums[row]
        assert len(sums) == num_tokens
        mean = sums / np.float32(num_queries)
        return np.full_like(mean, np.nan) if num_tokens in self.nan_at else mean

    def reset(self) -> None:
        super().reset()
        self._sums = {}

    def _fail(self) -> None:
        raise RuntimeError("a device fault")

    def _stored(self, row: int, count: int) -> list[int]:
        size, places = self.page_size, range(count)
        table = self._page_table[row]
        return [int(self._slots[table[at // size] * size + at % size]) for at in places]


@lru_cache(maxsize=20_000)
def query_scores(history: tuple[int, ...], num_tokens: int) -> npt.NDArray[np.float32]:
    """What the last token of `history` scores of the first `num_tokens`."""
    seed = int.from_bytes(
        hashlib.blake2b(np.array(history, np.int64).tobytes(), digest_size=8).digest(), "little"
    )
    return np.random.default_rng(seed).random(num_tokens, np.float32)


def scores_of(prompt: tuple[int, ...], stop: frozenset[int]) -> list[float]:
    """The scores of a prompt's chunks, by the fake model over one growing list of tokens."""
    history, sums, count = list(prompt), np.zeros(len(prompt), np.float32), 0
    for number in range(LOOK_AHEAD):
        scores = query_scores(tuple(history), len(prompt))
        sums = scores if not number else sums + scores
        count += 1
        drawn = next_token(history, (0, 0), vocab_size=VOCAB_SIZE)
        if drawn in stop:
            break
        history.append(drawn)
    return chunk_scores((sums / np.float32(count)).tolist(), len(prompt))


def kept_of(request: Request) -> KeptTokens | None:
    """What a request keeps, as it follows from the request alone."""
    sparse, prompt = request.sparse_prefill, request.prompt_token_ids
    if sparse is None:
        return None
    params = request.params
    stop = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else EOS_TOKEN_IDS)
    return sparse.select(scores_of(prompt, stop), len(prompt))


def scorer_limits(limits: EngineLimits, num_tokens: int = 48) -> EngineLimits:
    """A scorer's limits beside those of its target."""
    return replace(
        limits,
        max_num_seqs=MAX_SCORINGS,
        max_num_batched_tokens=num_tokens,
        max_model_len=limits.max_model_len + LOOK_AHEAD,
    )


def scorer_of(
    limits: EngineLimits,
    num_tokens: int = 48,
    kind: type[FakeRunner] = FakeScorer,
    **given: Any,
) -> PromptScorerModel:
    own = scorer_limits(limits, num_tokens)
    runner = kind(
        max_num_seqs=own.max_num_seqs,
        max_num_batched_tokens=own.max_num_batched_tokens,
        max_pages_per_seq=own.max_pages_per_seq,
        num_pages=own.num_pages,
        page_size=own.page_size,
        **{"vocab_size": VOCAB_SIZE, **given},
    )
    return PromptScorerModel(runner=runner, limits=own)


def scoring_engine(
    limits: EngineLimits = LIMITS, scorer: PromptScorerModel | None = None, **options: Any
) -> EngineCore:
    """An engine with a scorer."""
    works = WorkOptions(prompt_scorer=scorer or scorer_of(limits))
    return engine_of(limits, works=works, **options)


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


def asking(
    prompt: tuple[int, ...],
    keep: float = 0.7,
    forced: tuple[PromptSpan, ...] = (),
    sparse: dict[str, Any] | None = None,
    **params: Any,
) -> Request:
    """A request whose prompt is to be scored."""
    plain = request_of(prompt, None, **params)
    asked = SparsePrefill(keep=keep, forced=forced, **(sparse or {}))
    return replace(plain, sparse_prefill=asked)


def owed(
    request: Request,
    kept: KeptTokens | None,
    limits: EngineLimits = LIMITS,
    sample: int = 0,
    *,
    sees: bool = False,
) -> SoloStream:
    """What a sample of a seeded request gives alone, by the fake model."""
    seed = request.params.seed
    assert seed is not None, "its stream does not follow from the request"
    plain = replace(request, sparse_prefill=None)
    seed = derive_sample_seed(seed, sample)
    return solo_stream(plain, seed, limits.max_model_len, sees=sees, kept=kept, window=WINDOW)
