"""Prompts that are pruned by a draft model: what answers, headers, the log and the metrics say, in
every API; and on the bundled model, their fingerprints and receipts."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.config import EngineConfig
from cadenza.frontend.loaded_model import LoadedModel, load_model
from cadenza.frontend.sparse_prompts import SparsePrompts
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.sparse_prefill import SpecPrefillConfig
from cadenza.verification.replay import read_receipts, replay_receipts
from cadenza_bench.spec_prefill.tasks import TaskPrompt, make_prompt
from tests.server.bodies import PATHS
from tests.server.dialects import DIALECTS, body_of, events_of
from tests.server.harness import RunningServer, WatchedService, read_metrics, running_server
from tests.server.scripted_engine import CAPABILITIES, ScriptedEngine

WORDS = "one two three four five six seven eight nine ten " * 40
USER = {"role": "user", "content": WORDS}
CHAT = {"messages": [USER], "max_tokens": 2}
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
    for name in DIALECTS:
        answer = post(server, PATHS[name], body_of(name, [USER], 2))
        whole = answer.json()
        usage = whole.get("usage", whole)
        details = "input" if name in ("responses", "messages") else "prompt"
        found = usage.get(f"{details}_tokens_details", usage)
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


SPARSE = SpecPrefillConfig(keep=0.3, threshold=400)
GREEDY = {"max_tokens": 8, "temperature": 0.0}


@pytest.fixture(scope="module")
def pruning() -> Iterator[LoadedModel]:
    loaded = load_model(
        None, EngineConfig(max_num_seqs=4, max_num_batched_tokens=64, spec_prefill=SPARSE)
    )
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def pruning_server(pruning: LoadedModel) -> Iterator[RunningServer]:
    watched = WatchedService(pruning.core, pruning.fingerprint)
    with running_server(watched, pruning.text) as running:
        yield running


@pytest.fixture(scope="module")
def task(pruning: LoadedModel) -> TaskPrompt:
    return make_prompt("needle", 700, 0.4, 3, pruning.text.encode)


def answer(pruning_server: RunningServer, task: TaskPrompt, **changes: Any) -> Any:
    body = {**GREEDY, "prompt": list(task.token_ids), **changes}
    found = pruning_server.post("/v1/completions", body)
    assert found.status_code == 200, found.text
    return found


def details(found: Any) -> dict[str, Any]:
    return found.json()["usage"]["prompt_tokens_details"]


def test_a_long_prompt_is_thinned_out_and_its_answer_is_found(
    pruning_server: RunningServer, task: TaskPrompt
):
    found = answer(pruning_server, task)
    kept, skipped = details(found)["kept_tokens"], details(found)["skipped_tokens"]
    assert kept + skipped == len(task.token_ids)
    assert 0.25 < kept / len(task.token_ids) < 0.45
    assert found.headers[HEADER] == f"kept={kept}; of={kept + skipped}"
    assert task.is_right(found.json()["choices"][0]["text"])
    again = answer(pruning_server, task)
    assert again.json()["choices"] == found.json()["choices"]
    assert details(again)["cached_tokens"] > 0


def test_all_of_it_kept_is_the_whole_prompts_answer_and_never_its_fingerprint(
    pruning_server: RunningServer, task: TaskPrompt
):
    asked = {"logprobs": 3, "max_tokens": 12}
    whole = answer(pruning_server, task, spec_prefill=False, **asked)
    kept = answer(pruning_server, task, spec_prefill={"keep": 1.0}, **asked)
    assert whole.json()["choices"] == kept.json()["choices"]
    assert details(kept)["skipped_tokens"] == 0
    assert whole.json()["system_fingerprint"] != kept.json()["system_fingerprint"]
    assert details(whole)["whole_because"] == "declined"


def test_a_short_prompt_is_computed_whole(pruning_server: RunningServer, task: TaskPrompt):
    found = pruning_server.post("/v1/completions", {**GREEDY, "prompt": list(task.token_ids[:300])})
    assert details(found)["whole_because"] == "short"
    assert found.headers[HEADER] == "kept=300; of=300; reason=short"


def test_openais_client_streams_a_thinned_answer(pruning_server: RunningServer, task: TaskPrompt):
    with openai.OpenAI(
        base_url=f"{pruning_server.url}/v1", api_key="none", max_retries=0
    ) as client:
        stream = client.completions.create(
            model="scripted",
            prompt=[*task.token_ids],
            max_tokens=8,
            temperature=0.0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [*stream]
    text = "".join(each.choices[0].text for each in chunks if each.choices)
    assert text == answer(pruning_server, task).json()["choices"][0]["text"]
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.model_dump()["skipped_tokens"] > 300


@pytest.mark.parametrize(
    ("name", "num_unknown"), [("completions", 0), ("chat", 1), ("responses", 2)]
)
def test_an_answer_has_the_fingerprint_of_what_was_computed_and_a_streams_beginning_none(
    pruning_server: RunningServer, name: str, num_unknown: int
):
    """Whether a prompt is thinned out is known when the engine starts the request."""
    words = f"{name} is a name. " + "The fox and the dog are fine. " * 120
    always = body_of(name, [{"role": "user", "content": words}])
    cold = {**always, "spec_prefill": {"when": "cold"}}

    def fingerprint(body: dict[str, Any]) -> str:
        return pruning_server.post(PATHS[name], body).json()["system_fingerprint"]

    thinned_cold, thinned = fingerprint(cold), fingerprint(always)
    whole = fingerprint({**always, "spec_prefill": False})
    assert len({thinned_cold, thinned, whole}) == 3
    assert fingerprint(cold) == whole, "it is cached now"
    for body, expected in ((cold, whole), (always, thinned)):
        sent = pruning_server.post(PATHS[name], {**body, "stream": True}).content
        events = [each.get("response", each) for each in events_of(sent)]
        found = [each["system_fingerprint"] for each in events if "system_fingerprint" in each]
        assert found[:num_unknown] == [None] * num_unknown
        assert set(found[num_unknown:]) == {expected}


def test_of_several_prompts_the_fingerprint_is_that_of_thinned_ones(
    pruning_server: RunningServer, task: TaskPrompt
):
    thinned = answer(pruning_server, task).json()["system_fingerprint"]
    both = answer(pruning_server, task, prompt=[[5, 6, 7], list(task.token_ids)]).json()
    assert both["system_fingerprint"] == thinned
    short = answer(pruning_server, task, prompt=[[5, 6, 7], [8, 9]]).json()
    assert short["system_fingerprint"] != thinned


def test_a_thinned_answer_is_replayed_from_its_receipt(
    pruning_server: RunningServer, task: TaskPrompt, tmp_path: Path
):
    """By this pruning_server, and by an engine without a draft model."""
    receipt = answer(pruning_server, task, receipt=True).json()["choices"][0]["receipt"]
    assert receipt["fingerprint"]["sparse_prefill"]
    again = pruning_server.post("/v1/receipts/replay", {"receipt": receipt})
    assert again.json()["equal"] is True
    changed = pruning_server.post("/v1/receipts/replay", {"receipt": {**receipt, "kept": "//8="}})
    assert changed.status_code == 400
    file = tmp_path / "receipts.jsonl"
    file.write_text(json.dumps(receipt))
    assert [each.differences for each in replay_receipts(None, read_receipts(file))] == [()]
