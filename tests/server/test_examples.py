"""What the examples, the cookbook and the documents show: the loop of tool calls, the client of a
server, passages, batch files, structured outputs."""

import importlib.util
import json
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType

import openai
import pytest

from examples import batch_file, rag, tool_loop
from tests.server.harness import RunningServer


def test_the_loop_calls_sends_the_result_back_and_ends_with_an_answer(
    bundled: RunningServer,
) -> None:
    base_url = f"{bundled.url}/v1"
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        messages = tool_loop.conversation(client, tool_loop.QUESTION)
    user, called, result, *rest = messages
    assert user == {"role": "user", "content": tool_loop.QUESTION}
    (call,) = called["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
    assert result == {
        "role": "tool",
        "tool_call_id": call["id"],
        "content": "It is sunny in Paris.",
    }
    assert rest[-1]["role"] == "assistant"
    assert not rest[-1].get("tool_calls")
    assert rest[-1]["content"]


def test_the_loop_ends_however_often_the_model_would_call() -> None:
    choices = [tool_loop.choice_of(place, 4) for place in range(4)]
    assert choices == ["required", "auto", "auto", "none"]


def test_what_is_wrong_with_a_call_becomes_its_result() -> None:
    unknown = {"name": "odd", "arguments": "{}"}
    assert "there is no function odd" in tool_loop.result_of(unknown)
    assert "unexpected" in tool_loop.result_of({"name": "weather", "arguments": '{"town": "x"}'})
    assert "Error: " in tool_loop.result_of({"name": "weather", "arguments": "{"})


def test_a_message_is_shown_with_its_calls() -> None:
    function = {"name": "weather", "arguments": "{}"}
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
    assert tool_loop.shown(called) == "assistant: weather({})"
    assert tool_loop.shown({"role": "user", "content": "hi"}) == "user: hi"


SCRIPT = Path(__file__).parents[2] / "examples" / "clients.py"


@pytest.fixture(scope="module")
def clients() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_clients", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def url() -> Iterator[str]:
    """A server with a key that lists two models."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_let_in = self.headers["Authorization"] == "Bearer a-key"
            models = [{"id": "somebody/first"}, {"id": "second"}]
            self.send_response(200 if is_let_in and self.path == "/v1/models" else 401)
            self.end_headers()
            self.wfile.write(json.dumps({"data": models}).encode())

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_model_is_the_first_that_the_server_lists(clients: ModuleType, url: str):
    server = clients.server_of([f"{url}/", "--api-key", "a-key"])
    assert (server.url, server.model) == (url, "somebody/first")


def test_a_model_that_is_named_is_taken(clients: ModuleType):
    server = clients.server_of(["http://127.0.0.1:1", "--model", "second"])
    assert server.model == "second"


@pytest.fixture
def client(bundled: RunningServer):
    with openai.OpenAI(base_url=f"{bundled.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize(
    ("question", "passage"),
    [("Where do foxes sleep?", rag.PASSAGES[2]), ("Who learned to swim?", rag.PASSAGES[3])],
)
def test_the_passage_that_a_question_is_about_is_found(
    client: openai.OpenAI, question: str, passage: str
) -> None:
    assert rag.nearest(client, rag.PASSAGES, question) == [passage]


def line(name: str, **body: object) -> str:
    body = {"prompt": "12 + 30 =", "max_tokens": 4, "temperature": 0, **body}
    asked = {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(asked) + "\n"


def run(server: RunningServer, folder: Path) -> tuple[int, dict[str, dict]]:
    """The exit code, and the answers' lines by their names."""
    questions, answers = folder / "questions.jsonl", folder / "answers.jsonl"
    code = batch_file.main([server.url, str(questions), str(answers), "--at-once", "3"])
    lines = [json.loads(each) for each in answers.read_text().splitlines()]
    return code, {each["custom_id"]: each for each in lines}


def test_a_batch_file_that_was_cut_goes_on_and_ends_with_the_same_answers(
    bundled: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [str(each) for each in range(7)]
    (tmp_path / "questions.jsonl").write_text("".join(map(line, names)))
    code, whole = run(bundled, tmp_path)
    assert code == 0
    assert set(whole) == set(names)
    texts = {each["response"]["body"]["choices"][0]["text"].strip() for each in whole.values()}
    assert texts == {"42"}
    answers = tmp_path / "answers.jsonl"
    kept = answers.read_text().splitlines(keepends=True)[:3]
    answers.write_text("".join(kept) + '{"custom_id": "of a line that was c')
    code, again = run(bundled, tmp_path)
    assert capsys.readouterr().out.endswith("4 answered, 0 of them with an error; 3 were there\n")
    assert set(again) == set(names)


def test_a_question_that_fails_has_its_error_and_is_asked_again(
    bundled: RunningServer, tmp_path: Path
) -> None:
    (tmp_path / "questions.jsonl").write_text(line("good") + line("bad", temperature=-1))
    for _ in range(2):
        code, found = run(bundled, tmp_path)
        assert code == 1
        assert found["good"]["error"] is None
        assert found["bad"]["response"]["status_code"] == 400
        assert found["bad"]["error"]["error"]["param"] == "temperature"
    assert (tmp_path / "answers.jsonl").read_text().count('"good"') == 1


def test_a_file_of_passages_has_one_on_each_line_that_is_not_blank(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("one\n\n  \ntwo\n")
    assert rag.lines_of(tmp_path / "notes.txt") == ["one", "two"]


SERVING = Path(__file__).parents[2] / "docs" / "serving.md"


def test_the_structured_output_of_the_documents_is_what_they_say(bundled: RunningServer) -> None:
    section = SERVING.read_text().partition("## Structured outputs")[2]
    command = re.search(r"curl http://127.0.0.1:8000(\S+) .*?-d '(.*?)'\n", section, re.DOTALL)
    answer = re.search(r"The content is `(.*?)`", section)
    assert command is not None
    assert answer is not None
    choice = bundled.post(command[1], json.loads(command[2])).json()["choices"][0]
    assert choice["message"]["content"] == answer[1]
    assert choice["finish_reason"] == "stop"
    assert json.loads(answer[1]) == {"city": "Paris"}
