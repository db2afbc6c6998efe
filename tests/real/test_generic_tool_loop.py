"""OpenAI's client and SmolLM2, whose chat template has no place for tools: a call, then the answer.

Skipped where the model is absent.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from cadenza.config import EngineConfig
from cadenza.frontend.loaded_model import load_model
from tests.server.harness import RunningServer, WatchedService, running_server

pytestmark = [pytest.mark.native, pytest.mark.slow, pytest.mark.soak]

QUESTION = "What is the weather in Paris?"
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 24}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]
NUM_SEEDS, MIN_RIGHT = 10, 8


@pytest.fixture(scope="module")
def smollm2_file(smollm2_folder: Path) -> Iterator[RunningServer]:
    file = smollm2_folder.with_name(f"{smollm2_folder.name}.gguf")
    loaded = load_model(str(file), EngineConfig(max_num_seqs=4, max_model_len=1024))
    try:
        watched = WatchedService(loaded.core, loaded.fingerprint)
        with running_server(watched, loaded.text) as running:
            yield running
    finally:
        loaded.close()


def answer_of(client: openai.OpenAI, seed: int) -> str | None:
    """The final answer; None where the call was another than that which is asked for."""
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    for choice in ("required", "auto"):
        answer = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=TOOLS,
            tool_choice=choice,  # type: ignore[call-overload]
            parallel_tool_calls=False,
            temperature=0.3,
            seed=seed,
            max_tokens=60,
        )
        message: dict[str, Any] = answer.choices[0].message.to_dict()
        messages.append(message)
        for call in message.get("tool_calls", ()):
            if json.loads(call["function"]["arguments"]) != {"city": "Paris"}:
                return None
            told = {"tool_call_id": call["id"], "content": "It is sunny in Paris."}
            messages.append({"role": "tool", **told})
    return messages[-1]["content"]


def test_a_model_without_tools_in_its_template_calls_and_answers_with_the_result(
    smollm2_file: RunningServer,
) -> None:
    with openai.OpenAI(base_url=f"{smollm2_file.url}/v1", api_key="none", max_retries=0) as client:
        answers = [answer_of(client, seed) for seed in range(NUM_SEEDS)]
    right = [answer for answer in answers if answer and "sunny" in answer]
    assert len(right) >= MIN_RIGHT, answers
