"""`AsyncEngine` over any `BatchEngine`: coalescing, kinds of output, leaving, a dead engine."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from cadenza import AsyncEngine, Request, RequestOutput
from cadenza.frontend.async_engine import NOTIFIED_AT_ONCE, OutputStream
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.outputs import OutputKind
from tests.faces.scripted_engine import ScriptedEngine, finished, token

TIMEOUT_S = 180
STEPS = [[token(0, 5 + index, index)] for index in range(4)]
IDS = (5, 6, 7, 8)
END = [finished(0, count=4)]
MANY = 4 * NOTIFIED_AT_ONCE
"""Streams."""

Play = Callable[[ScriptedEngine, AsyncEngine], Awaitable[None]]


def run(text: TextFrontend, play: Play) -> ScriptedEngine:
    scripted = ScriptedEngine()

    async def serve() -> None:
        async with AsyncEngine(scripted, text) as engine:
            await asyncio.wait_for(play(scripted, engine), TIMEOUT_S)

    asyncio.run(serve())
    return scripted


def ids(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_a_reader_who_keeps_up_gets_an_output_for_each_step(tiny_text: TextFrontend):
    async def play(scripted: ScriptedEngine, engine: AsyncEngine) -> None:
        stream = engine.generate([1], kind="delta")
        steps = [*STEPS, END]
        outputs: list[RequestOutput] = []
        scripted.play(steps.pop(0))
        async for output in stream:
            outputs.append(output)
            if steps:
                scripted.play(steps.pop(0))
        assert ids(outputs) == [(5,), (6,), (7,), (8,), ()]
        assert [output.finished for output in outputs] == [False] * 4 + [True]

    run(tiny_text, play)


def test_a_slow_reader_gets_all_that_came_meanwhile_in_one_output(tiny_text: TextFrontend):
    async def play(scripted: ScriptedEngine, engine: AsyncEngine) -> None:
        slow = engine.submit(Request(prompt_token_ids=(1,)), kind="delta")
        other = engine.submit(Request(prompt_token_ids=(2,)), kind="final")
        scripted.play(*STEPS, END, [finished(1)])
        await other.next()
        outputs = [output async for output in slow]
        assert ids(outputs) == [IDS]
        assert outputs[0].finished

    run(tiny_text, play)


@pytest.mark.parametrize("kind", ["cumulative", "delta", "final"])
def test_each_kind_tells_the_same_story(tiny_text: TextFrontend, kind: OutputKind):
    async def play(scripted: ScriptedEngine, engine: AsyncEngine) -> None:
        stream = engine.generate([1], kind=kind)
        first = asyncio.ensure_future(anext(stream))
        scripted.play(*STEPS)
        while kind != "final" and not first.done():
            await asyncio.wait([first])
        scripted.play(END)
        outputs = [await first] + [output async for output in stream]
        assert outputs[-1].finished
        if kind == "delta":
            assert sum(ids(outputs), ()) == IDS
        else:
            assert ids(outputs)[-1] == IDS
        if kind == "final":
            assert len(outputs) == 1

    run(tiny_text, play)


def test_a_step_reaches_every_stream_it_has_news_for_and_no_other(tiny_text: TextFrontend):
    async def play(scripted: ScriptedEngine, engine: AsyncEngine) -> None:
        streams = [engine.generate([1], kind="delta") for _ in range(3)]
        first = [asyncio.ensure_future(anext(stream)) for stream in streams]
        scripted.play([token(0, 3), token(2, 4)], [token(99, 9)])
        await asyncio.wait([first[0], first[2]])
        assert not first[1].done()
        scripted.play([token(1, 5)])
        assert ids([await task for task in first]) == [(3,), (5,), (4,)]
        for stream in streams:
            await stream.aclose()

    run(tiny_text, play)


def test_leaving_cancels_in_the_engine_at_once(tiny_text: TextFrontend):
    async def play(scripted: ScriptedEngine, engine: AsyncEngine) -> None:
        stream = engine.generate([1])
        scripted.play([token(0, 3)])
        await anext(stream)
        await stream.aclose()
        assert scripted.cancelled == [(0, None)]

    assert run(tiny_text, play).cancelled == [(0, None)]


def test_a_cancelled_task_cancels_its_request(tiny_text: TextFrontend):
    async def play(scripted: ScriptedEngine, engine: AsyncEngine) -> None:
        async def read() -> None:
            async for _ in engine.generate([1]):
                pass

        task = asyncio.ensure_future(read())
        while not scripted.submitted:
            await asyncio.wait([task], timeout=0)
        task.cancel()
        await asyncio.wait([task])
        assert scripted.cancelled == [(0, None)]

    run(tiny_text, play)


def test_a_finished_request_is_not_cancelled(tiny_text: TextFrontend):
    async def play(scripted: ScriptedEngine, engine: AsyncEngine) -> None:
        scripted.play()
        stream = engine.generate([1])
        first = asyncio.ensure_future(anext(stream))
        while not scripted.submitted:
            await asyncio.wait([first], timeout=0)
        scripted.play([token(0, 3), finished(0)])
        assert (await first).finished
        await stream.aclose()

    assert run(tiny_text, play).cancelled == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_dies_ends_every_stream_with_an_error(tiny_text: TextFrontend):
    async def play(scripted: ScriptedEngine, engine: AsyncEngine) -> None:
        streams = [engine.submit(Request(prompt_token_ids=(1,))) for _ in range(2)]
        scripted.play([token(0, 3)])
        scripted.break_down()
        last = [[output async for output in stream][-1] for stream in streams]
        assert [output.outputs[0].finish_reason for output in last] == ["error"] * 2
        assert all(output.outputs[0].error for output in last)
        assert ids(last) == [(3,), ()]

    run(tiny_text, play)


def submit(engine: AsyncEngine, hear: Callable[[int], object]) -> list[OutputStream]:
    return [
        engine.submit(Request(prompt_token_ids=(1,)), on_news=partial(hear, each))
        for each in range(MANY)
    ]


def test_what_comes_meanwhile_waits_for_a_part_of_a_steps_outputs(tiny_text: TextFrontend):
    told: list[int] = []
    told_before: list[int] = []

    async def play(scripted: ScriptedEngine, engine: AsyncEngine) -> None:
        client, server = socket.socketpair()
        is_over = asyncio.Event()

        def accept() -> None:
            told_before.append(len(told))
            server.recv(1)

        def hear(request_id: int) -> None:
            told.append(request_id)
            if request_id == 0:
                client.send(b"?")
            if request_id == MANY - 1:
                is_over.set()

        with client, server:
            submit(engine, hear)
            asyncio.get_running_loop().add_reader(server, accept)
            scripted.play([token(each, 5) for each in range(MANY)])
            await is_over.wait()
            asyncio.get_running_loop().remove_reader(server)
        assert told == [*range(MANY)]
        assert told_before == [2 * NOTIFIED_AT_ONCE]  # those of its own pass, and of the next

    run(tiny_text, play)


def test_who_has_left_is_not_told(tiny_text: TextFrontend):
    told: list[int] = []

    async def play(scripted: ScriptedEngine, engine: AsyncEngine) -> None:
        is_over = asyncio.Event()

        def hear(request_id: int) -> None:
            told.append(request_id)
            if request_id == 0:
                streams[-1].close()
                streams[1].close()
            if request_id == MANY - 2:
                is_over.set()

        streams = submit(engine, hear)
        scripted.play([token(each, 5) for each in range(MANY)])
        await is_over.wait()
        assert told == [0, *range(2, MANY - 1)]

    run(tiny_text, play)


def test_all_are_told_of_the_end_before_stop_returns(tiny_text: TextFrontend):
    told: list[int] = []

    async def play(_: ScriptedEngine, engine: AsyncEngine) -> None:
        submit(engine, told.append)
        await engine.stop()
        assert told == [*range(MANY)]

    run(tiny_text, play)
