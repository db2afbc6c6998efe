"""/v1/rerank: orders, scores that are the embeddings' cosines, forms of texts, refusals."""

from math import fsum
from typing import Any

import httpx
import pytest

from cadenza.frontend.text_frontend import TextFrontend
from tests.server.harness import RunningServer, running_server
from tests.server.scripted_engine import ScriptedEngine

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
    nested = [{"text": each} for each in TEXTS]
    found = ask(scripted, query={"text": QUERY}, documents=nested, top_n=0).json()["results"]
    assert found == ask(scripted).json()["results"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"query": ""}, "query"),
        ({"query": {"image": "x"}}, "query"),
        ({"documents": []}, "documents"),
        ({"documents": "the fox"}, "documents"),
        ({"documents": ["a", ""]}, "documents"),
        ({"documents": [{"text": "a", "title": "b"}]}, "documents"),
        ({"documents": ["a"] * 2048}, "documents"),
        ({"documents": ["the fox " * 300]}, "documents"),
        ({"top_n": -1}, "top_n"),
        ({"stream": True}, "stream"),
        ({"rank_fields": ["title"]}, "rank_fields"),
        ({"max_tokens_per_doc": 8}, "max_tokens_per_doc"),
        ({"pooling": "cls"}, "pooling"),
    ],
)
def test_what_cannot_be_ranked_is_refused_by_name(
    scripted: RunningServer, fields: dict[str, Any], param: str
) -> None:
    answer = ask(scripted, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_an_engine_without_hidden_states_is_named(
    script: tuple[int, ...], text: TextFrontend
) -> None:
    with running_server(ScriptedEngine(script, hidden_size=None), text) as server:
        error = ask(server).json()["error"]
        assert "its backend gives no hidden states" in error["message"]
