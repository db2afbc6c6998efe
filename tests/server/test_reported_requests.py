"""Requests of `reported_requests.json`, which failed against servers of this kind: how each is
sent, and what its answer must be. docs/compatibility.md has their verdicts."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import httpx
import pytest

from tests.server.harness import MODEL, RunningServer

LONG_TEXT = "word " * 40_000
"""What `$LONG` stands for: more than a context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """One of the requests.

    Args:
        raw: the body as it is, where it is no JSON of `body`.
        checks: each the name of one of `CHECKS`, and its arguments.
        why: it is refused, or falls short.
    """

    name: str
    dialect: str
    tried: str
    path: str
    status: int
    verdict: Literal["works", "mended", "refused by name", "falls short"]
    body: dict[str, Any] | None = None
    raw: str | None = None
    method: str | None = None
    query: str = ""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    checks: Sequence[Sequence[Any]] = ()
    why: str = ""

    @property
    def shown(self) -> str:
        return f"{self.dialect}/{self.name}"

    def send(self, client: httpx.Client, model: str) -> httpx.Response:
        content = self.raw
        if self.body is not None:
            body = {"model": model, **self.body}
            content = json.dumps(body).replace("$MODEL", model).replace("$LONG", LONG_TEXT)
        method = self.method or ("GET" if content is None else "POST")
        headers = {"content-type": "application/json", **self.headers}
        return client.request(method, self.path + self.query, content=content, headers=headers)

    def faults(self, answer: httpx.Response) -> list[str]:
        """What of the answer is not as it must be."""
        if answer.status_code != self.status:
            return [f"status {answer.status_code}, not {self.status}: {answer.text[:500]}"]
        failed = [check for check in self.checks if not CHECKS[check[0]](answer, *check[1:])]
        return [f"{check}: {answer.text[:2000]}" for check in failed]


def read_reported() -> list[Reported]:
    found: list[dict[str, Any]] = json.loads(
        (Path(__file__).parent / "reported_requests.json").read_text()
    )
    return [Reported(**each) for each in found]


def at(value: Any, path: str) -> Any:
    """What is found along names and places, such as `choices.0.message`; None without it."""
    for part in path.split("."):
        try:
            value = value[int(part) if part.isdigit() else part]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = (line.removeprefix("data: ") for line in answer.text.splitlines() if "data: " in line)
    return [json.loads(line) for line in lines if line != "[DONE]"]


def _is(answer: httpx.Response, path: str, value: object) -> bool:
    return at(answer.json(), path) == value


def _has(answer: httpx.Response, path: str) -> bool:
    return at(answer.json(), path) is not None


def _lacks(answer: httpx.Response, path: str) -> bool:
    return at(answer.json(), path) is None


def _is_text(answer: httpx.Response, path: str) -> bool:
    return isinstance(at(answer.json(), path), str)


def _count(answer: httpx.Response, path: str, number: int) -> bool:
    return len(at(answer.json(), path)) == number


def _begins(answer: httpx.Response, path: str, words: str) -> bool:
    return at(answer.json(), path).startswith(words)


def _without(answer: httpx.Response, path: str, words: str) -> bool:
    return words not in at(answer.json(), path)


def _json_keys(answer: httpx.Response, path: str, keys: list[str]) -> bool:
    try:
        found: object = json.loads(at(answer.json(), path))
    except (TypeError, ValueError):
        return False
    return isinstance(found, dict) and set(keys) <= cast(dict[str, object], found).keys()


def _error_has(answer: httpx.Response, words: str) -> bool:
    error = answer.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    return words.lower() in message.lower()


def _header(answer: httpx.Response, name: str, words: str) -> bool:
    return words in answer.headers.get(name, "")


def _header_lacks(answer: httpx.Response, name: str) -> bool:
    return name not in answer.headers


def _stream_one_id(answer: httpx.Response) -> bool:
    """One id for all chunks; the first has the role."""
    events = events_of(answer)
    is_begun = at(events[0], "choices.0.delta.role") == "assistant"
    return is_begun and len(events) > 1 and len({event["id"] for event in events}) == 1


def _lines_stream(answer: httpx.Response) -> bool:
    """Ollama's: the text in lines of its own, however many; the last line alone is done."""
    lines = [json.loads(line) for line in answer.text.splitlines()]
    pieces = [line for line in lines[:-1] if line["message"]["content"]]
    return bool(pieces) and [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]


def _stream_finish(answer: httpx.Response, reasons: list[str]) -> bool:
    """One for each choice, null before it, and [DONE] at last."""
    choices = [choice for event in events_of(answer) for choice in event["choices"]]
    found = [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None]
    return sorted(found) == sorted(reasons) and answer.text.endswith("data: [DONE]\n\n")


def _stream_usage(answer: httpx.Response) -> bool:
    *before, last = events_of(answer)
    is_last = last["choices"] == [] and last["usage"]["completion_tokens"] > 0
    return is_last and not any(event.get("usage") for event in before)


def _stream_calls(answer: httpx.Response, number: int) -> bool:
    """As many calls: each has its id and name once, and arguments that are JSON."""
    parts = [
        part
        for event in events_of(answer)
        for choice in event["choices"]
        for part in choice["delta"].get("tool_calls", ())
    ]
    calls: dict[int, list[dict[str, Any]]] = {}
    for part in parts:
        calls.setdefault(part["index"], []).append(part)
    for found in calls.values():
        named = [part for part in found if part["function"].get("name")]
        json.loads("".join(part["function"].get("arguments", "") for part in found))
        if len(named) != 1 or named != [part for part in found if part.get("id")]:
            return False
    return [*calls] == [*range(number)]


def _events_numbered(answer: httpx.Response) -> bool:
    numbers = [event["sequence_number"] for event in events_of(answer)]
    return numbers == [*range(len(numbers))]


def _events_placed(answer: httpx.Response) -> bool:
    """Each event of an item says which one it is of, each item has an id."""
    of_items = [event for event in events_of(answer) if "response" not in event]
    items = [event["item"] for event in of_items if "item" in event]
    is_named = all(event.get("item_id") or event.get("item") for event in of_items)
    are_placed = all(isinstance(event.get("output_index"), int) for event in of_items)
    return bool(items) and is_named and are_placed and all(item["id"] for item in items)


def _events_have(answer: httpx.Response, kinds: list[str]) -> bool:
    return set(kinds) <= {event["type"] for event in events_of(answer)}


CHECKS: Mapping[str, Callable[..., bool]] = {
    "is": _is,
    "has": _has,
    "lacks": _lacks,
    "text": _is_text,
    "count": _count,
    "begins": _begins,
    "without": _without,
    "json_keys": _json_keys,
    "error_has": _error_has,
    "header": _header,
    "header_lacks": _header_lacks,
    "stream_one_id": _stream_one_id,
    "lines_stream": _lines_stream,
    "stream_finish": _stream_finish,
    "stream_usage": _stream_usage,
    "stream_calls": _stream_calls,
    "events_numbered": _events_numbered,
    "events_placed": _events_placed,
    "events_have": _events_have,
}


REPORTED = read_reported()
TABLE = Path(__file__).parents[2] / "docs" / "compatibility.md"


@pytest.mark.parametrize("reported", REPORTED, ids=lambda each: each.shown)
def test_a_reported_request_is_answered_as_it_should_be(
    bundled: RunningServer, reported: Reported
) -> None:
    with bundled.client() as client:
        assert reported.faults(reported.send(client, MODEL)) == []


def test_the_table_of_the_documentation_has_every_request_and_its_verdict() -> None:
    assert [line for line in TABLE.read_text().splitlines() if line.startswith("| ")][1:] == [
        table_row(each) for each in REPORTED
    ]


def table_row(reported: Reported) -> str:
    verdict = f"{reported.verdict}: {reported.why}" if reported.why else reported.verdict
    return f"| {reported.tried} | {reported.dialect} | {verdict} |"
