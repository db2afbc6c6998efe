"""What takes the page at / longer: a real server whose engine is killed, long answers, axe-core."""

import io
import json
import os
import signal
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.server.harness import InBackground, in_background
from tests.server.serve_process import serve_process
from tests.ui.conftest import PATIENCE_MS, Visiting
from tests.ui.test_chat_page import HOSTILE, finish
from tests.ui.test_live_page import events

pytestmark = pytest.mark.soak

NUM_STREAMS = 32
NUM_TOKENS = 20_000
MOST_FRAME_MS = 50.0
FLAGS = ("--port", "0", "--max-num-seqs", str(NUM_STREAMS + 1), "--log-format", "json")
WORDS = "the quick brown fox jumps over the lazy dog one two three four five six seven "
MIXED = (
    f"## the quick brown fox\n\n{WORDS * 4}with *the quick* and `one two`\n\n- {WORDS}\n- {WORDS}"
    f"\n\n```\n{WORDS}\n{WORDS}\n```\n\n| one | two |\n|---|---|\n| three | four |\n\n"
)
LONG_ANSWERS = {"mixed": MIXED, "code": f"```\n{(WORDS + chr(10)) * 400}", "one line": WORDS * 400}


def test_a_killed_engine_is_said_and_the_answer_goes_on_and_is_proved(browser: Any) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True}
    with serve_process(*FLAGS) as serving:
        serving.wait_ready()
        page = browser.new_page()
        page.set_default_timeout(6 * PATIENCE_MS)
        page.goto(serving.url)
        page.get_by_role("button", name="Live", exact=True).click()
        page.locator(".now").wait_for()
        streams: list[InBackground] = in_background(
            [lambda: serving.post("/v1/completions", body).json()] * NUM_STREAMS
        )
        page.fill("#message", "Tell me a short story about a fox who learns to swim.")
        page.keyboard.press("Enter")
        page.locator(".message.assistant .md", has_text="a").wait_for()
        os.kill(serving.engine_pid(), signal.SIGKILL)
        page.get_by_text("The engine is being restarted").first.wait_for()
        page.get_by_role("button", name="Prove it", exact=True).click()
        page.get_by_text("Equal, bit for bit.").wait_for()
        counts = {each.result()["usage"]["completion_tokens"] for each in streams}
        assert counts == {1500}
        page.close()


@pytest.mark.parametrize("kind", LONG_ANSWERS)
def test_a_long_answer_costs_no_frame_more_than_its_time(
    visit: Visiting, browser: Any, tmp_path: Path, kind: str
) -> None:
    """CPU time of the tasks of the page's main thread, which other processes do not change."""
    trace = tmp_path / "trace.json"
    seen = visit(LONG_ANSWERS[kind], num_tokens=NUM_TOKENS)
    seen.page.set_default_timeout(20 * PATIENCE_MS)
    browser.start_tracing(page=seen.page, path=str(trace), categories=["toplevel"])
    seen.ask()
    finish(seen)
    seen.page.evaluate(
        """async () => {
          const log = document.querySelector(".log");
          for (let at = log.scrollHeight; at > 0; at -= 300) {
            log.scrollTop = at;
            await new Promise(requestAnimationFrame);
          }
        }"""
    )
    browser.stop_tracing()
    assert longest_task_ms(json.loads(trace.read_text())["traceEvents"]) < MOST_FRAME_MS


def longest_task_ms(found: list[dict[str, Any]]) -> float:
    mains = {
        (event["pid"], event["tid"])
        for event in found
        if event.get("name") == "thread_name" and event["args"].get("name") == "CrRendererMain"
    }
    tasks = [
        event["tdur"] / 1000
        for event in found
        if event["name"].endswith("RunTask")
        and (event["pid"], event["tid"]) in mains
        and "tdur" in event
    ]
    assert len(tasks) > NUM_TOKENS / 100
    return max(tasks)


@pytest.fixture(scope="module")
def axe_core(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("axe")
    try:
        subprocess.run(["npm", "pack", "--silent", "axe-core@4"], cwd=folder, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("npm does not find axe-core")
    (path,) = folder.iterdir()
    with tarfile.open(fileobj=io.BytesIO(path.read_bytes())) as archive:
        member = archive.extractfile("package/axe.min.js")
        assert member is not None
        return member.read().decode()


@pytest.mark.parametrize(("width", "scheme"), [(1100, "light"), (320, "dark")])
def test_axe_finds_nothing(visit: Visiting, axe_core: str, width: int, scheme: str) -> None:
    seen = visit(
        f"{HOSTILE}\n\n# Head\n\n1. one\n\n| a | b |\n|--|--|\n| 1 | 2 |\n\n> quote",
        viewport={"width": width, "height": 700},
        color_scheme=scheme,
        bypass_csp=True,  # axe is injected
    )
    seen.page.route(
        "**/debug/batch/stream*",
        lambda route: route.fulfill(content_type="text/event-stream", body=events(50)),
    )
    seen.page.locator(".welcome").wait_for()
    seen.page.evaluate(axe_core)
    for name in ("", "Send", "Settings", "Live"):
        if name == "Send":
            seen.ask()
            finish(seen)
        elif name:
            seen.press(name)
        found = seen.page.evaluate("async () => (await axe.run()).violations")
        assert [(each["id"], each["nodes"][0]["html"]) for each in found] == [], name
