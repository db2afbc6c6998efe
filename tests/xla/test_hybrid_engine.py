"""A hybrid model through the engine: cold = warm = drafted = preempted = forked = restarted.

Each stream has the bits of its request alone, without a prefix cache, at prompts around pages and
snapshots; and what was to be found in the cache was found.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from cadenza.backends.xla.runner import XlaRunner
from cadenza.batch.draw_keys import derive_sample_seed
from cadenza.config import EngineLimits
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.engine.new_sequences import ResumedSample, Resumption
from cadenza.engine.page_folder import PageFolder
from cadenza.events import Finished, Token
from cadenza.request import Request, SamplingParams
from tests.by_day import by_day
from tests.xla.harness import Lab, Stream, Variant

SHAPE = "tiny-qwen3.5"
VARIANT = Variant(shape=SHAPE)
LIMITS = replace(VARIANT.limits, num_state_slots=40, state_snapshot_interval=48)
ALONE = replace(LIMITS, max_num_seqs=8, enable_prefix_caching=False)
LENGTHS = by_day(range(2, 120), {17, 48, 49, 97})
MAX_TOKENS = 20
SEED = 3

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def warm_runner(lab: Lab) -> XlaRunner:
    setup = replace(VARIANT.setup, limits=LIMITS, capabilities=frozenset({"page_copies"}))
    runner = XlaRunner(VARIANT.config, lab.weights(SHAPE), setup, VARIANT.ops)
    runner.warmup()
    return runner


@pytest.fixture
def runner(warm_runner: XlaRunner) -> XlaRunner:
    warm_runner.reset()
    return warm_runner


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    random = np.random.default_rng(seed)
    return tuple(random.integers(3, VARIANT.config.vocab_size, 150).tolist()[:length])


def request_of(prompt: tuple[int, ...], *, n: int = 1, seed: int = SEED) -> Request:
    params = SamplingParams(
        temperature=1.0, seed=seed, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=4, n=n
    )
    return Request(prompt_token_ids=prompt, params=params)


@dataclass(slots=True)
class Ran:
    streams: dict[tuple[int, int], Stream] = field(default_factory=dict)

    @property
    def cached(self) -> list[int]:
        ends = [stream.finished for stream in self.streams.values()]
        return [end.num_cached_tokens for end in ends if end is not None]


def run(engine: EngineCore) -> Ran:
    ran = Ran()
    while not engine.is_idle:
        for event in engine.step():
            if isinstance(event, Token | Finished):
                stream = ran.streams.setdefault((event.request_id, event.sample), Stream())
                if isinstance(event, Finished):
                    assert event.error is None
                    stream.finished = event
                else:
                    stream.tokens.append(event)
        engine.check_invariants()
    return ran


def serve(engine: EngineCore, *requests: Request) -> Ran:
    for request in requests:
        engine.submit(request)
    return run(engine)


def engine_of(
    runner: XlaRunner, limits: EngineLimits = LIMITS, options: CoreOptions | None = None
) -> EngineCore:
    runner.reset()
    return EngineCore(runner, limits, options)


def same(ran: Ran, expected: Ran) -> None:
    ours = [ran.streams[key] for key in sorted(ran.streams)]
    for stream, alone in zip(ours, expected.streams.values(), strict=True):
        assert stream.difference(alone) is None


@pytest.mark.parametrize("length", LENGTHS)
def test_cold_warm_drafted_forked_and_restarted_have_the_same_bits(
    runner: XlaRunner, length: int, tmp_path: Path
):
    request, samples = request_of(prompt_of(length)), request_of(prompt_of(length), n=3)
    cold = serve(engine_of(runner, ALONE), request)
    apart = Ran()
    for sample in range(3):
        own = request_of(prompt_of(length), seed=derive_sample_seed(SEED, sample))
        apart.streams[0, sample] = serve(engine_of(runner, ALONE), own).streams[0, 0]

    folder = PageFolder(tmp_path, "one model", 1 << 26)
    engine = engine_of(runner, options=CoreOptions(page_folder=folder))
    same(serve(engine, request), cold)
    warm = serve(engine, request)
    same(warm, cold)
    hit = (length - 1) // 16 * 16
    assert warm.cached == [hit]
    same(serve(engine, samples), apart)
    assert engine.stored_pages is not None
    while engine.stored_pages.is_busy:
        engine.stored_pages.advance()
        engine.stored_pages.wait()
    engine.stored_pages.close()

    (stream,) = cold.streams.values()
    ids = enumerate(stream.token_ids)
    guess = [(token + 1) % 90 if at % 4 == 3 else token for at, token in ids]
    drafting = engine_of(runner)
    same(serve(drafting, replace(request, prediction=tuple(guess))), cold)
    assert drafting.draft_counts.num_accepted_tokens > 0
    assert drafting.draft_counts.num_draft_tokens > 5
    same(serve(engine_of(runner), samples), apart)

    folder = PageFolder(tmp_path, "one model", 1 << 26)
    restarted = engine_of(runner, options=CoreOptions(page_folder=folder))
    again = serve(restarted, request)
    same(again, cold)
    assert again.cached == [hit]
    assert restarted.stored_pages is not None
    restarted.stored_pages.close()


def test_the_next_turn_starts_behind_the_answer(runner: XlaRunner):
    first = serve(engine_of(runner, ALONE), request_of(prompt_of(40)))
    (stream,) = first.streams.values()
    turn = request_of((*prompt_of(40), *stream.token_ids, *prompt_of(30, seed=4)))
    cold = serve(engine_of(runner, ALONE), turn)
    engine = engine_of(runner)
    serve(engine, request_of(prompt_of(40)))
    warm = serve(engine, turn)
    same(warm, cold)
    assert warm.cached == [48]


@pytest.mark.parametrize("num_slots", [16, 40])
def test_preempted_streams_beside_others_have_the_same_bits(runner: XlaRunner, num_slots: int):
    requests = [request_of((*prompt_of(50), 5 + at)) for at in range(7)]
    cold = [serve(engine_of(runner, ALONE), each) for each in requests]
    tight = replace(LIMITS, num_pages=14, num_state_slots=num_slots, max_model_len=96)
    engine = engine_of(runner, tight, CoreOptions(reserved_output=0.0))
    ran = serve(engine, *requests)
    assert engine.scheduler.num_preemptions > 0
    assert engine.scheduler.prefix_counts.num_hits > 0
    for stream, alone in zip(
        [ran.streams[at, 0] for at in range(7)], [each.streams[0, 0] for each in cold], strict=True
    ):
        assert stream.difference(alone) is None


def test_a_stream_that_another_engine_goes_on_with_has_the_same_bits(runner: XlaRunner):
    request = request_of(prompt_of(60))
    cold = serve(engine_of(runner, ALONE), request)
    (stream,) = cold.streams.values()
    for count in (1, 4, 5, 11):
        engine = engine_of(runner)
        resumed = ResumedSample(sample=0, token_ids=stream.token_ids[:count])
        engine.resume(0, request, Resumption(samples=(resumed,)))
        (rest,) = run(engine).streams.values()
        expected = Stream(stream.tokens[count:], stream.finished)
        assert rest.difference(expected) is None
