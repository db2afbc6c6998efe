"""The table of all routes, and their handlers.

The router, the policy on keys and the API's description are made from it. An endpoint that
calls the engine is added to `GENERATING`. Invariant: a path that is not in the table needs a key,
and is then not found.
"""

from collections.abc import Mapping
from functools import partial

import msgspec

from cadenza.server.endpoints.chat import CHAT
from cadenza.server.endpoints.completions import COMPLETIONS
from cadenza.server.endpoints.embeddings import EMBEDDINGS
from cadenza.server.endpoints.generating import GeneratingEndpoint
from cadenza.server.endpoints.messages import MESSAGES
from cadenza.server.endpoints.ollama import OLLAMA_CHAT, OLLAMA_GENERATE
from cadenza.server.endpoints.ollama_embed import OLLAMA_EMBED, OLLAMA_EMBEDDINGS
from cadenza.server.endpoints.ollama_models import OLLAMA_ROUTES
from cadenza.server.endpoints.rerank import RERANK
from cadenza.server.endpoints.responses import RESPONSES
from cadenza.server.endpoints.root import ROOT_ROUTES, RootHandler
from cadenza.server.endpoints.status import STATUS_ROUTES
from cadenza.server.endpoints.stored_responses import STORED_RESPONSE_ROUTES
from cadenza.server.endpoints.tokens import TOKEN_ROUTES
from cadenza.server.generation import Generation
from cadenza.server.http_exchange import Exchange, Handler, Response
from cadenza.server.openapi import DESCRIPTION, ApiRoute, describe_api
from cadenza.server.service import Service

GENERATING: tuple[GeneratingEndpoint, ...] = (
    CHAT,
    COMPLETIONS,
    RESPONSES,
    MESSAGES,
    EMBEDDINGS,
    *RERANK,
    OLLAMA_CHAT,
    OLLAMA_GENERATE,
    OLLAMA_EMBED,
    OLLAMA_EMBEDDINGS,
)

ROUTES: tuple[ApiRoute, ...] = (
    *(endpoint.route for endpoint in GENERATING),
    *STORED_RESPONSE_ROUTES,
    *STATUS_ROUTES,
    DESCRIPTION,
    *TOKEN_ROUTES,
    *OLLAMA_ROUTES,
    *ROOT_ROUTES,
)

OPEN_PATHS = frozenset(route.path for route in ROUTES if route.policy == "open")


def make_handlers(service: Service) -> Mapping[str, Handler]:
    """By the names of the routes."""
    needs_key, unknown = not service.options.keys.is_open, service.options.unknown_fields
    description = msgspec.json.encode(
        describe_api(ROUTES, needs_key=needs_key, unknown_fields=unknown)
    )

    async def describe(exchange: Exchange) -> None:
        await exchange.answer(Response(body=description))

    return {
        **{each.route.name: Generation(service, each) for each in GENERATING},
        **{each.name: partial(each.handler, service) for each in ROUTES if each.handler},
        **{each.name: RootHandler(service, ROUTES) for each in ROOT_ROUTES},
        DESCRIPTION.name: describe,
    }
