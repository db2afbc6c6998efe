"""Ollama's API: recorded requests of its clients, lines of streams, options, models, refusals."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.frontend.loaded_model import LoadedModel
from cadenza.frontend.prepared_request import OWN_TERMS
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.server.calls.endpoint import AnswerHead
from cadenza.server.calls.record import AnswerTimes, Usage
from cadenza.server.ollama.generate import LineEncoder, OllamaChatRequest, chat_shape
from cadenza.server.ollama.models import tagged
from cadenza.server.openai.chat import ChatRequest
from tests.server.harness import RunningServer, Serve, running_server
from tests.server.scripted_engine import ScriptedEngine

RECORDED = json.loads((Path(__file__).parent / "ollama_requests.json").read_text())
CHAT, GENERATE = "/api/chat", "/api/generate"
MESSAGES = [{"role": "user", "content": "the fox"}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
NOW = {"type": "function", "function": {"name": "now", "description": "The time."}}


def ask(server: RunningServer, path: str = CHAT, **fields: Any) -> httpx.Response:
    given = {"messages": MESSAGES} if path == CHAT else {"prompt": "the fox"}
    return server.post(path, {"options": {"num_predict": 4}, **given, **fields})


def lines_of(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in answer.text.removesuffix("\n").split("\n")]


def refused(answer: httpx.Response) -> tuple[int, str]:
    assert answer.json().keys() == {"error"}
    return answer.status_code, answer.json()["error"]


@pytest.mark.parametrize(
    "call", RECORDED, ids=lambda call: f"{call['client']} {call['path'].rpartition('/')[2]}"
)
def test_recorded_requests_of_clients_are_answered(
    bundled: RunningServer, call: dict[str, Any]
) -> None:
    with bundled.client() as client:
        answer = client.request(call["method"], call["path"], json=call["body"])
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", [CHAT, GENERATE])
def test_the_last_line_alone_is_done_and_has_durations(scripted: RunningServer, path: str) -> None:
    whole = ask(scripted, path, stream=False).json()
    *parts, end = lines_of(ask(scripted, path))

    def text_of(held: dict[str, Any]) -> str:
        return held["message"]["content"] if path == CHAT else held["response"]

    assert not any(part["done"] for part in parts)
    for last in (whole, end):
        assert (last["done"], last["done_reason"]) == (True, "length")
        assert last["total_duration"] >= last["prompt_eval_duration"] > 0 < last["eval_duration"]
    assert text_of(end) == ""
    assert {line["model"] for line in (*parts, end)} == {"scripted"}


def head_of(**fields: Any) -> AnswerHead:
    return AnswerHead(**{"request_id": "1", "created": 0, "model": "m", "text": None, **fields})


def test_durations_and_counts_are_those_of_the_call() -> None:
    times = AnswerTimes(total_s=2.5, first_s=0.5, prompt_s=0.5, decode_s=1.75)
    usage = Usage(prompt={0: 7}, generated={0: 3})
    head = head_of(usage=usage, created=1_700_000_000, times=lambda: times)
    end = json.loads(LineEncoder(head, chat_shape, None).closing())
    assert end == {
        "model": "m",
        "created_at": "2023-11-14T22:13:20+00:00",
        "message": {"role": "assistant", "content": ""},
        "done": True,
        "done_reason": None,
        "total_duration": 2_500_000_000,
        "load_duration": 0,
        "prompt_eval_count": 7,
        "prompt_eval_duration": 500_000_000,
        "eval_count": 3,
        "eval_duration": 1_750_000_000,
    }


def test_each_line_has_its_own_time() -> None:
    times = iter((1_700_000_000.25, 1_700_000_001.5))
    encoder = LineEncoder(head_of(now=lambda: next(times)), chat_shape, None)
    told = [json.loads(line)["created_at"] for line in (encoder.silence(), encoder.closing())]
    assert told == ["2023-11-14T22:13:20.250000+00:00", "2023-11-14T22:13:21.500000+00:00"]


def test_a_silence_is_a_line_that_adds_nothing() -> None:
    line = json.loads(LineEncoder(head_of(), chat_shape, None).silence())
    assert (line["message"]["content"], line["done"]) == ("", False)


def test_log_probabilities_go_with_their_lines(scripted: RunningServer) -> None:
    whole = ask(scripted, stream=False, logprobs=True, top_logprobs=2).json()["logprobs"]
    lines = lines_of(ask(scripted, logprobs=True, top_logprobs=2))
    assert [each for line in lines for each in line.get("logprobs", ())] == whole
    assert len(whole) == 4
    assert [len(each["top_logprobs"]) for each in whole] == [2] * 4


def test_a_conversation_with_calls_has_chats_prompt(loaded: LoadedModel) -> None:
    """Results follow their calls by name; chat's ids are those that the calls get here."""
    call = {"function": {"name": "now", "arguments": {"zone": "UTC"}}}
    other = {"function": {"name": "then", "arguments": {}}}
    asked = OllamaChatRequest.read(
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": "When?"},
                    {"role": "assistant", "tool_calls": [other, call], "thinking": "Hm."},
                    {"role": "tool", "tool_name": "now", "content": "noon"},
                    {"role": "tool", "content": "dawn"},
                ],
                "tools": [NOW],
            }
        ).encode()
    )
    calls = [{"id": f"{n:09d}", "type": "function", **each} for n, each in enumerate((other, call))]
    for each in calls:
        function = each["function"]
        each["function"] = {**function, "arguments": json.dumps(function["arguments"])}
    chat = ChatRequest.read(
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": "When?"},
                    {"role": "assistant", "tool_calls": calls, "reasoning_content": "Hm."},
                    {"role": "tool", "name": "now", "content": "noon", "tool_call_id": "000000001"},
                    {"role": "tool", "content": "dawn", "tool_call_id": "000000000"},
                ],
                "tools": [NOW],
            }
        ).encode()
    )
    assert [*asked.messages] == [*chat.messages]
    prompts = [
        each.prepare(loaded.text, OWN_TERMS)[0].request.prompt_token_ids for each in (asked, chat)
    ]
    assert prompts[0] == prompts[1]


def test_options_have_their_meaning(server: RunningServer, engine: ScriptedEngine) -> None:
    given = {
        "temperature": 0.25,
        "top_k": 7,
        "top_p": 0.5,
        "min_p": 0.125,
        "seed": 11,
        "num_predict": 3,
        "stop": ["\n", "user:"],
        "repeat_penalty": 1.5,
        "repeat_last_n": -1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "num_ctx": 1024,
        "numa": False,
        "an_option_of_tomorrow": 1,
    }
    answer = ask(server, options=given)
    assert answer.status_code == 200
    assert answer.headers["x-cadenza-ignored"] == "options.an_option_of_tomorrow"
    params = engine.submitted[-1].params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.25, 7, 0.5, 0.125)
    assert (params.seed, params.max_tokens) == (11, 3)
    assert params.stop == ("\n", "user:")
    assert params.repetition_penalty == 1.5
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, -0.5)


def test_an_answer_ends_at_num_ctx_unless_the_prompt_is_longer(
    server: RunningServer, engine: ScriptedEngine
) -> None:
    def bound(**options: int) -> int | None:
        assert ask(server, GENERATE, raw=True, options=options).status_code == 200
        return engine.submitted[-1].params.max_tokens

    assert bound(num_ctx=-1) == bound()
    num_tokens = len(engine.submitted[-1].prompt_token_ids)
    assert bound(num_ctx=num_tokens + 5) == 5
    assert bound(num_ctx=num_tokens + 5, num_predict=3) == 3
    assert bound(num_ctx=num_tokens) == bound()
    assert bound(num_ctx=1 << 20) == bound(), "the context ends it sooner"


def test_numbers_that_ask_for_nothing_are_no_numbers(
    server: RunningServer, engine: ScriptedEngine
) -> None:
    none = {"num_predict": -1, "seed": -1, "repeat_penalty": 1.5, "repeat_last_n": 0}
    assert ask(server, options=none, stream=False).json()["eval_count"] > 100
    params = engine.submitted[-1].params
    assert (params.max_tokens, params.seed, params.repetition_penalty) == (None, None, 1.0)


def test_a_prompt_is_a_users_message_unless_it_is_raw(
    server: RunningServer, engine: ScriptedEngine, text: TextFrontend
) -> None:
    ask(server, GENERATE, system="one")
    rendered = "<|system|>one<|end|><|user|>the fox<|end|><|assistant|>"
    assert text.decode(engine.submitted[-1].prompt_token_ids) == rendered
    ask(server, GENERATE, raw=True)
    assert text.decode(engine.submitted[-1].prompt_token_ids) == "the fox"


@pytest.mark.parametrize(("path", "empty"), [(CHAT, {"messages": []}), (GENERATE, {"prompt": ""})])
def test_without_a_prompt_the_model_is_loaded(
    server: RunningServer, engine: ScriptedEngine, path: str, empty: dict[str, Any]
) -> None:
    answer = server.post(path, {"model": "scripted", "keep_alive": 0, **empty})
    assert answer.headers["content-type"] == "application/json"
    assert (answer.json()["done"], answer.json()["done_reason"]) == (True, "load")
    assert not engine.submitted


def test_embeddings_are_those_of_the_other_endpoint(scripted: RunningServer) -> None:
    texts = ["the fox", "one two"]
    answer = scripted.post("/v1/embeddings", {"input": texts, "dimensions": 3}).json()
    vectors = [each["embedding"] for each in answer["data"]]
    found = scripted.post("/api/embed", {"input": texts, "dimensions": 3}).json()
    assert found["embeddings"] == vectors
    assert found["prompt_eval_count"] == answer["usage"]["prompt_tokens"]
    alone = scripted.post("/v1/embeddings", {"input": "the fox"}).json()["data"][0]["embedding"]
    assert scripted.post("/api/embed", {"input": "the fox"}).json()["embeddings"] == [alone]
    older = scripted.post("/api/embeddings", {"prompt": "the fox"}).json()
    assert older == {"embedding": alone}
    assert scripted.post("/api/embed", {"input": []}).json()["embeddings"] == []
    assert scripted.post("/api/embeddings", {}).json() == {"embedding": []}
    assert refused(scripted.post("/api/embed", {"input": ["a", ""]}))[0] == 400


def test_models_are_listed_by_names_that_work(serve: Serve) -> None:
    names = ("tiny", "owner/model", "small:4b")
    server = serve(names=names)
    listed = server.get("/api/tags").json()["models"]
    assert [each["model"] for each in listed] == ["tiny:latest", "owner/model:latest", "small:4b"]
    assert listed == [
        {key: each[key] for key in listed[0]} for each in server.get("/api/ps").json()["models"]
    ]
    for each in listed:
        shown = server.post("/api/show", {"name": each["name"]}).json()
        assert shown["details"] == each["details"]
        family = shown["model_info"]["general.architecture"]
        assert shown["model_info"][f"{family}.context_length"] == 256
        answer = ask(server, stream=False, model=each["model"])
        assert answer.json()["model"] == each["model"]
    assert refused(server.post("/api/show", {"model": "small"}))[0] == 404
    assert refused(ask(server, model="llama3.2:1b"))[0] == 404


def test_tags_are_added_to_names_without_one() -> None:
    assert tagged("a") == "a:latest"
    assert tagged("host:5000/a") == "host:5000/a:latest"
    assert tagged("owner/a:Q4_K_M") == "owner/a:Q4_K_M"


def test_a_models_facts_are_told(bundled: RunningServer) -> None:
    shown = bundled.post("/api/show", {"model": "scripted"}).json()
    assert shown["capabilities"] == ["completion", "tools"]
    assert shown["model_info"]["general.parameter_count"] == 3_410_688
    assert shown["details"]["parameter_size"] == "3.411M"
    assert "tools" in shown["template"]
    props = bundled.get("/props").json()
    assert props["chat_template"] == shown["template"]
    assert props["total_slots"] == 8
    assert props["modalities"] == {"vision": False, "audio": False}
    assert props["default_generation_settings"]["n_ctx"] == 2048
    assert "vision" not in shown["capabilities"]
    version = bundled.get("/api/version").json()["version"]
    assert [int(part) for part in version.split(".")] >= [0, 6, 4]


def test_a_model_that_sees_tells_so(engine: ScriptedEngine) -> None:
    """To Ollama's clients, and to llama.cpp's, which send images only to one that does."""
    text = TextFrontend(open_checkpoint(Path("bundled-vision")))
    with running_server(engine, text) as server:
        assert server.get("/props").json()["modalities"] == {"vision": True, "audio": False}
        shown = server.post("/api/show", {"model": "scripted"}).json()
        assert "vision" in shown["capabilities"]


def test_a_model_that_still_loads_is_listed_and_not_loaded(
    server: RunningServer, engine: ScriptedEngine
) -> None:
    engine.state = "loading"
    assert server.get("/api/ps").json() == {"models": []}
    assert len(server.get("/api/tags").json()["models"]) == 1
    assert refused(ask(server))[0] == 503


@pytest.mark.parametrize(
    ("method", "path", "words"),
    [
        ("POST", "/api/pull", "cadenza serve MODEL"),
        ("POST", "/api/create", "cadenza serve MODEL"),
        ("POST", "/api/blobs/sha256:00", "cadenza serve MODEL"),
        ("POST", "/api/copy", "--served-model-name"),
        ("DELETE", "/api/delete", "remove the model's files"),
        ("POST", "/api/push", "publishing a model"),
    ],
)
def test_changing_the_models_is_refused_with_what_to_do(
    scripted: RunningServer, method: str, path: str, words: str
) -> None:
    with scripted.client() as client:
        status, message = refused(client.request(method, path, json={"model": "llama3.2"}))
    assert status == 400
    assert path.split("/")[2] in message
    assert words in message


def test_a_model_that_is_served_is_pulled_already(scripted: RunningServer) -> None:
    assert scripted.post("/api/pull", {"model": "scripted:latest"}).json() == {"status": "success"}


UNLABELLED = {
    "none": [],
    "empty": ["content-type: "],
    "text": ["content-type: text/plain; charset=utf-8"],
    "form": ["Content-Type: application/x-www-form-urlencoded"],
}
"""What clients say that set no type: LiteLLM and Go's http.Client nothing, fetch in JavaScript that
it is text, curl that it is a form."""


@pytest.mark.parametrize("headers", UNLABELLED.values(), ids=[*UNLABELLED])
def test_a_body_without_a_type_of_its_own_is_read_unless_a_page_sent_it(
    scripted: RunningServer, headers: list[str]
) -> None:
    """A browser would send such a body to any server, but names the page."""
    assert status_of(scripted, CHAT, headers) == 200
    for origins in (["http://evil.example"], ["null"], ["http://a", "http://b"]):
        sent = [*headers, *(f"origin: {origin}" for origin in origins)]
        assert status_of(scripted, CHAT, sent) == 415
    assert status_of(scripted, "/v1/chat/completions", headers) == 415
    assert status_of(scripted, "/v1/messages", headers) == 415


@pytest.mark.parametrize(
    "headers",
    [
        ["content-type: application/xml"],
        ["content-type: multipart/form-data; boundary=x"],
        ["content-type: t\xe9xt/plain"],
        ["content-type: text/plain", "content-type: text/plain"],
        ["content-type: application/json", "content-type: application/json"],
    ],
)
def test_a_body_of_another_type_is_refused(scripted: RunningServer, headers: list[str]) -> None:
    assert status_of(scripted, CHAT, headers) == 415


def status_of(server: RunningServer, path: str, headers: list[str]) -> int:
    """Of a body sent with these headers and no others that name its type."""
    body = json.dumps({"messages": MESSAGES, "stream": False, "max_tokens": 1}).encode()
    head = [f"POST {path} HTTP/1.1", "host: localhost", f"content-length: {len(body)}", *headers]
    lines = "\r\n".join([*head, "connection: close", "", ""])
    return int(server.raw(lines.encode("latin-1") + body).split()[1])


def test_ollamas_own_client_works(bundled: RunningServer) -> None:
    ollama = pytest.importorskip("ollama")
    greedy = {"num_predict": 4, "temperature": 0}
    with ollama.Client(bundled.url, trust_env=False) as client:
        (model,) = client.list().models
        told = client.chat(model.model, MESSAGES, options=greedy)
        parts = client.chat(model.model, MESSAGES, stream=True, options=greedy)
        assert "".join(part.message.content for part in parts) == told.message.content
        assert told.eval_count == 4
        with pytest.raises(ollama.ResponseError) as error:
            client.chat("llama3.2:1b", MESSAGES)
        assert error.value.status_code == 404
