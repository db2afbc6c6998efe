"""Usage says why a prompt was not found whole in the prefix cache, in each dialect."""

from typing import Any

import pytest

from tests.server.bodies import PATHS
from tests.server.dialects import body_of
from tests.server.harness import RunningServer
from tests.server.test_metrics_and_log import read_metrics

LINES = "The quick brown fox jumps over the lazy dog, and a small red hen follows. "
NAMES = ("chat", "completions", "responses", "messages")


def asked(name: str, text: str, **fields: Any) -> dict[str, Any]:
    """A body with a prompt that no other call has; each API has a salt of its own."""
    fields = {"cache_salt": name, **fields}
    if name == "completions":
        return {"prompt": text, "max_tokens": 1, **fields}
    return body_of(name, [{"role": "user", "content": text}], 1, **fields)


def details_of(usage: dict[str, Any], path: str) -> dict[str, Any]:
    """The member of a usage that has a `cache_miss`."""
    if path == "messages":
        return usage
    return usage["input_tokens_details" if path == "responses" else "prompt_tokens_details"]


@pytest.mark.parametrize("path", NAMES)
def test_usage_says_that_a_prompt_is_new_then_found_then_differs(
    bundled: RunningServer, path: str
) -> None:
    def told(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
        answer = bundled.post(PATHS[path], asked(path, text))
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        return details_of(usage, path), usage

    whole = LINES * 3
    first, _ = told(whole)
    assert first["cache_miss"]["reason"] == "new"
    found, _ = told(whole)
    assert "cache_miss" not in found
    changed, usage = told(whole.replace("hen", "cat"))
    num_cached = changed.get("cached_tokens", changed.get("cache_read_input_tokens"))
    num_tokens = usage.get("prompt_tokens", usage.get("total_tokens", 10_000))
    assert changed["cache_miss"]["reason"] == "differs"
    assert num_cached <= changed["cache_miss"]["shared_tokens"] < num_tokens
    assert changed["cache_miss"]["shared_tokens"] > 5


def test_the_last_chunk_of_a_stream_says_it(bundled: RunningServer) -> None:
    streaming = {"stream": True, "stream_options": {"include_usage": True}}
    body = asked("completions", LINES, cache_salt="a stream", **streaming)
    usage = bundled.events("/v1/completions", body)[-2]["usage"]
    miss = {"shared_tokens": 0, "reason": "new"}
    assert usage["prompt_tokens_details"]["cache_miss"] == miss


def test_the_first_of_several_prompts_with_a_miss_is_told(bundled: RunningServer) -> None:
    texts = [LINES, "Other words. " * 12]
    body = asked("completions", LINES, cache_salt="several")
    bundled.post("/v1/completions", body)
    usage = bundled.post("/v1/completions", {**body, "prompt": texts}).json()["usage"]
    miss = {"shared_tokens": 0, "reason": "differs"}
    assert usage["prompt_tokens_details"]["cache_miss"] == miss


def test_metrics_count_the_prompts_by_reason_and_the_tokens_behind_a_difference(
    bundled: RunningServer,
) -> None:
    def count(name: str, label: str = "") -> float:
        found = [
            value
            for series, value in read_metrics(bundled).items()
            if series.startswith(f"cadenza:{name}_total{{") and label in series
        ]
        assert len(found) == 1
        return found[0]

    body = asked("completions", LINES, cache_salt="counted")
    bundled.post("/v1/completions", body)
    before = count("prefix_cache_missed_prompts", 'reason="differs"')
    tokens_before = count("prefix_cache_differing_tokens")
    changed = {**body, "prompt": LINES.replace("fox", "cat")}
    usage = bundled.post("/v1/completions", changed).json()["usage"]
    miss = usage["prompt_tokens_details"]["cache_miss"]
    assert count("prefix_cache_missed_prompts", 'reason="differs"') == before + 1
    num_differing = count("prefix_cache_differing_tokens") - tokens_before
    assert num_differing == usage["prompt_tokens"] - miss["shared_tokens"] > 0
