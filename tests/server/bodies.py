"""The bodies and the generating endpoints by short names, for tests that go over all of them."""

import json
from typing import Any

import pytest

from cadenza.server.anthropic.messages import MESSAGES, MessageRequest
from cadenza.server.calls.endpoint import CallRequest, GeneratingEndpoint
from cadenza.server.errors import ApiError
from cadenza.server.fields.body import Body, UnknownFields
from cadenza.server.limits import ServerLimits
from cadenza.server.ollama.generate import (
    OLLAMA_CHAT,
    OLLAMA_EMBED,
    OLLAMA_GENERATE,
    OllamaChatRequest,
    OllamaEmbedRequest,
    OllamaPromptRequest,
)
from cadenza.server.openai.chat import CHAT, ChatRequest
from cadenza.server.openai.completions import COMPLETIONS, CompletionRequest
from cadenza.server.openai.responses import RESPONSES, ResponseRequest
from cadenza.server.operations.tokens import CountTokensBody, DetokenizeBody, TokenizeBody
from cadenza.server.pooling.embeddings import EMBEDDINGS, EmbeddingRequest
from cadenza.server.pooling.rerank import RERANK, RerankRequest

GENERATING: dict[str, GeneratingEndpoint] = {
    "completions": COMPLETIONS,
    "chat": CHAT,
    "responses": RESPONSES,
    "messages": MESSAGES,
    "embeddings": EMBEDDINGS,
    "rerank": RERANK[0],
    "ollama_chat": OLLAMA_CHAT,
    "ollama_generate": OLLAMA_GENERATE,
    "ollama_embed": OLLAMA_EMBED,
}
BODIES: dict[str, type[Body]] = {
    "completions": CompletionRequest,
    "chat": ChatRequest,
    "responses": ResponseRequest,
    "messages": MessageRequest,
    "embeddings": EmbeddingRequest,
    "rerank": RerankRequest,
    "ollama_chat": OllamaChatRequest,
    "ollama_generate": OllamaPromptRequest,
    "ollama_embed": OllamaEmbedRequest,
    "count_tokens": CountTokensBody,
    "tokenize": TokenizeBody,
    "detokenize": DetokenizeBody,
}

USER = {"role": "user", "content": "the fox"}
NEEDED: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "the fox"},
    "chat": {"messages": [USER]},
    "responses": {"input": "the fox"},
    "messages": {"messages": [USER], "max_tokens": 6},
    "embeddings": {"input": "the fox"},
    "rerank": {"query": "the fox", "documents": ["the dog"]},
    "ollama_chat": {"messages": [USER], "options": {"num_predict": 1}, "stream": False},
    "ollama_generate": {"prompt": "the fox", "options": {"num_predict": 1}, "stream": False},
    "ollama_embed": {"input": "the fox"},
    "count_tokens": {"messages": [USER]},
    "tokenize": {"prompt": "the fox"},
    "detokenize": {"tokens": [5]},
}
"""For each body the fields that it needs."""
PATHS = {
    **{name: endpoint.path for name, endpoint in GENERATING.items()},
    "count_tokens": "/v1/messages/count_tokens",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
}


def checked(name: str, unknown: UnknownFields = "suggest", **fields: Any) -> dict[str, Any]:
    """The checked values of a body with these fields."""
    return BODIES[name].check({**NEEDED[name], **fields}, unknown)


def read(name: str, **fields: Any) -> CallRequest:
    """A request to a generating endpoint, all of whose checks it has passed."""
    body = json.dumps({**NEEDED[name], **fields}).encode()
    return GENERATING[name].read(body, ServerLimits())


def refusal(name: str, unknown: UnknownFields = "suggest", **fields: Any) -> ApiError:
    """The error of a body with these fields."""
    with pytest.raises(ApiError) as refused:
        BODIES[name].check({**NEEDED[name], **fields}, unknown)
    assert refused.value.body(), "the answer can be encoded"
    return refused.value
