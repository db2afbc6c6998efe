"""Streams over prompts with gaps, on the real step: each is what its request gives alone."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np
import pytest

from cadenza.backends.xla.runner import XlaRunner
from cadenza.config import SchedulerLoop
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.engine.scoring_steps import PromptScorerModel
from cadenza.engine.step_works import WorkOptions
from cadenza.events import Finished, Token
from cadenza.models.layer_kind import LayerKind
from cadenza.request import Request, SamplingParams
from cadenza.scheduler.scoring_queue import ScoringQueue
from cadenza.sparse_prefill import SparsePrefill
from tests.engine.sparse import random_kept, scorer_limits
from tests.xla.harness import BASE, REFERENCE, Lab, Stream, Variant

WINDOW = 24
VARIANTS = [BASE, replace(REFERENCE, shape="two layers of hostile")]


@dataclass(frozen=True, slots=True)
class Pair:
    variant: Variant
    runner: XlaRunner
    scorer: PromptScorerModel


@pytest.fixture(scope="module", params=VARIANTS, ids=["native", "reference"])
def pair(lab: Lab, request: pytest.FixtureRequest) -> Iterator[Pair]:
    variant: Variant = request.param
    model = replace(variant.config, layer_pattern=(LayerKind(window=WINDOW), LayerKind()))
    setup = replace(variant.setup, capabilities=frozenset({"sparse_prompts"}))
    runner = XlaRunner(model, lab.weights(variant.shape), setup, variant.ops)
    limits = scorer_limits(variant.limits, 32)
    draft = replace(REFERENCE, ops=variant.ops)
    own = replace(variant.setup, limits=limits, capabilities=frozenset({"scores"}))
    scorer = XlaRunner(draft.config, lab.weights(draft.shape), own, variant.ops)
    runner.warmup()
    scorer.warmup()
    with closing(runner), closing(scorer):
        yield Pair(variant, runner, PromptScorerModel(runner=scorer, limits=limits))


def tokens_of(count: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(3, 211, count).tolist())


def asked(count: int, *, is_known: bool = False, keep: float = 0.7, n: int = 1) -> Request:
    """`is_known`: which tokens are kept is given, so that nothing is scored."""
    kept = random_kept(count, count).mask if is_known else None
    params = SamplingParams(
        max_tokens=10, temperature=0.8, seed=count, ignore_eos=True, logprobs=3, n=n
    )
    sparse = SparsePrefill(keep=keep, kept=kept)
    return Request(prompt_token_ids=tokens_of(count, count), params=params, sparse_prefill=sparse)


def serve(
    pair: Pair,
    requests: Sequence[Request],
    *,
    budget: int = 64,
    num_pages: int | None = None,
    loop: SchedulerLoop = "overlap",
) -> tuple[list[Stream], EngineCore]:
    pair.runner.reset()
    pair.scorer.runner.reset()
    limits = replace(
        pair.variant.limits,
        max_num_batched_tokens=budget,
        num_pages=num_pages or pair.variant.num_pages,
    )
    options = CoreOptions(
        secret=b"test",
        window=WINDOW,
        loop=loop,
        reserved_output=0.0,
        works=WorkOptions(prompt_scorer=pair.scorer),
    )
    engine = EngineCore(pair.runner, limits, options)
    streams = {engine.submit(each): Stream() for each in requests}
    while not engine.is_idle:
        for event in engine.step():
            if isinstance(event, Token) and event.sample == 0:
                streams[event.request_id].tokens.append(event)
            elif isinstance(event, Finished) and event.sample == 0:
                streams[event.request_id].finished = event
        engine.check_invariants()
    return [*streams.values()], engine


def test_streams_alone_together_in_any_cut_and_preempted_are_equal_bit_by_bit(pair: Pair) -> None:
    plain = replace(asked(70), sparse_prefill=None)
    requests = [asked(200), asked(261, is_known=True), plain, asked(300), asked(131, n=2)]
    alone = [serve(pair, [each], loop="plain")[0][0] for each in requests]
    for budget, num_pages in ((64, None), (11, None), (40, 21)):
        streams, engine = serve(pair, requests, budget=budget, num_pages=num_pages)
        found = [a.difference(b) for a, b in zip(streams, alone, strict=True)]
        assert found == [None] * len(requests)
        if num_pages is not None:
            assert engine.scheduler.work(ScoringQueue).counts.num_failed == 0
            preempted = engine.scheduler.work(ScoringQueue).counts.num_preempted
            assert engine.scheduler.num_preemptions + preempted > 0


def test_with_everything_kept_a_stream_has_the_bits_of_the_whole_prompt(pair: Pair) -> None:
    request = asked(200, keep=1.0)
    (thinned,), _ = serve(pair, [request])
    (whole,), _ = serve(pair, [replace(request, sparse_prefill=None)])
    (gaps,), _ = serve(pair, [asked(200)])
    assert thinned.difference(whole) is None
    assert gaps.difference(whole) is not None, "the control: gaps change the stream"
