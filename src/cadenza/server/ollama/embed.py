"""/api/embed, and the older /api/embeddings: embeddings as Ollama's API gives them. Invariant: an
embedding has the bits that it has by /v1/embeddings."""

from collections.abc import Sequence
from typing import Any, cast

import msgspec

from cadenza.outputs import RequestOutput, values_of
from cadenza.request import DIMENSIONS
from cadenza.server.calls.encoder import AnswerHead
from cadenza.server.calls.request import GeneratingEndpoint
from cadenza.server.errors import invalid_value
from cadenza.server.fields.body import label, optional
from cadenza.server.fields.sampling import MAX_CHOICES, MAX_PROMPT_CHARS
from cadenza.server.fields.types import (
    Boolean,
    Integer,
    String,
    array_schema,
    field_type,
    refuse,
)
from cadenza.server.ollama.fields import ollama_options
from cadenza.server.ollama.generate import KEEP_ALIVE, KEEP_ALIVE_HELP, metrics
from cadenza.server.openapi import TEXT, AnswerSchema, list_of, object_of
from cadenza.server.pooling.embeddings import (
    PooledRequest,
    embedding_bytes,
)

_encode = msgspec.json.encode
_TEXT = String(max_chars=MAX_PROMPT_CHARS)
_NUMBERS = list_of({"type": "number"})


_ONE_TEXT = {**_TEXT.schema(), "minLength": 1}


@field_type({"anyOf": [_TEXT.schema(), array_schema(_ONE_TEXT, high=MAX_CHOICES)]})
def input_texts(name: str, value: object) -> tuple[str, ...]:
    """A text, or a list of texts; with neither, Ollama's clients load a model."""
    items = cast(list[object], value) if isinstance(value, list) else [value]
    if len(items) > MAX_CHOICES:
        raise invalid_value(
            f"{name} has {len(items)} texts; at most {MAX_CHOICES} are allowed", name
        )
    if not all(isinstance(item, str) for item in items):
        raise refuse(name, cast(object, value), "a text, or a list of texts")
    texts = tuple([_TEXT.check(name, item) for item in items])
    if len(texts) > 1 and "" in texts:
        raise invalid_value(f"{name} has an empty text; leave it out", name)
    return () if texts == ("",) else texts


class EmbeddingBase(PooledRequest):
    """What both bodies have in common."""

    options = label(ollama_options, "Options of sampling change nothing here.")
    keep_alive = label(KEEP_ALIVE, KEEP_ALIVE_HELP)


class OllamaEmbedRequest(EmbeddingBase):
    """A body of /api/embed."""

    prompt_field = "input"

    input = optional(input_texts, "A text, or a list of texts.", default=())
    dimensions = optional(
        Integer(int(DIMENSIONS.low), int(DIMENSIONS.high)),
        "Keep only so many of the first values, at unit length.",
    )
    truncate = label(Boolean(), "A text beyond the context is always refused.")

    def immediate(self, head: AnswerHead) -> bytes | None:
        return None if self.texts else _encode({"model": head.model, "embeddings": []})

    def whole_answer(self, head: AnswerHead, outputs: Sequence[RequestOutput]) -> bytes:
        # One after the other, so that other threads can run between them.
        vectors = b",".join(_encode(values_of(embedding_bytes(each))) for each in outputs)
        fields: dict[str, Any] = {"model": head.model, **metrics(head)}
        del fields["eval_count"], fields["eval_duration"]
        return _encode(fields)[:-1] + b',"embeddings":[' + vectors + b"]}"


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

    def whole_answer(self, head: AnswerHead, outputs: Sequence[RequestOutput]) -> bytes:
        del head  # an embedding is all of the answer
        (output,) = outputs
        return _encode({"embedding": values_of(embedding_bytes(output))})


OLLAMA_EMBED = GeneratingEndpoint(
    "ollama_embed",
    "/api/embed",
    "Turn texts into vectors, as Ollama does.",
    OllamaEmbedRequest,
    AnswerSchema(
        name="OllamaEmbed", schema=object_of({"model": TEXT, "embeddings": list_of(_NUMBERS)})
    ),
    can_stream=False,
)
OLLAMA_EMBEDDINGS = GeneratingEndpoint(
    "ollama_embeddings",
    "/api/embeddings",
    "Turn a text into a vector: the older form.",
    OllamaEmbeddingRequest,
    AnswerSchema(name="OllamaEmbeddings", schema=object_of({"embedding": _NUMBERS})),
    can_stream=False,
)
