"""A text side that breaks on one request: its client hears of it, the others' streams go on."""

from typing import Any

import pytest

from cadenza.engine.text_face import TextFace
from tests.faces.faulty_text import FAULTY_STOP, SECRET, Fault, FaultyText
from tests.server.harness import running_server
from tests.server.scripted_engine import ScriptedEngine
from tests.server.test_streams import wait_until

BODY: dict[str, Any] = {"prompt": "the fox", "max_tokens": 40}


@pytest.mark.parametrize("fault", ["detokenizer", "flush", "stop strings"])
def test_a_client_whose_text_breaks_is_told_and_another_one_is_served(
    text: TextFace, script: tuple[int, ...], fault: Fault
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
