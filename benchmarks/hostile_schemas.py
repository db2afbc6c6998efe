"""What forms that are made to cost much do to another request: the worst gap between its tokens.

    python benchmarks/hostile_schemas.py [--model FOLDER]

Streams free text from `cadenza serve` without a pause, and meanwhile asks for an answer in each
form, one after the other. Prints the status of each answer, its time, and the worst gap between two
tokens of the free stream in that time. The first lines are ordinary forms, for comparison. Fails if
an answer is neither a 200 nor a 400, or takes longer than 15 seconds.
"""

import argparse
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from serving import serving

MAX_TOKENS = 64
MOST_S = 15.0
TIMEOUT_S = 60.0


def optional(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(count)}}


def doubling(count: int) -> str:
    rules = "\n".join(f'r{i}: r{i + 1} r{i + 1} | "a"' for i in range(count))
    return f'start: r0\n{rules}\nr{count}: "b"'


def enum(num_bytes: int) -> dict[str, Any]:
    return {"enum": [f"{i:04} {'x' * 50}" for i in range(num_bytes // 60)]}


def nested(levels: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        found = {"type": "array", "items": found}
    return found


def patterns(*lengths: int) -> dict[str, Any]:
    return {"allOf": [{"type": "string", "pattern": f"^([ab]{{{n}}})*$"} for n in lengths]}


FORMS: Mapping[str, dict[str, Any]] = {
    "any object": {"json_object": True},
    "three properties": {"json": {**optional(3), "required": ["p0", "p1", "p2"]}},
    "[a-z ]{64,}": {"regex": "[a-z ]{64,}"},
    "enum just under 64 KiB": {"json": enum(64_500)},
    "enum just over 64 KiB": {"json": enum(70_000)},
    "4,096 choices": {"choice": [f"no. {i}" for i in range(4096)]},
    "two choices of 30 KB": {"choice": ["a" * 30_000 + "b", "a" * 30_000 + "c"]},
    "100 optional properties": {"json": optional(100)},
    "1,500 optional properties": {"json": optional(1500)},
    "nested 24 levels": {"json": nested(24)},
    "nested 60 levels": {"json": nested(60)},
    "a $ref to itself": {"json": {"$ref": "#"}},
    "a list of lists, for ever": {"json": {"type": "array", "minItems": 1, "items": {"$ref": "#"}}},
    "multipleOf 9973": {"json": {"type": "integer", "multipleOf": 9973}},
    "multipleOf 999983": {"json": {"type": "integer", "multipleOf": 999_983}},
    "minLength 10^8": {"json": {"type": "string", "minLength": 10**8}},
    "five repeated patterns": {"json": patterns(7, 11, 13, 17, 19)},
    "a?{500}a{500}": {"regex": "(a?){500}a{500}"},
    "nested counts": {"regex": "((((a{1,50}){1,50}){1,50}b){1,50}c){1,50}"},
    "(a|b)*a(a|b){20}": {"regex": "(a|b)*a(a|b){20}"},
    "2,000 stars": {"regex": "(a|aa|aaa)*" * 2000},
    r"(\w+\s?){1,1000}": {"regex": r"(\w+\s?){1,1000}"},
    "20,000 parentheses": {"regex": "(" * 20_000 + "a" + ")" * 20_000},
    "s: s s s s | s s | a": {"grammar": 'start: s\ns: s s s s | s s s | s s | "a" | ""'},
    "rules that double": {"grammar": doubling(400)},
    "more rules that double": {"grammar": doubling(900)},
    "2,000 optional rules": {
        "grammar": f"start: {' '.join(f'r{i}' for i in range(2000))}\n"
        + "\n".join(f'r{i}: "a"?' for i in range(2000))
    },
}


@dataclass(slots=True, eq=False)
class FreeStream:
    """Asks for free text again and again, and records the gaps between its tokens."""

    url: str
    worst_s: float = 0.0
    num_tokens: int = 0
    has_ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        body = {"prompt": "Once upon a time", "stream": True, "ignore_eos": True, "max_tokens": 400}
        with httpx.Client(timeout=TIMEOUT_S) as client:
            while not self.has_ended.is_set():
                with client.stream("POST", f"{self.url}/v1/completions", json=body) as answer:
                    answer.raise_for_status()
                    self._take(answer)

    def _take(self, answer: httpx.Response) -> None:
        last_s: float | None = None
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            now_s = time.perf_counter()
            if last_s is not None:
                self.worst_s = max(self.worst_s, now_s - last_s)
            last_s = now_s
            self.num_tokens += 1


def ask(url: str, form: dict[str, Any]) -> tuple[int, str]:
    """The status of an answer, and how it ended."""
    body = {"prompt": "Answer:", "temperature": 1.5, "seed": 3, "max_tokens": MAX_TOKENS}
    answer = httpx.post(
        f"{url}/v1/completions", json={**body, "structured_outputs": form}, timeout=TIMEOUT_S
    )
    found = answer.json()
    if answer.is_success:
        return answer.status_code, str(found["choices"][0]["finish_reason"])
    return answer.status_code, str(found["error"]["message"])[-70:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None)
    arguments = parser.parse_args()
    has_failed = False
    with serving(arguments.model) as url:
        stream = FreeStream(url)
        thread = threading.Thread(target=stream.run, daemon=True)
        thread.start()
        print(f"{'form':28} {'status':>6} {'seconds':>8} {'worst gap, ms':>14}  end")
        for name, form in FORMS.items():
            stream.worst_s = 0.0
            since, start_s = stream.num_tokens, time.perf_counter()
            status, end = ask(url, form)
            took_s = time.perf_counter() - start_s
            while stream.num_tokens < since + 8:  # a gap that the form caused has ended
                time.sleep(0.01)
            has_failed |= status not in (200, 400) or took_s > MOST_S
            print(
                f"{name:28} {status:6} {took_s:8.2f} {stream.worst_s * 1e3:14.0f}  {end}",
                flush=True,
            )
        stream.has_ended.set()
        thread.join()
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
