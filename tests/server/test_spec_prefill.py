"""What answers, headers, the log and the metrics say about thinned prompts, in every API."""

import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.frontend.sparse_prompts import SparsePrompts
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.sparse_prefill import SpecPrefillConfig
from tests.server.harness import RunningServer, read_metrics, running_server
from tests.server.scripted_engine import CAPABILITIES, ScriptedEngine

WORDS = "one two three four five six seven eight nine ten " * 40
CHAT = {"model": "scripted", "messages": [{"role": "user", "content": WORDS}], "max_tokens": 2}
HEADER = "x-cadenza-spec-prefill"


@pytest.fixture(scope="module")
def face() -> TextFrontend:
    text = TextFrontend(open_checkpoint(None))
    text.sparse = SparsePrompts(config=SpecPrefillConfig(keep=0.25, threshold=100))
    return text


@pytest.fixture
def engine(face: TextFrontend) -> ScriptedEngine:
    return ScriptedEngine(
        face.encode("the fox"),
        vocab_size=100_000,
        max_model_len=2048,
        capabilities=CAPABILITIES | {"sparse_prompts"},
    )


@pytest.fixture
def server(engine: ScriptedEngine, face: TextFrontend) -> Iterator[RunningServer]:
    with running_server(engine, face) as running:
        yield running


def post(server: RunningServer, path: str, body: Any) -> httpx.Response:
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


def told(found: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(found.get(key) for key in ("kept_tokens", "skipped_tokens", "whole_because"))


def test_every_api_says_how_much_of_the_prompt_was_computed(
    server: RunningServer, engine: ScriptedEngine
):
    plain = {"model": "scripted", "prompt": WORDS, "max_tokens": 2}
    own = {"model": "scripted", "input": WORDS, "max_output_tokens": 2}
    ollama = {"model": "scripted", "prompt": WORDS, "stream": False}
    calls: list[tuple[str, Any, tuple[str, ...]]] = [
        ("/v1/chat/completions", CHAT, ("usage", "prompt_tokens_details")),
        ("/v1/completions", plain, ("usage", "prompt_tokens_details")),
        ("/v1/responses", own, ("usage", "input_tokens_details")),
        ("/v1/messages", CHAT, ("usage", "input_tokens_details")),
        ("/api/generate", {**ollama, "options": {"num_predict": 2}}, ()),
    ]
    for path, body, place in calls:
        answer = post(server, path, body)
        found = answer.json()
        for key in place:
            found = found[key]
        kept, skipped, because = told(found)
        request = engine.submitted[-1]
        assert request.sparse_prefill is not None
        assert kept + skipped == len(request.prompt_token_ids)
        assert 0 < kept == request.sparse_prefill.num_kept_tokens(kept + skipped) < kept + skipped
        assert because is None
        assert answer.headers[HEADER] == f"kept={kept}; of={kept + skipped}"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"spec_prefill": False}, "declined"),
        ({"spec_prefill": {"threshold": 2000}}, "short"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"repetition_penalty": 1.5}, "repetition_penalty"),
    ],
)
def test_a_whole_prompt_has_a_reason(
    server: RunningServer, engine: ScriptedEngine, changes: Any, reason: str
):
    answer = post(server, "/v1/chat/completions", {**CHAT, **changes})
    usage = answer.json()["usage"]
    num_tokens = usage["prompt_tokens"]
    assert told(usage["prompt_tokens_details"]) == (num_tokens, 0, reason)
    assert answer.headers[HEADER] == f"kept={num_tokens}; of={num_tokens}; reason={reason}"
    assert engine.submitted[-1].sparse_prefill is None


def test_what_the_engine_did_otherwise_is_told(server: RunningServer, engine: ScriptedEngine):
    engine.whole_because = "scoring_failed"
    answer = post(server, "/v1/chat/completions", CHAT)
    usage = answer.json()["usage"]
    assert told(usage["prompt_tokens_details"]) == (usage["prompt_tokens"], 0, "scoring_failed")
    assert answer.headers[HEADER].endswith("; reason=scoring_failed")


def test_a_server_without_it_says_nothing_unless_it_is_asked_for(scripted: RunningServer):
    body = {"model": "scripted", "prompt": "one two", "max_tokens": 2}
    silent = post(scripted, "/v1/completions", body)
    assert HEADER not in silent.headers
    assert told(silent.json()["usage"]["prompt_tokens_details"]) == (None, None, None)
    asked = post(scripted, "/v1/completions", {**body, "spec_prefill": True})
    assert asked.headers[HEADER].endswith("; reason=off")


def test_openais_client_reads_it_from_a_streams_last_chunk(
    server: RunningServer, engine: ScriptedEngine
):
    engine.whole_because = None
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        raw = client.chat.completions.with_raw_response.create(
            model="scripted",
            messages=[{"role": "user", "content": WORDS}],
            max_tokens=2,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"spec_prefill": {"keep": 0.5}},
        )
        last = [*raw.parse()][-1]
    assert last.usage is not None
    details = last.usage.prompt_tokens_details
    assert details is not None
    kept, skipped, because = told(details.model_dump())
    assert because is None
    assert kept + skipped == last.usage.prompt_tokens
    assert 0.4 < kept / last.usage.prompt_tokens < 0.7
    assert raw.headers[HEADER] == f"kept={kept}; of={kept + skipped}"


def test_metrics_count_outcomes_and_tokens_and_the_log_has_them(
    server: RunningServer, caplog: pytest.LogCaptureFixture
):
    before = read_metrics(server)
    with caplog.at_level(logging.INFO, logger="cadenza.requests"):
        thin = post(server, "/v1/chat/completions", CHAT).json()["usage"]["prompt_tokens_details"]
        post(server, "/v1/chat/completions", {**CHAT, "spec_prefill": False})
        after = read_metrics(server)

    def grown(name: str, labels: str = "") -> float:
        key = f'cadenza:spec_prefill_{name}_total{{model_name="scripted"{labels}}}'
        return after[key] - before[key]

    assert grown("kept_tokens") == thin["kept_tokens"]
    assert grown("skipped_tokens") == thin["skipped_tokens"]
    labels = [f',outcome="{each}"' for each in ("thinned", "declined", "short")]
    assert [grown("prompts", each) for each in labels] == [1, 1, 0]
    lines = [vars(record)["request"] for record in caplog.records if record.message == "request"]
    assert [told(line) for line in lines] == [
        (thin["kept_tokens"], thin["skipped_tokens"], None),
        (lines[1]["prompt_tokens"], 0, "declined"),
    ]
    assert json.dumps(lines)
