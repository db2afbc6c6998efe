"""A whole loop of tool calls with OpenAI's client: the model calls, gets results, and answers.

    cadenza serve &
    pip install openai
    python examples/tool_loop.py http://127.0.0.1:8000 "What is the weather in Paris?"

Each answer is either calls, whose results are sent back, or the final text. The first answer must
be calls (`tool_choice: required`), so that there is a loop with a small model, too; the last round
may have none, so that there is an end. In between the model decides.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openai import OpenAI

QUESTION = "What is the weather in Paris?"
MAX_ROUNDS = 4
MAX_TOKENS = 80

Function = Callable[..., str]


def weather(city: str) -> str:
    return f"It is sunny in {city}."


FUNCTIONS: Mapping[str, Function] = {"weather": weather}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 24}},
                "required": ["city"],
                "additionalProperties": False,
            },
            "strict": True,
        },
    }
]


def main(arguments: list[str]) -> int:
    from openai import OpenAI

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("url", help="of the server, without /v1")
    parser.add_argument("question", nargs="?", default=QUESTION)
    parser.add_argument("--api-key", default="none")
    given = parser.parse_args(arguments)
    with OpenAI(base_url=f"{given.url}/v1", api_key=given.api_key) as client:
        for message in conversation(client, given.question):
            print(shown(message))
    return 0


def conversation(client: "OpenAI", question: str, rounds: int = MAX_ROUNDS) -> list[dict[str, Any]]:
    """All messages from the question to the final answer."""
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": question}]
    for place in range(rounds):
        answer = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=TOOLS,
            tool_choice=choice_of(place, rounds),
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=MAX_TOKENS,
        )
        message = answer.choices[0].message.to_dict()
        messages.append(message)
        if not message.get("tool_calls"):
            break
        messages += results_of(message["tool_calls"])
    return messages


def choice_of(place: int, rounds: int) -> Any:
    """Whether a round's answer has to be a call, or cannot be one."""
    if place == rounds - 1:
        return "none"
    return "required" if place == 0 else "auto"


def results_of(calls: list[Any]) -> list[dict[str, Any]]:
    """A message for each call; what went wrong is told to the model, which may call again."""
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": result_of(call["function"])}
        for call in calls
    ]


def result_of(called: Mapping[str, str]) -> str:
    function = FUNCTIONS.get(called["name"])
    if function is None:
        return f"Error: there is no function {called['name']}; there are {', '.join(FUNCTIONS)}"
    try:
        return function(**json.loads(called["arguments"]))
    except (TypeError, ValueError) as error:
        return f"Error: {error}"


def shown(message: Mapping[str, Any]) -> str:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    texts = [message.get("content") or ""] if message.get("content") or not calls else []
    told = [f"{each['name']}({each['arguments']})" for each in calls]
    return f"{message['role']}: {' '.join(texts + told)}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
