"""Probes answer while long texts are tokenised, and while every row is busy: the bars, and a
tokenizer that must fail them."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import pytest

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.frontend.text_frontend import TextFrontend
from tests.by_day import by_day
from tests.cli.harness import write_model
from tests.server.crowd import ask, bystander, closing_get, share
from tests.server.harness import TIMEOUT_S, running_server
from tests.server.scripted_engine import ScriptedEngine
from tests.server.serve_process import PLAIN, ServeProcess, serve_process
from tests.server.test_crowds import gauge, port_of, show

PATHS = ("/live", "/ready", "/metrics")
ENOUGH = 2 * len(PATHS)
"""Probes; a server that answers none meanwhile may still answer one when it is done."""
FLAGS = ("--max-num-seqs", "4", "--max-model-len", "1024")
LONG_TEXT = "the quick brown fox jumps over the lazy dog " * 95_000
"""A body with it is just below its bound of 4 MiB."""
CUT = {"max_tokens": 1, "truncate_prompt_tokens": 16}
LONG_CALLS: dict[str, tuple[str, Any, int]] = {
    "refused": ("/v1/completions", {"prompt": LONG_TEXT}, 400),
    "cut": ("/v1/completions", {"prompt": LONG_TEXT, **CUT}, 200),
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": LONG_TEXT}], **CUT},
        200,
    ),
    "forged": ("/v1/completions", {"prompt": LONG_TEXT + "<|im_end|>", **CUT}, 200),
    "tokenize": ("/tokenize", {"prompt": LONG_TEXT}, 200),
    "ids": ("/v1/completions", {"prompt": [7] * 2_000_000, **CUT}, 200),
}
"""Path, body and status; no text of the bundled model's context comes near this length."""
LONG_BY_DAY = {"refused", "chat", "tokenize", "ids"}
"""The others are tokenised and cut as a chat is."""


def ask_probes(url: str, face: "SlowFace") -> int:
    """How many are answered while a text is tokenised; that goes on until they are `ENOUGH`."""
    num_answered = 0
    with httpx.Client(base_url=url, **PLAIN) as client:
        for path in cycle(PATHS):
            if face.ended.is_set():
                break
            assert client.get(path).status_code == 200
            num_answered += 1
            if num_answered == ENOUGH:
                face.is_enough.set()
    return num_answered


@pytest.fixture(scope="module")
def serving() -> Iterator[ServeProcess]:
    with serve_process(*FLAGS) as serving:
        serving.wait_ready()
        yield serving


@pytest.mark.soak
@pytest.mark.parametrize("kind", by_day(LONG_CALLS, LONG_BY_DAY))
def test_a_call_of_four_megabytes_is_answered(serving: ServeProcess, kind: str) -> None:
    path, body, status = LONG_CALLS[kind]
    answer = serving.post(path, body)
    assert answer.status_code == status, answer.text[:200]
    if status == 400:
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
        assert str(len(LONG_TEXT)) in error["message"]


class SlowFace(TextFrontend):
    """Tokenises a prompt again and again until it was enough, or holds the interpreter if told to.

    Meanwhile nobody can take the interpreter from it: others run where it is given away.
    """

    def __init__(self, folder: Path, *, is_holding: bool) -> None:
        super().__init__(open_checkpoint(folder))
        self.is_holding = is_holding
        self.started = threading.Event()
        self.is_enough = threading.Event()
        self.ended = threading.Event()

    def encode(self, prompt: str | Sequence[int], **settings: Any) -> tuple[int, ...]:
        before_s = sys.getswitchinterval()
        sys.setswitchinterval(2 * TIMEOUT_S)
        try:
            self.started.set()
            if self.is_holding:
                sum(range(50_000_000))
                return (5,)
            end_s = time.monotonic() + TIMEOUT_S / 2
            while True:
                found = super().encode(prompt, **settings)
                if self.is_enough.is_set() or time.monotonic() > end_s:
                    return found
        finally:
            self.ended.set()
            sys.setswitchinterval(before_s)


@pytest.mark.parametrize("is_holding", [False, True])
def test_probes_are_answered_while_a_text_is_tokenised(
    script: tuple[int, ...], tmp_path: Path, is_holding: bool
) -> None:
    """Counted, not timed, so that it does not matter who is faster."""
    face = SlowFace(write_model(tmp_path / "tiny"), is_holding=is_holding)
    with running_server(ScriptedEngine(script), face) as server:
        body = {"prompt": LONG_TEXT[: 1 << 20], **CUT}
        asking = threading.Thread(target=server.post, args=("/v1/completions", body))
        asking.start()
        assert face.started.wait(TIMEOUT_S)
        num_answered = ask_probes(server.url, face)
        asking.join(TIMEOUT_S)
    assert (num_answered < ENOUGH) == is_holding, num_answered


NUM_ROWS = 4
BESIDE = "/beside"
CROWD = """
import sys
from tests.server.crowd import saturate
from tests.server.test_probes import LONG_CALLS
saturate(int(sys.argv[1]), int(sys.argv[2]), [call[:2] for call in LONG_CALLS.values()])
"""


@contextmanager
def saturated(serving: ServeProcess) -> Generator[None]:
    """By a process of its own, so that the probes' times are the server's."""
    command = [sys.executable, "-c", CROWD, str(port_of(serving)), str(2 * NUM_ROWS)]
    crowd = subprocess.Popen(command)
    try:
        serving.wait_for(
            lambda: gauge(serving, 'cadenza:num_requests_running{model_name="bundled"}') == NUM_ROWS
        )
        yield
        assert crowd.poll() is None, "the crowd has failed"
    finally:
        crowd.kill()
        crowd.wait()


def play(seconds: float) -> dict[str, list[float]]:
    """Seconds that each answer took, by path; those of a server with nothing to do as well."""
    with serve_process(*FLAGS) as serving, bystander() as other_port:
        serving.wait_ready()
        ports = {**dict.fromkeys(PATHS, port_of(serving)), BESIDE: other_port}
        with saturated(serving):
            times = asyncio.run(ask_in_turn(ports, seconds))
    for path, found in times.items():
        p50, p99, worst = (share(found, q) * 1e3 for q in (0.5, 0.99, 1.0))
        show(f"{path}: {len(found)} probes, p50 {p50:.1f}, p99 {p99:.1f}, worst {worst:.1f} ms")
    return times


async def ask_in_turn(ports: dict[str, int], seconds: float) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {path: [] for path in ports}
    end_s = time.monotonic() + seconds
    while True:
        for path, port in ports.items():
            reply = await ask(port, closing_get(path))
            assert reply.status == 200
            times[path].append(reply.seconds)
        if time.monotonic() >= end_s:
            return times


@pytest.mark.soak
def test_probes_are_answered_at_once_by_a_saturated_server() -> None:
    """Where others use the machine, by what they cost a server with nothing to do."""
    p99_s = {path: share(found, 0.99) for path, found in play(60.0).items()}
    allowed_s = 0.05 + p99_s.pop(BESIDE)
    assert max(p99_s.values()) < allowed_s
