"""The page at / in a real browser: Chromium, driven by Playwright, over a scripted engine.

Skipped with a reason where one of them is absent, unless CADENZA_REQUIRE_BROWSER=1. Invariant: in
every test the page asks nothing of another address, logs nothing and throws nothing.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.server.service import ServerOptions
from tests.cli.harness import write_model
from tests.server.harness import RunningServer, running_server
from tests.server.scripted_engine import ScriptedEngine

CHROMIUM = Path("/usr/bin/chromium")
SWITCHES = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)
CONTEXT_TOKENS = 4096
PATIENCE_MS = 20_000  # of one expectation: a loaded machine must not fail a correct page


def absent(reason: str) -> None:
    if os.environ.get("CADENZA_REQUIRE_BROWSER") == "1":
        pytest.fail(f"CADENZA_REQUIRE_BROWSER=1, but {reason}", pytrace=False)
    pytest.skip(f"{reason} (`make test-ui`)")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    if not CHROMIUM.exists():
        absent(f"there is no {CHROMIUM}")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        absent("playwright is not installed")
        raise
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=str(CHROMIUM), args=list(SWITCHES), timeout=PATIENCE_MS
        )
        yield launched
        launched.close()


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextFrontend:
    return TextFrontend(open_checkpoint(write_model(tmp_path_factory.mktemp("models") / "tiny")))


@dataclass(slots=True, eq=False)
class Visit:
    """A page of a server; `faults` is what it must not do."""

    page: Any
    server: RunningServer
    engine: ScriptedEngine
    answer: str
    expected_faults: tuple[str, ...] = ()
    faults: list[str] = field(default_factory=list)

    def ask(self, words: str = "Hello") -> None:
        self.page.fill("#message", words)
        self.page.keyboard.press("Enter")

    def see(self, text: str) -> Any:
        """Waits for a text on the page."""
        found = self.page.get_by_text(text).first
        found.wait_for(state="visible")
        return found

    def press(self, name: str) -> None:
        self.page.get_by_role("button", name=name, exact=True).first.click()

    def stream(self, *deltas: dict[str, Any], is_cut: bool = False, receipt: object = None) -> None:
        """Has the next requests for a chat answered with these deltas, and a receipt at the end."""
        choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
        if receipt is not None:
            end = {"index": 0, "delta": {}, "finish_reason": "stop", "receipt": receipt}
            choices.append(end)
        chunks: list[Any] = [{"model": "scripted", "choices": [each]} for each in choices]
        frames = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        body = "".join(frames) + ("" if is_cut else "data: [DONE]\n\n")
        self.page.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(content_type="text/event-stream", body=body),
        )


Visiting = Callable[..., Visit]


@pytest.fixture
def visit(browser: Any, text: TextFrontend) -> Iterator[Visiting]:
    """Opens the page of a new server, whose every answer is `answer`, or `num_tokens` of it over
    and over."""
    with ExitStack() as stack:
        visits: list[Visit] = []

        def open_page(
            answer: str = "A fox, a dog.",
            options: ServerOptions | None = None,
            step_s: float = 0.0,
            num_tokens: int | None = None,
            face: TextFrontend | None = None,
            **context: Any,
        ) -> Visit:
            face = face or text
            script = face.encode(answer)
            most = num_tokens or len(script)
            engine = ScriptedEngine(script, max_model_len=most + CONTEXT_TOKENS, step_s=step_s)
            server = stack.enter_context(running_server(engine, face, options))
            opened = browser.new_context(**context)
            stack.callback(opened.close)
            settings = json.dumps({"max_tokens": str(most)})
            opened.add_init_script(
                f"localStorage.getItem('cadenza.settings') ?? "
                f"localStorage.setItem('cadenza.settings', {settings!r})"
            )
            page = opened.new_page()
            page.set_default_timeout(PATIENCE_MS)
            made = Visit(page, server, engine, answer)
            visits.append(made)
            watch(made)
            page.goto(server.url)
            return made

        yield open_page
        for each in visits:
            unexpected = [
                fault
                for fault in each.faults
                if not any(known in fault for known in each.expected_faults)
            ]
            assert unexpected == []


def watch(visit: Visit) -> None:
    page, faults = visit.page, visit.faults
    known = (visit.server.url, "blob:", "data:image/")
    page.on("console", lambda message: faults.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: faults.append(f"error: {error}"))
    page.on("dialog", lambda dialog: (faults.append("dialog"), dialog.dismiss()))
    page.on(
        "request", lambda asked: asked.url.startswith(known) or faults.append(f"left: {asked.url}")
    )
