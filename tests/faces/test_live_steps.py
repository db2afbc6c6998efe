"""`LiveSteps` and `AsyncEngine.watch`: who is told what, what is kept, what a slow reader loses."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from cadenza import AsyncEngine
from cadenza.engine.step_watch import OnNews, RowSummary, StepSummary
from cadenza.errors import QueueFullError
from cadenza.frontend.live_steps import (
    HISTORY_S,
    MAX_HISTORY_BYTES,
    MAX_UNREAD,
    MAX_VIEWERS,
    LiveSteps,
)
from cadenza.frontend.text_frontend import TextFrontend
from tests.faces.scripted_engine import ScriptedEngine

SUMMARY = StepSummary(
    num_steps=1,
    seconds=0.1,
    longest_s=0.1,
    num_tokens=1,
    num_sampled=1,
    num_running=1,
    num_waiting=0,
    pages_live=1,
    pages_cached=0,
    pages_free=7,
    tenants=("",),
    rows=(RowSummary(1, 0, "decode", 3, 4, 0, 1, 0, 0),),
)


class Ears:
    """An engine to which `LiveSteps` listens, and its clock."""

    def __init__(self) -> None:
        self.now_s = 50.0
        self.heard: list[OnNews | None] = []
        self.live = LiveSteps(lambda: self.now_s)
        self.live.attach(self.heard.append)


def summary(num_steps: int) -> StepSummary:
    return msgspec.structs.replace(SUMMARY, num_steps=num_steps)


def numbers(entries: list) -> list[object]:
    return [
        each.news.num_steps if isinstance(each.news, StepSummary) else each.news for each in entries
    ]


def test_an_engine_is_listened_to_only_while_there_is_a_viewer():
    ears = Ears()
    assert ears.heard == []
    with ears.live.viewing(), ears.live.viewing():
        assert ears.heard == [ears.live.take]
    assert ears.heard == [ears.live.take, None]
    with ears.live.viewing():
        ears.live.detach()
    assert ears.heard == [ears.live.take, None, ears.live.take]
    assert not ears.live.is_attached


def test_a_later_engine_is_listened_to_for_those_who_are_there():
    ears, later = Ears(), list[OnNews | None]()
    with ears.live.viewing() as viewer:
        ears.live.detach()
        ears.live.attach(later.append)
        assert later == [ears.live.take]
        assert numbers(asyncio.run(viewer.next())) == ["unloaded"]


def test_a_second_viewer_gets_the_last_minute_first_and_the_next_watch_nothing_old():
    ears = Ears()
    with ears.live.viewing():
        ears.live.take(summary(1))
        ears.now_s += HISTORY_S - 1
        ears.live.take(summary(2))
        ears.now_s += 2
        ears.live.take("lost")
        with ears.live.viewing() as second:
            assert numbers([*second.history]) == [2, "lost"]
            assert [each.at_s for each in second.history] == [59.0, 61.0]
    ears.live.take(summary(3))  # it was under way
    with ears.live.viewing() as viewer:
        assert viewer.history == ()


def test_history_is_bounded_in_bytes():
    ears = Ears()
    row = SUMMARY.rows[0]
    large = msgspec.structs.replace(SUMMARY, rows=(row,) * 20_000)
    with ears.live.viewing():
        for _ in range(20):
            ears.live.take(large)
        with ears.live.viewing() as viewer:
            num_bytes = sum(len(msgspec.msgpack.encode(each.news)) for each in viewer.history)
            assert 0 < num_bytes <= MAX_HISTORY_BYTES
            assert len(viewer.history) < 20


def test_a_slow_reader_skips_the_oldest():
    ears = Ears()
    with ears.live.viewing() as slow:
        for count in range(MAX_UNREAD + 5):
            ears.live.take(summary(count))
        assert numbers(asyncio.run(slow.next())) == [*range(5, MAX_UNREAD + 5)]


def test_a_viewer_too_many_is_refused_and_takes_the_place_of_one_that_leaves():
    ears = Ears()
    viewing = [ears.live.viewing() for _ in range(MAX_VIEWERS)]
    for each in viewing:
        each.__enter__()
    with pytest.raises(QueueFullError, match="8 viewers watch the batch already"):
        ears.live.viewing().__enter__()
    viewing[0].__exit__(None, None, None)
    with ears.live.viewing():
        pass


def test_a_wait_ends_in_time_or_with_the_viewer():
    ears = Ears()

    async def play() -> None:
        with ears.live.viewing() as viewer:
            assert await viewer.next(0.001) == []
            waiting = asyncio.ensure_future(viewer.next())
            await asyncio.wait({waiting}, timeout=0)
            ears.live.close()
            assert await waiting == []
            assert viewer.is_closed

    asyncio.run(play())


def watched(
    text: TextFrontend, play: Callable[[ScriptedEngine, AsyncEngine], Awaitable[None]]
) -> ScriptedEngine:
    scripted = ScriptedEngine()

    async def serve() -> None:
        async with AsyncEngine(scripted, text) as engine:
            await asyncio.wait_for(play(scripted, engine), 180)

    asyncio.run(serve())
    return scripted


def test_an_async_engine_is_watched_until_it_ends(tiny_text: TextFrontend):
    async def play(scripted: ScriptedEngine, engine: AsyncEngine) -> None:
        steps = engine.watch()
        first = asyncio.ensure_future(anext(steps))
        await asyncio.wait({first}, timeout=0)
        assert scripted.on_news is not None
        scripted.on_news(summary(4))
        assert (await first).news == summary(4)
        scripted.shutdown()
        assert [each.news async for each in steps] == ["unloaded"]

    watched(tiny_text, play)


def test_leaving_the_iterator_ends_the_watch(tiny_text: TextFrontend):
    async def play(scripted: ScriptedEngine, engine: AsyncEngine) -> None:
        steps = engine.watch()
        first = asyncio.ensure_future(anext(steps))
        await asyncio.wait({first}, timeout=0)
        assert scripted.on_news is not None
        scripted.on_news("ready")
        await first
        await steps.aclose()
        assert scripted.on_news is None

    watched(tiny_text, play)


def test_a_watch_on_a_loop_that_was_closed_is_over(tiny_text: TextFrontend):
    scripted = ScriptedEngine()
    engine = AsyncEngine(scripted, tiny_text)
    steps = engine.watch()

    async def look() -> None:
        first = asyncio.ensure_future(anext(steps))
        await asyncio.wait({first}, timeout=0)
        assert scripted.on_news is not None
        scripted.on_news("ready")
        await first

    loop = asyncio.new_event_loop()
    loop.run_until_complete(look())
    loop.close()

    async def stop() -> None:
        engine.start()
        assert scripted.on_news is None
        await engine.stop()

    asyncio.run(stop())
