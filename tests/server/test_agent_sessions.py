"""Sessions of coding agents: every turn is answered, and finds the turn before it in the cache."""

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from tests.server.agent_sessions import NUM_TURNS, messages_session, responses_session
from tests.server.harness import RunningServer

PAGE_TOKENS = 16


def messages_counts(usage: dict[str, Any]) -> tuple[int, int]:
    """The tokens of the prompt, and those of them that were cached."""
    cached = usage["cache_read_input_tokens"]
    return usage["input_tokens"] + cached, cached


def responses_counts(usage: dict[str, Any]) -> tuple[int, int]:
    return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize(
    ("path", "session", "counts"),
    [
        ("/v1/messages?beta=true", messages_session, messages_counts),
        ("/v1/responses", responses_session, responses_counts),
    ],
    ids=["messages", "responses"],
)
def test_each_turn_of_a_session_finds_the_turn_before_it_in_the_cache(
    bundled: RunningServer,
    path: str,
    session: Callable[[], Iterator[dict[str, Any]]],
    counts: Callable[[dict[str, Any]], tuple[int, int]],
) -> None:
    found = [counts(usage) for usage in usages(bundled, path, session())]
    assert len(found) == NUM_TURNS
    for (before, _), (num_tokens, cached) in pairwise(found):
        assert before < num_tokens
        assert cached >= before // PAGE_TOKENS * PAGE_TOKENS, found


def usages(
    server: RunningServer, path: str, bodies: Iterable[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    with server.client() as client:
        for body in bodies:
            answer = client.post(path, json={**body, "model": "scripted"})
            assert answer.status_code == 200, answer.text
            yield answer.json()["usage"]
