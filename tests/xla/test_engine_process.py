"""Bars 11 and 12 on the real engine in a process of its own: kills, hangs, failing steps.

Small here, in full size under `make soak`; the times of the bars are held by `tests/e2e`. Whatever
happens, each stream ends once, what it had brought until then is a beginning of its whole, and the
next request is served.
"""

import asyncio
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from cadenza import LLM, AsyncEngine, EngineConfig, SamplingParams
from cadenza.engine.batch_engine import Clock
from cadenza.engine.process.child_process import COMMAND
from cadenza.engine.process.engine_process import EngineProcess, ProcessOptions
from cadenza.engine.process.supervision import Patience
from cadenza.errors import CheckpointError
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.loading.build import find_checkpoint
from cadenza.request import Request
from tests.engine.process.conftest import Front, HandClock
from tests.process_cost import IDLE_SHARE, SHORT_IDLE_SHARE, idle_share, needs_proc
from tests.xla.faulty_child import RAISE

CONFIG = EngineConfig(max_num_seqs=16, max_model_len=512, max_consecutive_step_errors=3)
FAULTY = (sys.executable, str(Path(__file__).with_name("faulty_child.py")))
LOAD_S = 120.0
NUM_STREAMS = 64
NUM_TOKENS = 400
PATIENT = Patience(hung_after_s=LOAD_S, max_crashes=1000, backoff_s=0.0)
"""A machine that stands still for a while is no hang."""
STRICT = Patience(max_crashes=1000, backoff_s=0.0)
"""As served, for a `HandClock`."""


def open_front(
    command: tuple[str, ...] = COMMAND,
    model: str | None = None,
    patience: Patience = PATIENT,
    clock: Clock = time.monotonic,
) -> Front:
    options = ProcessOptions(command=command, patience=patience)
    front = Front(EngineProcess(model, CONFIG, options, clock))
    front.wait(lambda: front.engine.status().state in {"ready", "dead"}, LOAD_S)
    return front


def requests_of(seed: int, max_tokens: int) -> list[Request]:
    rng = random.Random(seed)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.8, seed=5, ignore_eos=True)
    return [
        Request(prompt_token_ids=tuple(rng.choices(range(3, 2000), k=20)), params=params)
        for _ in range(NUM_STREAMS)
    ]


@pytest.fixture(scope="module")
def whole() -> dict[tuple[int, ...], tuple[int, ...]]:
    """What each of the requests gives when nothing happens."""
    llm = LLM(max_num_seqs=16, max_model_len=512)
    requests = requests_of(0, NUM_TOKENS)
    outputs = llm.generate([list(each.prompt_token_ids) for each in requests], requests[0].params)
    llm.close()
    return {tuple(each.prompt_token_ids): each.outputs[0].token_ids for each in outputs}


def check_beginnings(front: Front, first_id: int, requests: list[Request], whole: dict) -> None:
    streams = front.streams()
    for index, each in enumerate(requests):
        tokens = tuple(streams.get(first_id + index, ()))
        assert tokens == whole[tuple(each.prompt_token_ids)][: len(tokens)]


def hit(front: Front, number: signal.Signals, requests: list[Request], at: int) -> int:
    """Signals the engine once `at` tokens of all streams have come; the first stream's id."""
    num_before = len(front.events)
    first_id, *_ = [front.engine.submit(each) for each in requests]
    front.wait(lambda: len(front.events) - num_before >= at)
    pid = front.engine.pid
    assert pid is not None
    os.kill(pid, number)
    return first_id


def kill_again_and_again(times: int, whole: dict) -> None:
    front = open_front()
    requests, rng = requests_of(0, NUM_TOKENS), random.Random(times)
    for turn in range(times):
        num_ends = NUM_STREAMS * (turn + 1)
        first_id = hit(front, signal.SIGKILL, requests, rng.randint(1, 2500))
        front.wait_ends(num_ends)
        front.wait_restarts(turn + 1)
        ends = [front.ends()[first_id + index] for index in range(NUM_STREAMS)]
        assert {(end.finish_reason, end.error_kind) for end in ends} <= {
            ("error", "engine_lost"),
            ("length", None),
        }
        assert any(end.error_kind == "engine_lost" for end in ends)
        check_beginnings(front, first_id, requests, whole)
        front.wait(lambda: front.engine.status().is_ready, LOAD_S)
    assert front.engine.status().num_restarts == times
    front.stop()


def test_a_killed_engine_ends_64_streams_and_is_back(whole: dict):
    kill_again_and_again(2, whole)


@pytest.mark.soak
def test_a_hundred_kills_end_64_streams_each(whole: dict):
    kill_again_and_again(100, whole)


def stop_again_and_again(times: int, whole: dict) -> None:
    clock = HandClock()
    front = open_front(patience=STRICT, clock=clock)
    requests = requests_of(0, NUM_TOKENS)
    for turn in range(times):
        first_id = hit(front, signal.SIGSTOP, requests, 50 + 100 * turn)
        assert front.engine.status().num_restarts == turn
        clock.let_pass_until(lambda turn=turn: front.engine.status().num_restarts > turn)
        front.wait_ends(NUM_STREAMS * (turn + 1))
        check_beginnings(front, first_id, requests, whole)
        front.wait(lambda: front.engine.status().is_ready, LOAD_S)
    front.stop()


def test_a_stopped_engine_is_seen_and_replaced(whole: dict):
    stop_again_and_again(1, whole)


@pytest.mark.soak
def test_twenty_stopped_engines_are_seen_and_replaced(whole: dict):
    stop_again_and_again(20, whole)


def test_failing_steps_end_their_requests_and_then_have_the_engine_replaced(whole: dict):
    front = open_front(FAULTY)
    requests = requests_of(0, NUM_TOKENS)[:8]
    broken = Request(prompt_token_ids=(3, RAISE), params=SamplingParams(max_tokens=5))
    for each in requests:
        front.engine.submit(each)
    front.wait(lambda: len(front.events) > 100)
    front.engine.submit(broken)
    front.wait_ends(9)
    assert {end.error_kind for end in front.ends().values()} == {"step_failed"}
    check_beginnings(front, 0, requests, whole)
    fine = front.engine.submit(requests[0])
    assert front.wait_ends(10)[fine].finish_reason == "length"
    pid = front.engine.pid
    for turn in range(3):
        assert front.engine.pid == pid
        front.engine.submit(broken)
        front.wait_ends(11 + turn)
    front.wait(lambda: front.engine.pid not in {pid, None})
    front.wait(lambda: front.engine.status().is_ready, LOAD_S)
    again = front.engine.submit(requests[0])
    front.wait_ends(14)
    expected = list(whole[tuple(requests[0].prompt_token_ids)])
    assert front.streams()[fine] == front.streams()[again] == expected
    front.stop()


def test_the_async_face_over_a_process_gives_what_llm_gives():
    params = SamplingParams(max_tokens=30, temperature=0.0)
    prompts = ["The capital of France is", "One, two,", "A long time ago"]

    async def play() -> list[str]:
        process = EngineProcess(None, CONFIG, ProcessOptions(patience=PATIENT))
        async with AsyncEngine(process, TextFrontend(find_checkpoint(None))) as engine:
            await asyncio.to_thread(process.wait_ready, LOAD_S)

            async def one(prompt: str) -> str:
                outputs = [each async for each in engine.generate(prompt, params)]
                return outputs[-1].outputs[0].text

            return await asyncio.gather(*map(one, prompts))

    llm = LLM(max_num_seqs=16, max_model_len=512)
    expected = [each.outputs[0].text for each in llm.generate(prompts, params)]
    llm.close()
    assert asyncio.run(play()) == expected


def test_a_folder_without_a_model_is_the_engines_own_error_here(tmp_path: Path):
    front = open_front(model=str(tmp_path))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        front.engine.wait_ready(LOAD_S)
    front.stop()


def check_idle(seconds: float, share: float) -> None:
    """Both processes, after some work, take less than this share of a core."""
    front = open_front()
    for each in requests_of(1, 10)[:4]:
        front.engine.submit(each)
    front.wait_ends(4)
    stats = front.engine.stats()
    assert stats is not None
    assert stats.num_compiles_after_warmup == 0
    pid = front.engine.pid
    assert pid is not None
    # The serving thread is the only one of this process that is awake.
    assert max(idle_share(pid, seconds), idle_share(os.getpid(), seconds)) < share
    assert front.engine.status().is_ready
    front.stop()


@needs_proc
def test_an_idle_engine_sleeps_in_both_processes():
    check_idle(3.0, SHORT_IDLE_SHARE)


@pytest.mark.soak
@needs_proc
def test_an_idle_engine_sleeps_for_a_minute_in_both_processes():
    check_idle(60.0, IDLE_SHARE)
