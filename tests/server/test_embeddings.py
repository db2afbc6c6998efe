"""/v1/embeddings: all forms of inputs and answers, errors, and calls that end early."""

import json
import struct
import threading
from base64 import b64decode
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tokenizers import Tokenizer, processors

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.request import PoolingParams
from cadenza.server.errors import ApiError
from cadenza.server.pooling.embeddings import EmbeddingRequest
from tests.cli.harness import write_model
from tests.server.harness import TIMEOUT_S, RunningServer, running_server
from tests.server.scripted_engine import HIDDEN_SIZE, ScriptedEngine
from tests.server.test_metrics_and_log import read_metrics
from tests.server.test_streams import wait_until

PATH = "/v1/embeddings"
TEXTS = ["one two", "the lazy dog", "three"]


def ask(server: RunningServer, given: Any, **fields: Any) -> httpx.Response:
    return server.post(PATH, {"input": given, **fields})


def vectors(answer: httpx.Response) -> list[Any]:
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [(each["object"], each["index"]) for each in data] == [
        ("embedding", index) for index in range(len(data))
    ]
    return [each["embedding"] for each in data]


def error(answer: httpx.Response) -> tuple[int, str, str | None]:
    found = answer.json()["error"]
    return answer.status_code, found["code"], found["param"]


def test_an_answer_has_the_fields_of_its_kind(scripted: RunningServer, text: TextFrontend) -> None:
    answer = ask(scripted, "the fox", model="scripted", user="me")
    ids = text.encode("the fox")
    body = answer.json()
    assert body["object"] == "list"
    assert body["model"] == "scripted"
    assert body["id"] == f"embd-{answer.headers['x-request-id']}"
    assert body["usage"] == {"prompt_tokens": len(ids), "total_tokens": len(ids)}
    assert vectors(answer) == [[len(ids), ids[0], ids[-1], 0.0]]


@pytest.mark.parametrize("is_ids", [False, True])
def test_inputs_may_be_texts_or_token_ids(
    scripted: RunningServer, text: TextFrontend, is_ids: bool
) -> None:
    ids = [list(text.encode(each)) for each in TEXTS]
    given: list[Any] = ids if is_ids else TEXTS
    answer = ask(scripted, given)
    assert vectors(answer) == [[len(each), each[0], each[-1], 0.0] for each in ids]
    assert answer.json()["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert vectors(ask(scripted, given[1])) == vectors(answer)[1:2]


def test_base64_is_float32_in_little_endian(scripted: RunningServer) -> None:
    numbers = vectors(ask(scripted, TEXTS))
    encoded = vectors(ask(scripted, TEXTS, encoding_format="base64"))
    assert [list(struct.unpack("<4f", b64decode(each))) for each in encoded] == numbers


def test_fields_reach_the_engine(server: RunningServer, engine: ScriptedEngine) -> None:
    answer = ask(
        server,
        [5, 6, 7, 8],
        dimensions=2,
        pooling="mean",
        truncate_prompt_tokens=3,
        cache_salt="own",
    )
    assert vectors(answer) == [[3.0, 6.0]]
    (request,) = engine.submitted
    assert request.pooling == PoolingParams(pooling="mean", dimensions=2)
    assert request.prompt_token_ids == (6, 7, 8)
    assert request.cache_salt not in ("", "own")
    assert request.params.max_tokens == 0


def test_special_tokens_can_be_left_out(script: tuple[int, ...], tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id("<|end|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|end|>", special_tokens=[("<|end|>", end)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    with running_server(ScriptedEngine(script), TextFrontend(open_checkpoint(folder))) as server:
        (found,) = vectors(ask(server, "the fox"))
        (without,) = vectors(ask(server, "the fox", add_special_tokens=False))
    assert found[2] == end
    assert without[:2] == [found[0] - 1, found[1]]


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"input": [331]}, "invalid_value", "input"),
        ({"input": [5] * 257}, "context_length_exceeded", "input"),
        ({"input": "fox " * 257}, "context_length_exceeded", "input"),
        ({"dimensions": HIDDEN_SIZE + 1}, "invalid_value", "dimensions"),
    ],
)
def test_what_this_engine_cannot_take_is_named(
    scripted: RunningServer, fields: dict[str, Any], code: str, param: str
) -> None:
    assert error(scripted.post(PATH, {"input": "x", **fields})) == (400, code, param)


def test_a_prompt_may_fill_the_context(scripted: RunningServer) -> None:
    assert vectors(ask(scripted, [5] * 256)) == [[256.0, 5.0, 5.0, 0.0]]
    assert vectors(ask(scripted, [5] * 300, truncate_prompt_tokens=256))[0][0] == 256.0


def test_an_engine_without_hidden_states_is_named(
    script: tuple[int, ...], text: TextFrontend
) -> None:
    with running_server(ScriptedEngine(script, hidden_size=None), text) as server:
        answer = ask(server, "x")
    assert error(answer) == (400, "invalid_value", "pooling")
    assert "scripted backend" in answer.json()["error"]["message"]


def test_a_checkpoint_of_another_pooling_needs_one_to_be_named(
    script: tuple[int, ...], tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "cls"}))
    with running_server(ScriptedEngine(script), TextFrontend(open_checkpoint(folder))) as server:
        assert error(ask(server, "x")) == (400, "invalid_value", "pooling")
        assert vectors(ask(server, "x", pooling="mean"))[0][3] == 1.0


@pytest.mark.parametrize(
    ("fields", "num_inputs", "advice"),
    [
        ({}, 745, "use encoding_format base64, dimensions or fewer inputs"),
        ({"dimensions": 4096}, 745, "use encoding_format base64, dimensions or fewer inputs"),
        ({"encoding_format": "base64", "dimensions": 9000}, 1399, "use dimensions or fewer inputs"),
    ],
)
def test_an_answer_has_at_most_64_mib(fields: dict[str, Any], num_inputs: int, advice: str) -> None:
    hidden_size = 4096 if "encoding_format" not in fields else 9000
    largest = EmbeddingRequest({"input": ((5,),) * (num_inputs - 1), **fields})
    largest.check_size(hidden_size)
    larger = EmbeddingRequest({"input": ((5,),) * num_inputs, **fields})
    with pytest.raises(ApiError, match=advice) as refused:
        larger.check_size(hidden_size)
    assert (refused.value.status, refused.value.param) == (400, "input")
    larger.check_size(None)  # which the engine refuses


def test_an_answer_that_is_too_large_is_refused_before_the_work(
    script: tuple[int, ...], text: TextFrontend
) -> None:
    engine = ScriptedEngine(script, hidden_size=1 << 20)
    with running_server(engine, text) as server:
        assert error(ask(server, TEXTS)) == (400, "invalid_value", "input")
        assert not engine.submitted
        assert vectors(ask(server, TEXTS, dimensions=2))[0][0] > 0


def test_more_inputs_than_the_queue_holds_come_in_their_order(scripted: RunningServer) -> None:
    inputs = [[5 + at % 200] * (1 + at % 7) for at in range(100)]
    assert vectors(ask(scripted, inputs)) == [[len(e), e[0], e[0], 0.0] for e in inputs]


def test_the_tokens_of_all_inputs_are_counted(server: RunningServer, lines: list[dict]) -> None:
    usage = ask(server, TEXTS, user="me").json()["usage"]
    wait_until(lambda: lines)
    assert (lines[0]["user"], lines[0]["prompt_tokens"]) == ("me", usage["total_tokens"])
    label = '{model_name="scripted"}'
    metrics = read_metrics(server)
    assert metrics[f"vllm:prompt_tokens_total{label}"] == usage["prompt_tokens"]
    assert metrics[f"vllm:time_to_first_token_seconds_count{label}"] == 0
    assert metrics['vllm:request_success_total{finished_reason="stop",model_name="scripted"}'] == 3


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_models_embeddings_have_the_same_bits_alone_and_beside_others(
    bundled: RunningServer, pooling: str
) -> None:
    texts = [*TEXTS, "Once upon a time there was a fox. " * 20]
    fields = {"pooling": pooling, "encoding_format": "base64"}
    alone = [vectors(ask(bundled, each, **fields))[0] for each in texts]
    story = {"prompt": texts, "max_tokens": 60, "ignore_eos": True}
    beside = threading.Thread(target=lambda: bundled.post("/v1/completions", story))
    beside.start()
    together = vectors(ask(bundled, texts * 4, **fields))
    beside.join(TIMEOUT_S)
    assert together == alone * 4
    assert len(set(alone)) == len(texts)


def test_the_official_client_reads_them(bundled: RunningServer) -> None:
    """It asks for base64 where nothing is said."""
    client = openai.OpenAI(base_url=f"{bundled.url}/v1", api_key="none", max_retries=0)
    with client:
        model = client.models.list().data[0].id
        found = client.embeddings.create(model=model, input=TEXTS)
        floats = client.embeddings.create(model=model, input=TEXTS, encoding_format="float")
        cut = client.embeddings.create(model=model, input=TEXTS[0], dimensions=8)
    assert [each.embedding for each in found.data] == [each.embedding for each in floats.data]
    assert sum(x * x for x in found.data[0].embedding) == pytest.approx(1.0, rel=1e-5)
    assert len(cut.data[0].embedding) == 8
    assert found.usage.total_tokens == found.usage.prompt_tokens
