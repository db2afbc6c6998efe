"""Calls with more prompts than the engine's queue holds: order, turns, and how they end early."""

import asyncio
import json
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cadenza.engine.timeouts import RequestTimeouts
from cadenza.errors import QueueFullError
from cadenza.frontend.prepared_request import PreparedRequest
from cadenza.frontend.sample_output import SampleOutput
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.outputs import CompletionOutput
from cadenza.request import Request
from cadenza.server.limits import ServerLimits
from cadenza.server.metrics import ServedCounts
from cadenza.server.served_model import FURTHER_AT_ONCE, OpenCall
from cadenza.server.tenants import TenantFile, Tenants, TenantUse
from tests.server.harness import (
    TIMEOUT_S,
    InBackground,
    RunningServer,
    Serve,
    raw_post,
    running_server,
    wait_until,
)
from tests.server.scripted_engine import ScriptedEngine
from tests.server.test_completions import finish_reasons, joined

OUTPUT = CompletionOutput(
    index=0,
    text="",
    token_ids=(),
    logprobs=None,
    cumulative_logprob=None,
    finish_reason=None,
    stop_reason=None,
)
NUM_PLACES = 68
"""Of a scripted engine: 4 rows, and 64 requests that wait."""
PROMPTS = [[5 + place % 200] * (1 + place % 7) for place in range(100)]


class SpokenStream:
    """The part of `OutputStream`, and of its processor, that a call uses; says each output once."""

    def __init__(self, on_update: Callable[[], None]) -> None:
        self.is_finished = False
        self.processor = self
        self._on_update = on_update
        self._outputs: list[CompletionOutput] = []

    def say(self) -> None:
        self._outputs.append(OUTPUT)
        self._on_update()

    def abort(self) -> None:
        self.is_finished = True
        self.say()

    def take(self) -> list[CompletionOutput]:
        taken, self._outputs = self._outputs, []
        return taken

    def close(self) -> None:
        """Nothing runs behind it."""


def call_of(num_prompts: int, submit: Callable[..., Any]) -> tuple[OpenCall, TenantUse]:
    """Of a model that submits so, and whose queue takes no turns."""
    prepared = PreparedRequest(text=None, request=Request(prompt_token_ids=(1,)))
    queue = SimpleNamespace(calls=(), add=str, discard=str)
    engine = SimpleNamespace(timeouts=RequestTimeouts(total_s=60.0))
    text = SimpleNamespace(
        unenforced_schema=lambda _: None, sample_output=lambda *given: SampleOutput(given[1], None)
    )
    serving = SimpleNamespace(submit=lambda given, *, kind, on_news: submit(given, on_news))
    model: Any = SimpleNamespace(
        serving=serving, waiting=queue, engine=engine, fingerprint=lambda: None, text=text
    )
    use = Tenants(TenantFile(), ServedCounts(), lambda: 0.0).use("")
    return OpenCall([prepared] * num_prompts, model, use), use


def test_a_silence_is_told_after_news_and_after_a_silence() -> None:
    """One timer serves all waits of a call."""

    async def listen() -> list[int]:
        streams: list[SpokenStream] = []

        def submit(_: PreparedRequest, on_update: Callable[[], None]) -> Any:
            streams.append(SpokenStream(on_update))
            return streams[-1]

        call, _ = call_of(1, submit)
        call.submit_next()
        found: list[int] = []
        async with call:
            for is_silent in (True, False, True, True, False, True):
                if not is_silent:  # in mid-wait: the timer that runs is not that of the next wait
                    asyncio.get_running_loop().call_later(0.02, streams[0].say)
                found.append(len(await asyncio.wait_for(call.next_updates(0.04), 10.0)))
        return found

    assert asyncio.run(listen()) == [0, 1, 0, 0, 1, 0]


@pytest.mark.parametrize(("num_prompts", "waits"), [(1, [True, True, False]), (2, [True, False])])
def test_who_waits_for_a_whole_answer_is_woken_by_the_end_of_its_only_prompt(
    num_prompts: int, waits: list[bool]
) -> None:
    progress: list[int] = []

    async def listen() -> list[bool]:
        streams: list[SpokenStream] = []

        def submit(_: PreparedRequest, on_update: Callable[[], None]) -> Any:
            streams.append(SpokenStream(on_update))
            return streams[-1]

        call, _ = call_of(num_prompts, submit)
        for _ in range(num_prompts):
            call.submit_next()
        found: list[bool] = []
        async with call:
            reading = asyncio.create_task(
                call.next_updates(on_progress=lambda updates: progress.append(len(updates)))
            )
            for act in (lambda: None, streams[0].say, streams[0].abort)[: len(waits)]:
                act()
                await asyncio.sleep(0)
                found.append(not reading.done())
            assert len(await reading) == 1
        return found

    assert asyncio.run(listen()) == waits
    assert progress == ([1] if num_prompts == 1 else [])


def test_a_failure_to_count_progress_is_raised_to_who_waits_for_it() -> None:
    async def listen() -> None:
        streams: list[SpokenStream] = []

        def submit(_: PreparedRequest, on_update: Callable[[], None]) -> Any:
            streams.append(SpokenStream(on_update))
            return streams[-1]

        def fail(_: object) -> None:
            raise ValueError("it cannot be counted")

        call, _ = call_of(1, submit)
        call.submit_next()
        async with call:
            reading = asyncio.create_task(call.next_updates(on_progress=fail))
            await asyncio.sleep(0)
            streams[0].say()
            await asyncio.wait_for(reading, TIMEOUT_S)

    with pytest.raises(ValueError, match="cannot be counted"):
        asyncio.run(listen())


@given(
    num_prompts=st.integers(1, 5),
    steps=st.lists(st.sampled_from(["submit", "refuse", "end", "news", "abort"]), max_size=20),
)
@example(num_prompts=2, steps=["submit", "submit", "end", "news"])
@settings(max_examples=60, deadline=None)
def test_the_prompts_beside_one_are_counted_while_they_are_submitted(
    num_prompts: int, steps: list[str]
) -> None:
    async def run() -> None:
        streams: list[SpokenStream] = []

        def submit(_: PreparedRequest, on_update: Callable[[], None]) -> Any:
            if step == "refuse":
                raise QueueFullError("not now")
            streams.append(SpokenStream(on_update))
            return streams[-1]

        call, use = call_of(num_prompts, submit)
        async with call:
            for step in steps:
                if step in {"submit", "refuse"} and call.next_prompt is not None:
                    with pytest.raises(QueueFullError) if step == "refuse" else nullcontext():
                        call.submit_next()
                elif step == "end" and streams:
                    streams.pop(0).abort()
                elif step == "abort":
                    call.abort()
                elif step == "news":
                    await call.next_updates(0.0)
                assert use.num_open == max(0, call.num_submitted - 1)
        assert use.num_open == 0

    asyncio.run(run())


@pytest.fixture(params=["scripted", "bundled"])
def any_server(request: pytest.FixtureRequest) -> RunningServer:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("n", [1, 2])
def test_a_hundred_prompts_are_answered_in_their_order(any_server: RunningServer, n: int) -> None:
    """A queue has room for fewer; the prompts' ids tell the answers apart."""
    body = {"prompt": PROMPTS, "n": n, "max_tokens": 3, "ignore_eos": True, "echo": True}
    body |= {"temperature": 0.0, "return_token_ids": True}
    whole = any_server.post("/v1/completions", body)
    assert whole.status_code == 200, whole.text
    choices = whole.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(100 * n))
    assert [choice["prompt_token_ids"] for choice in choices[::n]] == PROMPTS
    usage = whole.json()["usage"]
    assert usage["prompt_tokens"] == sum(map(len, PROMPTS))
    assert usage["completion_tokens"] == 300 * n
    streaming = {**body, "stream": True, "stream_options": {"include_usage": True}}
    events = any_server.events("/v1/completions", streaming)
    assert events[-2]["usage"]["completion_tokens"] == 300 * n
    for index in (0, 1, 50 * n, 100 * n - 1):
        assert joined(events, index, ("text",)) == choices[index]["text"]
        assert finish_reasons(events, index) == ["length"]


def test_a_call_has_so_many_answers_and_no_more(scripted: RunningServer) -> None:
    body = {"prompt": [[5]] * 2048, "max_tokens": 1}
    assert len(scripted.post("/v1/completions", body).json()["choices"]) == 2048
    for more in ({"prompt": [[5]] * 2049}, {"n": 2}):
        answer = scripted.post("/v1/completions", {**body, **more})
        assert answer.status_code == 400
        assert "2048" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "bounds",
    [{"max_num_queued_reqs": 1}, {"max_num_queued_tokens": 1}, {"max_num_queued_tokens": 20}],
)
def test_small_queues_take_every_prompt_in_time(
    script: tuple[int, ...], text: TextFrontend, bounds: dict[str, int]
) -> None:
    engine = ScriptedEngine(script, **bounds)
    with running_server(engine, text) as server:
        prompts = [[5] * 15, [6] * 5, [7] * 40, [8], [9] * 3, [10]]
        answer = server.post("/v1/completions", {"prompt": prompts, "max_tokens": 2})
        assert answer.status_code == 200, answer.text
        assert 'reason="queue_full"} 0.0' in server.get("/metrics").text
        assert 'reason="queue_tokens_full"} 0.0' in server.get("/metrics").text
    assert [list(request.prompt_token_ids) for request in engine.submitted] == prompts


def test_one_call_leaves_half_of_the_places_to_others(
    server: RunningServer, engine: ScriptedEngine
) -> None:
    engine.pause()
    many = server.posting("/v1/completions", {"prompt": [[5]] * 500, "max_tokens": 1})
    wait_until(lambda: engine.num_open == NUM_PLACES // 2)
    others = [
        server.posting("/v1/completions", {"prompt": [6], "max_tokens": 1})
        for _ in range(NUM_PLACES // 2)
    ]
    wait_until(lambda: engine.num_open == NUM_PLACES)
    assert server.post("/v1/completions", {"prompt": [[7]] * 3}).status_code == 429
    engine.resume()
    assert [other.result().status_code for other in others] == [200] * len(others)
    assert len(many.result().json()["choices"]) == 500


def test_one_call_keeps_the_rows_busy_and_does_not_fill_a_long_queue(serve: Serve) -> None:
    """Of four rows: others wait behind a dozen requests a row, however many the queue may hold."""
    server = serve(max_num_queued_reqs=5000)
    engine = server.engine
    engine.pause()
    many = server.posting("/v1/completions", {"prompt": [[5]] * 500, "max_tokens": 1})
    wait_until(lambda: engine.num_open == FURTHER_AT_ONCE)
    other = server.posting("/v1/completions", {"prompt": [6], "max_tokens": 1})
    wait_until(lambda: engine.num_open == FURTHER_AT_ONCE + 1)
    engine.resume()
    assert other.result().status_code == 200
    assert len(many.result().json()["choices"]) == 500
    assert [each.prompt_token_ids[0] for each in engine.submitted].index(6) == FURTHER_AT_ONCE


def test_prompts_wait_while_the_engine_is_restarted(
    server: RunningServer, engine: ScriptedEngine
) -> None:
    engine.pause()
    many = server.posting("/v1/completions", {"prompt": [[5]] * 200, "max_tokens": 1})
    wait_until(lambda: engine.num_open == NUM_PLACES // 2)
    engine.state = "restarting"
    engine.resume()
    wait_until(lambda: engine.num_open == 0)  # and there is no more news by which to go on
    assert len(engine.submitted) == NUM_PLACES // 2
    engine.state = "ready"
    answer = many.result()
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"]) == 200


def test_calls_with_many_prompts_take_turns(server: RunningServer, engine: ScriptedEngine) -> None:
    engine.pause()
    first = server.posting("/v1/completions", {"prompt": [[5]] * 300, "max_tokens": 1})
    wait_until(lambda: engine.num_open == NUM_PLACES // 2)
    second = server.posting("/v1/completions", {"prompt": [[6]] * 300, "max_tokens": 1})
    wait_until(lambda: engine.num_open == NUM_PLACES // 2 + 1)
    engine.resume()
    for call in (first, second):
        assert len(call.result().json()["choices"]) == 300
    order = [request.prompt_token_ids[0] for request in engine.submitted]
    shared = order[NUM_PLACES // 2 + 1 : 300]
    assert abs(shared.count(5) - shared.count(6)) <= 1


def test_a_call_in_progress_waits_for_a_place_rather_than_fail(serve: Serve) -> None:
    """Four of five places are held throughout; its prompts go through the fifth."""
    server = serve(max_num_queued_reqs=1, max_model_len=1 << 20, step_s=0.001)
    engine = server.engine
    long = {"prompt": [6], "max_tokens": 1 << 19, "stream": True}
    connections = [server.connect() for _ in range(4)]
    for connection in connections:
        connection.sendall(raw_post("/v1/completions", json.dumps(long).encode()))
    wait_until(lambda: engine.num_open == 4)
    answer = server.post("/v1/completions", {"prompt": [[5]] * 20, "max_tokens": 2})
    assert engine.num_open == 4
    for connection in connections:
        connection.close()
    assert len(answer.json()["choices"]) == 20


def test_a_client_that_leaves_takes_its_waiting_prompts_along(
    server: RunningServer, engine: ScriptedEngine
) -> None:
    engine.pause()
    body = json.dumps({"prompt": [[5]] * 500, "max_tokens": 1}).encode()
    with server.connect() as connection:
        connection.sendall(raw_post("/v1/completions", body))
        wait_until(lambda: engine.num_open == NUM_PLACES // 2)
    wait_until(lambda: not server.service.num_open)
    engine.resume()
    assert server.post("/v1/completions", {"prompt": [6], "max_tokens": 1}).status_code == 200
    assert len(engine.submitted) == NUM_PLACES // 2 + 1


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_cancelled_call_tells_the_end_of_every_choice(
    server: RunningServer, engine: ScriptedEngine, is_stream: bool
) -> None:
    engine.pause()
    body = {"prompt": [[5]] * 500, "n": 2, "request_id": "many-1", "stream": is_stream}
    ask = server.events if is_stream else server.post
    call = InBackground(lambda: ask("/v1/completions", body))
    wait_until(lambda: engine.num_open == NUM_PLACES // 2)
    assert server.post("/v1/requests/many-1/cancel").status_code == 200
    found = call.result()
    events = found[:-1] if is_stream else [found.json()]
    ends = {c["index"]: c["finish_reason"] for event in events for c in event["choices"]}
    assert ends == dict.fromkeys(range(1000), "abort")
    assert len(engine.submitted) == NUM_PLACES // 2


def test_a_call_as_a_whole_has_one_deadline(serve: Serve) -> None:
    server = serve(timeouts=RequestTimeouts(total_s=0.3))
    engine = server.engine
    engine.pause()
    answer = server.post("/v1/completions", {"prompt": [[5]] * 500, "max_tokens": 1})
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    assert "--request-timeout" in answer.json()["error"]["message"]
    wait_until(lambda: not engine.num_open)
    engine.resume()


def test_a_prompt_that_the_engine_refuses_later_fails_the_call(
    server: RunningServer, engine: ScriptedEngine
) -> None:
    engine.pause()
    call = server.posting("/v1/completions", {"prompt": [[5]] * 500, "max_tokens": 1})
    wait_until(lambda: engine.num_open == NUM_PLACES // 2)
    engine.state = "dead"
    engine.resume()
    answer = call.result()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
    wait_until(lambda: not engine.num_open)


def test_a_server_that_ends_tells_a_call_whose_prompts_wait(serve: Serve) -> None:
    server = serve(limits=ServerLimits(drain_s=0.1))
    engine = server.engine
    engine.pause()
    call = server.posting("/v1/completions", {"prompt": [[5]] * 500, "max_tokens": 1})
    wait_until(lambda: engine.num_open == NUM_PLACES // 2)
    server.call(server.lifecycle.ask)
    answer = call.result()
    server.thread.join(TIMEOUT_S)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
