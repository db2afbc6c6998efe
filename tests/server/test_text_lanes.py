"""Who waits for whose text: short prompts for no long one, and nobody for /tokenize; a text
side that breaks on one request, which alone hears of it."""

import threading
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.server.generation import MAX_INLINE_OUTPUTS
from cadenza.server.limits import LONG_BYTES, ServerLimits
from tests.cli.harness import write_model
from tests.faces.faulty_text import FAULTY_STOP, SECRET, Fault, FaultyOutput, FaultyText
from tests.server.bodies import read
from tests.server.dialects import check_error, form_of, tools_of
from tests.server.harness import TIMEOUT_S, RunningServer, options, running_server, wait_until
from tests.server.scripted_engine import ScriptedEngine

MAX_MODEL_LEN = 256
NUM_LONG = 8
SHORT = {"prompt": "the fox", "max_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": "the fox"}], "max_tokens": 2}
CUT = {"max_tokens": 1, "truncate_prompt_tokens": 16}


class HeldFace(TextFrontend):
    """Tokenises no text that begins with one of `held` until it is let go."""

    def __init__(self, folder: Path, held: Sequence[str]) -> None:
        super().__init__(open_checkpoint(folder))
        self.held = tuple(held)
        self.let_go = threading.Event()
        self.num_waiting = 0
        self.most_waiting = 0
        self._lock = threading.Lock()

    def encode(self, prompt: str | Sequence[int], **settings: Any) -> tuple[int, ...]:
        if isinstance(prompt, str) and prompt.startswith(self.held):
            with self._lock:
                self.num_waiting += 1
                self.most_waiting = max(self.most_waiting, self.num_waiting)
            assert self.let_go.wait(TIMEOUT_S)
            with self._lock:
                self.num_waiting -= 1
        return super().encode(prompt, **settings)


def long_text(start: str) -> str:
    return start + " the fox" * (LONG_BYTES // 8)


@contextmanager
def held_server(
    script: tuple[int, ...],
    folder: Path,
    *held: str,
    drain_s: float = 30.0,
    engine: ScriptedEngine | None = None,
    **bounds: int,
) -> Generator[tuple[RunningServer, HeldFace, ThreadPoolExecutor]]:
    face = HeldFace(write_model(folder / "tiny"), held)
    engine = engine or ScriptedEngine(script, max_model_len=MAX_MODEL_LEN, **bounds)
    limits = ServerLimits(drain_s=drain_s)
    with (
        running_server(engine, face, options(limits=limits)) as server,
        ThreadPoolExecutor(4 * NUM_LONG) as clients,
    ):
        try:
            yield server, face, clients
        finally:
            face.let_go.set()


def statuses(calls: list[Future[httpx.Response]]) -> list[int]:
    return [call.result(TIMEOUT_S).status_code for call in calls]


def test_no_short_text_waits_for_a_long_one(script: tuple[int, ...], tmp_path: Path) -> None:
    with held_server(script, tmp_path, "held") as (server, face, clients):
        long = long_text("held")
        waiting = [
            clients.submit(server.post, path, body)
            for path, body in (
                ("/tokenize", {"prompt": long}),
                ("/v1/completions", {"prompt": long, **CUT}),
            )
            for _ in range(NUM_LONG)
        ]
        wait_until(lambda: face.num_waiting == 2)
        for path, body in (
            ("/v1/completions", SHORT),
            ("/v1/chat/completions", CHAT),
            ("/tokenize", {"prompt": "the fox"}),
            ("/detokenize", {"tokens": [5]}),
        ):
            assert server.post(path, body).status_code == 200
        assert not any(call.done() for call in waiting)
        assert face.most_waiting == 2, "a long text of either kind at a time"
        face.let_go.set()
        assert statuses(waiting) == [200] * (2 * NUM_LONG)


@pytest.mark.parametrize("is_long", [False, True])
def test_no_prompt_waits_for_tokenize(
    script: tuple[int, ...], tmp_path: Path, is_long: bool
) -> None:
    with held_server(script, tmp_path, "held") as (server, face, clients):
        text = long_text("held") if is_long else "held"
        waiting = [
            clients.submit(server.post, "/tokenize", {"prompt": text}) for _ in range(NUM_LONG)
        ]
        wait_until(lambda: face.num_waiting == 1)
        body = {"prompt": long_text("other") if is_long else "other", **CUT}
        assert server.post("/v1/completions", body).status_code == 200
        assert face.most_waiting == 1
        face.let_go.set()
        assert statuses(waiting) == [200] * NUM_LONG


def test_no_prompt_waits_for_a_form(script: tuple[int, ...], tmp_path: Path) -> None:
    """Checking one may take seconds."""
    with held_server(script, tmp_path, "held") as (server, face, clients):
        body = {"prompt": "held", "max_tokens": 1, "guided_regex": "[a-z]"}
        waiting = [clients.submit(server.post, "/v1/completions", body) for _ in range(NUM_LONG)]
        wait_until(lambda: face.num_waiting == 4)
        assert server.post("/v1/completions", SHORT).status_code == 200
        assert server.post("/v1/chat/completions", CHAT).status_code == 200
        assert not any(call.done() for call in waiting)
        face.let_go.set()
        statuses(waiting)


TOOL = {"name": "f", "parameters": {}}
STRICT = {**TOOL, "strict": True}


@pytest.mark.parametrize(
    ("name", "fields", "has_form"),
    [
        ("completions", {}, False),
        ("completions", {"structured_outputs": {"regex": "a"}}, True),
        ("chat", {"response_format": {"type": "text"}, "tools": tools_of("chat", TOOL)}, True),
        ("chat", {"tools": tools_of("chat", TOOL), "tool_choice": "none"}, False),
        ("chat", {"tools": tools_of("chat", TOOL), "tool_choice": "required"}, True),
        ("chat", {"tools": tools_of("chat", STRICT)}, True),
        ("chat", {"response_format": {"type": "json_object"}}, True),
        ("responses", {"tools": tools_of("responses", TOOL)}, True),
        ("responses", {"tools": tools_of("responses", STRICT)}, True),
        ("responses", {"text": {"format": {"type": "json_object"}}}, True),
        ("messages", {"tools": tools_of("messages", TOOL)}, True),
        ("messages", {"tools": tools_of("messages", TOOL), "tool_choice": {"type": "any"}}, True),
        ("messages", form_of("messages", {}), True),
        ("embeddings", {}, False),
    ],
)
def test_what_has_a_form_is_known_before_it_is_prepared(
    name: str, fields: dict[str, Any], *, has_form: bool
) -> None:
    assert read(name, **fields).has_form is has_form


def test_no_prompt_waits_for_an_answer_that_is_encoded_nor_the_other_way_round(
    script: tuple[int, ...], tmp_path: Path
) -> None:
    engine = ScriptedEngine(script)
    with held_server(script, tmp_path, "held", engine=engine) as (server, face, clients):
        engine.pause()
        inputs = [[5]] * (MAX_INLINE_OUTPUTS + 1)
        encoded = clients.submit(server.post, "/v1/embeddings", {"input": inputs})
        wait_until(lambda: engine.num_open)
        waiting = [
            clients.submit(server.post, "/v1/completions", {"prompt": "held", "max_tokens": 1})
            for _ in range(3)
        ]
        wait_until(lambda: face.num_waiting == 2)
        engine.resume()
        assert len(encoded.result(TIMEOUT_S).json()["data"]) == len(inputs)
        assert not any(call.done() for call in waiting)
        face.let_go.set()
        assert statuses(waiting) == [200] * len(waiting)


def test_calls_of_tokenize_are_bounded_and_take_no_room_of_completions(
    script: tuple[int, ...], tmp_path: Path
) -> None:
    bounds = {"max_num_queued_reqs": 1}  # and four rows
    with held_server(script, tmp_path, "held", **bounds) as (server, _, clients):
        waiting = [clients.submit(server.post, "/tokenize", {"prompt": "held"}) for _ in range(6)]
        wait_until(lambda: any(call.done() for call in waiting))
        (refused,) = [call.result() for call in waiting if call.done()]
        assert refused.headers["retry-after"] == "1"
        words = ("5 calls that tokenize", "--max-num-queued-reqs")
        check_error(refused, 429, "queue_full", None, *words)
        assert server.post("/v1/completions", SHORT).status_code == 200


def test_prompts_in_hand_when_the_server_ends_are_refused_as_draining(
    script: tuple[int, ...], tmp_path: Path
) -> None:
    """Those that a thread tokenises, and those that wait for one."""
    with held_server(script, tmp_path, "held", drain_s=0.1) as (server, face, clients):
        waiting = [
            clients.submit(server.post, path, {"prompt": "held"})
            for path in ("/v1/completions", "/tokenize")
            for _ in range(4)
        ]
        wait_until(lambda: server.service.num_open == len(waiting) and face.num_waiting == 3)
        server.call(server.lifecycle.drain)
        wait_until(lambda: sum(call.done() for call in waiting) == 5)
        face.let_go.set()
        answers = [call.result(TIMEOUT_S) for call in waiting]
    ended = [answer for answer in answers if answer.status_code != 200]
    assert len(ended) >= len(answers) - 1  # one was being tokenised for its own sake
    for answer in ended:
        check_error(answer, 503, "draining")


WORDS = "the fox " * 300
"""More tokens than the context holds, in fewer characters than tell it."""


@pytest.mark.parametrize(
    "body", [{"prompt": WORDS}, {"messages": [{"role": "user", "content": WORDS}]}]
)
def test_tokenize_counts_what_no_context_holds(
    scripted: RunningServer, text: TextFrontend, body: dict[str, Any]
) -> None:
    answer = scripted.post("/tokenize", body)
    assert answer.status_code == 200, answer.text[:200]
    found = answer.json()
    if "prompt" in body:
        assert found["tokens"] == [*text.encode(WORDS)]
    assert found["count"] == len(found["tokens"]) > found["max_model_len"] == MAX_MODEL_LEN
    far = scripted.post("/tokenize", {"prompt": WORDS * 300}).json()
    assert far["count"] > 300 * MAX_MODEL_LEN


def test_tokenize_takes_as_many_tokens_as_the_context_holds(
    scripted: RunningServer, text: TextFrontend
) -> None:
    whole = ""
    while len(text.encode(whole + "fox ")) <= MAX_MODEL_LEN:
        whole += "fox "
    answer = scripted.post("/tokenize", {"prompt": whole, "return_token_strs": True})
    assert answer.status_code == 200
    found = answer.json()
    assert found["tokens"] == list(text.encode(whole))
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert MAX_MODEL_LEN - 4 < found["count"] <= found["max_model_len"] == MAX_MODEL_LEN


def test_detokenize_takes_as_many_tokens_as_the_context_holds(scripted: RunningServer) -> None:
    assert scripted.post("/detokenize", {"tokens": [5] * MAX_MODEL_LEN}).status_code == 200
    answer = scripted.post("/detokenize", {"tokens": [5] * (MAX_MODEL_LEN + 1)})
    words = f"maximum context length is {MAX_MODEL_LEN} tokens; tokens has {MAX_MODEL_LEN + 1}"
    check_error(answer, 400, "context_length_exceeded", "tokens", words)


BODY: dict[str, Any] = {"prompt": "the fox", "max_tokens": 40}


@pytest.mark.parametrize("fault", ["detokenizer", "flush", "stop strings"])
def test_a_client_whose_text_breaks_is_told_and_another_one_is_served(
    text: TextFrontend, script: tuple[int, ...], fault: Fault
) -> None:
    engine = ScriptedEngine(script)
    faulty: Any = FaultyText(text, fault)
    with running_server(engine, faulty) as server:
        whole = server.post("/v1/completions", BODY).json()["choices"][0]["text"]
        with server.client() as client:
            beside = client.stream("POST", "/v1/completions", json={**BODY, "stream": True})
            engine.pause()
            with beside as response:
                engine.resume()
                answer = server.post("/v1/completions", {**BODY, "stop": FAULTY_STOP})
                assert answer.status_code == 500
                assert answer.json()["error"]["code"] == "server_error"
                assert answer.headers["x-should-retry"] == "false"
                assert SECRET not in answer.text
                assert list(response.iter_lines())[-2:] == ["data: [DONE]", ""]
        streamed = {**BODY, "stop": FAULTY_STOP, "stream": True}
        *_, failed, done = server.events("/v1/completions", streamed)
        assert failed["error"]["code"] == "server_error"
        assert done == "[DONE]"
        assert server.post("/v1/completions", BODY).json()["choices"][0]["text"] == whole
        wait_until(lambda: engine.num_open == server.service.num_open == 0)


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_call_of_several_prompts_ends_with_the_one_whose_output_cannot_be_made(
    text: TextFrontend, script: tuple[int, ...], victim: int, is_stream: bool
) -> None:
    engine = ScriptedEngine(script)
    faulty: Any = FaultyOutput(text, victim)
    body = {**BODY, "prompt": ["the fox", "a dog", "the cat"], "max_tokens": 200}
    with running_server(engine, faulty) as server:
        if is_stream:
            *_, failed, done = server.events("/v1/completions", {**body, "stream": True})
            assert failed["error"]["code"] == "server_error"
            assert done == "[DONE]"
        else:
            answer = server.post("/v1/completions", body)
            assert answer.status_code == 500
            assert answer.json()["error"]["code"] == "server_error"
            assert SECRET not in answer.text
        wait_until(lambda: engine.num_open == server.service.num_open == 0)
        assert len(server.post("/v1/completions", body).json()["choices"]) == 3
