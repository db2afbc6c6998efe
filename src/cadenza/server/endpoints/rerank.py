"""/v1/rerank: documents by how much they have to do with a query.

Owns its body and its answer. Knows no HTTP. Invariant: a score is a function of the query and of
its document alone, with the same bits whatever else is ranked; of equal scores the earlier document
comes first.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import fsum
from operator import mul
from typing import Any, cast, get_args

import msgspec

from cadenza.frontend.embeddings import values_of
from cadenza.frontend.text_frontend import PreparedRequest, TextFrontend
from cadenza.outputs import RequestOutput
from cadenza.request import Pooling, PoolingParams, SamplingParams, prompt_only
from cadenza.server.endpoints.generating import (
    GENERATION_STATUSES,
    CallRequest,
    GeneratingEndpoint,
)
from cadenza.server.errors import cancelled, invalid_value
from cadenza.server.limits import ServerLimits
from cadenza.server.openapi import COUNT, TEXT, AnswerSchema, ApiRoute, list_of, object_of
from cadenza.server.schemas.body import optional, required, unsupported
from cadenza.server.schemas.field_types import (
    Boolean,
    Integer,
    OneOf,
    Schema,
    String,
    members_of,
    refuse,
)
from cadenza.server.schemas.generation import LABEL, MAX_CHOICES, SamplingField
from cadenza.server.schemas.prompts import MAX_PROMPT_CHARS
from cadenza.server.sse import AnswerEncoder, AnswerHead, Usage

MAX_DOCUMENTS = MAX_CHOICES - 1
"""Beside the query."""

Score = Callable[[Sequence[float]], float]

_TEXT = String(min_chars=1, max_chars=MAX_PROMPT_CHARS)

_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class RankedText:
    """A text, or an object that has one as `text`."""

    def check(self, name: str, value: object) -> str:
        members = members_of(value)
        if members and members.keys() != {"text"}:
            raise refuse(name, value, 'a text, or an object {"text": ...}')
        return _TEXT.check(name, members.get("text") if members else value)

    def schema(self) -> Schema:
        nested: Schema = {
            "type": "object",
            "properties": {"text": _TEXT.schema()},
            "required": ["text"],
            "additionalProperties": False,
        }
        return {"anyOf": [_TEXT.schema(), nested]}


@dataclass(frozen=True, slots=True)
class Documents:
    """A list of texts."""

    def check(self, name: str, value: object) -> tuple[str, ...]:
        if not isinstance(value, list):
            raise refuse(name, value, "a list of texts")
        items = cast(list[object], value)
        if not 1 <= len(items) <= MAX_DOCUMENTS:
            raise invalid_value(
                f"{name} has {len(items)} texts; from 1 to {MAX_DOCUMENTS} are allowed", name
            )
        return tuple(RankedText().check(name, item) for item in items)

    def schema(self) -> Schema:
        return {**list_of(RankedText().schema()), "minItems": 1, "maxItems": MAX_DOCUMENTS}


class RerankRequest(CallRequest):
    """A body of /v1/rerank."""

    prompt_field = "documents"

    query = required(RankedText(), "What is looked for.")
    documents = required(Documents(), "Where it is looked for: texts.")
    top_n = optional(Integer(0, 1 << 31), "Only so many of the best; 0: all.")
    return_documents = optional(Boolean(), "The texts beside their scores.", default=True)
    pooling = optional(
        OneOf(get_args(Pooling)),
        "Of the embeddings that are compared; otherwise as the model asks for.",
    )
    truncate_prompt_tokens = SamplingField("Keep this many tokens of each text's end.", None)
    user = optional(LABEL, "Who asks; it goes into the log's line.")

    stream = unsupported("a stream of scores", False)
    rank_fields = unsupported("documents of several fields", [], ["text"])
    max_chunks_per_doc = unsupported("documents in chunks", 1)
    max_tokens_per_doc = unsupported("cutting a document's end off")

    @property
    def num_prompts(self) -> int:
        return 1 + len(self.documents)

    @property
    def user_label(self) -> str | None:
        return self.user

    def check_together(self, limits: ServerLimits) -> None:
        """None of them excludes another."""

    def check_size(self, hidden_size: int | None) -> None:
        if hidden_size is None:
            raise invalid_value(
                "this server cannot rank: its backend gives no hidden states, of which embeddings "
                "and scores are made; serve the model with --backend xla",
                "documents",
            )

    def sampling(self, text: TextFrontend) -> SamplingParams:
        del text  # no checkpoint recommends anything for it
        return prompt_only(self.truncate_prompt_tokens)

    def prepare(
        self, text: TextFrontend, params: SamplingParams, max_num_tokens: int | None
    ) -> list[PreparedRequest]:
        if text.score_head is not None:
            if self.pooling is not None:
                raise invalid_value(
                    "this model scores by its own head, which takes no pooling; leave it out",
                    "pooling",
                )
            return [
                text.prepare_scored(self.query, each, params, max_num_tokens=max_num_tokens)
                for each in self.documents
            ]
        pooling = PoolingParams(pooling=cast(Pooling | None, self.pooling))
        return [
            text.prepare_pooled(each, pooling, params, max_num_tokens=max_num_tokens)
            for each in (self.query, *self.documents)
        ]

    def encoder(self, head: AnswerHead, usage: Usage, text: TextFrontend) -> AnswerEncoder:
        own = text.score_head
        return RankEncoder(head, usage, self, None if own is None else own.score)


class RankEncoder:
    """An `AnswerEncoder` in the shape of Jina's and Cohere's.

    Args:
        score: of a hidden state, where there is one for each document; otherwise the states are
            embeddings, the query's first.
    """

    def __init__(
        self, head: AnswerHead, usage: Usage, request: RerankRequest, score: Score | None
    ) -> None:
        self.usage = usage
        self._head = head
        self._request = request
        self._score = score

    def whole(self, outputs: Iterable[RequestOutput]) -> bytes:
        vectors = [_vector(output) for output in outputs]
        if self._score is None:
            scores = _similarities(vectors)
        else:
            scores = [self._score(each) for each in vectors]
        order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
        results = [self._result(index, scores[index]) for index in order]
        num_tokens = self.usage.prompt_tokens
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        fields = self._head.fields("rerank-", "list")
        return _encode(
            {**fields, "usage": usage, "results": results[: self._request.top_n or None]}
        )

    def close(self) -> None:
        """Nothing is left of an answer."""

    def _result(self, index: int, score: float) -> dict[str, Any]:
        result: dict[str, Any] = {"index": index, "relevance_score": score}
        if self._request.return_documents:
            result["document"] = {"text": self._request.documents[index]}
        return result


def _similarities(vectors: Sequence[Sequence[float]]) -> list[float]:
    """Of the first one to each other: the cosine, since embeddings have unit length."""
    query, *documents = vectors
    # Exactly rounded, so that it does not depend on an order of summing.
    return [fsum(map(mul, query, document)) for document in documents]


def _vector(request: RequestOutput) -> list[float]:
    """Raises ApiError where there is none."""
    (output,) = request.outputs
    if output.embedding is None:
        raise cancelled()
    return values_of(output.embedding)


_RESULT: Schema = object_of({"index": COUNT, "relevance_score": {"type": "number"}})
_ANSWER = AnswerSchema(
    name="Ranking",
    schema=object_of(
        {
            "id": TEXT,
            "model": TEXT,
            "results": list_of(_RESULT),
            "usage": object_of({"prompt_tokens": COUNT, "total_tokens": COUNT}),
        }
    ),
)


def _endpoint(name: str, path: str) -> GeneratingEndpoint:
    return GeneratingEndpoint(
        route=ApiRoute(
            name=name,
            method="POST",
            path=path,
            policy="key",
            summary="Order documents by how much they have to do with a query.",
            answers=_ANSWER,
            statuses=GENERATION_STATUSES,
            body=RerankRequest,
        ),
        request_type=RerankRequest,
    )


RERANK = (
    _endpoint("rerank", "/v1/rerank"),
    _endpoint("rerank_v2", "/v2/rerank"),
    _endpoint("rerank_root", "/rerank"),
    _endpoint("reranking", "/v1/reranking"),
)
"""Under the paths at which clients of other servers look for it."""
