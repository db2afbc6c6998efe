"""/v1/embeddings and /v1/rerank: forms of inputs and answers, scores that are the embeddings'
cosines, orders, refusals."""

import json
import math
import struct
import threading
from base64 import b64decode
from collections.abc import Iterator
from math import fsum
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from tokenizers import Tokenizer as NativeTokenizer
from tokenizers import models, pre_tokenizers, processors

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.config import EngineConfig
from cadenza.errors import TextTooLongError
from cadenza.frontend.loaded_model import LoadedModel, load_model
from cadenza.frontend.prepared_request import RequestOptions, ScoredPair
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.request import PoolingParams
from cadenza.server.errors import ApiError
from cadenza.server.pooling.embeddings import EmbeddingRequest
from cadenza.text import Tokenizer
from cadenza.text.tokens.tokenizer import TokenizerSource
from cadenza.weights.weights import open_weights
from tests.checkpoint.files import write_tensors
from tests.cli.harness import write_model
from tests.server.harness import (
    TIMEOUT_S,
    RunningServer,
    Serve,
    WatchedService,
    read_metrics,
    running_server,
    wait_until,
)
from tests.server.scripted_engine import HIDDEN_SIZE, ScriptedEngine

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
    tokenizer = NativeTokenizer.from_file(str(folder / "tokenizer.json"))
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


def test_an_engine_without_hidden_states_is_named(serve: Serve) -> None:
    server = serve(hidden_size=None)
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


def test_an_answer_that_is_too_large_is_refused_before_the_work(serve: Serve) -> None:
    server = serve(hidden_size=1 << 20)
    engine = server.engine
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


RERANK = "/v1/rerank"
QUERY = "the fox"
DOCUMENTS = ["one two three four", "the lazy dog", "the fox", "seven", "the fox"]


def rank(server: RunningServer, path: str = RERANK, **fields: Any) -> httpx.Response:
    return server.post(path, {"query": QUERY, "documents": DOCUMENTS, **fields})


def embedded(server: RunningServer, texts: list[str], **fields: Any) -> list[list[float]]:
    answer = server.post("/v1/embeddings", {"input": texts, **fields})
    assert answer.status_code == 200, answer.text
    return [each["embedding"] for each in answer.json()["data"]]


@pytest.mark.parametrize("fields", [{}, {"pooling": "mean"}, {"truncate_prompt_tokens": 2}])
def test_scores_are_the_cosines_of_the_embeddings_and_give_the_order(
    bundled: RunningServer, fields: dict[str, Any]
) -> None:
    query, *documents = embedded(bundled, [QUERY, *DOCUMENTS], **fields)
    cosines = [fsum(a * b for a, b in zip(query, each, strict=True)) for each in documents]
    body = rank(bundled, **fields).json()
    found = [(each["index"], each["relevance_score"]) for each in body["results"]]
    assert found == sorted(enumerate(cosines), key=lambda each: (-each[1], each[0]))
    assert [index for index, _ in found[:2]] == [2, 4], "equal texts keep their order"
    assert found[0][1] == pytest.approx(1.0, abs=1e-6)
    assert found[0][1] != found[-1][1]
    assert [each["document"]["text"] for each in body["results"]] == [
        DOCUMENTS[i] for i, _ in found
    ]


def test_a_score_does_not_depend_on_the_other_documents(bundled: RunningServer) -> None:
    together = {each["index"]: each for each in rank(bundled).json()["results"]}
    for index, text in enumerate(DOCUMENTS):
        (alone,) = rank(bundled, documents=[text]).json()["results"]
        assert alone["relevance_score"] == together[index]["relevance_score"]


@pytest.mark.parametrize("path", [RERANK, "/v2/rerank", "/rerank", "/v1/reranking"])
def test_it_is_at_the_paths_of_other_servers(
    scripted: RunningServer, text: TextFrontend, path: str
) -> None:
    answer = rank(scripted, path, top_n=2, return_documents=False, model="scripted")
    body = answer.json()
    assert body["id"] == f"rerank-{answer.headers['x-request-id']}"
    assert (body["object"], body["model"]) == ("list", "scripted")
    assert len(body["results"]) == 2
    assert body["results"][0].keys() == {"index", "relevance_score"}
    num_tokens = sum(len(text.encode(each)) for each in (QUERY, *DOCUMENTS))
    assert body["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def test_texts_may_stand_in_objects(scripted: RunningServer) -> None:
    long = rank(scripted, documents=["the fox " * 300])
    assert (long.status_code, long.json()["error"]["param"]) == (400, "documents")
    nested = [{"text": each} for each in DOCUMENTS]
    found = rank(scripted, query={"text": QUERY}, documents=nested, top_n=0).json()["results"]
    assert found == rank(scripted).json()["results"]


def test_a_rerank_without_hidden_states_names_the_engine(serve: Serve) -> None:
    server = serve(hidden_size=None)
    error = rank(server).json()["error"]
    assert "its backend gives no hidden states" in error["message"]


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, LoadedModel]]:
    """A server of a tiny model with a score head."""
    folder = write_model(tmp_path_factory.mktemp("scorer") / "tiny")
    with_scores(folder)
    config = EngineConfig(max_num_seqs=4, max_model_len=256, max_num_batched_tokens=64)
    loaded = load_model(folder, config)
    with running_server(WatchedService(loaded.core, loaded.fingerprint), loaded.text) as running:
        yield running, loaded
    loaded.close()


def with_scores(folder: Path) -> None:
    weights = open_weights(folder)
    hidden_size = weights.shape("model.embed_tokens.weight")[1]
    score = np.random.default_rng(5).normal(size=(1, hidden_size)).astype(np.float32)
    tensors = {name: np.array(weights[name]) for name in weights}
    write_tensors(folder / "model.safetensors", {**tensors, "score.weight": score})
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["LlamaForSequenceClassification"]
    (folder / "config.json").write_text(json.dumps(config))


def test_a_score_head_scores_query_and_document_together(
    scorer: tuple[RunningServer, LoadedModel],
) -> None:
    """The state of the pair's last token times the head. Its direction is the embedding's, and its
    length follows from the final norm, before whose weights a state has the length of its size."""
    server, loaded = scorer
    head, norm = loaded.checkpoint.score_head, loaded.checkpoint.weights["model.norm.weight"]
    assert head is not None
    scores = {each["index"]: each["relevance_score"] for each in rank(server).json()["results"]}
    assert list(scores) == sorted(scores, key=lambda index: (-scores[index], index))
    assert len({*scores.values()}) == 4, "equal documents have equal scores, others do not"
    assert scores[2] == scores[4]
    for index, text in enumerate(DOCUMENTS):
        ids = [*loaded.text.encode(QUERY), *loaded.text.encode(text)]
        (vector,) = embedded(server, [ids], pooling="last")
        logit = math.log(scores[index] / (1 - scores[index]))
        direction = fsum(w * x for w, x in zip(head.weights, vector, strict=True))
        unscaled = np.asarray(vector) / np.asarray(norm, np.float64)
        length = math.sqrt(len(vector)) / np.linalg.norm(unscaled)
        assert logit == pytest.approx(direction * length, rel=1e-2)
        (alone,) = rank(server, documents=[text]).json()["results"]
        assert alone["relevance_score"] == scores[index]


def test_a_model_that_scores_has_embeddings_and_does_not_generate(
    scorer: tuple[RunningServer, LoadedModel],
) -> None:
    server, _ = scorer
    assert len(embedded(server, [QUERY])) == 1
    error = server.post("/v1/completions", {"prompt": "x"}).json()["error"]
    assert "cannot generate" in error["message"]
    assert rank(server, pooling="mean").json()["error"]["param"] == "pooling"


def test_its_calls_are_counted_by_documents(scorer: tuple[RunningServer, LoadedModel]) -> None:
    server, _ = scorer
    before = read_metrics(server)
    assert rank(server).status_code == 200
    ended = 'vllm:request_success_total{finished_reason="%s",model_name="scripted"}'
    wait_until(
        lambda: read_metrics(server)[ended % "stop"] == before[ended % "stop"] + len(DOCUMENTS)
    )
    assert read_metrics(server)[ended % "error"] == before[ended % "error"]


def test_a_template_with_the_roles_writes_what_is_read(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny")
    with_scores(folder)
    template = (
        '{% for m in messages %}{% if m.role == "query" %}<|user|>{{ m.content }}{% endif %}'
        '{% if m.role == "document" %}<|assistant|>{{ m.content }}<|end|>{% endif %}{% endfor %}'
    )
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    text = TextFrontend(open_checkpoint(folder))
    pooling = PoolingParams(pooling="last", normalize=False)
    pair = ScoredPair(query="one", document="two <|end|>")
    prepared = text.prepare(pair, options=RequestOptions(pooling=pooling))
    shown = text.decode(prepared.request.prompt_token_ids)
    assert shown == "<|user|>one<|assistant|>two <|end|><|end|>"
    assert prepared.request.prompt_token_ids.count(0) == 1, "a document forges no control token"
    assert prepared.request.pooling == pooling


def test_a_pair_has_the_tokenizers_own_tokens() -> None:
    native = NativeTokenizer(models.WordLevel({"a": 0, "b": 1, "[S]": 2, "[E]": 3}, unk_token="a"))
    native.add_special_tokens(["[S]", "[E]"])
    native.pre_tokenizer = pre_tokenizers.Whitespace()
    native.post_processor = processors.TemplateProcessing(
        single="[S] $A", pair="[S] $A [E] $B [E]", special_tokens=[("[S]", 2), ("[E]", 3)]
    )
    tokenizer = Tokenizer(TokenizerSource(name="pair", read=lambda: native.to_str().encode()))
    assert tokenizer.encode_pair("a b", "b") == native.encode("a b", "b").ids == [2, 0, 1, 3, 1, 3]
    with pytest.raises(TextTooLongError):
        tokenizer.encode_pair("a b", "b", max_num_tokens=5)
