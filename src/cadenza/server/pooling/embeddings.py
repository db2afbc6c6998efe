"""/v1/embeddings: the embedding of each input; and what all endpoints that embed have in common.
Invariant: each input has its embedding, in the order of the inputs, or the call fails as a
whole."""

import sys
from base64 import b64encode
from collections.abc import Sequence
from typing import Any, get_args

import msgspec

from cadenza.frontend.prepared_request import AnyPrompt, RequestOptions
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.outputs import RequestOutput, values_of
from cadenza.request import DIMENSIONS, Pooling, PoolingParams, SamplingParams, prompt_only
from cadenza.server.calls.endpoint import AnswerHead, CallRequest, GeneratingEndpoint
from cadenza.server.calls.record import Usage
from cadenza.server.errors import cancelled, invalid_value
from cadenza.server.fields.body import optional, required, unsupported
from cadenza.server.fields.sampling import LABEL, PlainPrompt, SamplingField, plain_prompts
from cadenza.server.fields.types import Boolean, Integer, OneOf, Schema, or_null
from cadenza.server.openapi import COUNT, TEXT, AnswerSchema, list_of, object_of, one_of

MAX_ANSWER_BYTES = 64 << 20
_FLOAT_BYTES, _BASE64_BYTES = 22, 16 / 3
"""Bytes of a number in an answer: a typical float32 as a double's shortest text, with a comma."""

_encode = msgspec.json.encode

POOLING = OneOf(get_args(Pooling))


class PooledRequest(CallRequest):
    """A call for the hidden states of its prompts, of which nothing is generated."""

    @property
    def texts(self) -> Sequence[PlainPrompt]:
        """The prompts, of which there may be none."""
        return self.values.get(self.prompt_field, ())

    def check_size(self, hidden_size: int | None) -> None:
        num_values = min(self.values.get("dimensions", sys.maxsize), hidden_size or 0)
        is_base64 = self.values.get("encoding_format") == "base64"
        value_bytes = _BASE64_BYTES if is_base64 else _FLOAT_BYTES
        if len(self.texts) * num_values * value_bytes > MAX_ANSWER_BYTES:
            has_base64 = "encoding_format" in self.fields and not is_base64
            base64 = "encoding_format base64, " if has_base64 else ""
            raise invalid_value(
                f"{len(self.texts)} embeddings of {num_values} numbers are an answer of over "
                f"{MAX_ANSWER_BYTES >> 20} MiB; use {base64}dimensions or fewer inputs",
                "input",
            )

    def request_options(self, text: TextFrontend) -> RequestOptions:
        del text
        get = self.values.get
        return RequestOptions(
            pooling=PoolingParams(pooling=get("pooling"), dimensions=get("dimensions")),
            add_special_tokens=get("add_special_tokens", True),
        )

    def sampling(self, text: TextFrontend) -> SamplingParams:
        del text  # no checkpoint recommends anything for it
        return prompt_only(self.values.get("truncate_prompt_tokens"))

    def prompts(self, text: TextFrontend) -> Sequence[AnyPrompt]:
        del text  # they are as they are
        return self.texts


class EmbeddingRequest(PooledRequest):
    """A body of /v1/embeddings."""

    prompt_field = "input"

    input = required(plain_prompts, "A text, token ids, or a list of either.")
    encoding_format = optional(
        OneOf(("float", "base64")),
        "How numbers are written: a list, or their float32 in little endian as base64.",
        default="float",
    )
    dimensions = optional(
        Integer(int(DIMENSIONS.low), int(DIMENSIONS.high)),
        "Keep only so many of the first values, at unit length.",
    )
    pooling = optional(
        POOLING,
        "The last token's state, or the mean of all tokens'; otherwise as the model asks for.",
    )
    truncate_prompt_tokens = SamplingField("Keep this many tokens of the input's end.")
    add_special_tokens = optional(
        Boolean(), "Put around a text what the tokenizer puts around texts.", default=True
    )
    user = optional(LABEL, "Who asks; it goes into the log's line.")

    stream = unsupported("a stream of embeddings", False)
    normalize = unsupported("embeddings of another length than 1", True)
    use_activation = unsupported("embeddings of another length than 1", True)
    embed_dtype = unsupported("embeddings in another type", "float32")
    endianness = unsupported("embeddings in another order of bytes", "little", "native")
    truncation_side = unsupported("cutting the input's end off", "left")
    messages = unsupported("embeddings of conversations", [])

    def whole_answer(self, head: AnswerHead, outputs: Sequence[RequestOutput]) -> bytes:
        is_base64 = self.encoding_format == "base64"

        def encoded(index: int, request: RequestOutput) -> bytes:
            embedding = embedding_bytes(request)
            shown: Any = b64encode(embedding).decode() if is_base64 else values_of(embedding)
            return _encode({"object": "embedding", "index": index, "embedding": shown})

        # One after the other, so that other threads can run between them.
        data = [encoded(index, each) for index, each in enumerate(outputs)]
        fields = {**head.fields("embd-", "list"), "usage": prompt_usage(head.usage)}
        return _encode(fields)[:-1] + b',"data":[' + b",".join(data) + b"]}"


def embedding_bytes(request: RequestOutput) -> bytes:
    """Of a request's only output. Raises ApiError if it has none, since the call was cancelled."""
    (output,) = request.outputs
    if output.embedding is None:
        raise cancelled()
    return output.embedding


def prompt_usage(usage: Usage) -> dict[str, int]:
    return {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}


PROMPT_USAGE = object_of({"prompt_tokens": COUNT, "total_tokens": COUNT})
_VECTOR: Schema = {"anyOf": [list_of({"type": "number"}), TEXT]}
_ITEM = object_of({"object": one_of("embedding"), "index": COUNT, "embedding": _VECTOR})
_ANSWER = object_of(
    {
        "id": TEXT,
        "object": one_of("list"),
        "created": COUNT,
        "model": TEXT,
        "system_fingerprint": or_null(TEXT),
        "data": {**list_of(_ITEM), "minItems": 1},
        "usage": PROMPT_USAGE,
    }
)

EMBEDDINGS = GeneratingEndpoint(
    "embeddings",
    "/v1/embeddings",
    "Turn inputs into vectors.",
    EmbeddingRequest,
    AnswerSchema(name="Embeddings", schema=_ANSWER),
    can_stream=False,
)
