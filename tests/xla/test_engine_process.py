"""Bars 11 and 12 on the real engine in a process of its own: kills, hangs, failing steps.

Small here, in full size under `make soak`; the times of the bars are held by `tests/e2e`. Whatever
happens, each stream is what it is when nothing happens, and ends once.
"""

import asyncio
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path

import pytest

from cadenza import LLM, AsyncEngine, EngineConfig, SamplingParams
from cadenza.engine.batch_engine import Clock
from cadenza.engine.front import EngineFront
from cadenza.engine.process.launch import COMMAND
from cadenza.engine.process.process_link import ProcessLink, ProcessOptions
from cadenza.engine.process.supervision import WatchdogTimeouts
from cadenza.engine.timeouts import RequestTimeouts
from cadenza.errors import CheckpointError, EngineUnavailableError
from cadenza.events import Finished
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.loading.build import find_checkpoint
from cadenza.request import Request
from tests.by_day import by_day
from tests.e2e.figures import Figures
from tests.engine.process.conftest import Front, HandClock
from tests.engine.process.test_recovery import StreamId, content_of
from tests.process_cost import IDLE_SHARE, SHORT_IDLE_SHARE, idle_share, needs_proc
from tests.xla.faulty_child import RAISE

CONFIG = EngineConfig(
    max_num_seqs=16, max_num_batched_tokens=64, max_model_len=512, max_consecutive_step_errors=3
)
FAULTY = (sys.executable, str(Path(__file__).with_name("faulty_child.py")))
LOAD_S = 120.0
NUM_STREAMS = 64
NUM_TOKENS = 400
LENIENT = 60.0
LENIENT_TIMEOUTS = RequestTimeouts(queue_s=3600.0, total_s=3600.0)
MOST_ROUNDS = 50
UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
# A machine that stands still for a while is no hang.
PATIENT = WatchdogTimeouts(hung_after_s=LOAD_S, backoff_s=0.0)
STRICT = WatchdogTimeouts(backoff_s=0.0)  # as served, for a `HandClock`


def open_front(
    command: tuple[str, ...] = COMMAND,
    model: str | None = None,
    watchdog: WatchdogTimeouts = PATIENT,
    clock: Clock = time.monotonic,
) -> Front:
    options = ProcessOptions(command=command, watchdog=watchdog, timeouts=LENIENT_TIMEOUTS)
    front = Front(ProcessLink(model, CONFIG, options, clock))
    front.wait(lambda: front.engine.status().state in {"ready", "dead"}, LOAD_S)
    return front


def requests_of(seed: int, max_tokens: int) -> list[Request]:
    rng = random.Random(seed)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.8, seed=5, ignore_eos=True)
    return [
        Request(prompt_token_ids=tuple(rng.choices(range(3, 2000), k=20)), params=params)
        for _ in range(NUM_STREAMS)
    ]


def mixed_requests() -> list[Request]:
    rng = random.Random("mixed")
    return [
        Request(
            prompt_token_ids=tuple(rng.choices(range(3, 2000), k=rng.choice([3, 20, 200]))),
            params=SamplingParams(
                max_tokens=rng.choice([40, 120, 250]),
                min_tokens=rng.choice([0, 30]),
                temperature=rng.choice([0.0, 0.8]),
                top_p=rng.choice([1.0, 0.9]),
                seed=index,
                frequency_penalty=rng.choice([0.0, 0.5]),
                repetition_penalty=rng.choice([1.0, 1.2]),
                logit_bias=rng.choice([(), ((40, 2.0),)]),
                logprobs=rng.choice([None, 3]),
                prompt_logprobs=rng.choice([None, None, 1]),
                n=rng.choice([1, 1, 2]),
                ignore_eos=rng.random() < 0.5,
            ),
        )
        for index in range(NUM_STREAMS)
    ]


class Rounds:
    """The same requests again and again in one front; each must give what the first round gave."""

    def __init__(self, front: Front) -> None:
        self.front = front
        self.requests = mixed_requests()
        self._num_events = 0
        self.begin()
        self._undisturbed = self.finish()

    def begin(self, at: int = 0) -> None:
        self._num_events = len(self.front.events)
        self._first_id, *_ = [self.front.engine.submit(each) for each in self.requests]
        self.front.wait(lambda: len(self.front.events) - self._num_events >= at)

    def finish(self) -> dict[StreamId, list[object]]:
        self.front.wait(lambda: not self.front.engine.load().num_open)
        content = content_of(self.front.events[self._num_events :])
        return {(key - self._first_id, sample): own for (key, sample), own in content.items()}

    def check(self) -> None:
        assert self.finish() == self._undisturbed

    def check_short_of_memory(self) -> None:
        """A request whose own step gets no memory, twice, ends with an error behind its beginning;
        all others are whole.
        """
        for key, own in self.finish().items():
            whole, end = self._undisturbed[key], own[-1]
            if isinstance(end, list) and end[0] == "error":
                assert own[:-1] == whole[: len(own) - 1]
            else:
                assert own == whole
        kinds = {event.error_kind for event in self.front.events if isinstance(event, Finished)}
        assert kinds <= {None, "step_failed"}

    def wait_token_of_another_engine(self, num_restarts: int) -> None:
        """After that restart; or until all has ended, for its tokens may have arrived before."""
        front = self.front
        front.wait_restarts(num_restarts)
        num_events = len(front.events)
        front.wait(lambda: len(front.events) > num_events or not front.engine.load().num_open)

    @property
    def pid(self) -> int:
        pid = self.front.link.pid
        assert pid is not None
        return pid

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


def kill_again_and_again(times: int) -> None:
    rounds, rng = Rounds(front := open_front()), random.Random(times)
    figures = Figures(LENIENT)
    for turn in range(times):
        rounds.begin(rng.randint(1, 3000))
        if front.engine.load().num_open:
            start_s = time.monotonic()
            rounds.signal(signal.SIGKILL)
            rounds.wait_token_of_another_engine(turn + 1)
            figures.note("from kill to the next token", time.monotonic() - start_s, 5.0)
        else:
            rounds.signal(signal.SIGKILL)
        rounds.check()
        front.wait_restarts(turn + 1)
        front.wait(lambda: front.engine.status().is_ready, LOAD_S)
    stats, resumed = front.engine.stats(), front.engine.request_stats()
    assert stats is not None
    assert (
        stats.by_label["pages"]["live"],
        stats.numbers["num_requests_running"],
        stats.numbers["num_requests_waiting"],
    ) == (0, 0, 0)
    assert resumed.ends.keys() <= {"length", "stop"}
    assert resumed.resume_seconds.count
    mean_s = resumed.resume_seconds.total / resumed.resume_seconds.count
    print(f"{resumed.num_resumed} requests resumed, {mean_s:.2f} s to a token of each")
    figures.tell(f"{times} kills of the engine")
    front.stop()


@pytest.mark.parametrize("times", by_day([1, 100], {1}))
def test_killed_engines_change_none_of_64_streams(times: int):
    """Of kills that follow each other `tests/e2e` has two by day."""
    kill_again_and_again(times)


def stop_again_and_again(times: int) -> None:
    clock = HandClock()
    rounds = Rounds(front := open_front(watchdog=STRICT, clock=clock))
    for turn in range(times):
        rounds.begin(50 + 100 * turn)
        rounds.signal(signal.SIGSTOP)
        assert front.engine.status().num_restarts == turn
        clock.let_pass_until(lambda turn=turn: front.engine.status().num_restarts > turn)
        rounds.check()
        front.wait(lambda: front.engine.status().is_ready, LOAD_S)
    front.stop()


@pytest.mark.soak
@pytest.mark.parametrize("times", [1, 20])
def test_stopped_engines_change_no_stream(times: int):
    """By day `tests/engine/process` stops a scripted child."""
    stop_again_and_again(times)


def memory_of(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel does not say")


def get_no_more_memory(spare_bytes: int) -> None:
    """From some moment on; the engine is lost, or its steps fail, and the next one has no limit."""
    rounds = Rounds(front := open_front())
    rounds.begin(300)
    limit = memory_of(rounds.pid) + spare_bytes
    resource.prlimit(rounds.pid, resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    for _ in range(MOST_ROUNDS):
        rounds.check_short_of_memory()
        stats = front.engine.stats()
        if front.engine.status().num_restarts or (stats and stats.numbers["failed_steps"]):
            break
        rounds.begin()
    else:
        raise AssertionError("the limit was never reached")
    front.wait(lambda: front.engine.status().is_ready, LOAD_S)
    resource.prlimit(rounds.pid, resource.RLIMIT_DATA, UNLIMITED)
    rounds.begin()
    rounds.check()
    front.stop()


@pytest.mark.soak
@needs_proc
@pytest.mark.parametrize("spare_bytes", [0, 1 << 16, 1 << 18, 1 << 20, 1 << 22])
def test_an_engine_that_gets_little_or_no_more_memory_loses_no_stream(spare_bytes: int):
    get_no_more_memory(spare_bytes)


@pytest.mark.soak
@needs_proc
def test_engines_without_the_memory_to_load_end_streams_with_one_clean_error(tmp_path: Path):
    limit = tmp_path / "limit"
    script = f'test -e {limit} && ulimit -d 100000; exec "$@"'
    front = open_front(("sh", "-c", script, "sh", *COMMAND))
    requests = mixed_requests()
    for each in requests:
        front.engine.submit(each)
    front.wait(lambda: len(front.events) > 300)
    limit.touch()
    pid = front.link.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    front.wait_state("dead")
    front.wait(lambda: not front.engine.load().num_open)
    ends = [event for event in front.events if isinstance(event, Finished)]
    assert {end.error_kind for end in ends} <= {None, "engine_lost"}
    assert sum(end.error_kind == "engine_lost" for end in ends) > 0
    assert len(ends) == sum(each.params.n for each in requests)
    with pytest.raises(EngineUnavailableError, match="failed too often"):
        front.engine.submit(requests[0])
    front.stop()


def test_a_step_that_fails_twice_ends_its_request_alone():
    front = open_front(FAULTY)
    requests = requests_of(0, NUM_TOKENS)[:8]
    broken = Request(prompt_token_ids=(3, RAISE), params=SamplingParams(max_tokens=5))
    first = [front.engine.submit(each) for each in requests]
    front.wait(lambda: len(front.events) > 100)
    culprit = front.engine.submit(broken)
    ends = front.wait_ends(9)
    assert ends.pop(culprit).error_kind == "step_failed"
    assert {end.finish_reason for end in ends.values()} == {"length"}
    again = [front.engine.submit(each) for each in requests]
    front.wait_ends(17)
    streams = front.streams()
    assert [streams[each] for each in first] == [streams[each] for each in again]
    assert front.engine.status().num_restarts == 0
    front.stop()


def test_the_async_face_over_a_process_gives_what_llm_gives():
    params = SamplingParams(max_tokens=30, temperature=0.0)
    prompts = ["The capital of France is", "One, two,", "A long time ago"]

    async def play() -> list[str]:
        process = EngineFront(ProcessLink(None, CONFIG, ProcessOptions(watchdog=PATIENT)))
        async with AsyncEngine(process, TextFrontend(find_checkpoint(None))) as engine:
            await asyncio.to_thread(process.wait_ready, LOAD_S)

            async def one(prompt: str) -> str:
                outputs = [each async for each in engine.generate(prompt, params)]
                return outputs[-1].outputs[0].text

            return await asyncio.gather(*map(one, prompts))

    llm = LLM(max_num_seqs=16, max_num_batched_tokens=64, max_model_len=512)
    expected = [each.outputs[0].text for each in llm.generate(prompts, params)]
    llm.close()
    assert asyncio.run(play()) == expected


def test_a_folder_without_a_model_is_the_engines_own_error_here(tmp_path: Path):
    front = open_front(model=str(tmp_path))
    with pytest.raises(CheckpointError, match="is empty; name a folder"):
        front.engine.wait_ready(LOAD_S)
    front.stop()


def check_idle(seconds: float, share: float) -> None:
    front = open_front()
    for each in requests_of(1, 10)[:4]:
        front.engine.submit(each)
    front.wait_ends(4)
    stats = front.engine.stats()
    assert stats is not None
    assert stats.numbers["compiles_after_warmup"] == 0
    pid = front.link.pid
    assert pid is not None
    # The serving thread is the only one of this process that is awake.
    assert max(idle_share(pid, seconds), idle_share(os.getpid(), seconds)) < share
    assert front.engine.status().is_ready
    front.stop()


@pytest.mark.soak
@needs_proc
@pytest.mark.parametrize(("seconds", "share"), [(3.0, SHORT_IDLE_SHARE), (60.0, IDLE_SHARE)])
def test_an_idle_engine_sleeps_in_both_processes(seconds: float, share: float):
    """By day `tests/native/test_process_cost.py` looks at a server and its engine."""
    check_idle(seconds, share)
