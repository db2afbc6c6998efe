"""An engine whose images attend both ways: spans are computed whole, streams are solo."""

import numpy as np
import pytest

from cadenza.backends.base import BackendTraits, Capability
from cadenza.backends.fake import FakeRunner, FakeStepHandle
from cadenza.batch.step_schema import NO_REACH, ModelInputs
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.config import EngineConfig, EngineLimits, ImageLimits
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.errors import ConfigError, RunnerError
from cadenza.events import Token
from cadenza.loading.plan import make_plan
from cadenza.request import Attachment, Request, SamplingParams
from tests.engine.seeing import image_at
from tests.engine.solo import EOS_TOKEN_IDS, IMAGE_TOKEN_ID, VOCAB_SIZE, solo_stream_of

SEED = 5


class SeeingRunner(FakeRunner):
    """Refuses a step in which a token sees further than its row's tokens go."""

    @property
    def capabilities(self) -> frozenset[Capability]:
        return frozenset({"logprobs", "attachments", "whole_spans"})

    def launch(self, inputs: ModelInputs) -> FakeStepHandle:
        starts, reaches = inputs.rows.query_starts, inputs.tokens.reaches
        for row, kv_len in enumerate(inputs.rows.kv_lens.tolist()):
            inside = reaches[starts[row] : starts[row + 1]]
            if len(inside) and inside.max() >= kv_len:
                raise RunnerError(f"row {row} sees to {inside.max()} of {kv_len} tokens")
        self.num_reaching += int((reaches != NO_REACH).sum())
        return FakeRunner.launch(self, inputs)

    num_reaching = 0


def engine_of(budget: int, num_pages: int = 24) -> EngineCore:
    limits = EngineLimits(
        max_num_seqs=3,
        max_num_batched_tokens=budget,
        max_model_len=160,
        page_size=16,
        num_pages=num_pages,
        max_num_queued_reqs=16,
        enable_prefix_caching=True,
        images=ImageLimits(token_id=IMAGE_TOKEN_ID, num_slots=64),
    )
    runner = SeeingRunner(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=budget,
        max_pages_per_seq=limits.max_pages_per_seq,
        num_pages=num_pages,
        page_size=limits.page_size,
        vocab_size=VOCAB_SIZE,
        num_image_slots=64,
        image_token_id=IMAGE_TOKEN_ID,
    )
    return EngineCore(runner, limits, CoreOptions(eos_token_ids=EOS_TOKEN_IDS, seed=SEED))


def request_of(length: int, *spans: tuple[int, int], max_tokens: int = 8) -> Request:
    prompt = np.random.default_rng(length).integers(12, IMAGE_TOKEN_ID, length).tolist()
    attachments: list[Attachment] = []
    for start, stop in spans:
        prompt[start:stop], own = image_at(start, length, 1, stop - start)
        attachments += own
    return Request(
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1),
        attachments=tuple(attachments),
    )


REQUESTS = [
    request_of(60, (3, 12), (20, 29)),
    request_of(60, (3, 12), (20, 29)),  # finds pages that end within the spans
    request_of(80, (0, 9), (9, 18), (70, 79)),
    request_of(30),
    request_of(40, (31, 40)),  # ends with a span
]


def run(engine: EngineCore, requests: list[Request]) -> list[tuple[int, ...]]:
    """The streams; all requests are there from the start."""
    streams: dict[int, list[int]] = {engine.submit(request): [] for request in requests}
    ids = list(streams)
    while not engine.is_idle:
        for event in engine.step():
            if isinstance(event, Token):
                streams[event.request_id].append(event.token_id)
        engine.check_invariants()
    return [tuple(streams[request_id]) for request_id in ids]


@pytest.mark.parametrize(
    ("budget", "num_pages"), [(11, 24), (13, 24), (16, 24), (64, 24), (16, 11)]
)
def test_streams_are_solo_at_every_budget_and_no_span_is_cut(budget: int, num_pages: int) -> None:
    engine = engine_of(budget, num_pages)
    for _ in range(2):  # the second time over what the first has cached
        first_id = engine._next_request_id
        streams = run(engine, REQUESTS)
        for place, request in enumerate(REQUESTS):
            solo = solo_stream_of(request, (first_id + place, 0), engine, SEED)
            assert streams[place] == solo.token_ids
    runner = engine.runner
    assert isinstance(runner, SeeingRunner)
    assert runner.num_reaching > 0
    assert engine.loop.num_failed_steps == 0


TRAITS = BackendTraits(
    name="test:cpu",
    ops="native",
    exactness="bitwise",
    dtypes=("float32",),
    dtype_for={"float32": "float32", "bfloat16": "float32"},
    max_num_batched_tokens=48,
    device_memory_bytes=None,
    whole_span=30,
)


@pytest.mark.parametrize(("rows", "budget"), [(16, 48), (19, 48), (20, 49), (100, 129)])
def test_the_default_budget_holds_the_longest_span_beside_every_row(rows: int, budget: int) -> None:
    plan = make_plan(EngineConfig(max_num_seqs=rows), open_checkpoint(None), TRAITS, 4 << 30)
    assert plan.limits.max_num_batched_tokens == budget


def test_a_budget_that_holds_no_span_is_refused_with_the_least_that_does() -> None:
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=32)
    with pytest.raises(ConfigError, match="set --max-num-batched-tokens 33, or --no-images"):
        make_plan(config, open_checkpoint(None), TRAITS, 4 << 30)
