"""The bodies and the generating endpoints by short names, for tests that go over all of them."""

from cadenza.server.endpoints.chat import CHAT, ChatRequest
from cadenza.server.endpoints.completions import COMPLETIONS, CompletionRequest
from cadenza.server.endpoints.embeddings import EMBEDDINGS, EmbeddingRequest
from cadenza.server.endpoints.generating import GeneratingEndpoint
from cadenza.server.endpoints.messages import MESSAGES, MessageRequest
from cadenza.server.endpoints.ollama import (
    OLLAMA_CHAT,
    OLLAMA_GENERATE,
    OllamaChatRequest,
    OllamaPromptRequest,
)
from cadenza.server.endpoints.ollama_embed import OLLAMA_EMBED, OllamaEmbedRequest
from cadenza.server.endpoints.rerank import RERANK, RerankRequest
from cadenza.server.endpoints.responses import RESPONSES, ResponseRequest
from cadenza.server.endpoints.tokens import CountTokensBody, DetokenizeBody, TokenizeBody
from cadenza.server.schemas.body import Body

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
