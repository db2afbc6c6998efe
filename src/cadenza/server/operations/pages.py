"""`/` and `/docs`: pages for browsers, a few words for others; and the page's files. Invariants:
open, but say nothing of the model to whoever has no key, if there are keys; `/docs` has no script,
and all text in it is escaped; the page at `/` runs only its own scripts and asks no other address;
its files are read at the start, and no part of a request becomes a path."""

import gzip
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from html import escape
from pathlib import Path

import cadenza
from cadenza.server.errors import UNAVAILABLE_CODES, Headers
from cadenza.server.http.exchange import NOT_MODIFIED, Exchange, Response, send_object
from cadenza.server.openapi import TEXT, AnswerSchema, ApiRoute, object_of
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

HTML_TYPE = "text/html; charset=utf-8"
_STYLE = """
:root { color-scheme: light dark; font: 15px/1.45 system-ui, sans-serif; }
body { max-width: 62rem; margin: 1.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1rem; margin: 1rem 0 .25rem; }
p, dl, pre { margin: .25rem 0; }
code, pre { font: 13px/1.4 ui-monospace, monospace; }
pre { overflow-x: auto; padding: .5rem .75rem; border: 1px solid; border-radius: .3rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; }
dd { margin: 0; overflow-wrap: anywhere; }
ul { columns: 19rem; margin: .25rem 0; padding-left: 1.1rem; }
.state { font-weight: 600; }
"""

_STYLE_HASH = b64encode(sha256(_STYLE.encode()).digest()).decode()
PAGE_HEADERS: Headers = (
    (
        "content-security-policy",
        f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; "
        f"form-action 'none'; frame-ancestors 'none'",
    ),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cache-control", "no-store"),
    ("vary", "accept, authorization, x-api-key"),
)

_KEY_ADVICE = "<p>This server has API keys: its model is shown to whoever sends one.</p>"
FOLDER = Path(cadenza.__file__).parent / "ui"
UI_PREFIX = "/ui/"
INDEX = "index.html"
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": HTML_TYPE,
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)

_HEADERS: Headers = (
    ("content-security-policy", _POLICY),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
    ("cache-control", "no-cache"),
)

UI_FILES: tuple[str, ...] = (
    *("app.js", "api.js", "answer.js", "chat.js", "compose.js", "conversation.js", "markdown.js"),
    *("images.js", "live.js", "live_picture.js", "message.js", "prove.js"),
    *("settings.js", "sse.js", "store.js", "ui.js", "style.css", "icon.svg"),
    *("vendor/preact.js", "vendor/hooks.js", "vendor/htm.js", "vendor/marked.js"),
    *("vendor/uplot.js", "vendor/uplot.css", "vendor/LICENSES.txt"),
)
"""Below `UI_PREFIX`; `INDEX` is at `/`."""

UI_PATHS = frozenset(f"{UI_PREFIX}{name}" for name in UI_FILES)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFacts:
    """What the page shows."""

    version: str
    state: str  # of the engine, in one word, and why, if that is known
    models: Sequence[str] | None  # None where the reader may not know them
    needs_key: bool
    facts: Mapping[str, str]  # of the model
    address: str  # of this server, as the reader called it
    endpoints: Mapping[str, Sequence[tuple[str, str]]]  # method and path of each, by API


def render_page(shown: PageFacts) -> bytes:
    title = "Cadenza" if shown.models is None else ", ".join(shown.models)
    model = shown.models[0] if shown.models else "MODEL"
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)} · Cadenza</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        f'<p>Cadenza {escape(shown.version)} · <span class="state">{escape(shown.state)}</span> · '
        '<a href="/health">health</a> · <a href="/openapi.json">every field (OpenAPI)</a> · '
        '<a href="/metrics">metrics</a> · <a href="/v1/models">models</a></p>',
        _KEY_ADVICE if shown.models is None else "",
        _definitions(shown.facts),
        "<h2>Where clients find it</h2>",
        _definitions(
            {
                "OpenAI's clients": f"{shown.address}/v1",
                "Anthropic's clients": shown.address,
                "Ollama's clients": shown.address,
            }
        ),
        f"<pre>{escape(_example(shown, model))}</pre>",
        *(_section(api, listed) for api, listed in shown.endpoints.items()),
        "<p>docs/serving.md and docs/apis.md of the source describe them.</p>",
        "</body></html>",
    ]
    return "\n".join(part for part in parts if part).encode()


def _definitions(facts: Mapping[str, str]) -> str:
    if not facts:
        return ""
    rows = (
        f"<dt>{escape(name)}</dt><dd><code>{escape(value)}</code></dd>"
        for name, value in facts.items()
    )
    return f"<dl>{''.join(rows)}</dl>"


def _section(api: str, listed: Sequence[tuple[str, str]]) -> str:
    items = (f"<li><code>{escape(method)} {escape(path)}</code></li>" for method, path in listed)
    return f"<h2>{escape(api)}</h2><ul>{''.join(items)}</ul>"


def _example(shown: PageFacts, model: str) -> str:
    """A command for a shell; a name that would need quoting there is left out."""
    named = "" if set(model) & set("'\"\\") else f'"model": "{model}", '
    body = f'{{{named}"messages": [{{"role": "user", "content": "Hello!"}}]}}'
    key = " -H 'authorization: Bearer KEY'" if shown.needs_key else ""
    head = f"curl {shown.address}/v1/chat/completions{key} -H 'content-type: application/json'"
    return f"{head} \\\n  -d '{body}'"


@dataclass(frozen=True)
class UiFile:
    """A file and the headers that go with it; called, it answers."""

    content: bytes
    content_type: str

    @cached_property
    def etag(self) -> str:
        """Weak: it is that of the compressed content, too."""
        return f'W/"{sha256(self.content).hexdigest()[:32]}"'

    @cached_property
    def compressed(self) -> bytes:
        return gzip.compress(self.content, 9, mtime=0)

    async def __call__(self, exchange: Exchange) -> None:
        """Answers also for `/`, where the answer depends on what the client accepts."""
        headers = (*_HEADERS, ("etag", self.etag), ("vary", "accept, accept-encoding"))
        known = (exchange.header(b"if-none-match") or b"").decode("latin-1")
        if known == "*" or self.etag in (each.strip() for each in known.split(",")):
            await exchange.answer(Response(status=NOT_MODIFIED, headers=headers))
            return
        body = self.content
        if _takes_gzip(exchange):
            body, headers = self.compressed, (*headers, ("content-encoding", "gzip"))
        await exchange.answer(Response(body=body, content_type=self.content_type, headers=headers))


def read_ui_file(name: str) -> UiFile:
    path = FOLDER / name
    return UiFile(path.read_bytes(), _TYPES[path.suffix])


def _takes_gzip(exchange: Exchange) -> bool:
    codings = (exchange.header(b"accept-encoding") or b"").decode("latin-1").lower()
    listed = [each.replace(" ", "").partition(";") for each in codings.split(",")]
    return any(name == "gzip" and weight not in ("q=0", "q=0.0") for name, _, weight in listed)


_ROOT = AnswerSchema("Root", object_of({"status": TEXT, "openapi": TEXT}), also=("text/html",))
ROOT_ROUTES: tuple[ApiRoute, ...] = tuple(
    ApiRoute(name, "GET", path, "What is here; for browsers a page.", _ROOT, policy="open")
    for name, path in (("root", "/"), ("docs", "/docs"))
)
