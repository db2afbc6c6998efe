"""The APIs that generate, by the names of `bodies`: how each asks, and where its answers, streams
and errors have what all of them tell."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from cadenza.frontend.receipts import ReceiptSeal
from cadenza.frontend.sampling_defaults import SamplingDefaults
from cadenza.outputs import CompletionOutput, OutputPart, RequestOutput
from cadenza.server.calls.endpoint import AnswerHead, CallContext, CallRequest, StreamEncoder
from cadenza.server.response_store import ResponseStore, StoreBounds
from tests.server.bodies import PATHS
from tests.server.harness import RunningServer

CONVERSING = ("chat", "responses", "messages", "ollama_chat")
DIALECTS = (*CONVERSING, "completions", "ollama_generate")
Json = dict[str, Any]


@dataclass(slots=True)
class Told:
    """What an answer tells: of each call the name and the arguments."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, Json]] = field(default_factory=list[tuple[str, Json]])


@dataclass(frozen=True, slots=True)
class Ending:
    """Why an answer ended, in the words of chats, and the tokens of prompt and answer. `cached`:
    those found of the prompt, where the API tells them."""

    reason: str | None
    num_prompt_tokens: int
    num_tokens: int
    cached: int | None = None


@dataclass(frozen=True, slots=True)
class ToldError:
    """An error; None for what the API's errors have no member for."""

    message: str
    type: str | None = None
    code: str | None = None
    param: str | None = None


# How each asks.


def body_of(name: str, messages: Sequence[Json], max_tokens: int = 6, **fields: Any) -> Json:
    """A body with the messages, of which some APIs have the last one's text alone, and fields that
    have one name in all APIs but for `stop`; Ollama's are options, but for these."""
    match name:
        case "completions":
            return {"prompt": messages[-1]["content"], "max_tokens": max_tokens, **fields}
        case "responses":
            return {"input": [*messages], "max_output_tokens": max_tokens, "store": False, **fields}
        case "ollama_chat" | "ollama_generate":
            own = {key: fields.pop(key) for key in ("tools", "format", "think") if key in fields}
            own |= {"stream": False, "options": {"num_predict": max_tokens, **fields}}
            if name == "ollama_generate":
                return {"prompt": messages[-1]["content"], **own}
            return {"messages": [*messages], **own}
        case "messages" if "stop" in fields:
            fields["stop_sequences"] = fields.pop("stop")
    return {"messages": [*messages], "max_tokens": max_tokens, **fields}


def tools_of(name: str, *functions: Json) -> list[Json]:
    """The functions as a body's `tools`."""
    match name:
        case "responses":
            return [{"type": "function", **each} for each in functions]
        case "messages":
            return [
                {"name": each["name"], "input_schema": each["parameters"]} for each in functions
            ]
        case _:
            return [{"type": "function", "function": each} for each in functions]


def form_of(name: str, schema: Any) -> Json:
    """The fields that ask for JSON of a schema."""
    match name:
        case "responses":
            return {"text": {"format": {"type": "json_schema", "name": "n", "schema": schema}}}
        case "messages":
            return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
        case "ollama_chat" | "ollama_generate":
            return {"format": schema}
        case _:
            return {"response_format": {"type": "json_object", "schema": schema}}


def streaming(name: str, body: Json) -> Json:
    """The body of a stream whose end tells the usage."""
    is_told = name not in ("chat", "completions")
    return {**body, "stream": True} | (
        {} if is_told else {"stream_options": {"include_usage": True}}
    )


def post(server: RunningServer, name: str, body: Json) -> Json:
    answer = server.post(PATHS[name], body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(server: RunningServer, name: str, body: Json) -> bytes:
    answer = server.post(PATHS[name], streaming(name, body))
    assert answer.status_code == 200, answer.text
    return answer.content


# Where each has what all tell.


def told(name: str, answer: Json) -> Told:
    """Of a whole answer."""
    found = Told()
    match name:
        case "completions":
            found.content = answer["choices"][0]["text"]
        case "ollama_generate":
            found.content, found.reasoning = answer["response"], answer.get("thinking") or ""
        case "responses":
            for item in answer["output"]:
                match item["type"]:
                    case "reasoning":
                        found.reasoning += item["content"][0]["text"]
                    case "message":
                        found.content += item["content"][0]["text"]
                    case _:
                        found.calls.append((item["name"], json.loads(item["arguments"])))
        case "messages":
            for block in answer["content"]:
                found.reasoning += block.get("thinking", "")
                found.content += block.get("text", "")
                if block["type"] == "tool_use":
                    found.calls.append((block["name"], block["input"]))
        case _:
            message = (
                answer["message"] if name == "ollama_chat" else answer["choices"][0]["message"]
            )
            found.reasoning = message.get("thinking") or message.get("reasoning") or ""
            found.content = message["content"] or ""
            for call in message.get("tool_calls", ()):
                given = call["function"]["arguments"]
                arguments = json.loads(given) if isinstance(given, str) else given
                found.calls.append((call["function"]["name"], arguments))
    return found


_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "tool_use": "tool_calls",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "pause_turn": "abort",
    "completed": "stop",
    "incomplete": "length",
    "cancelled": "abort",
}
"""Of messages and responses."""


def ending(name: str, answer: Json) -> Ending:
    """Of a whole answer."""
    usage = answer.get("usage", {})
    match name:
        case "responses":
            cached = usage["input_tokens_details"]["cached_tokens"]
            counts = (usage["input_tokens"], usage["output_tokens"], cached)
            return Ending(_REASONS[answer["status"]], *counts)
        case "messages":
            cached = usage["cache_read_input_tokens"]
            counts = (usage["input_tokens"] + cached, usage["output_tokens"], cached)
            return Ending(_REASONS[answer["stop_reason"]], *counts)
        case "ollama_chat" | "ollama_generate":
            counts = (answer["prompt_eval_count"], answer["eval_count"])
            return Ending(answer["done_reason"], *counts)
        case _:
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            counts = (usage["prompt_tokens"], usage["completion_tokens"], cached)
            return Ending(answer["choices"][0]["finish_reason"], *counts)


def told_error(name: str, answer: Json) -> ToldError:
    """Of an answer, or of a stream's last event."""
    if name.startswith("ollama"):
        assert answer.keys() == {"error"}
        return ToldError(answer["error"])
    if "response" in answer:
        error = answer["response"]["error"]
        assert error.keys() == {"code", "message"}
        return ToldError(error["message"])
    error = answer["error"]
    if name in ("messages", "count_tokens"):
        assert answer.keys() == {"type", "error", "request_id"}
        assert answer["type"] == "error"
        return ToldError(error["message"], error["type"])
    assert answer.keys() == {"error"}
    assert error.keys() == {"message", "type", "param", "code"}
    return ToldError(**error)


_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "server_error", 504: "server_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def check_error(
    answer: httpx.Response,
    status: int,
    code: str,
    param: str | None = None,
    *words: str,
    name: str = "",
) -> None:
    """An answer's status, and its error in the shape of the named API, or else of OpenAI's; 503 is
    529 in Anthropic's."""
    is_anthropic = name in ("messages", "count_tokens")
    assert answer.status_code == (529 if is_anthropic and status == 503 else status), answer.text
    error = told_error(name, answer.json())
    if is_anthropic:
        wanted = _ANTHROPIC_TYPES.get(status, "invalid_request_error")
        assert (error.type, error.code, error.param) == (wanted, None, None)
        assert answer.json()["request_id"] == answer.headers["request-id"]
    elif not name.startswith("ollama"):
        wanted = _TYPES.get(status, "invalid_request_error")
        assert (error.type, error.code, error.param) == (wanted, code, param)
    shows_path = re.search(r"(^|[\s'\"(])/\w", error.message)
    assert shows_path is None or code in ("unknown_url", "method_not_allowed")
    for word in words:
        assert word in error.message


def events_of(data: bytes) -> Iterator[Json]:
    """The objects of a stream of events or of lines; an event's name is that of its data."""
    event = ""
    for line in data.decode().splitlines():
        if line.startswith("event: "):
            event = line.removeprefix("event: ")
        elif line.startswith(("data: {", "{")):
            found = json.loads(line.removeprefix("data: "))
            assert event == found.get("type", "")
            yield found


def told_in_stream(name: str, data: bytes) -> Told:
    return told(name, joined(name, data))


def joined(name: str, data: bytes) -> Json:
    """The whole answer that a stream's parts are."""
    events = [*events_of(data)]
    match name:
        case "responses":
            assert [event["sequence_number"] for event in events] == [*range(len(events))]
            whole = told(name, events[-1]["response"])
            written = "".join(event.get("delta", "") for event in events)
            assert all(text in written for text in (whole.reasoning, whole.content))
            return events[-1]["response"]
        case "messages":
            end = next(event for event in events if event["type"] == "message_delta")
            return {"content": _blocks(events), **end["delta"], "usage": end["usage"]}
        case "ollama_chat":
            return {**events[-1], "message": _message([event["message"] for event in events])}
        case "ollama_generate":
            return {**events[-1], "response": "".join(event["response"] for event in events)}
        case _:
            choices = [choice for event in events for choice in event["choices"]]
            (reason,) = {each["finish_reason"] for each in choices} - {None}
            if name == "completions":
                said: Json = {"text": "".join(each["text"] for each in choices)}
            else:
                assert choices[0]["delta"] == {"role": "assistant", "content": ""}
                said = {"message": _message([choice["delta"] for choice in choices])}
            usage = events[-1].get("usage", {})
            return {"choices": [{**choices[-1], **said, "finish_reason": reason}], "usage": usage}


def _blocks(events: Sequence[Json]) -> list[Json]:
    """Of a message's events."""
    blocks: list[Json] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "written": ""})
        elif event["type"] == "content_block_delta":
            (text,) = (v for k, v in event["delta"].items() if k != "type")
            blocks[event["index"]]["written"] += text
    for block in blocks:
        member = "input" if block["type"] == "tool_use" else block["type"]
        written = block.pop("written")
        block[member] = json.loads(written) if member == "input" else written
    return blocks


def _message(deltas: Sequence[Json]) -> Json:
    """Of a chat's parts."""
    calls = [call for each in deltas for call in each.get("tool_calls", ())]
    assert [{**each["function"], **each}["index"] for each in calls] == [*range(len(calls))]
    texts = {
        member: "".join(each.get(member) or "" for each in deltas)
        for member in ("content", "reasoning", "thinking")
    }
    return {**texts, "tool_calls": calls}


# Encoders without a server.


def encoder_of(request: CallRequest) -> StreamEncoder:
    """That of a request that needs no front end and stores nothing."""
    request.enter(context_of(ResponseStore(StoreBounds(), lambda: 0.0)))
    text: Any = _NoText()
    encoder: Any = request.encoder(AnswerHead(request_id="1", created=0, model="m", text=text))
    return encoder


def context_of(store: ResponseStore, tenant: str = "") -> CallContext:
    """That of a call for which no engine runs."""
    none: Any = None
    return CallContext(
        tenant=tenant, request_id="1", responses=store, seal=ReceiptSeal(), model=none
    )


class _NoText:
    """A front end of which only the default parameters are asked."""

    defaults = SamplingDefaults()


def sample(*parts: OutputPart, end: Any = None, is_valid: bool | None = None) -> CompletionOutput:
    return CompletionOutput(
        index=0,
        text="".join(part.text for part in parts),
        token_ids=(),
        logprobs=None,
        cumulative_logprob=None,
        finish_reason=end,
        stop_reason=None,
        parts=parts,
        is_schema_valid=is_valid,
    )


def output_of(samples: Sequence[CompletionOutput]) -> RequestOutput:
    """All samples as one whole output of a request."""
    parts = [part for each in samples for part in each.parts or ()]
    last = samples[-1]
    return RequestOutput(
        request_id=0,
        prompt=None,
        prompt_token_ids=(1,),
        prompt_logprobs=None,
        num_cached_tokens=0,
        outputs=(sample(*parts, end=last.finish_reason, is_valid=last.is_schema_valid),),
        finished=True,
    )
