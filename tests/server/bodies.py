"""The bodies and the generating endpoints by short names, for tests that go over all of them."""

from cadenza.server.endpoints.chat import CHAT, ChatRequest
from cadenza.server.endpoints.completions import COMPLETIONS, CompletionRequest
from cadenza.server.endpoints.embeddings import EMBEDDINGS, EmbeddingRequest
from cadenza.server.endpoints.generating import GeneratingEndpoint
from cadenza.server.endpoints.messages import MESSAGES, MessageRequest
from cadenza.server.endpoints.responses import RESPONSES, ResponseRequest
from cadenza.server.endpoints.tokens import CountTokensBody, DetokenizeBody, TokenizeBody
from cadenza.server.schemas.body import Body

GENERATING: dict[str, GeneratingEndpoint] = {
    "completions": COMPLETIONS,
    "chat": CHAT,
    "responses": RESPONSES,
    "messages": MESSAGES,
    "embeddings": EMBEDDINGS,
}
BODIES: dict[str, type[Body]] = {
    "completions": CompletionRequest,
    "chat": ChatRequest,
    "responses": ResponseRequest,
    "messages": MessageRequest,
    "embeddings": EmbeddingRequest,
    "count_tokens": CountTokensBody,
    "tokenize": TokenizeBody,
    "detokenize": DetokenizeBody,
}
