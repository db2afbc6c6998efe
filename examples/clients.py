"""Drives a running server with official clients, each API streamed and not, and a loop of calls.

    cadenza serve &
    pip install openai anthropic
    python examples/clients.py http://127.0.0.1:8000

A client that is not installed is named and left out. Exit code 1: a client did not get what it
asked for. The tests have openai only, so that they need no further client.
"""

import argparse
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

QUESTION = "What is the weather in Paris?"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
KEY = "none"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("url", help="of the server, without /v1")
    parser.add_argument("--api-key", default=KEY)
    given = parser.parse_args(arguments)
    failures = 0
    for library, checks in CHECKS.items():
        if importlib.util.find_spec(library) is None:
            print(f"{library}: not installed")
            continue
        for check in checks:
            try:
                check(given.url, given.api_key)
                print(f"{library} {check.__name__}: ok")
            except Exception as error:  # noqa: BLE001  a client's own errors have no common type
                failures += 1
                print(f"{library} {check.__name__}: {type(error).__name__}: {error}")
    return 1 if failures else 0


def responses(url: str, key: str) -> None:
    import openai

    tool: Any = {"type": "function", "name": "weather", "parameters": CITY, "strict": True}
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        model = client.models.list().data[0].id
        first = client.responses.create(
            model=model, input=QUESTION, tools=[tool], tool_choice="required", max_output_tokens=60
        )
        calls = [item for item in first.output if item.type == "function_call"]
        results: Any = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
            for call in calls
        ]
        with client.responses.stream(
            model=model,
            input=results,
            previous_response_id=first.id,
            tools=[tool],
            tool_choice="none",
            max_output_tokens=60,
        ) as stream:
            text = "".join(
                event.delta for event in stream if event.type == "response.output_text.delta"
            )
        client.responses.delete(first.id)
    check_that(bool(calls) and bool(text), "a call, and then a text")


def messages(url: str, key: str) -> None:
    import anthropic

    tool: Any = {"name": "weather", "input_schema": CITY}
    with anthropic.Anthropic(base_url=url, api_key=key, max_retries=0) as client:
        model = client.models.list().data[0].id
        asked: list[Any] = [{"role": "user", "content": QUESTION}]
        common: Any = {"model": model, "tools": [tool]}
        counted = client.messages.count_tokens(messages=asked, **common)
        first = client.messages.create(
            messages=asked, tool_choice={"type": "any"}, max_tokens=60, **common
        )
        num_tokens = first.usage.input_tokens + (first.usage.cache_read_input_tokens or 0)
        check_that(counted.input_tokens == num_tokens, "the tokens that were counted")
        calls = [block for block in first.content if block.type == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny."} for call in calls
        ]
        asked += [{"role": "assistant", "content": first.content}]
        asked += [{"role": "user", "content": results}]
        with client.messages.stream(
            messages=asked, tool_choice={"type": "none"}, max_tokens=60, **common
        ) as stream:
            text = "".join(stream.text_stream)
            last = stream.get_final_message()
        try:
            client.messages.create(messages=[], max_tokens=1, **common)
            raise AssertionError("a wrong request was answered")
        except anthropic.BadRequestError as error:
            check_that("messages" in str(error), "the name of the field at fault")
    said = [block.text for block in last.content if block.type == "text"]
    check_that(bool(calls) and bool(text) and "".join(said) == text, "a call, and then a text")


def check_that(is_so: bool, what: str) -> None:
    if not is_so:
        raise AssertionError(f"there was not {what}")


CHECKS: dict[str, tuple[Callable[[str, str], None], ...]] = {
    "openai": (responses,),
    "anthropic": (messages,),
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
