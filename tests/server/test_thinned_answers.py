"""A server of the bundled model with its draft: prompts are thinned out, labelled, and replayed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from cadenza.config import EngineConfig
from cadenza.frontend.loaded_model import LoadedModel, load_model
from cadenza.sparse_prefill import SpecPrefillConfig
from cadenza.verification.replay import read_receipts, replay_receipts
from cadenza_bench.spec_prefill.tasks import TaskPrompt, make_prompt
from tests.server.harness import RunningServer, running_server
from tests.server.watched_service import WatchedService

HEADER = "x-cadenza-spec-prefill"
SPARSE = SpecPrefillConfig(keep=0.3, threshold=400)
COMPLETION = {"max_tokens": 8, "temperature": 0.0}


@pytest.fixture(scope="module")
def thinning() -> Iterator[LoadedModel]:
    loaded = load_model(
        None, EngineConfig(max_num_seqs=4, max_num_batched_tokens=64, spec_prefill=SPARSE)
    )
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def server(thinning: LoadedModel) -> Iterator[RunningServer]:
    watched = WatchedService(thinning.core, thinning.fingerprint)
    with running_server(watched, thinning.text) as running:
        yield running


@pytest.fixture(scope="module")
def task(thinning: LoadedModel) -> TaskPrompt:
    return make_prompt("needle", 700, 0.4, 3, thinning.text.encode)


def answer(server: RunningServer, task: TaskPrompt, **changes: Any) -> Any:
    body = {**COMPLETION, "prompt": list(task.token_ids), **changes}
    found = server.post("/v1/completions", body)
    assert found.status_code == 200, found.text
    return found


def details(found: Any) -> dict[str, Any]:
    return found.json()["usage"]["prompt_tokens_details"]


def test_a_long_prompt_is_thinned_out_and_its_answer_is_found(
    server: RunningServer, task: TaskPrompt
):
    found = answer(server, task)
    kept, skipped = details(found)["kept_tokens"], details(found)["skipped_tokens"]
    assert kept + skipped == len(task.token_ids)
    assert 0.25 < kept / len(task.token_ids) < 0.45
    assert found.headers[HEADER] == f"kept={kept}; of={kept + skipped}"
    assert task.is_right(found.json()["choices"][0]["text"])
    again = answer(server, task)
    assert again.json()["choices"] == found.json()["choices"]
    assert details(again)["cached_tokens"] > 0


def test_all_of_it_kept_is_the_whole_prompts_answer_and_never_its_fingerprint(
    server: RunningServer, task: TaskPrompt
):
    asked = {"logprobs": 3, "max_tokens": 12}
    whole = answer(server, task, spec_prefill=False, **asked)
    kept = answer(server, task, spec_prefill={"keep": 1.0}, **asked)
    assert whole.json()["choices"] == kept.json()["choices"]
    assert details(kept)["skipped_tokens"] == 0
    assert whole.json()["system_fingerprint"] != kept.json()["system_fingerprint"]
    assert details(whole)["whole_because"] == "declined"


def test_a_short_prompt_is_computed_whole(server: RunningServer, task: TaskPrompt):
    found = server.post("/v1/completions", {**COMPLETION, "prompt": list(task.token_ids[:300])})
    assert details(found)["whole_because"] == "short"
    assert found.headers[HEADER] == "kept=300; of=300; reason=short"


def test_openais_client_streams_a_thinned_answer(server: RunningServer, task: TaskPrompt):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
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
    assert text == answer(server, task).json()["choices"][0]["text"]
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.model_dump()["skipped_tokens"] > 300


def events_of(server: RunningServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    found = server.post(path, {**body, "stream": True})
    assert found.status_code == 200, found.text
    lines = [each.removeprefix("data: ") for each in found.text.splitlines()]
    return [json.loads(each) for each in lines if each.startswith("{")]


@pytest.mark.parametrize(
    ("path", "num_unknown"),
    [("/v1/completions", 0), ("/v1/chat/completions", 1), ("/v1/responses", 2)],
)
def test_an_answer_has_the_fingerprint_of_what_was_computed_and_a_streams_beginning_none(
    server: RunningServer, path: str, num_unknown: int
):
    """Whether a prompt is thinned out is known when the engine starts the request."""
    words = f"{path} is a path. " + "The fox and the dog are fine. " * 120
    given: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": words, "max_tokens": 6},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": words}], "max_tokens": 6},
        "/v1/responses": {"input": words, "max_output_tokens": 6},
    }
    always, cold = given[path], {**given[path], "spec_prefill": {"when": "cold"}}

    def fingerprint(body: dict[str, Any]) -> str:
        return server.post(path, body).json()["system_fingerprint"]

    thinned_cold, thinned = fingerprint(cold), fingerprint(always)
    whole = fingerprint({**always, "spec_prefill": False})
    assert len({thinned_cold, thinned, whole}) == 3
    assert fingerprint(cold) == whole, "it is cached now"
    for body, expected in ((cold, whole), (always, thinned)):
        events = [each.get("response", each) for each in events_of(server, path, body)]
        found = [each["system_fingerprint"] for each in events if "system_fingerprint" in each]
        assert found[:num_unknown] == [None] * num_unknown
        assert set(found[num_unknown:]) == {expected}


def test_of_several_prompts_the_fingerprint_is_that_of_thinned_ones(
    server: RunningServer, task: TaskPrompt
):
    thinned = answer(server, task).json()["system_fingerprint"]
    both = answer(server, task, prompt=[[5, 6, 7], list(task.token_ids)]).json()
    assert both["system_fingerprint"] == thinned
    short = answer(server, task, prompt=[[5, 6, 7], [8, 9]]).json()
    assert short["system_fingerprint"] != thinned


def test_a_thinned_answer_is_replayed_from_its_receipt(
    server: RunningServer, task: TaskPrompt, tmp_path: Path
):
    """By this server, and by an engine without a draft model."""
    receipt = answer(server, task, receipt=True).json()["choices"][0]["receipt"]
    assert receipt["fingerprint"]["sparse_prefill"]
    again = server.post("/v1/receipts/replay", {"receipt": receipt})
    assert again.json()["equal"] is True
    changed = server.post("/v1/receipts/replay", {"receipt": {**receipt, "kept": "//8="}})
    assert changed.status_code == 400
    file = tmp_path / "receipts.jsonl"
    file.write_text(json.dumps(receipt))
    assert [each.differences for each in replay_receipts(None, read_receipts(file))] == [()]
