"""All routes, for the router, the policy on keys, the API's description and advice on base URLs.
Endpoints that call the engine are in `GENERATING`. Invariant: a path outside the table needs a key,
and is then not found."""

from collections.abc import Mapping
from functools import partial

import msgspec

from cadenza.server.anthropic.messages import ANTHROPIC, MESSAGES
from cadenza.server.calls.endpoint import GeneratingEndpoint
from cadenza.server.generation import Generation, OneAtATime
from cadenza.server.http.exchange import OPENAI, Dialect, Exchange, Handler, Response
from cadenza.server.ollama.generate import (
    OLLAMA,
    OLLAMA_CHAT,
    OLLAMA_EMBED,
    OLLAMA_EMBEDDINGS,
    OLLAMA_GENERATE,
)
from cadenza.server.ollama.models import OLLAMA_ROUTES
from cadenza.server.openai.chat import CHAT
from cadenza.server.openai.completions import COMPLETIONS
from cadenza.server.openai.response_answer import STORED_RESPONSE_ROUTES
from cadenza.server.openai.responses import RESPONSES
from cadenza.server.openapi import DESCRIPTION, ApiRoute, describe_api
from cadenza.server.operations.batch_stream import BATCH_ROUTES
from cadenza.server.operations.pages import (
    ROOT_ROUTES,
    UI_FILES,
    UI_PATHS,
    UI_PREFIX,
    RootHandler,
    read_ui_file,
)
from cadenza.server.operations.replay import BUSY, REPLAY
from cadenza.server.operations.status import STATUS_ROUTES
from cadenza.server.operations.tokens import TOKEN_ROUTES
from cadenza.server.pooling.embeddings import EMBEDDINGS
from cadenza.server.pooling.rerank import RERANK
from cadenza.server.service import Service

_ROOTED = ("/v1/messages", "/api/")
"""Paths that clients add to an address as a whole; to all others under /v1 they add the rest."""

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
    REPLAY,
)

ROUTES: tuple[ApiRoute, ...] = (
    *(endpoint.route for endpoint in GENERATING),
    *STORED_RESPONSE_ROUTES,
    *STATUS_ROUTES,
    *BATCH_ROUTES,
    DESCRIPTION,
    *TOKEN_ROUTES,
    *OLLAMA_ROUTES,
    *ROOT_ROUTES,
)

_DIALECTS = {"/v1/messages": ANTHROPIC, "/api": OLLAMA}

PATHS = frozenset(route.path for route in ROUTES)
OPEN_PATHS = UI_PATHS | {route.path for route in ROUTES if route.policy == "open"}


def dialect_of(path: str) -> Dialect:
    """Also of a path without a route."""
    for prefix, dialect in _DIALECTS.items():
        if path == prefix or path.startswith(f"{prefix}/"):
            return dialect
    return OPENAI


def make_handlers(service: Service) -> Mapping[str, Handler]:
    needs_key, unknown = not service.options.keys.is_open, service.options.unknown_fields
    description = msgspec.json.encode(
        describe_api(ROUTES, dialect_of, needs_key=needs_key, unknown_fields=unknown)
    )

    async def describe(exchange: Exchange) -> None:
        await exchange.answer(Response(body=description))

    return {
        **{each.route.name: Generation(service, each) for each in GENERATING},
        REPLAY.route.name: OneAtATime(Generation(service, REPLAY), BUSY),
        **{each.name: partial(each.handler, service) for each in ROUTES if each.handler},
        **{each.name: RootHandler(service, ROUTES) for each in ROOT_ROUTES},
        DESCRIPTION.name: describe,
    }


def make_ui_handlers(service: Service) -> Mapping[str, Handler]:
    """The files of the page at `/`, by their paths; they are no part of the API's description."""
    if not service.options.has_ui:
        return {}
    return {f"{UI_PREFIX}{name}": read_ui_file(name) for name in UI_FILES}


def base_url_advice(path: str, address: str) -> str | None:
    """What a client's base URL should have been; None for a path like none of the APIs'. `address`:
    this server's."""
    asked = path.rstrip("/")
    for each in sorted((each for each in PATHS if "{" not in each), key=len, reverse=True):
        if each.startswith(_ROOTED):
            if asked.endswith(each):
                return _advice(asked, each, address)
        elif each.startswith("/v1/") and asked.endswith(each.removeprefix("/v1")):
            return _advice(asked, each, f"{address}/v1")
    if asked == "/api" or asked.startswith("/api/"):
        listed = ", ".join(
            sorted(each for each in PATHS if each.startswith("/api/") and "{" not in each)
        )
        return (
            f"of Ollama's API there is {listed}; its base URL is {address}, and that of OpenAI's "
            f"clients {address}/v1"
        )
    if asked == "/v1":
        return f"the base URL of OpenAI's clients is {address}/v1"
    return None


def _advice(asked: str, path: str, base_url: str) -> str:
    if asked == path:  # with a slash after it
        return f"the path is {path}, without a slash at its end"
    return f"{path} is there: set the client's base URL to {base_url}"
