"""/api/embed, and the older /api/embeddings: embeddings as Ollama's API gives them.

Owns their bodies and answers. Knows no HTTP. Invariant: an embedding has the bits that it has by
/v1/embeddings.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from cadenza.frontend.embeddings import values_of
from cadenza.frontend.text_frontend import PreparedRequest, TextFrontend
from cadenza.outputs import RequestOutput
from cadenza.request import DIMENSIONS, PoolingParams, SamplingParams, prompt_only
from cadenza.server.endpoints.embeddings import FLOAT_BYTES, check_embeddings_size
from cadenza.server.endpoints.generating import (
    GENERATION_STATUSES,
    CallRequest,
    GeneratingEndpoint,
)
from cadenza.server.endpoints.ollama import KEEP_ALIVE, KEEP_ALIVE_HELP
from cadenza.server.endpoints.ollama_answer import metrics
from cadenza.server.errors import cancelled, invalid_value
from cadenza.server.limits import ServerLimits
from cadenza.server.openapi import TEXT, AnswerSchema, ApiRoute, list_of, object_of
from cadenza.server.schemas.body import label, optional
from cadenza.server.schemas.field_types import Boolean, Integer, Schema, String, refuse
from cadenza.server.schemas.generation import MAX_CHOICES
from cadenza.server.schemas.ollama import OllamaOptions
from cadenza.server.schemas.prompts import MAX_PROMPT_CHARS
from cadenza.server.sse import AnswerEncoder, AnswerHead, Usage

_encode = msgspec.json.encode
_TEXT = String(max_chars=MAX_PROMPT_CHARS)
_NUMBERS = list_of({"type": "number"})
_ADVICE = "use dimensions or fewer inputs"


@dataclass(frozen=True, slots=True)
class Inputs:
    """A text, or a list of texts; nothing, to Ollama's clients, loads a model."""

    def check(self, name: str, value: object) -> tuple[str, ...]:
        items = cast(list[object], value) if isinstance(value, list) else [value]
        if len(items) > MAX_CHOICES:
            raise invalid_value(
                f"{name} has {len(items)} texts; at most {MAX_CHOICES} are allowed", name
            )
        if not all(isinstance(item, str) for item in items):
            raise refuse(name, cast(object, value), "a text, or a list of texts")
        texts = tuple(_TEXT.check(name, item) for item in items)
        if len(texts) > 1 and "" in texts:
            raise invalid_value(f"{name} has an empty text; leave it out", name)
        return () if texts == ("",) else texts

    def schema(self) -> Schema:
        text = _TEXT.schema()
        many = {"type": "array", "items": {**text, "minLength": 1}, "maxItems": MAX_CHOICES}
        return {"anyOf": [text, many]}


class EmbeddingBase(CallRequest):
    """What both bodies have in common."""

    options = label(OllamaOptions(), "Options of sampling change nothing here.")
    keep_alive = label(KEEP_ALIVE, KEEP_ALIVE_HELP)

    @property
    def texts(self) -> Sequence[str]:
        raise NotImplementedError

    @property
    def num_values(self) -> int | None:
        """Of each embedding; None: all."""
        return None

    @property
    def num_prompts(self) -> int:
        return len(self.texts)

    def check_together(self, limits: ServerLimits) -> None:
        """None of them excludes another."""

    def check_size(self, hidden_size: int | None) -> None:
        num_values = min(self.num_values or sys.maxsize, hidden_size or 0)
        check_embeddings_size(self.num_prompts, num_values, FLOAT_BYTES, _ADVICE)

    def sampling(self, text: TextFrontend) -> SamplingParams:
        del text  # no checkpoint recommends anything for it
        return prompt_only()

    def prepare(
        self, text: TextFrontend, params: SamplingParams, max_num_tokens: int | None
    ) -> list[PreparedRequest]:
        pooling = PoolingParams(dimensions=self.num_values)
        return [
            text.prepare_pooled(each, pooling, params, max_num_tokens=max_num_tokens)
            for each in self.texts
        ]


class OllamaEmbedRequest(EmbeddingBase):
    """A body of /api/embed."""

    prompt_field = "input"

    input = optional(Inputs(), "A text, or a list of texts.", default=())
    dimensions = optional(
        Integer(int(DIMENSIONS.low), int(DIMENSIONS.high)),
        "Keep only so many of the first values, at unit length.",
    )
    truncate = label(Boolean(), "A text beyond the context is always refused.")

    @property
    def texts(self) -> Sequence[str]:
        return self.input

    @property
    def num_values(self) -> int | None:
        return self.dimensions

    def immediate(self, head: AnswerHead) -> bytes | None:
        return None if self.texts else _encode({"model": head.model, "embeddings": []})

    def encoder(self, head: AnswerHead, usage: Usage, text: TextFrontend) -> AnswerEncoder:
        del text  # an embedding has none
        return EmbedEncoder(head, usage)


class OllamaEmbeddingRequest(EmbeddingBase):
    """A body of /api/embeddings."""

    prompt_field = "prompt"

    prompt = optional(_TEXT, "A text.", default="")

    @property
    def texts(self) -> Sequence[str]:
        return [self.prompt] if self.prompt else []

    def immediate(self, head: AnswerHead) -> bytes | None:
        del head
        return None if self.prompt else _encode({"embedding": []})

    def encoder(self, head: AnswerHead, usage: Usage, text: TextFrontend) -> AnswerEncoder:
        del text, head  # an embedding is all of the answer
        return OneEmbeddingEncoder(usage)


class EmbedEncoder:
    """An `AnswerEncoder`: embeddings, tokens and durations."""

    def __init__(self, head: AnswerHead, usage: Usage) -> None:
        self.usage = usage
        self._head = head

    def whole(self, outputs: Iterable[RequestOutput]) -> bytes:
        # One after the other, so that other threads can run between them.
        vectors = b",".join(_encode(_vector(each)) for each in outputs)
        fields: dict[str, Any] = {"model": self._head.model, **metrics(self._head, self.usage)}
        del fields["eval_count"], fields["eval_duration"]
        return _encode(fields)[:-1] + b',"embeddings":[' + vectors + b"]}"

    def close(self) -> None:
        """Nothing is left of an answer."""


class OneEmbeddingEncoder:
    """An `AnswerEncoder`: one embedding."""

    def __init__(self, usage: Usage) -> None:
        self.usage = usage

    def whole(self, outputs: Iterable[RequestOutput]) -> bytes:
        (output,) = outputs
        return _encode({"embedding": _vector(output)})

    def close(self) -> None:
        """Nothing is left of an answer."""


def _vector(request: RequestOutput) -> list[float]:
    """Raises ApiError where there is none."""
    (output,) = request.outputs
    if output.embedding is None:
        raise cancelled()
    return values_of(output.embedding)


OLLAMA_EMBED = GeneratingEndpoint(
    route=ApiRoute(
        name="ollama_embed",
        method="POST",
        path="/api/embed",
        policy="key",
        summary="Turn texts into vectors, as Ollama does.",
        answers=AnswerSchema(
            name="OllamaEmbed", schema=object_of({"model": TEXT, "embeddings": list_of(_NUMBERS)})
        ),
        statuses=GENERATION_STATUSES,
        body=OllamaEmbedRequest,
    ),
    request_type=OllamaEmbedRequest,
)
OLLAMA_EMBEDDINGS = GeneratingEndpoint(
    route=ApiRoute(
        name="ollama_embeddings",
        method="POST",
        path="/api/embeddings",
        policy="key",
        summary="Turn a text into a vector: the older form.",
        answers=AnswerSchema(name="OllamaEmbeddings", schema=object_of({"embedding": _NUMBERS})),
        statuses=GENERATION_STATUSES,
        body=OllamaEmbeddingRequest,
    ),
    request_type=OllamaEmbeddingRequest,
)
