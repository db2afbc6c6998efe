"""The files of the page at `/`, by path in `UI_FILES`. Invariant: read once, at the start; no part
of a request becomes a path; the page runs only its own scripts, builds no HTML from text, and
requests no other address."""

import gzip
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path

import cadenza
from cadenza.server.errors import Headers
from cadenza.server.http.exchange import NOT_MODIFIED, Exchange, Response
from cadenza.server.operations.page import HTML_TYPE

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
