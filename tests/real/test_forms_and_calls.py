"""SmolLM2 fills ten schemas and calls tools in a loop; skipped where the model is absent.

Its own chat template has no place for tools, so its folder gets the bundled model's, which has the
same marks. Everything is greedy. Invariant: each answer parses, and is valid by jsonschema_rs,
which has nothing in common with what constrained it.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import openai
import pytest

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.config import EngineConfig
from cadenza.frontend.loaded_model import load_model
from examples import tool_loop
from tests.server.harness import RunningServer, WatchedService, running_server

pytestmark = [pytest.mark.native, pytest.mark.slow]

CHAT = "/v1/chat/completions"
TEXT = {"type": "string", "maxLength": 16}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}


def object_of(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS: list[dict[str, Any]] = [
    object_of(city=TEXT),
    object_of(name=TEXT, age=NUMBER),
    object_of(is_capital={"type": "boolean"}, country=TEXT),
    object_of(color={"enum": ["red", "green", "blue"]}),
    object_of(words={"type": "array", "items": TEXT, "minItems": 2, "maxItems": 3}),
    object_of(place=object_of(city=TEXT, zip={"type": "string", "pattern": "^[0-9]{5}$"})),
    object_of(price={"type": "number", "minimum": 0, "maximum": 100}),
    object_of(note={"anyOf": [{"type": "null"}, TEXT]}),
    {"type": "array", "items": NUMBER, "minItems": 3, "maxItems": 3},
    {**object_of(to={"$ref": "#/$defs/who"}), "$defs": {"who": object_of(name=TEXT)}},
]


@pytest.fixture(scope="module")
def smollm2(
    smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("smollm2-with-tools")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).symlink_to(smollm2_folder / name)
    settings = json.loads((smollm2_folder / "tokenizer_config.json").read_text())
    template = open_checkpoint(None).chat_template
    assert template is not None
    settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    loaded = load_model(folder, EngineConfig(max_num_seqs=4, max_model_len=1024))
    try:
        watched = WatchedService(loaded.core, loaded.fingerprint)
        with running_server(watched, loaded.text) as running:
            yield running
    finally:
        loaded.close()


@pytest.mark.parametrize("place", range(len(SCHEMAS)))
def test_a_schema_is_filled(smollm2: RunningServer, place: int) -> None:
    schema = SCHEMAS[place]
    body = {
        "messages": [{"role": "user", "content": "Describe Paris as JSON."}],
        "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
        "temperature": 0,
        "max_tokens": 120,
    }
    choice = smollm2.post(CHAT, body).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    found = json.loads(choice["message"]["content"])
    assert jsonschema_rs.validator_for(schema).is_valid(found), found
    assert not jsonschema_rs.validator_for(schema).is_valid({"odd": found})


@pytest.mark.parametrize("is_named", [False, True], ids=["required", "named"])
def test_tools_are_called_in_a_loop(smollm2: RunningServer, is_named: bool) -> None:
    """A call in each round, its result sent back, and at last an answer without tools."""
    function: dict[str, Any] = tool_loop.TOOLS[0]["function"]
    named = {"type": "function", "function": {"name": function["name"]}}
    choice = named if is_named else "required"
    body = {
        "messages": [{"role": "user", "content": tool_loop.QUESTION}],
        "tools": tool_loop.TOOLS,
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 80,
    }
    for _ in range(3):
        message = smollm2.post(CHAT, {**body, "tool_choice": choice}).json()["choices"][0][
            "message"
        ]
        (call,) = message["tool_calls"]
        assert call["function"]["name"] == function["name"]
        arguments = json.loads(call["function"]["arguments"])
        assert jsonschema_rs.validator_for(function["parameters"]).is_valid(arguments)
        body["messages"] += [message, *tool_loop.results_of([call])]
        assert body["messages"][-1]["content"].startswith("It is sunny in ")
    last = smollm2.post(CHAT, {**body, "tool_choice": "none"}).json()["choices"][0]["message"]
    assert last["content"]
    assert "tool_calls" not in last


def test_the_example_has_its_loop(smollm2: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{smollm2.url}/v1", api_key="none", max_retries=0) as client:
        messages = tool_loop.conversation(client, tool_loop.QUESTION)
    assert messages[1]["tool_calls"][0]["function"]["name"] == "weather"
    assert messages[-1]["content"]
