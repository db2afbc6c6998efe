"""The live picture of the page at /, and its proof: over scripted events and answers."""

import json
import struct
from typing import Any

import pytest

from tests.ui.conftest import Visit, Visiting

PAGES = {"live": 120, "cached": 30, "free": 106}
COLOURS = {
    "waiting": (195, 202, 212),
    "prompt": (227, 154, 45),
    "decode": (31, 95, 174),
    "cached": (125, 79, 12),
    "drafts": (95, 208, 166),
}


def row(label: int, kind: str, **more: int) -> dict[str, Any]:
    counts = dict.fromkeys(("computed", "total", "cached", "new", "drafts", "preempted"), 0)
    return {"id": label, "kind": kind, **counts, **more}


def events(count: int) -> str:
    """The stream's text: two rows that run and one that waits, over `count` tenths of a second."""
    hello = {"v": 1, "rows": 16, "pages": 256, "page_size": 16, "model": "scripted"}
    frames = [("hello", hello)]
    for number in range(count):
        rows = [
            row(1, "decode", computed=90 + number, total=90 + number, new=1, drafts=1),
            row(2, "prompt", computed=10 * number, total=1000, cached=250),
            row(3, "waiting", total=64),
        ]
        step = {"t": 5000 + 100 * number, "tokens": 65, "steps": 2, "waiting": 1, "running": 2}
        more = {"pages": PAGES, "tok_s": 512.25, "gap_ms": 38.4, "rows": rows, "others": None}
        frames.append(("step", {**step, **more}))
    frames.append(("engine", {"state": "lost"}))
    return "".join([f"event: {name}\ndata: {json.dumps(value)}\n\n" for name, value in frames])


def test_the_batch_is_shown_as_a_picture_and_a_table(visit: Visiting) -> None:
    seen = visit(color_scheme="light", viewport={"width": 1100, "height": 900})
    seen.page.route(
        "**/debug/batch/stream*",
        lambda route: route.fulfill(content_type="text/event-stream", body=events(300)),
    )
    seen.press("Live")
    seen.see("2 of 16")
    now = seen.page.locator(".now").inner_text().split()
    assert [word for word in now if word.isdigit()] == "2 16 1 512 38 120 30 106".split()
    seen.see("The engine is being restarted")
    seen.page.locator("summary", has_text="Rows as a table").click()
    seen.page.locator(".rows tbody tr").nth(2).wait_for()
    cells = seen.page.locator(".rows tbody tr").all_inner_texts()
    assert cells[0].split() == ["1", "decode", "389", "389", "0", "1", "1"]
    assert cells[1].split() == ["2", "prompt", "2990", "1000", "250", "0", "0"]
    painted = colours_of(seen)
    assert all(colour in painted for colour in COLOURS.values()), painted
    assert seen.page.locator(".lines .uplot").count() == 3


def colours_of(seen: Visit) -> set[tuple[int, ...]]:
    found = seen.page.evaluate(
        """() => {
          const canvas = document.querySelector(".picture canvas");
          const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
          const found = new Set();
          for (let at = 0; at < data.length; at += 4) found.add(data.slice(at, at + 3).join());
          return [...found];
        }"""
    )
    return {tuple(int(part) for part in each.split(",")) for each in found}


RECEIPT = {
    "token_ids": [5, 7],
    "logprobs": [-0.625, -0.875],
    "logprob_digest": "d" * 64,
    "system_fingerprint": "fp",
    "params": {"seed": (1 << 64) - 3, "stop": ["}", '"{']},  # no number of JavaScript
}


def bits_of(value: float) -> str:
    return struct.pack(">f", value).hex()


@pytest.mark.parametrize("is_equal", [True, False])
def test_an_answer_is_proved_and_a_changed_bit_is_red(visit: Visiting, is_equal: bool) -> None:
    seen = visit()
    seen.stream({"content": "A fox."}, receipt=RECEIPT)
    again = -0.875 if is_equal else -0.87500006
    replay = {
        "equal": is_equal,
        "alone": is_equal,
        "beside": 0 if is_equal else 7,
        "tokens": RECEIPT["token_ids"],
        "logprobs": [-0.625, again],
        "bits": [bits_of(-0.625), bits_of(again)],
        "digest": "d" * 64,
        "expected_digest": "d" * 64,
        "fingerprint": "fp",
        "first_difference": None if is_equal else 1,
    }
    asked: list[Any] = []

    def answer(route: Any) -> None:
        asked.append(route.request.post_data_json)
        route.fulfill(json=replay)

    seen.page.route("**/v1/receipts/replay", answer)
    seen.ask()
    seen.press("Prove it")
    if is_equal:
        seen.see("Equal, bit for bit.")
        seen.see("alone, with nothing else in the batch")
    else:
        seen.see("Not equal. First difference: token 2.")
        seen.see("in another row, among 7 other requests")
    assert asked == [{"receipt": RECEIPT}]
    seen.page.locator("summary", has_text="Every token").click()
    rows = seen.page.locator(".prove tbody tr")
    assert rows.nth(1).inner_text().split() == ["2", "7", "7", bits_of(-0.875), bits_of(again)]
    assert seen.page.locator(".prove tr.fault").count() == (0 if is_equal else 1)
