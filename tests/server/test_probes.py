"""Probes answer while long texts are tokenised: the bar, and a tokenizer that must fail it."""

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import pytest

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.frontend.text_frontend import TextFrontend
from tests.by_day import by_day
from tests.cli.harness import write_model
from tests.server.harness import TIMEOUT_S, running_server
from tests.server.scripted_engine import ScriptedEngine
from tests.server.serve_process import PLAIN, ServeProcess, serve_process

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
