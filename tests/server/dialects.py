"""The APIs that answer a conversation: their bodies, and what their answers tell, alike for all."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from cadenza.frontend.receipts import ReceiptSeal
from cadenza.frontend.sampling_defaults import SamplingDefaults
from cadenza.outputs import CompletionOutput, OutputPart, RequestOutput
from cadenza.server.calls.encoder import AnswerHead, StreamEncoder
from cadenza.server.calls.request import CallContext, CallRequest
from cadenza.server.response_store import ResponseStore, StoreBounds
from tests.server.bodies import PATHS
from tests.server.harness import RunningServer

DIALECTS = ("chat", "responses", "messages", "ollama_chat")
Json = dict[str, Any]


@dataclass(slots=True)
class Told:
    """What an answer tells: of each call the name and the arguments."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, Json]] = field(default_factory=list[tuple[str, Json]])


def body_of(name: str, messages: Sequence[Json], max_tokens: int = 6, **fields: Any) -> Json:
    """A body with the messages, and fields that have one name in all APIs; Ollama's are options,
    but for these."""
    match name:
        case "responses":
            return {"input": [*messages], "max_output_tokens": max_tokens, "store": False, **fields}
        case "ollama_chat":
            own = {key: fields.pop(key) for key in ("tools", "format", "think") if key in fields}
            options = {"num_predict": max_tokens, **fields}
            return {"messages": [*messages], "stream": False, "options": options, **own}
        case _:
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
        case "ollama_chat":
            return {"format": schema}
        case _:
            return {"response_format": {"type": "json_object", "schema": schema}}


def post(server: RunningServer, name: str, body: Json) -> Json:
    answer = server.post(PATHS[name], body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(server: RunningServer, name: str, body: Json) -> bytes:
    answer = server.post(PATHS[name], {**body, "stream": True})
    assert answer.status_code == 200, answer.text
    return answer.content


def told(name: str, answer: Json) -> Told:
    """Of a whole answer."""
    found = Told()
    match name:
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
    """Of a stream's parts, put together."""
    found, events = Told(), list(events_of(data))
    match name:
        case "responses":
            assert [event["sequence_number"] for event in events] == [*range(len(events))]
            whole = told(name, events[-1]["response"])
            written = "".join(event.get("delta", "") for event in events)
            assert all(text in written for text in (whole.reasoning, whole.content))
            return whole
        case "messages":
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
            return told(name, {"content": blocks})
        case _:
            deltas = [choice["delta"] for event in events for choice in event.get("choices", ())]
            assert not deltas or deltas[0] == {"role": "assistant", "content": ""}
            deltas = deltas or [event["message"] for event in events]
            calls = [call for each in deltas for call in each.get("tool_calls", ())]
            numbers = [{**call["function"], **call}["index"] for call in calls]
            assert numbers == [*range(len(calls))]
            for delta in deltas:
                message = {"content": "", **delta}
                more = told(name, {"choices": [{"message": message}], "message": message})
                found.reasoning += more.reasoning
                found.content += more.content
                found.calls += more.calls
            return found


def encoder_of(request: CallRequest) -> StreamEncoder:
    """That of a request that needs no front end and stores nothing."""
    request.enter(context_of(ResponseStore(StoreBounds(), lambda: 0.0)))
    text: Any = _NoText()
    encoder: Any = request.encoder(AnswerHead(request_id="1", created=0, model="m", text=text))
    return encoder


def context_of(store: ResponseStore, tenant: str = "") -> CallContext:
    """That of a call for which no engine runs."""

    def none() -> NoReturn:
        raise AssertionError("there is no engine")

    return CallContext(
        tenant=tenant,
        request_id="1",
        responses=store,
        seal=ReceiptSeal(),
        engine=none,
        fingerprint=lambda: None,
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
