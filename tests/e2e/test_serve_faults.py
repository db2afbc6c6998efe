"""Bar 12 on `cadenza serve` and the bundled model: the engine is killed or stopped under streams,
of which no client notices more than a pause.

One kill by day is in `test_serve_lifecycle.py`. The bar's times are stretched by what else the
machine does.
"""

import os
import random
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.harness import ENGINE, write_model
from tests.e2e.figures import Figures
from tests.e2e.streams import TIMEOUT_S, Stream, Streams
from tests.server.serve_process import ServeProcess, is_alive, serve_process

FLAGS = (
    *("--max-num-seqs", "16", "--max-model-len", "512", "--disable-log-requests"),
    *("--queue-timeout", "600"),  # however long a loaded machine takes to restart
)
PROMPTS = ("The capital of France is", "12 + 30 =", "Once upon a time", "The dog")


def body_of(index: int) -> dict[str, Any]:
    """Streamed and plain; greedy, seeded, with penalties, log probabilities, samples and stops."""
    body: dict[str, Any] = {
        "prompt": PROMPTS[index % len(PROMPTS)] * (1 + index % 5),
        "max_tokens": 400 if index % 3 else 150,
        "seed": index,
        "ignore_eos": True,
        "temperature": 0.0 if index % 6 == 5 else 1.0,
    }
    if index % 4 == 1:
        body |= {"frequency_penalty": 0.5, "repetition_penalty": 1.1}
    if index % 5 == 2:
        body |= {"stop": ["the end", "e w"], "min_tokens": 5}
    if index % 7 == 3:
        body |= {"n": 2, "max_tokens": 100}
    if index % 8 == 4:
        body |= {"logprobs": 2}
    if index % 3 == 0:
        return {**body, "stream": False}
    return {**body, "stream_options": {"include_usage": True}}


FULL = [body_of(index) for index in range(64)]
SMALL = [body | {"max_tokens": body["max_tokens"] // 3} for body in FULL[:24]]


# Sixteen streams that take a while.
MANY_PROMPTS = [
    {**body, "prompt": [body["prompt"], *PROMPTS], "n": 2, "stream": True, "max_tokens": 400}
    for body in FULL[:16]
]


def most_done(bodies: list[dict[str, Any]]) -> int:
    """More than a round of rows is left then, however late the signal is."""
    return len(bodies) * 3 // 8


def port_of(serving: ServeProcess) -> int:
    return int(serving.url.rpartition(":")[2])


def wholes(serving: ServeProcess, bodies: list[dict[str, Any]]) -> list[Any]:
    """What the answers are when nothing happens."""
    streams = Streams(port_of(serving), bodies).join()
    assert all(stream.is_whole and stream.error is None for stream in streams)
    return [stream.content for stream in streams]


def first_red(serving: ServeProcess, num_starts: int) -> httpx.Response | None:
    """Waits for the first answer of /ready that is no 200; /live is one throughout.

    None where the next engine is ready before anybody saw that it was not: a client that gets
    hardly any of a loaded machine asks too seldom.
    """

    def look() -> list[httpx.Response | None]:
        assert serving.status("/live") == 200
        is_replaced = serving.log.count("engine ready") > num_starts
        answer = serving.get("/ready")
        if answer.status_code != 200:
            return [answer]
        return [None] if is_replaced else []

    return serving.wait_for(look)[0]


def check_red_answer(answer: httpx.Response, fault: signal.Signals) -> None:
    reason = "ended" if fault == signal.SIGKILL else "made no progress"
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    assert answer.json()["error"]["message"].startswith(f"the engine process {reason}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A signal to the engine process of this number, from 1, once so many streams are whole."""

    signal: signal.Signals
    process: int
    num_done: int
    bar_s: float


def break_engine(
    serving: ServeProcess, bodies: list[dict[str, Any]], fault: Fault, figures: Figures
) -> list[Stream]:
    """All streams, read to their ends."""
    streams = Streams(port_of(serving), bodies)
    streams.wait(lambda: streams.num_frames and streams.num_ended >= fault.num_done)
    engine = serving.engine_pid(fault.process)
    was_late, start_s = streams.num_ended == len(bodies), time.monotonic()
    os.kill(engine, fault.signal)
    answer = first_red(serving, fault.process)
    if answer is not None:
        figures.note("/ready is 503", time.monotonic() - start_s, fault.bar_s)
        check_red_answer(answer, fault.signal)
    assert answer is not None or not figures.is_strict
    ended = streams.join()
    serving.wait_for(lambda: not is_alive(engine))
    if any(stream.error for stream in ended):
        last_s = max(stream.ended_s or 0.0 for stream in ended)
        figures.note("the last stream has its error", max(0.0, last_s - start_s), fault.bar_s)
    return [] if was_late else ended


def check_undisturbed(streams: list[Stream], expected: list[Any]) -> None:
    """No client has seen an error, and each answer is what it is when nothing happens."""
    for stream, whole in zip(streams, expected if streams else [], strict=True):
        assert (stream.is_whole, stream.error) == (True, None)
        assert stream.content == whole


def check_ends(streams: list[Stream], expected: list[Any], codes: set[str]) -> None:
    """With `--on-engine-failure error`."""
    assert all(stream.is_whole for stream in streams), "a stream was cut"
    assert not streams or {stream.error for stream in streams} - {None} == codes
    for stream, whole in zip(streams, expected if streams else [], strict=True):
        if stream.error is None:
            assert stream.content == whole
        for index, own in stream.content["choices"].items():
            assert whole["choices"][index]["text"].startswith(own["text"])


def wait_restarted(serving: ServeProcess, figures: Figures, load_s: float) -> None:
    start_s = time.monotonic()
    serving.wait_ready()
    figures.note("it serves again", time.monotonic() - start_s, load_s + 5)


def load_seconds(serving: ServeProcess) -> float:
    """The first start's, as /metrics tells it."""
    lines = serving.get("/metrics").text.splitlines()
    told = [line for line in lines if line.startswith("cadenza:startup_seconds{")]
    return sum(float(line.rpartition(" ")[2]) for line in told)


def kill_again_and_again(bodies: list[dict[str, Any]], seed: int, num_kills: int) -> None:
    """Each is repaired, and no stream is another one."""
    rng, figures = random.Random(seed), Figures()
    with serve_process(*FLAGS) as serving:
        serving.wait_ready()
        load_s, expected = load_seconds(serving), wholes(serving, bodies)
        for crash in range(1, num_kills + 1):
            num_done = rng.randint(0, most_done(bodies))
            kill = Fault(signal=signal.SIGKILL, process=crash, num_done=num_done, bar_s=1.0)
            check_undisturbed(break_engine(serving, bodies, kill, figures), expected)
            wait_restarted(serving, figures, load_s)
    figures.tell(f"kill -9 under {len(bodies)} streams, seed {seed}")


@pytest.mark.soak
@pytest.mark.parametrize("part", range(25))
def test_a_hundred_kills_under_streams(part: int) -> None:
    kill_again_and_again(FULL, part, 4)


def kill_each(serving: ServeProcess, lives_s: list[float]) -> None:
    """Each engine process when it has lived so long, whatever it does then."""
    for num_starts, life_s in enumerate(lives_s, start=1):
        engine = serving.engine_pid(num_starts)
        time.sleep(life_s)
        os.kill(engine, signal.SIGKILL)


def are_undisturbed(streams: list[Stream], expected: list[Any]) -> int:
    """How many were refused because the engine was down when they came; all others are whole."""
    is_refused = [stream.status == 503 for stream in streams]
    open_ones = [each for each, refused in zip(streams, is_refused, strict=True) if not refused]
    wanted = [each for each, refused in zip(expected, is_refused, strict=True) if not refused]
    check_undisturbed(open_ones, wanted)
    return sum(is_refused)


def kill_at_random_moments(seed: int, num_kills: int, seconds: float) -> None:
    """Clients open their streams again and again, when /ready is 200."""
    rng, num_streams, num_refused = random.Random(seed), 0, 0
    lives_s = [rng.uniform(0.0, 2 * seconds / num_kills) for _ in range(num_kills)]
    with serve_process(*FLAGS) as serving:
        serving.wait_ready()
        expected = wholes(serving, MANY_PROMPTS)
        killer = threading.Thread(target=kill_each, args=(serving, lives_s))
        killer.start()
        while killer.is_alive():
            serving.wait_ready()
            streams = Streams(port_of(serving), MANY_PROMPTS).join(seconds + TIMEOUT_S)
            num_refused += are_undisturbed(streams, expected)
            num_streams += len(streams)
        killer.join()
        serving.wait_ready()
        num_ready = serving.log.count("engine ready")
    print(f"\n{num_kills} kills: {num_streams} streams, {num_refused} refused at their beginning")
    print(
        f"  {num_ready} of {num_kills + 1} engines were loaded when they were killed or at the end"
    )
    assert num_streams > num_refused


@pytest.mark.soak
def test_thirty_kills_in_three_minutes_change_none_of_sixteen_streams() -> None:
    kill_at_random_moments(0, 30, 180.0)


@pytest.mark.soak
def test_an_engine_that_cannot_be_loaded_again_ends_the_server_when_it_has_been_red(
    tmp_path: Path,
) -> None:
    folder = write_model(tmp_path / "model")
    with serve_process(folder, *ENGINE) as serving:
        serving.wait_ready()
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
        os.kill(serving.engine_pid(), signal.SIGKILL)
        answer = first_red(serving, 1)
        assert answer is not None
        check_red_answer(answer, signal.SIGKILL)
        assert serving.wait() == 1
    told = serving.other_lines[-1]
    assert told.startswith("cadenza: error: model.safetensors: ")
    assert "failed so 3 times in a row while it loaded" in told
    assert "draining" not in serving.log


@pytest.mark.soak
def test_streams_end_with_an_error_where_they_are_not_to_be_resumed() -> None:
    figures = Figures(60.0)
    with serve_process(*FLAGS, "--on-engine-failure", "error") as serving:
        serving.wait_ready()
        expected = wholes(serving, SMALL)
        kill = Fault(signal=signal.SIGKILL, process=1, num_done=0, bar_s=1.0)
        ended = break_engine(serving, SMALL, kill, figures)
        check_ends(ended, expected, {"engine_restarting"})
        serving.wait_ready()
        assert "cadenza:requests_resumed_total{" in serving.get("/metrics").text
        assert "cadenza:resume_seconds_bucket{" in serving.get("/metrics").text


def stop_and_go(seed: int) -> None:
    """A stopped engine is red within five seconds and replaced; woken early it goes on."""
    rng, figures = random.Random(seed), Figures()
    with serve_process(*FLAGS) as serving:
        serving.wait_ready()
        load_s, expected = load_seconds(serving), wholes(serving, FULL)
        check_woken(serving, FULL, expected)
        for process in (1, 2):
            num_done = rng.randint(0, most_done(FULL))
            stop = Fault(signal=signal.SIGSTOP, process=process, num_done=num_done, bar_s=5.0 + 1.0)
            check_undisturbed(break_engine(serving, FULL, stop, figures), expected)
            wait_restarted(serving, figures, load_s)
        assert wholes(serving, FULL) == expected
        assert serving.log.count("made no progress for") == 2
    figures.tell(f"SIGSTOP under {len(FULL)} streams, seed {seed}")


def check_woken(serving: ServeProcess, bodies: list[dict[str, Any]], expected: list[Any]) -> None:
    """A stop of no length is no hang: the streams are whole and the process is the same."""
    engine = serving.engine_pid()
    streams = Streams(port_of(serving), bodies)
    streams.wait(lambda: streams.num_frames >= len(bodies))
    os.kill(engine, signal.SIGSTOP)
    os.kill(engine, signal.SIGCONT)
    assert [stream.content for stream in streams.join()] == expected
    assert serving.engine_pid() == engine
    assert serving.status("/ready") == 200


@pytest.mark.soak
@pytest.mark.parametrize("part", range(10))
def test_twenty_stopped_engines_are_seen_and_replaced(part: int) -> None:
    stop_and_go(part)
