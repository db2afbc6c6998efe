"""Every kind of cache and weights: requests mixed in one batch are what they are alone."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cadenza.backends.base import RunnerSetup
from cadenza.config import EngineLimits
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.request import Finished, Request, SamplingParams, Token
from tests.mlx.tiny_models import KINDS, VOCAB_SIZE

LIMITS = EngineLimits(
    max_num_seqs=4,
    max_num_batched_tokens=40,
    max_model_len=160,
    page_size=160,
    num_pages=4,
    max_num_queued_reqs=100,
    enable_prefix_caching=False,
)
LENGTHS = (5, 93, 1, 40, 64, 17, 130)
NUM_TOKENS = 12

Streams = dict[int, tuple[int, ...]]


def requests() -> list[Request]:
    rng = np.random.default_rng(3)
    prompts = [tuple(rng.integers(3, VOCAB_SIZE, length).tolist()) for length in LENGTHS]
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    drawn = replace(greedy, temperature=0.8, top_p=0.9, seed=5)
    return [
        Request(prompt_token_ids=prompt, params=drawn if index % 3 == 2 else greedy)
        for index, prompt in enumerate(prompts)
    ]


def streams(core: EngineCore, wanted: Iterable[Request], *, at_once: bool) -> list[Any]:
    """The tokens of each request, played together or one after the other."""
    found: dict[Any, list[int]] = {}
    for request in wanted:
        core.submit(request)
        while not at_once and not core.is_idle:
            take(core, found)
    while not core.is_idle:
        take(core, found)
    return [found[key] for key in sorted(found)]


def take(core: EngineCore, found: dict[Any, list[int]]) -> None:
    for event in core.step():
        if isinstance(event, Token):
            found.setdefault((event.request_id, event.sample), []).append(event.token_id)
        elif isinstance(event, Finished):
            assert event.error is None


@pytest.fixture(scope="module", params=KINDS)
def runner(request: pytest.FixtureRequest, tiny_model: Callable[[str], Path]) -> Iterator[Any]:
    from cadenza.backends.mlx.runner import MlxRunner

    setup = RunnerSetup(limits=LIMITS, device="cpu", ops="auto", dtype="float32", fill=1000.0)
    folder = tiny_model(request.param)
    with closing(MlxRunner(folder, VOCAB_SIZE, setup)) as made:
        made.warmup()
        yield made, KINDS[request.param], folder


def engine(runner: Any, **changes: Any) -> EngineCore:
    runner.reset()
    return EngineCore(runner, replace(LIMITS, **changes), CoreOptions(eos_token_ids=frozenset()))


def test_rows_decode_together_where_the_models_code_allows_it(runner: Any):
    made, kind, _ = runner
    assert made.abilities.is_ragged == kind.is_ragged


def test_requests_in_one_batch_are_what_each_is_alone(runner: Any):
    made, _, _ = runner
    alone = streams(engine(made), requests(), at_once=False)
    together = streams(engine(made), requests(), at_once=True)
    in_small_chunks = streams(engine(made, max_num_batched_tokens=9), requests(), at_once=True)
    assert [len(each) for each in alone] == [NUM_TOKENS] * len(LENGTHS)
    assert together == alone
    assert in_small_chunks == alone


def test_greedy_streams_are_those_of_mlx_lm(runner: Any):
    import mlx.core as mx

    from cadenza.backends.mlx.zoo import load_zoo_model

    made, _, folder = runner
    zoo = load_zoo_model(folder)
    greedy = [each for each in requests() if each.params.temperature == 0]
    expected: list[list[int]] = []
    for each in greedy:
        caches, tokens = zoo.new_caches(), list(each.prompt_token_ids)
        logits = zoo.model(mx.array([tokens]), cache=caches)
        chosen = [int(mx.argmax(logits[0, -1]))]
        for _ in range(NUM_TOKENS - 1):
            logits = zoo.model(mx.array([chosen[-1:]]), cache=caches)
            chosen.append(int(mx.argmax(logits[0, -1])))
        expected.append(chosen)
    assert streams(engine(made), greedy, at_once=True) == expected


def test_samples_of_one_prompt_are_what_each_is_alone(runner: Any):
    made, _, _ = runner
    prompt = requests()[1].prompt_token_ids
    params = SamplingParams(temperature=1.0, n=3, max_tokens=NUM_TOKENS, ignore_eos=True, seed=4)
    together = streams(
        engine(made), [Request(prompt_token_ids=prompt, params=params)], at_once=True
    )
    first = Request(prompt_token_ids=prompt, params=replace(params, n=1))
    assert together[0] == streams(engine(made), [first], at_once=True)[0]
    assert len({tuple(each) for each in together}) == 3
    again = streams(
        engine(made), [*requests(), Request(prompt_token_ids=prompt, params=params)], at_once=True
    )
    assert again[-3:] == together
