"""Images on the page at /: attached, shown, sent as data URLs, kept; only where the model sees."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from cadenza.frontend.text_frontend import TextFrontend
from tests.faces.seeing import seeing_text
from tests.ui.conftest import Visit, Visiting


@pytest.fixture(scope="module")
def face() -> TextFrontend:
    return seeing_text()


def png(colour: str = "red") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (30, 20), colour).save(file, "PNG")
    return file.getvalue()


def url_of(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def attach(seen: Visit, *files: tuple[str, bytes, str]) -> None:
    given = [{"name": name, "mimeType": kind, "buffer": data} for name, data, kind in files]
    seen.page.locator(".compose input[type=file]").set_input_files(given)


def shown(seen: Visit, where: str) -> list[str]:
    return [each.get_attribute("src") for each in seen.page.locator(f"{where} img").all()]


def bodies(seen: Visit) -> list[Any]:
    found: list[Any] = []
    seen.page.on(
        "request", lambda sent: sent.method == "POST" and found.append(sent.post_data_json)
    )
    return found


def dropped(seen: Visit, event: str, member: str) -> None:
    """An event of this kind on the message with a file in its data."""
    seen.page.evaluate(
        """([event, member, bytes]) => {
            const data = new DataTransfer();
            data.items.add(new File([new Uint8Array(bytes)], "given.png", { type: "image/png" }));
            const kinds = { paste: ClipboardEvent, drop: DragEvent };
            const more = { [member]: data, bubbles: true, cancelable: true };
            const made = new kinds[event](event, more);
            document.querySelector("#message").dispatchEvent(made);
        }""",
        [event, member, list(png())],
    )


def test_images_are_attached_shown_sent_and_kept(visit: Visiting, face: TextFrontend) -> None:
    seen = visit(face=face)
    sent = bodies(seen)
    seen.stream({"role": "assistant", "content": "Two squares."})
    attach(seen, ("red.png", png(), "image/png"), ("blue.png", png("blue"), "image/png"))
    seen.page.locator(".compose img").nth(1).wait_for()
    assert shown(seen, ".compose") == [url_of(png()), url_of(png("blue"))]
    seen.page.get_by_role("button", name="Remove red.png").click()
    seen.ask("What is it?")
    seen.see("Two squares.")
    parts = [
        {"type": "image_url", "image_url": {"url": url_of(png("blue"))}},
        {"type": "text", "text": "What is it?"},
    ]
    assert sent[-1]["messages"] == [{"role": "user", "content": parts}]
    assert shown(seen, ".message.user") == [url_of(png("blue"))]
    assert shown(seen, ".compose") == []

    seen.press("Edit")
    seen.page.get_by_label("Edit your message").fill("And its colour?")
    seen.press("Send as a new version")
    seen.page.locator(".message.user", has_text="And its colour?").wait_for()
    assert sent[-1]["messages"][0]["content"][0] == parts[0]

    seen.page.reload()
    seen.page.locator(".welcome").wait_for()
    seen.press("And its colour?")
    seen.page.locator(".message.user img").wait_for()
    assert shown(seen, ".message.user") == [url_of(png("blue"))]


def test_images_are_pasted_and_dropped(visit: Visiting, face: TextFrontend) -> None:
    seen = visit(face=face)
    seen.page.locator(".compose input[type=file]").wait_for(state="attached")
    dropped(seen, "paste", "clipboardData")
    seen.page.locator(".compose img").wait_for()
    dropped(seen, "drop", "dataTransfer")
    seen.page.locator(".compose img").nth(1).wait_for()
    assert shown(seen, ".compose") == [url_of(png())] * 2


def test_an_image_alone_is_a_message(visit: Visiting, face: TextFrontend) -> None:
    seen = visit(face=face)
    sent = bodies(seen)
    seen.stream({"role": "assistant", "content": "A square."})
    assert seen.page.get_by_role("button", name="Send").is_disabled()
    attach(seen, ("red.png", png(), "image/png"))
    seen.page.locator(".compose img").wait_for()
    seen.press("Send")
    seen.see("A square.")
    (message,) = sent[-1]["messages"]
    assert [part["type"] for part in message["content"]] == ["image_url"]


def test_what_is_no_image_is_refused_with_its_name(visit: Visiting, face: TextFrontend) -> None:
    seen = visit(face=face)
    attach(seen, ("notes.txt", b"words", "text/plain"))
    seen.see("notes.txt: images are JPEG, PNG, WebP or GIF.")
    attach(seen, *[("red.png", png(), "image/png")] * 9)
    seen.see("A message takes at most 8 images.")
    assert shown(seen, ".compose") == []


def test_a_model_that_does_not_see_has_no_place_for_images(visit: Visiting) -> None:
    seen = visit()
    seen.page.locator(".welcome strong").wait_for()
    assert seen.page.locator(".compose input[type=file]").count() == 0
    dropped(seen, "paste", "clipboardData")
    seen.page.wait_for_timeout(100)
    assert shown(seen, ".compose") == []


def test_only_images_in_data_urls_come_out_of_an_import(
    visit: Visiting, face: TextFrontend, tmp_path: Path
) -> None:
    seen = visit(face=face)
    images = [
        {"name": "kept", "url": url_of(png())},
        {"name": "pixel", "url": "https://example.org/p.png"},
        {"name": "svg", "url": "data:image/svg+xml;base64,PHN2Zz4="},
        {"name": "script", "url": "javascript:window.ran=1"},
        "no image",
    ]
    message = {"id": "m1", "parent": None, "role": "user", "text": "See", "images": images}
    whole = {"id": "c1", "title": "Brought", "leaf": "m1", "messages": {"m1": message}}
    file = tmp_path / "export.json"
    file.write_text(json.dumps({"cadenza": 1, "conversations": [whole]}))
    seen.page.locator(".menu input[type=file]").set_input_files(file)
    seen.press("Brought")
    seen.page.locator(".message.user img").wait_for()
    assert shown(seen, ".message.user") == [url_of(png())]
    assert seen.page.evaluate("window.ran") is None
