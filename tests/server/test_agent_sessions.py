"""Whole sessions of two coding agents, in the shapes of `agent_requests.json`: every turn is
answered, and finds the turn before it in the cache."""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.config import EngineConfig
from cadenza.frontend.loaded_model import load_model
from tests.server.harness import RunningServer, WatchedService, running_server

AGENTS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "agent_requests.json").read_text()
)
NUM_TURNS = 20
_MARK = {"cache_control": {"type": "ephemeral"}}


def messages_session() -> Iterator[dict[str, Any]]:
    """The requests of an agent that speaks Anthropic's Messages API."""
    body = {**deepcopy(AGENTS["messages"]), "stream": False, "max_tokens": 3}
    body["messages"] = body["messages"][:2]
    for turn in range(NUM_TURNS):
        label = f"x-anthropic-billing-header: version=1; entry=cli; check={turn:05x};"
        body["system"][0]["text"] = label
        yield _with_last_marked(body)
        body["messages"] += _messages_turn(turn)


def _with_last_marked(body: dict[str, Any]) -> dict[str, Any]:
    """The mark of what to cache moves to the last message of blocks."""
    sent = deepcopy(body)
    blocks = [message["content"] for message in sent["messages"]]
    for each in blocks:
        if isinstance(each, list):
            for block in each:
                block.pop("cache_control", None)
    last = next(each for each in reversed(blocks) if isinstance(each, list))
    last[-1] |= _MARK
    return sent


def _messages_turn(turn: int) -> list[dict[str, Any]]:
    call = f"toolu_{turn:02}"
    read = {
        "type": "tool_use",
        "id": call,
        "name": "Read",
        "input": {"file_path": f"/{turn}.py"},
        "caller": {"type": "direct"},
    }
    answer: list[dict[str, Any]] = [{"type": "text", "text": f"I read file {turn}."}, read]
    if turn % 3 == 0:
        answer.insert(0, {"type": "thinking", "thinking": "look first", "signature": ""})
    result: dict[str, Any] = {"type": "tool_result", "tool_use_id": call, "content": f"x = {turn}"}
    if turn % 4 == 1:
        result |= {"content": "no such file", "is_error": True}
    said: list[dict[str, Any]] = [result]
    if turn % 5 == 4:
        said.append({"type": "text", "text": "go on"})
    messages = [{"role": "assistant", "content": answer}, {"role": "user", "content": said}]
    if turn % 6 == 2:
        messages.append({"role": "system", "content": f"<reminder>{turn}</reminder>"})
    return messages


def responses_session() -> Iterator[dict[str, Any]]:
    """The requests of an agent that speaks OpenAI's Responses API and sends all items again."""
    body = {**deepcopy(AGENTS["responses"]), "stream": False, "max_output_tokens": 3}
    patch = {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": None}
    files = {
        "type": "namespace",
        "name": "files",
        "description": "Files.",
        "tools": [{"type": "function", "name": "read", "parameters": {"type": "object"}}],
    }
    body["tools"] += [patch, files, {"type": "web_search"}, {"type": "image_generation"}]
    body["input"] = body["input"][:3]
    for turn in range(NUM_TURNS):
        body["client_metadata"] = {"turn": str(turn)}
        yield deepcopy(body)
        body["input"] += _responses_turn(turn)


def _responses_turn(turn: int) -> list[dict[str, Any]]:
    call = f"call_{turn:02}"
    kind = {"id": f"fc_{turn}", "call_id": call, "status": "completed"}
    said = {"type": "output_text", "text": f"I look at file {turn}.", "annotations": []}
    items: list[dict[str, Any]] = [
        {"type": "reasoning", "id": f"rs_{turn}", "summary": [], "encrypted_content": None},
        {"type": "message", "role": "assistant", "content": [said], "phase": "commentary"},
    ]
    match turn % 3:
        case 0:
            command = json.dumps({"command": ["cat", f"{turn}.py"]})
            items.append({"type": "function_call", "name": "shell", "arguments": command, **kind})
        case 1:
            text = f"*** Update File: {turn}.py"
            items.append({"type": "custom_tool_call", "name": "apply_patch", "input": text, **kind})
        case _:
            named = {"name": "read", "namespace": "files", "arguments": "{}"}
            items.append({"type": "function_call", **named, **kind})
    is_custom = turn % 3 == 1
    result = {"type": "custom_tool_call_output" if is_custom else "function_call_output"}
    output: Any = f"x = {turn}"
    if turn % 4 == 1:
        output = [{"type": "input_text", "text": output}]
    items.append({**result, "call_id": call, "output": output})
    if turn % 7 == 6:
        items.append({"role": "user", "content": [{"type": "input_text", "text": "go on"}]})
    return items


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
