"""`/` and `/docs`: pages for browsers, a few words for others; without a script in `/docs`, and in
`/` of a server without `ui`. Invariant: open, but say nothing of the model to whoever has no key,
if there are keys."""

from collections.abc import Sequence

import cadenza
from cadenza.server.errors import UNAVAILABLE_CODES
from cadenza.server.http.exchange import Exchange, Response, send_object
from cadenza.server.openapi import TEXT, AnswerSchema, ApiRoute, object_of
from cadenza.server.operations.page import HTML_TYPE, PAGE_HEADERS, PageFacts, render_page
from cadenza.server.operations.ui import INDEX, read_ui_file
from cadenza.server.served_model import ServedModel
from cadenza.server.service import Service

_LINKS = {"health": "/health", "models": "/v1/models", "docs": "/docs", "openapi": "/openapi.json"}
_APIS = {
    "/v1/messages": "Anthropic's API",
    "/v1/": "OpenAI's API",
    "/api/": "Ollama's API",
    "/": "This server",
}
"""By the beginnings of their paths, the longest first."""


class RootHandler:
    """Answers both of `ROOT_ROUTES`; `routes` are all of this server's."""

    def __init__(self, service: Service, routes: Sequence[ApiRoute]) -> None:
        self._service = service
        self._endpoints = _by_api(routes)
        self._index = read_ui_file(INDEX) if service.options.has_ui else None

    async def __call__(self, exchange: Exchange) -> None:
        if "text/html" not in exchange.accept.lower():
            await send_object(exchange, {"status": self._state(), **_LINKS})
            return
        if self._index is not None and exchange.scope["path"] == "/":
            await self._index(exchange)
            return
        keys = self._service.options.keys
        found = keys.tenant_of(exchange.header(b"authorization"), exchange.header(b"x-api-key"))
        shown = PageFacts(
            version=cadenza.__version__,
            state=self._state(),
            needs_key=not keys.is_open,
            models=None if found is None else self._service.models.names,
            facts={} if found is None else self._facts(),
            address=exchange.address,
            endpoints=self._endpoints,
        )
        page = Response(body=render_page(shown), content_type=HTML_TYPE, headers=PAGE_HEADERS)
        await exchange.answer(page)

    def _state(self) -> str:
        """One word, or a few: the code of the error that a request would get."""
        status = self._service.models.status()
        if self._service.is_draining:
            return "draining"
        return "ready" if status.is_ready else UNAVAILABLE_CODES[status.state].replace("_", " ")

    def _facts(self) -> dict[str, str]:
        models = self._service.models
        if not models.is_several:
            return _facts_of(models.first)
        return {
            f"{model.name}: {name}": fact
            for model in models.models
            for name, fact in _facts_of(model).items()
        }


def _facts_of(model: ServedModel) -> dict[str, str]:
    facts, limits = model.text.facts, model.limits
    fingerprint = model.engine.status().fingerprint
    found = {"weights": f"{facts.family}, {facts.stored_type}"}
    if facts.num_parameters is not None:
        found["weights"] += f", {facts.num_parameters:,} parameters"
    if limits is not None:
        found["context"] = f"{limits.max_model_len:,} tokens"
        found["at once"] = f"{limits.max_num_seqs} requests; {limits.max_num_queued_reqs} wait"
    if fingerprint is not None:
        found["fingerprint"] = fingerprint.digest
    return found


def _by_api(routes: Sequence[ApiRoute]) -> dict[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = {api: [] for api in _APIS.values()}
    for route in routes:
        api = next(api for prefix, api in _APIS.items() if route.path.startswith(prefix))
        if not route.summary.startswith("Not built"):
            found[api].append((route.method, route.path.replace(":path}", "}")))
    return found


_ROOT = AnswerSchema("Root", object_of({"status": TEXT, "openapi": TEXT}), also=("text/html",))

ROOT_ROUTES: tuple[ApiRoute, ...] = tuple(
    ApiRoute(name, "GET", path, "What is here; for browsers a page.", _ROOT, policy="open")
    for name, path in (("root", "/"), ("docs", "/docs"))
)
