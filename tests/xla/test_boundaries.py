"""Bar 8 on the real runner: requests at the edge of pool and context are refused or served."""

from dataclasses import replace

import numpy as np
import pytest

from cadenza.backends.xla.device_state import PAGE_COPIES, PAGE_UPDATES
from cadenza.backends.xla.runner import XlaRunner
from cadenza.batch.sequence import PageCopy
from cadenza.batch.step_schema import RuleUpdate
from cadenza.batch.token_rules import RuleLayout
from cadenza.errors import InvalidRequestError
from cadenza.request import Request, SamplingParams
from tests.contract.steps import Draw, Geometry, Stream, build_inputs, run_step
from tests.scheduler.builders import sequence_of
from tests.xla.harness import BASE, Lab, Mode, new_engine, serve, serve_alone

CONTEXT = BASE.max_model_len
POOL_PAGES = 6
POOL_TOKENS = POOL_PAGES * BASE.page_size
BLOCK = 128


def request_of(num_prompt_tokens: int, max_tokens: int | None) -> Request:
    prompt = np.random.default_rng(num_prompt_tokens).integers(3, 211, num_prompt_tokens)
    params = SamplingParams(
        max_tokens=max_tokens, temperature=0.9, seed=1, ignore_eos=True, logprobs=20
    )
    return Request(prompt_token_ids=tuple(prompt.tolist()), params=params)


@pytest.mark.parametrize("num_prompt_tokens", [1, 2, CONTEXT - 2, CONTEXT - 1])
@pytest.mark.parametrize("num_spare_tokens", [0, 1])
def test_requests_that_fit_the_context_are_served_exactly(
    lab: Lab, num_prompt_tokens: int, num_spare_tokens: int
):
    max_tokens = max(1, min(20, CONTEXT - num_prompt_tokens - num_spare_tokens))
    request = request_of(num_prompt_tokens, max_tokens)
    served = serve(lab.runner(), BASE, [request, request_of(40, 5)])
    stream = served.streams[0]
    assert (stream.finish_reason, len(stream.tokens)) == ("length", max_tokens)
    assert stream.token_ids == lab.reference().run(request).token_ids


def test_an_open_ended_request_runs_to_the_last_place_of_the_context(lab: Lab):
    request = request_of(CONTEXT - 30, None)
    stream = serve(lab.runner(), BASE, [request]).streams[0]
    assert (stream.finish_reason, len(stream.tokens)) == ("length", 30)
    assert stream.token_ids == lab.reference().run(request).token_ids


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens"),
    [(CONTEXT, None), (CONTEXT, 1), (CONTEXT - 1, 2), (1, CONTEXT)],
)
def test_requests_one_past_the_context_are_refused_with_both_numbers(
    lab: Lab, num_prompt_tokens: int, max_tokens: int | None
):
    engine = new_engine(lab.runner(), BASE, Mode())
    with pytest.raises(
        InvalidRequestError, match=rf"length is {CONTEXT} tokens.* has {num_prompt_tokens} tokens"
    ):
        engine.submit(request_of(num_prompt_tokens, max_tokens))
    assert engine.is_idle


@pytest.mark.parametrize("num_tokens", [POOL_TOKENS - 1, POOL_TOKENS, POOL_TOKENS + 1])
def test_requests_that_just_fill_the_pool_are_served_exactly(lab: Lab, num_tokens: int):
    """The last token's KV is never written, so one token more than the pool's slots fits."""
    request = request_of(num_tokens - 10, 10)
    other = request_of(30, 10)
    served = serve(lab.runner(), BASE, [request, other, request], Mode(num_pages=POOL_PAGES))
    for stream, asked in zip(served.streams, [request, other, request], strict=True):
        assert stream.difference(serve_alone(lab, BASE, asked)) is None


def test_a_request_one_past_the_pool_is_refused_with_both_numbers(lab: Lab):
    engine = new_engine(lab.runner(), BASE, Mode(num_pages=POOL_PAGES))
    with pytest.raises(InvalidRequestError, match=rf"{POOL_PAGES + 1} KV pages.*{POOL_PAGES}"):
        engine.submit(request_of(POOL_TOKENS - 8, 10))
    assert engine.is_idle


@pytest.mark.parametrize("edge", [BASE.page_size, BASE.bucket, BLOCK, 2 * BLOCK])
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_prompts_around_a_page_a_chunk_and_a_block_are_exact(lab: Lab, edge: int, offset: int):
    request = request_of(edge + offset, 6)
    together = serve(lab.runner(), BASE, [request_of(70, 9), request], Mode(budget=19))
    assert together.streams[1].difference(serve_alone(lab, BASE, request)) is None
    assert together.streams[1].token_ids == lab.reference().run(request).token_ids


def test_more_requests_than_rows_wait_for_a_row(lab: Lab):
    requests = [request_of(5 + index, 7) for index in range(3 * BASE.num_rows)]
    served = serve(lab.runner(), BASE, requests)
    for stream, request in zip(served.streams, requests, strict=True):
        assert stream.difference(serve_alone(lab, BASE, request)) is None


def test_page_table_entries_beyond_one_upload_arrive(lab: Lab):
    """The entries that matter come last, after more than one upload of others."""
    runner = lab.runner()
    expected = _decode_after(runner, num_other_entries=0)
    assert _decode_after(lab.runner(), num_other_entries=2 * PAGE_UPDATES + 10) == expected
    assert _decode_after(lab.runner(), num_other_entries=-1) != expected


def _decode_after(runner: XlaRunner, num_other_entries: int) -> list[int]:
    geometry = Geometry(bucket=BASE.bucket, num_rows=BASE.num_rows, page_size=BASE.page_size)
    stream = Stream(row=0, pages=[4, 9, 2], draw=Draw(temperature=1.0, seed=4))
    inputs = build_inputs([stream.chunk(range(10, 50), samples=True)], geometry)
    others = [[1 + index % 7, index % 20, 50] for index in range(num_other_entries)]
    entries = inputs.page_updates.tolist() if num_other_entries >= 0 else []
    inputs = replace(inputs, page_updates=np.array([*others, *entries], np.int32).reshape(-1, 3))
    tokens = [int(runner.launch(inputs).result().token_ids[0])]
    for _ in range(4):
        tokens.append(int(run_step(runner, [stream.next_token()], geometry).token_ids[0]))
    return tokens


def test_page_copies_beyond_one_upload_arrive(lab: Lab):
    """Keys, values and the tokens that penalties look back at; the copies that matter come last."""
    expected = _tokens_after_copies(lab.runner(), num_other_copies=None)
    assert _tokens_after_copies(lab.runner(), num_other_copies=2 * PAGE_COPIES + 10) == expected
    assert _tokens_after_copies(lab.runner(), num_other_copies=-1) != expected


def _tokens_after_copies(runner: XlaRunner, num_other_copies: int | None) -> list[int]:
    """Tokens of a row that goes on, under penalties, on copies of the pages of another.

    None goes on where the tokens were computed; -1 copies nothing.
    """
    geometry = Geometry(bucket=BASE.bucket, num_rows=BASE.num_rows, page_size=BASE.page_size)
    prompt = range(10, 50)
    stream = Stream(row=0, pages=[4, 9, 2])
    run_step(runner, [stream.chunk(prompt, samples=False)], geometry)
    if num_other_copies is not None:
        others = [PageCopy(50, 51 + index % 20, 16) for index in range(num_other_copies)]
        needed = [PageCopy(4, 30, 16), PageCopy(9, 31, 16), PageCopy(2, 32, 8)]
        needed = needed if num_other_copies >= 0 else []
        stream = Stream(row=1, pages=[30, 31, 32], num_computed=40, copies=[*others, *needed])
    params = SamplingParams(presence_penalty=2.0, repetition_penalty=20.0)
    record = RuleLayout(runner.vocab_size).encode(sequence_of(0, tuple(prompt), params=params))
    assert record is not None
    tokens: list[int] = []
    for step in range(6):
        chunk = stream.chunk([7], samples=True) if step == 0 else stream.next_token()
        inputs = build_inputs([chunk], geometry)
        inputs.logits.rule_record[0] = stream.row
        updates = (RuleUpdate(stream.row, record),) if step == 0 else ()
        output = runner.launch(replace(inputs, rule_updates=updates)).result()
        tokens.append(int(output.token_ids[0]))
    return tokens
