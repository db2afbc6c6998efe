"""`AsyncEngine`: concurrent callers, leaving early, shutting down."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from cadenza import LLM, AsyncEngine, EngineConfig, Request, RequestOutput, SamplingParams
from cadenza.engine.front import EngineFront, InProcessLink
from cadenza.engine.timeouts import RequestTimeouts
from cadenza.errors import ConfigError, EngineClosedError, InvalidRequestError
from cadenza.frontend.text_frontend import TextFrontend
from tests.engine.process.scripted_child import make_core
from tests.faces.conftest import LIMITS
from tests.faces.held_engine import HeldEngine

PROMPTS = [[1, 2, 3], [4, 5], [7] * 50, [9], [11] * 20, [12, 13]]
PARAMS = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
TIMEOUT_S = 60


async def collect(engine: AsyncEngine, prompt: list[int]) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, PARAMS)]


def open_real_engine(folder: Path) -> AsyncEngine:
    return AsyncEngine.from_model(folder, **LIMITS)


def fake_front(num_rows: int = 4, timeouts: RequestTimeouts | None = None) -> EngineFront:
    """Over the token-storing runner: what these tests show needs no model."""
    return EngineFront(InProcessLink(make_core(EngineConfig(max_num_seqs=num_rows)), timeouts))


def open_engine(text: TextFrontend) -> AsyncEngine:
    return AsyncEngine(fake_front(), text)


def open_held_engine(text: TextFrontend) -> AsyncEngine:
    """No stream of it is over before somebody ends one."""
    return AsyncEngine(HeldEngine(fake_front()), text)


def test_concurrent_callers_get_what_llm_gives(tiny_folder: Path, llm: LLM):
    async def play() -> list[list[RequestOutput]]:
        async with open_real_engine(tiny_folder) as engine:
            calls = (collect(engine, prompt) for prompt in PROMPTS)
            return await asyncio.wait_for(asyncio.gather(*calls), TIMEOUT_S)

    expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]
    streams = asyncio.run(play())
    assert [stream[-1].outputs[0].token_ids for stream in streams] == expected
    for stream in streams:
        assert stream[-1].finished
        assert not any(output.finished for output in stream[:-1])


def test_a_request_object_is_served_as_it_is(tiny_text: TextFrontend):
    async def play() -> RequestOutput:
        async with open_engine(tiny_text) as engine:
            outputs = engine.generate(Request(prompt_token_ids=(1, 2, 3), params=PARAMS))
            return [output async for output in outputs][-1]

    assert len(asyncio.run(play()).outputs[0].token_ids) == 10


def test_leaving_early_cancels_the_request_and_the_next_one_works(tiny_text: TextFrontend):
    async def play() -> list[RequestOutput]:
        async with open_engine(tiny_text) as engine:
            stream = engine.generate([1], SamplingParams(max_tokens=200, ignore_eos=True))
            await anext(stream)
            await stream.aclose()
            return await asyncio.wait_for(collect(engine, [2]), TIMEOUT_S)

    assert asyncio.run(play())[-1].finished


def test_a_request_that_is_not_started_in_time_ends_with_an_error(tiny_text: TextFrontend):
    async def play() -> list[RequestOutput]:
        engine = AsyncEngine(fake_front(1, RequestTimeouts(queue_s=0.001)), tiny_text)
        async with engine:
            first = engine.generate([1], SamplingParams(max_tokens=200, ignore_eos=True))
            await anext(first)
            second = await asyncio.wait_for(collect(engine, [2]), TIMEOUT_S)
            return [second[-1], [output async for output in first][-1]]

    second, first = asyncio.run(play())
    assert second.outputs[0].error_kind == "queue_timeout"
    assert second.outputs[0].error is not None
    assert "0.001 seconds in the queue" in second.outputs[0].error
    assert len(first.outputs[0].token_ids) == 200


@pytest.mark.parametrize("name", ["queue_timeout", "request_timeout"])
def test_a_timeout_that_cannot_work_is_refused_before_a_model_is_loaded(name: str):
    with pytest.raises(ConfigError, match=name.replace("_", "-")):
        AsyncEngine.from_model("/nowhere", **{name: 0.0})


def test_samples_and_stop_strings_are_what_llm_gives(worded_folder: Path, worded: LLM):
    asked: list[dict[str, object]] = [
        {"temperature": 1.5, "seed": seed, "n": 2, "stop": ["e", "o"], "ignore_eos": True}
        for seed in range(4)
    ]

    async def read(engine: AsyncEngine, options: dict[str, object]) -> list[RequestOutput]:
        return [output async for output in engine.generate("the dog", options, kind="delta")]

    async def play() -> list[list[RequestOutput]]:
        async with open_real_engine(worded_folder) as engine:
            calls = (read(engine, options) for options in asked)
            return await asyncio.wait_for(asyncio.gather(*calls), TIMEOUT_S)

    expected = worded.generate(["the dog"] * len(asked), asked)
    for stream, output in zip(asyncio.run(play()), expected, strict=True):
        assert stream[-1].finished
        for whole in output.outputs:
            parts = [
                each for delta in stream for each in delta.outputs if each.index == whole.index
            ]
            assert "".join(part.text for part in parts) == whole.text
            assert sum((part.token_ids for part in parts), ()) == whole.token_ids
            assert parts[-1].finish_reason == whole.finish_reason
            assert parts[-1].stop_reason == whole.stop_reason


def test_stopping_ends_open_streams_with_one_error_each(tiny_text: TextFrontend):
    async def play() -> RequestOutput:
        engine = open_held_engine(tiny_text)
        engine.start()
        stream = engine.generate([1], SamplingParams(max_tokens=250, ignore_eos=True))
        await anext(stream)
        await engine.stop()
        return [output async for output in stream][-1]

    output = asyncio.run(asyncio.wait_for(play(), TIMEOUT_S)).outputs[0]
    assert output.finish_reason == "error"
    assert output.error is not None


def test_a_stopped_engine_refuses_requests(tiny_text: TextFrontend):
    async def play() -> None:
        engine = open_engine(tiny_text)
        engine.start()
        await engine.stop()
        await anext(engine.generate([1], PARAMS))

    with pytest.raises(EngineClosedError):
        asyncio.run(play())


def test_an_invalid_request_is_refused_and_harms_nobody(tiny_text: TextFrontend):
    async def play() -> RequestOutput:
        async with open_engine(tiny_text) as engine:
            with pytest.raises(InvalidRequestError):
                await anext(engine.generate([10_000], PARAMS))
            return (await collect(engine, [2]))[-1]

    assert asyncio.run(play()).finished


def test_an_unknown_option_is_refused_with_the_known_ones(tiny_folder: Path):
    with pytest.raises(ConfigError, match=r"max_sequences.*max_num_seqs"):
        AsyncEngine.from_model(tiny_folder, max_sequences=3)  # type: ignore[call-arg]


def test_an_aborted_stream_ends_with_an_output_that_says_so(tiny_text: TextFrontend):
    async def play() -> list[RequestOutput]:
        async with open_held_engine(tiny_text) as engine:
            params = SamplingParams(max_tokens=200, ignore_eos=True)
            with engine.submit(Request(prompt_token_ids=(1,), params=params)) as stream:
                await stream.next()
                stream.abort()
                last = await asyncio.wait_for(stream.next(), TIMEOUT_S)
            return [last, *await asyncio.wait_for(collect(engine, [2]), TIMEOUT_S)]

    last, *others = asyncio.run(play())
    assert last.finished
    assert last.outputs[0].finish_reason == "abort"
    assert others[-1].outputs[0].finish_reason == "length"


def test_a_request_starts_the_engine(tiny_text: TextFrontend):
    async def play() -> list[RequestOutput]:
        engine = open_engine(tiny_text)
        try:
            return await asyncio.wait_for(collect(engine, [1, 2, 3]), TIMEOUT_S)
        finally:
            await engine.stop()

    assert asyncio.run(play())[-1].outputs[0].finish_reason == "length"


def test_an_engine_goes_on_in_the_next_event_loop_when_the_first_is_closed(tiny_text: TextFrontend):
    engine = open_engine(tiny_text)
    left_open: list[object] = []

    async def leave() -> None:
        stream = engine.submit(Request(prompt_token_ids=(1,), params=PARAMS))
        left_open.append(stream)
        await stream.next()

    async def play() -> list[RequestOutput]:
        return await asyncio.wait_for(collect(engine, [4, 5]), TIMEOUT_S)

    asyncio.run(leave())
    assert len(asyncio.run(play())[-1].outputs[0].token_ids) == 10
    asyncio.run(engine.stop())


def test_a_second_event_loop_is_refused_while_the_first_is_open(tiny_text: TextFrontend):
    engine = open_engine(tiny_text)
    with asyncio.Runner() as first, asyncio.Runner() as second:
        assert first.run(collect(engine, [2]))[-1].finished
        with pytest.raises(EngineClosedError, match="bound to another event loop"):
            second.run(collect(engine, [2]))
        first.run(engine.stop())


def test_an_engine_that_was_never_started_can_be_stopped(tiny_text: TextFrontend):
    engine = open_engine(tiny_text)
    asyncio.run(engine.stop())
    with pytest.raises(EngineClosedError):
        asyncio.run(collect(engine, [1]))


def test_a_conversation_is_answered_as_llm_answers_it(worded_folder: Path, worded: LLM):
    messages = [{"role": "user", "content": "the dog"}]

    async def play() -> RequestOutput:
        async with open_real_engine(worded_folder) as engine:
            return [output async for output in engine.chat(messages, PARAMS)][-1]

    (expected,) = worded.chat(messages, PARAMS)
    output = asyncio.run(play())
    assert (output.prompt, output.outputs) == (expected.prompt, expected.outputs)


IN_A_FORK = """
import asyncio, multiprocessing, sys, warnings
from cadenza import LLM, AsyncEngine
from cadenza.errors import EngineClosedError

def ask(call):
    try:
        call()
    except EngineClosedError as error:
        assert f"process {parent}," in str(error), error
    else:
        sys.exit("an answer in a fork")

def child():
    with llm:
        ask(lambda: llm.generate([1]))
        ask(lambda: llm.embed([1]))
        ask(lambda: next(stream))
    ask(lambda: asyncio.run(anext(engine.generate([1]))))
    asyncio.run(engine.stop())

warnings.simplefilter("ignore")
parent = multiprocessing.current_process().pid
options = {"max_num_seqs": 4, "max_model_len": 256, "max_num_batched_tokens": 64}
llm, engine = (load(sys.argv[1], **options) for load in (LLM, AsyncEngine.from_model))
stream = llm.stream([1])
next(stream)
process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join(60)
print(process.exitcode, len([*stream][-1].outputs[0].token_ids))
"""


def test_a_forked_child_gets_an_error_and_its_parent_goes_on(tiny_folder: Path):
    ran = subprocess.run(
        [sys.executable, "-c", IN_A_FORK, str(tiny_folder)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ran.stdout.split() == ["0", "16"], ran.stderr
