"""/v1/rerank: orders, scores that are the embeddings' cosines, forms of texts, refusals."""

import json
import math
from collections.abc import Iterator
from math import fsum
from pathlib import Path
from typing import Any

import httpx
import numpy as np
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
from cadenza.text import Tokenizer
from cadenza.text.tokens.tokenizer import TokenizerSource
from cadenza.weights.weights import open_weights
from tests.checkpoint.files import write_tensors
from tests.cli.harness import write_model
from tests.server.harness import RunningServer, running_server
from tests.server.scripted_engine import ScriptedEngine
from tests.server.test_metrics_and_log import read_metrics
from tests.server.test_streams import wait_until
from tests.server.watched_service import WatchedService

PATH = "/v1/rerank"
QUERY = "the fox"
TEXTS = ["one two three four", "the lazy dog", "the fox", "seven", "the fox"]


def ask(server: RunningServer, path: str = PATH, **fields: Any) -> httpx.Response:
    return server.post(path, {"query": QUERY, "documents": TEXTS, **fields})


def embedded(server: RunningServer, texts: list[str], **fields: Any) -> list[list[float]]:
    answer = server.post("/v1/embeddings", {"input": texts, **fields})
    assert answer.status_code == 200, answer.text
    return [each["embedding"] for each in answer.json()["data"]]


@pytest.mark.parametrize("fields", [{}, {"pooling": "mean"}, {"truncate_prompt_tokens": 2}])
def test_scores_are_the_cosines_of_the_embeddings_and_give_the_order(
    bundled: RunningServer, fields: dict[str, Any]
) -> None:
    query, *documents = embedded(bundled, [QUERY, *TEXTS], **fields)
    cosines = [fsum(a * b for a, b in zip(query, each, strict=True)) for each in documents]
    body = ask(bundled, **fields).json()
    found = [(each["index"], each["relevance_score"]) for each in body["results"]]
    assert found == sorted(enumerate(cosines), key=lambda each: (-each[1], each[0]))
    assert [index for index, _ in found[:2]] == [2, 4], "equal texts keep their order"
    assert found[0][1] == pytest.approx(1.0, abs=1e-6)
    assert found[0][1] != found[-1][1]
    assert [each["document"]["text"] for each in body["results"]] == [TEXTS[i] for i, _ in found]


def test_a_score_does_not_depend_on_the_other_documents(bundled: RunningServer) -> None:
    together = {each["index"]: each for each in ask(bundled).json()["results"]}
    for index, text in enumerate(TEXTS):
        (alone,) = ask(bundled, documents=[text]).json()["results"]
        assert alone["relevance_score"] == together[index]["relevance_score"]


@pytest.mark.parametrize("path", [PATH, "/v2/rerank", "/rerank", "/v1/reranking"])
def test_it_is_at_the_paths_of_other_servers(
    scripted: RunningServer, text: TextFrontend, path: str
) -> None:
    answer = ask(scripted, path, top_n=2, return_documents=False, model="scripted")
    body = answer.json()
    assert body["id"] == f"rerank-{answer.headers['x-request-id']}"
    assert (body["object"], body["model"]) == ("list", "scripted")
    assert len(body["results"]) == 2
    assert body["results"][0].keys() == {"index", "relevance_score"}
    num_tokens = sum(len(text.encode(each)) for each in (QUERY, *TEXTS))
    assert body["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def test_texts_may_stand_in_objects(scripted: RunningServer) -> None:
    long = ask(scripted, documents=["the fox " * 300])
    assert (long.status_code, long.json()["error"]["param"]) == (400, "documents")
    nested = [{"text": each} for each in TEXTS]
    found = ask(scripted, query={"text": QUERY}, documents=nested, top_n=0).json()["results"]
    assert found == ask(scripted).json()["results"]


def test_an_engine_without_hidden_states_is_named(
    script: tuple[int, ...], text: TextFrontend
) -> None:
    with running_server(ScriptedEngine(script, hidden_size=None), text) as server:
        error = ask(server).json()["error"]
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
    scores = {each["index"]: each["relevance_score"] for each in ask(server).json()["results"]}
    assert list(scores) == sorted(scores, key=lambda index: (-scores[index], index))
    assert len({*scores.values()}) == 4, "equal documents have equal scores, others do not"
    assert scores[2] == scores[4]
    for index, text in enumerate(TEXTS):
        ids = [*loaded.text.encode(QUERY), *loaded.text.encode(text)]
        (vector,) = embedded(server, [ids], pooling="last")
        logit = math.log(scores[index] / (1 - scores[index]))
        direction = fsum(w * x for w, x in zip(head.weights, vector, strict=True))
        unscaled = np.asarray(vector) / np.asarray(norm, np.float64)
        length = math.sqrt(len(vector)) / np.linalg.norm(unscaled)
        assert logit == pytest.approx(direction * length, rel=1e-2)
        (alone,) = ask(server, documents=[text]).json()["results"]
        assert alone["relevance_score"] == scores[index]


def test_a_model_that_scores_has_embeddings_and_does_not_generate(
    scorer: tuple[RunningServer, LoadedModel],
) -> None:
    server, _ = scorer
    assert len(embedded(server, [QUERY])) == 1
    error = server.post("/v1/completions", {"prompt": "x"}).json()["error"]
    assert "cannot generate" in error["message"]
    assert ask(server, pooling="mean").json()["error"]["param"] == "pooling"


def test_its_calls_are_counted_by_documents(scorer: tuple[RunningServer, LoadedModel]) -> None:
    server, _ = scorer
    before = read_metrics(server)
    assert ask(server).status_code == 200
    ended = 'vllm:request_success_total{finished_reason="%s",model_name="scripted"}'
    wait_until(lambda: read_metrics(server)[ended % "stop"] == before[ended % "stop"] + len(TEXTS))
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
