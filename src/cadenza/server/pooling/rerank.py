"""/v1/rerank: documents by relevance to a query. Invariant: a score depends on the query and its
document alone, bit for bit; of equal scores the earlier document comes first."""

from collections.abc import Sequence
from math import fsum
from operator import mul
from typing import Any

import msgspec

from cadenza.frontend.prepared_request import AnyPrompt, RequestOptions, ScoredPair
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.outputs import RequestOutput, values_of
from cadenza.request import PoolingParams
from cadenza.server.calls.endpoint import AnswerHead, GeneratingEndpoint
from cadenza.server.errors import invalid_value
from cadenza.server.fields.body import optional, required, unsupported
from cadenza.server.fields.sampling import LABEL, MAX_CHOICES, MAX_PROMPT_CHARS, SamplingField
from cadenza.server.fields.types import (
    Boolean,
    Integer,
    Schema,
    String,
    array_schema,
    checked_list,
    field_type,
    members_of,
    object_schema,
    refuse,
)
from cadenza.server.openapi import COUNT, TEXT, AnswerSchema, list_of, object_of
from cadenza.server.pooling.embeddings import (
    POOLING,
    PROMPT_USAGE,
    PooledRequest,
    embedding_bytes,
    prompt_usage,
)

MAX_DOCUMENTS = MAX_CHOICES - 1  # the query is one more prompt
_TEXT = String(min_chars=1, max_chars=MAX_PROMPT_CHARS)

_encode = msgspec.json.encode

_NESTED = object_schema({"text": _TEXT.schema()}, additionalProperties=False)


@field_type({"anyOf": [_TEXT.schema(), _NESTED]})
def ranked_text(name: str, value: object) -> str:
    members = members_of(value)
    if members and members.keys() != {"text"}:
        raise refuse(name, value, 'a text, or an object {"text": ...}')
    return _TEXT.check(name, members.get("text") if members else value)


@field_type(array_schema(ranked_text.schema(), 1, MAX_DOCUMENTS))
def ranked_documents(name: str, value: object) -> tuple[str, ...]:
    items = checked_list(name, value, "a list of texts", (1, MAX_DOCUMENTS), "texts")
    return tuple([ranked_text.check(name, item) for item in items])


class RerankRequest(PooledRequest):
    """A body of /v1/rerank."""

    prompt_field = "documents"

    query = required(ranked_text, "What is looked for.")
    documents = required(ranked_documents, "Where it is looked for: texts.")
    top_n = optional(Integer(0, 1 << 31), "Only so many of the best; 0: all.")
    return_documents = optional(Boolean(), "The texts beside their scores.", default=True)
    pooling = optional(
        POOLING, "Of the embeddings that are compared; otherwise as the model asks for."
    )
    truncate_prompt_tokens = SamplingField("Keep this many tokens of each text's end.")
    user = optional(LABEL, "Who asks; it goes into the log's line.")

    stream = unsupported("a stream of scores", False)
    rank_fields = unsupported("documents of several fields", [], ["text"])
    max_chunks_per_doc = unsupported("documents in chunks", 1)
    max_tokens_per_doc = unsupported("cutting a document's end off")

    def check_size(self, hidden_size: int | None) -> None:
        if hidden_size is None:
            raise invalid_value(
                "this server cannot rank: its backend gives no hidden states, of which embeddings "
                "and scores are made; serve the model with --backend xla",
                "documents",
            )

    def request_options(self, text: TextFrontend) -> RequestOptions:
        if text.score_head is None:
            return super().request_options(text)
        if self.pooling is not None:
            raise invalid_value(
                "this model scores by its own head, which takes no pooling; leave it out", "pooling"
            )
        return RequestOptions(pooling=PoolingParams(pooling="last", normalize=False))

    def prompts(self, text: TextFrontend) -> list[AnyPrompt]:
        if text.score_head is None:
            return [self.query, *self.documents]
        return [ScoredPair(query=self.query, document=each) for each in self.documents]

    def whole_answer(self, head: AnswerHead, outputs: Sequence[RequestOutput]) -> bytes:
        """In the shape of Jina's and Cohere's."""
        vectors = [values_of(embedding_bytes(output)) for output in outputs]
        own = head.text.score_head
        # One state for each document, or embeddings, the query's first.
        scores = _similarities(vectors) if own is None else [*map(own.score, vectors)]
        order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
        results = [self._result(index, scores[index]) for index in order[: self.top_n or None]]
        fields = {**head.fields("rerank-", "list"), "usage": prompt_usage(head.usage)}
        return _encode({**fields, "results": results})

    def _result(self, index: int, score: float) -> dict[str, Any]:
        text = {"document": {"text": self.documents[index]}} if self.return_documents else {}
        return {"index": index, "relevance_score": score, **text}


def _similarities(vectors: Sequence[Sequence[float]]) -> list[float]:
    """The cosine of the first vector and each other one, since embeddings have unit length."""
    query, *documents = vectors
    # Correctly rounded, so that the order of summing does not matter.
    return [fsum(map(mul, query, document)) for document in documents]


_RESULT: Schema = object_of({"index": COUNT, "relevance_score": {"type": "number"}})
_ANSWER = object_of({"id": TEXT, "model": TEXT, "results": list_of(_RESULT), "usage": PROMPT_USAGE})

RERANK = tuple(
    GeneratingEndpoint(
        name,
        path,
        "Order documents by how much they have to do with a query.",
        RerankRequest,
        AnswerSchema(name="Ranking", schema=_ANSWER),
        can_stream=False,
    )
    for name, path in (
        ("rerank", "/v1/rerank"),
        ("rerank_v2", "/v2/rerank"),
        ("rerank_root", "/rerank"),
        ("reranking", "/v1/reranking"),
    )
)
"""At the paths of other servers."""
