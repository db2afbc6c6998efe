"""Drives a running server with the clients that are installed, each dialect streamed and not.

    cadenza serve &
    pip install openai anthropic langchain-openai instructor litellm mcp
    python examples/clients.py http://127.0.0.1:8000

Each check asks for a text, for an object of a schema or for calls of tools, as its client offers
them, and fails where the client did not get what it asked for (exit code 1). A client that is not
installed is named and left out; docs/apis.md says which versions were run. The model is the first
that the server lists, or --model's. `clients.mjs` does the same with the AI SDK.
"""

import argparse
import asyncio
import importlib.metadata
import importlib.util
import json
import sys
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

QUESTION = "What is the weather in Paris?"
PROMPT = "The capital of France is"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "The weather.", "parameters": CITY}
ASKED: list[Any] = [{"role": "user", "content": QUESTION}]
NUM_TOKENS = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Where the clients go."""

    url: str
    key: str
    model: str

    @property
    def openai(self) -> dict[str, Any]:
        return {"base_url": f"{self.url}/v1", "api_key": self.key, "max_retries": 0}

    @property
    def anthropic(self) -> dict[str, Any]:
        return {"base_url": self.url, "api_key": self.key, "max_retries": 0}


Check = Callable[[Server], None]


def main(arguments: list[str]) -> int:
    server = server_of(arguments)
    print(f"model: {server.model}")
    failures = 0
    for (library, package), checks in CHECKS.items():
        if importlib.util.find_spec(library) is None:
            print(f"{package}: not installed")
            continue
        print(f"{package} {importlib.metadata.version(package)}")
        for check in checks:
            try:
                check(server)
                print(f"  {check.__name__}: ok")
            except Exception as error:  # noqa: BLE001  a client's own errors have no common type
                failures += 1
                print(f"  {check.__name__}: {type(error).__name__}: {str(error)[:300]}")
    return 1 if failures else 0


def server_of(arguments: list[str]) -> Server:
    """The server that the command names, and the model there."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("url", help="of the server, without /v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--model", help="a name that is served (default: the first listed)")
    given = parser.parse_args(arguments)
    url = given.url.rstrip("/")
    return Server(url=url, key=given.api_key, model=given.model or first_model(url, given.api_key))


def first_model(url: str, key: str) -> str:
    """The first model that the server lists."""
    asked = urllib.request.Request(f"{url}/v1/models")  # noqa: S310  the user's own URL
    asked.add_header("Authorization", f"Bearer {key}")
    with urllib.request.urlopen(asked, timeout=30) as answer:  # noqa: S310
        return json.load(answer)["data"][0]["id"]


def check_that(is_so: object, what: str) -> None:
    if not is_so:
        raise AssertionError(f"there was not {what}")


def place_type() -> Any:
    """An object of a schema, as clients take it."""
    from pydantic import BaseModel, Field

    class Place(BaseModel):
        city: str = Field(max_length=12)

    return Place


def check_place(found: object) -> None:
    check_that(isinstance(getattr(found, "city", None), str), "an object of the schema")


def openai_completions(server: Server) -> None:
    import openai

    with openai.OpenAI(**server.openai) as client:
        asked: Any = {"model": server.model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
        whole = client.completions.create(**asked).choices[0].text
        chunks = client.completions.create(**asked, stream=True)
        check_that(whole and "".join(each.choices[0].text for each in chunks) == whole, "a text")


def openai_chat(server: Server) -> None:
    import openai

    place = place_type()
    asked: Any = {"model": server.model, "messages": ASKED, "max_tokens": NUM_TOKENS}
    tools: Any = {"tools": [openai.pydantic_function_tool(place)], "tool_choice": "required"}
    tools["parallel_tool_calls"] = False  # a small model may go on to the bound
    with openai.OpenAI(**server.openai) as client:
        check_that(client.models.retrieve(server.model).id == server.model, "the model")
        check_place(
            client.chat.completions.parse(**asked, response_format=place).choices[0].message.parsed
        )
        with client.chat.completions.stream(**asked, response_format=place) as stream:
            check_place(stream.get_final_completion().choices[0].message.parsed)
        called = client.chat.completions.parse(**asked, **tools).choices[0].message.tool_calls
        with client.chat.completions.stream(**asked, **tools) as stream:
            streamed = stream.get_final_completion().choices[0].message.tool_calls
        for call in (*(called or ()), *(streamed or ())):
            check_place(call.function.parsed_arguments)
        check_that(called and streamed, "a call")


def openai_responses(server: Server) -> None:
    import openai

    place = place_type()
    asked: Any = {"model": server.model, "input": QUESTION, "max_output_tokens": NUM_TOKENS}
    with openai.OpenAI(**server.openai) as client:
        check_place(client.responses.parse(**asked, text_format=place).output_parsed)
        with client.responses.stream(**asked, text_format=place) as stream:
            check_place(stream.get_final_response().output_parsed)


def openai_responses_loop(server: Server) -> None:
    import openai

    tool: Any = {"type": "function", **FUNCTION, "strict": True}
    common: Any = {"model": server.model, "tools": [tool], "max_output_tokens": NUM_TOKENS}
    with openai.OpenAI(**server.openai) as client:
        first = client.responses.create(input=QUESTION, tool_choice="required", **common)
        calls = [item for item in first.output if item.type == "function_call"]
        results: Any = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
            for call in calls
        ]
        with client.responses.stream(
            input=results, previous_response_id=first.id, tool_choice="none", **common
        ) as stream:
            texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        client.responses.delete(first.id)
    check_that(calls and "".join(texts), "a call, and then a text")


def anthropic_messages(server: Server) -> None:
    import anthropic

    place = place_type()
    asked: Any = {"model": server.model, "messages": ASKED, "max_tokens": NUM_TOKENS}
    with anthropic.Anthropic(**server.anthropic) as client:
        check_place(client.messages.parse(**asked, output_format=place).parsed_output)
        with client.messages.stream(**asked, output_format=place) as stream:
            check_place(stream.get_final_message().parsed_output)
        try:
            client.messages.create(**{**asked, "messages": []})
            raise AssertionError("a wrong request was answered")
        except anthropic.BadRequestError as error:
            check_that("messages" in str(error), "the name of the field at fault")


def anthropic_loop(server: Server) -> None:
    import anthropic

    tool: Any = {"name": "weather", "input_schema": CITY}
    common: Any = {"model": server.model, "tools": [tool]}
    bounded: Any = {**common, "max_tokens": NUM_TOKENS}
    with anthropic.Anthropic(**server.anthropic) as client:
        asked = [*ASKED]
        counted = client.messages.count_tokens(messages=asked, **common)
        first = client.messages.create(messages=asked, tool_choice={"type": "any"}, **bounded)
        num_tokens = first.usage.input_tokens + (first.usage.cache_read_input_tokens or 0)
        check_that(counted.input_tokens == num_tokens, "the tokens that were counted")
        calls = [block for block in first.content if block.type == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny."} for call in calls
        ]
        asked += [{"role": "assistant", "content": first.content}]
        asked += [{"role": "user", "content": results}]
        with client.messages.stream(
            messages=asked, tool_choice={"type": "none"}, **bounded
        ) as stream:
            text = "".join(stream.text_stream)
    check_that(calls and text, "a call, and then a text")


def anthropic_tool_runner(server: Server) -> None:
    import anthropic

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """The weather."""
        return f"Sunny in {city}."

    with anthropic.Anthropic(**server.anthropic) as client:
        runner = client.beta.messages.tool_runner(
            model=server.model,
            max_tokens=NUM_TOKENS,
            messages=ASKED,
            tools=[weather],
            max_iterations=3,
        )
        check_that(list(runner), "an answer")


def langchain_chat(server: Server) -> None:
    _langchain(server, use_responses_api=False)


def langchain_responses(server: Server) -> None:
    _langchain(server, use_responses_api=True)


def _langchain(server: Server, *, use_responses_api: bool) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    place = place_type()
    settings: Any = {**server.openai, "model": server.model, "max_tokens": NUM_TOKENS}
    model = ChatOpenAI(**settings, use_responses_api=use_responses_api)
    check_that(model.invoke(QUESTION).text, "a text")
    check_that("".join(chunk.text for chunk in model.stream(QUESTION)), "a streamed text")
    for method in ("json_schema", "function_calling"):
        check_place(model.with_structured_output(place, method=method).invoke(QUESTION))
    check_place([*model.with_structured_output(place).stream(QUESTION)][-1])
    messages: list[Any] = [HumanMessage(QUESTION)]
    called = model.bind_tools([place], tool_choice="any").invoke(messages)
    results = [ToolMessage("Sunny.", tool_call_id=call["id"]) for call in called.tool_calls]
    told = model.bind_tools([place], tool_choice="none").invoke([*messages, called, *results])
    check_that(results and told.text, "a call, and then a text")


def langchain_completions(server: Server) -> None:
    from langchain_openai import OpenAI

    model = OpenAI(**server.openai, model=server.model, max_tokens=8)
    check_that(model.invoke(PROMPT) and "".join(model.stream(PROMPT)), "a text")


def instructor_openai(server: Server) -> None:
    import instructor
    import openai

    place = place_type()
    asked: Any = {"model": server.model, "messages": ASKED, "max_tokens": NUM_TOKENS}
    asked |= {"response_model": place, "max_retries": 0}
    for mode in ("TOOLS", "JSON_SCHEMA", "RESPONSES_TOOLS"):
        client = instructor.from_openai(
            openai.OpenAI(**server.openai), mode=getattr(instructor.Mode, mode)
        )
        check_place(client.chat.completions.create(**asked))
        check_place([*client.chat.completions.create_partial(**asked)][-1])


def instructor_anthropic(server: Server) -> None:
    import anthropic
    import instructor

    client = instructor.from_anthropic(anthropic.Anthropic(**server.anthropic))
    asked: Any = {"model": server.model, "messages": ASKED, "max_tokens": NUM_TOKENS}
    check_place(client.messages.create(**asked, response_model=place_type(), max_retries=0))


def pydantic_ai_chat(server: Server) -> None:
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{server.url}/v1", api_key=server.key)
    _pydantic_ai(OpenAIChatModel(server.model, provider=provider))


def pydantic_ai_responses(server: Server) -> None:
    from pydantic_ai.models.openai import OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{server.url}/v1", api_key=server.key)
    _pydantic_ai(OpenAIResponsesModel(server.model, provider=provider))


def pydantic_ai_messages(server: Server) -> None:
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.profiles.anthropic import AnthropicModelProfile
    from pydantic_ai.providers.anthropic import AnthropicProvider

    provider = AnthropicProvider(base_url=server.url, api_key=server.key)
    profile = AnthropicModelProfile(supports_json_schema_output=True)
    _pydantic_ai(AnthropicModel(server.model, provider=provider, profile=profile))


def _pydantic_ai(model: Any) -> None:
    from pydantic_ai import Agent, NativeOutput, ToolOutput

    place = place_type()
    settings: Any = {"max_tokens": NUM_TOKENS}

    async def streamed(agent: Any) -> Any:
        async with agent.run_stream(QUESTION) as run:
            return await run.get_output()

    async def all_of_them() -> None:
        plain = Agent(model, model_settings=settings)
        check_that((await plain.run(QUESTION)).output and await streamed(plain), "a text")
        for form in (ToolOutput, NativeOutput):
            agent: Any = Agent(model, model_settings=settings, output_type=form(place))
            check_place((await agent.run(QUESTION)).output)
            check_place(await streamed(agent))

    asyncio.run(all_of_them())


def litellm_chat(server: Server) -> None:
    _litellm(server, f"openai/{server.model}", f"{server.url}/v1")


def litellm_responses(server: Server) -> None:
    _litellm(server, f"openai/responses/{server.model}", f"{server.url}/v1")


def litellm_messages(server: Server) -> None:
    _litellm(server, f"anthropic/{server.model}", server.url)


def _litellm(server: Server, model: str, base: str) -> None:
    import litellm

    common: Any = {"model": model, "api_base": base, "api_key": server.key, "num_retries": 0}
    common |= {"max_tokens": NUM_TOKENS, "messages": [*ASKED]}
    place = place_type()
    check_that(litellm.completion(**common).choices[0].message.content, "a text")
    check_that(_joined(litellm.completion(**common, stream=True)), "a streamed text")
    formed = litellm.completion(**common, response_format=place).choices[0].message.content
    check_place(place.model_validate_json(formed))
    check_place(
        place.model_validate_json(
            _joined(litellm.completion(**common, response_format=place, stream=True))
        )
    )
    tools: Any = {"tools": [{"type": "function", "function": FUNCTION}]}
    called = litellm.completion(**common, **tools, tool_choice="required").choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "name": "weather", "content": "Sunny."}
        for call in called.tool_calls
    ]
    common["messages"] += [called, *results]
    told = litellm.completion(**common, **tools, tool_choice="none").choices[0].message.content
    check_that(results and told, "a call, and then a text")


def _joined(chunks: Iterable[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def litellm_completions(server: Server) -> None:
    import litellm

    common: Any = {"model": f"text-completion-openai/{server.model}", "prompt": PROMPT}
    common |= {"api_base": f"{server.url}/v1", "api_key": server.key, "max_tokens": 8}
    check_that(litellm.text_completion(**common).choices[0].text, "a text")
    chunks = litellm.text_completion(**common, stream=True)
    check_that("".join(each.choices[0].text or "" for each in chunks), "a streamed text")


CHECKS: dict[tuple[str, str], tuple[Check, ...]] = {
    ("openai", "openai"): (
        openai_completions,
        openai_chat,
        openai_responses,
        openai_responses_loop,
    ),
    ("anthropic", "anthropic"): (anthropic_messages, anthropic_loop, anthropic_tool_runner),
    ("langchain_openai", "langchain-openai"): (
        langchain_chat,
        langchain_responses,
        langchain_completions,
    ),
    ("instructor", "instructor"): (instructor_openai, instructor_anthropic),
    ("pydantic_ai", "pydantic-ai-slim"): (
        pydantic_ai_chat,
        pydantic_ai_responses,
        pydantic_ai_messages,
    ),
    ("litellm", "litellm"): (
        litellm_chat,
        litellm_responses,
        litellm_messages,
        litellm_completions,
    ),
}
"""By the names of the module and of its distribution."""

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
