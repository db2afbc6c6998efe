"""Text that cannot be made costs its own request an error, and no other anything."""

import asyncio
import logging
from typing import Any, get_args

import pytest

from cadenza import AsyncEngine, Request, RequestOutput, SamplingParams
from cadenza.config import EngineConfig
from cadenza.engine.front import EngineFront, InProcessLink
from cadenza.events import Event, Token, TokenLogprobs
from cadenza.frontend.output_processor import TEXT_FAILED, OutputProcessor, OutputRouter
from cadenza.frontend.prepared_request import PreparedRequest
from cadenza.frontend.text_frontend import TextFrontend
from tests.engine.process.scripted_child import make_core
from tests.faces.faulty_text import FAULTY_STOP, NUM_GOOD_TOKENS, SECRET, Fault, FaultyText
from tests.faces.scripted_engine import finished

FAULTS: tuple[Fault, ...] = get_args(Fault)
NUM_TOKENS = 6


def faulty(text: TextFrontend, fault: Fault) -> Any:
    return FaultyText(text, fault)


def victim(fault: Fault, **options: Any) -> SamplingParams:
    logprobs = 1 if fault == "log probabilities" else None
    return SamplingParams(max_tokens=None, stop=[FAULTY_STOP], logprobs=logprobs, **options)


def assembler_of(request_id: int, text: Any, params: SamplingParams) -> OutputProcessor:
    request = Request(prompt_token_ids=(1,), params=params)
    return OutputProcessor(request_id, PreparedRequest(text=None, request=request), text)


def step_of(request_id: int, index: int, text: TextFrontend, sample: int = 0) -> Token:
    (token_id,) = text.encode("a")
    found = TokenLogprobs(logprob=-0.5, rank=1, top_ids=(token_id,), top_logprobs=(-0.5,))
    return Token(
        request_id=request_id, token_id=token_id, index=index, logprobs=found, sample=sample
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_one_request_fails_and_the_others_get_all_their_events(
    worded_text: TextFrontend, fault: Fault
):
    text, cancelled = faulty(worded_text, fault), list[tuple[int, int | None]]()
    router = OutputRouter(lambda request_id, sample: cancelled.append((request_id, sample)))
    broken = assembler_of(1, text, victim(fault))
    whole = [assembler_of(each, worded_text, SamplingParams(max_tokens=None)) for each in (0, 2)]
    for each in (whole[0], broken, whole[1]):
        router.add(each)
    for index in range(NUM_TOKENS):
        router.push([step_of(request_id, index, worded_text) for request_id in range(3)])
    ends: list[Event] = [finished(request_id, count=NUM_TOKENS) for request_id in range(3)]
    router.push(ends)
    assert [each.output().outputs[0].text for each in whole] == ["a" * NUM_TOKENS] * 2
    completion = broken.output().outputs[0]
    assert (completion.finish_reason, completion.error_kind) == ("error", "text_failed")
    assert completion.error == TEXT_FAILED
    assert len(completion.token_ids) <= NUM_TOKENS
    assert cancelled == [(1, None)]
    assert not router.remove(1)


@pytest.mark.parametrize("fault", FAULTS)
def test_without_the_routers_care_the_fault_would_reach_everybody(
    worded_text: TextFrontend, fault: Fault
):
    broken = assembler_of(0, faulty(worded_text, fault), victim(fault))

    def play() -> None:
        for index in range(NUM_TOKENS):
            broken.push(step_of(0, index, worded_text))
        broken.push(finished(0, count=NUM_TOKENS))

    with pytest.raises(RuntimeError, match=SECRET):
        play()


def test_its_other_samples_end_with_it(worded_text: TextFrontend):
    broken = assembler_of(0, faulty(worded_text, "detokenizer"), victim("detokenizer", n=2))
    cancelled: list[tuple[int, int | None]] = []
    router = OutputRouter(lambda request_id, sample: cancelled.append((request_id, sample)))
    router.add(broken)
    for index in range(NUM_GOOD_TOKENS + 1):
        assert router.push([step_of(0, index, worded_text, sample=1)]) == [broken]
    assert [each.error_kind for each in broken.output().outputs] == ["text_failed"] * 2
    assert cancelled == [(0, None)]
    assert router.push([step_of(0, 0, worded_text)]) == []


def test_the_cause_is_logged_without_what_was_written(
    worded_text: TextFrontend, caplog: pytest.LogCaptureFixture
):
    router = OutputRouter(lambda request_id, sample: None)
    router.add(
        assembler_of(7, faulty(worded_text, "log probabilities"), victim("log probabilities"))
    )
    with caplog.at_level(logging.ERROR, "cadenza"):
        router.push([step_of(7, 0, worded_text)])
    (record,) = caplog.records
    assert "request 7: RuntimeError in break_down" in record.getMessage()
    assert SECRET not in record.getMessage()


@pytest.mark.parametrize("fault", ["detokenizer", "flush"])
def test_an_aborted_request_whose_last_text_fails_still_ends(
    worded_text: TextFrontend, fault: Fault
):
    broken = assembler_of(0, faulty(worded_text, fault), victim(fault))
    broken.push(step_of(0, 0, worded_text))
    broken.abort()
    assert broken.is_finished
    assert broken.output().outputs[0].error_kind == "text_failed"


def test_streams_go_on_beside_one_that_failed_and_its_pages_are_free(worded_text: TextFrontend):
    # The victim would run for five seconds if it were not cancelled.
    link = InProcessLink(make_core(EngineConfig(max_num_seqs=8), {"step_s": 0.02}))
    service = EngineFront(link)
    plain = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.7, seed=3)
    broken = victim("detokenizer", ignore_eos=True)

    async def play() -> list[RequestOutput]:
        async with AsyncEngine(service, faulty(worded_text, "detokenizer")) as engine:

            async def last(params: SamplingParams) -> RequestOutput:
                request = Request(prompt_token_ids=(1, 2, 3), params=params)
                return [each async for each in engine.generate(request, kind="final")][-1]

            outputs = await asyncio.gather(last(broken), *[last(plain) for _ in range(4)])
            assert service.request_stats().ends == {"abort": 1, "length": 4}
            await last(plain)
            assert link.stats.by_label["pages"]["live"] == 0
            return outputs

    failed, *others = asyncio.run(asyncio.wait_for(play(), 60))
    assert failed.outputs[0].error_kind == "text_failed"
    assert {each.outputs[0].finish_reason for each in others} == {"length"}
    assert len({each.outputs[0].token_ids for each in others}) == 1
