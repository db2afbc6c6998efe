"""The page at `/docs`: one screen without scripts. Invariant: every text parameter is escaped, and
the content security policy allows only its own style, so that unescaped text could not run."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from html import escape

from cadenza.server.errors import Headers

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


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFacts:
    """What the page shows. `state`: of the engine, in one word, and why, if that is known.
    `models`: their names; None where the reader may not know them. `needs_key`: whether requests
    need an API key. `facts`: of the model, by what they are. `address`: the URL of this server, as
    the reader called it. `endpoints`: method and path of each, by the API that has it."""

    version: str
    state: str
    models: Sequence[str] | None
    needs_key: bool
    facts: Mapping[str, str]
    address: str
    endpoints: Mapping[str, Sequence[tuple[str, str]]]


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
