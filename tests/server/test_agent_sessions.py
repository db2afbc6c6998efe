"""Sessions of coding agents: every turn is answered, and finds the turn before it in the cache."""

import shutil
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.config import EngineConfig
from cadenza.frontend.loaded_model import load_model
from tests.server.agent_sessions import NUM_TURNS, messages_session, responses_session
from tests.server.harness import RunningServer, running_server
from tests.server.watched_service import WatchedService

PAGE_TOKENS = 16


def messages_counts(usage: dict[str, Any]) -> tuple[int, int]:
    """The tokens of the prompt, and those of them that were cached."""
    cached = usage["cache_read_input_tokens"]
    return usage["input_tokens"] + cached, cached


def responses_counts(usage: dict[str, Any]) -> tuple[int, int]:
    return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]


SESSIONS = pytest.mark.parametrize(
    ("path", "session", "counts"),
    [
        ("/v1/messages?beta=true", messages_session, messages_counts),
        ("/v1/responses", responses_session, responses_counts),
    ],
    ids=["messages", "responses"],
)
Session = Callable[[], Iterator[dict[str, Any]]]
Counts = Callable[[dict[str, Any]], tuple[int, int]]
SYSTEM_FIRST = (
    "{%- for message in turns -%}{%- if message.role == 'system' -%}"
    "{{ raise_exception('a system message stands at the beginning') }}"
    "{%- endif -%}{%- endfor -%}"
)
"""In front of the bundled template's turns: the rule of templates that agents often meet."""


@SESSIONS
def test_each_turn_of_a_session_finds_the_turn_before_it_in_the_cache(
    bundled: RunningServer, path: str, session: Session, counts: Counts
) -> None:
    check_session(bundled, path, session, counts)


@pytest.fixture(scope="module")
def system_first(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The bundled model with a template that refuses a later system message."""
    folder = tmp_path_factory.mktemp("models") / "system-first"
    shutil.copytree(open_checkpoint(None).folder, folder)
    template = folder / "chat_template.jinja"
    start = "{%- if tools -%}"
    assert start in template.read_text()
    template.write_text(template.read_text().replace(start, SYSTEM_FIRST + start, 1))
    config = EngineConfig(max_num_seqs=8, max_num_queued_reqs=64, max_num_batched_tokens=64)
    loaded = load_model(str(folder), config)
    with running_server(WatchedService(loaded.core, loaded.fingerprint), loaded.text) as running:
        yield running
    loaded.close()


@pytest.mark.soak
@SESSIONS
def test_a_template_that_wants_the_system_message_first_keeps_every_turn_in_the_cache(
    system_first: RunningServer, path: str, session: Session, counts: Counts
) -> None:
    check_session(system_first, path, session, counts)


def check_session(server: RunningServer, path: str, session: Session, counts: Counts) -> None:
    found = [counts(usage) for usage in usages(server, path, session())]
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
