"""A text side that breaks on one request: its client hears of it, the others' streams go on."""

from typing import Any

import pytest

from cadenza.frontend.text_frontend import TextFrontend
from tests.faces.faulty_text import FAULTY_STOP, SECRET, Fault, FaultyOutput, FaultyText
from tests.server.harness import running_server
from tests.server.scripted_engine import ScriptedEngine
from tests.server.test_streams import wait_until

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
