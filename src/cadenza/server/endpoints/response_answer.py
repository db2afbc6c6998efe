"""`ResponseEncoder`: the object and the events of a response.

Owns the forms of output items, and the order of events (OpenAI's Responses API). Knows the request
only as `ResponseFrame`. Invariants: events are numbered from 0 without a gap; a stream has one last
event, whose response has the items of the events before; a response that is stored is stored once
it has begun, and again when it has ended.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from cadenza.events import FinishReason
from cadenza.outputs import CompletionOutput, RequestOutput
from cadenza.server.endpoints.blocks import Block, BlockEvent, BlockReader
from cadenza.server.errors import ApiError
from cadenza.server.request_log import Usage
from cadenza.server.response_store import ResponseStore, StoredResponse
from cadenza.server.schemas.response_tools import ResponseTool, text_of_input
from cadenza.server.sse import KEEP_ALIVE, PromptInfo

Status = Literal["in_progress", "completed", "incomplete", "cancelled", "failed"]

_encode = msgspec.json.encode

_STATUSES: dict[FinishReason, Status] = {
    "stop": "completed",
    "length": "incomplete",
    "abort": "cancelled",
    "error": "failed",
}
_PART_TYPES = {"content": "output_text", "reasoning": "reasoning_text"}
_ITEM_PREFIXES = {"content": "msg", "reasoning": "rs", "tool_call": "fc"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseFrame:
    """What is known of a response before it begins.

    Args:
        fields: the object without status, output and usage.
        input: the input items, with their ids, as JSON; only what is stored needs them.
        store: where it is stored; None: nowhere.
        tools: those that may be called, by their names in calls.
    """

    request_id: str
    fields: dict[str, Any]
    input: bytes
    tenant: str
    store: ResponseStore | None
    tools: Mapping[str, ResponseTool] = field(default_factory=dict[str, ResponseTool])


class ResponseEncoder:
    """A `StreamEncoder`."""

    def __init__(self, frame: ResponseFrame, usage: Usage) -> None:
        self.usage = usage
        self._frame = frame
        self._reader = BlockReader()
        self._status: Status = "in_progress"
        self._num_events = 0
        self._put(self._object())

    def opening(self) -> bytes:
        begun = self._object()
        return b"".join(
            self._event(f"response.{name}", response=begun) for name in ("created", "in_progress")
        )

    def take(self, place: int, request: PromptInfo, outputs: Sequence[CompletionOutput]) -> bytes:
        del place, request  # there is one prompt, which the answer does not contain
        made: list[bytes] = []
        for output in outputs:
            for event in self._read(output):
                made += self._events_of(event)
        return b"".join(made)

    def silence(self) -> bytes:
        return KEEP_ALIVE

    def closing(self) -> bytes:
        name = "completed" if self._status == "completed" else "incomplete"
        return self._event(f"response.{name}", response=self._end())

    def failure(self, error: ApiError) -> bytes:
        self._status = "failed"
        return self._event("response.failed", response=self._end(error))

    def whole(self, outputs: Iterable[RequestOutput]) -> bytes:
        for request in outputs:
            for output in request.outputs:
                for _ in self._read(output):
                    pass
        return _encode(self._end())

    def close(self) -> None:
        """Forgets the response where it was left."""
        if self._status == "in_progress" and self._frame.store is not None:
            self._frame.store.delete(self._frame.tenant, self._frame.fields["id"])

    def _read(self, output: CompletionOutput) -> Iterator[BlockEvent]:
        if output.finish_reason is not None:
            self._status = _STATUSES[output.finish_reason]
        yield from self._reader.take(output)

    def _end(self, error: ApiError | None = None) -> dict[str, Any]:
        found = self._object(error)
        self._put(found)
        return found

    def _put(self, response: dict[str, Any]) -> None:
        frame = self._frame
        if frame.store is None:
            return
        stored = StoredResponse(
            id=frame.fields["id"],
            previous_id=frame.fields["previous_response_id"],
            input=frame.input,
            body=_encode(response),
            is_open=self._status == "in_progress",
        )
        frame.store.put(frame.tenant, stored)

    def _object(self, error: ApiError | None = None) -> dict[str, Any]:
        is_open, is_cut = self._status == "in_progress", self._status == "incomplete"
        return {
            **self._frame.fields,
            "status": self._status,
            "error": None if error is None else _error_of_response(error),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [self._item(block) for block in self._reader.blocks],
            "usage": None if is_open else usage_object(self.usage),
            **self._reader.mark,
        }

    def _item(self, block: Block) -> dict[str, Any]:
        """A block as an output item; while it is open it has no text."""
        is_last = block.index == len(self._reader.blocks) - 1
        is_cut = is_last and self._status not in ("in_progress", "completed")
        status = "in_progress" if not block.is_ended else "incomplete" if is_cut else "completed"
        common = {"id": self._item_id(block), "status": status}
        if block.kind == "tool_call":
            return {**common, **self._call(block)}
        content = [_part(block, block.text)] if block.is_ended else []
        if block.kind == "reasoning":
            rest = {"summary": [], "content": content, "encrypted_content": None}
            return {**common, "type": "reasoning", **rest}
        return {**common, "type": "message", "role": "assistant", "content": content}

    def _call(self, block: Block) -> dict[str, Any]:
        """A call under the name and in the form of the tool that the client gave."""
        tool = self._frame.tools.get(block.name or "")
        name = block.name if tool is None else tool.own_name
        text = block.text if block.is_ended else ""
        if self._is_custom(block):
            text = text_of_input(text) if text else ""
            return {
                "type": "custom_tool_call",
                "call_id": block.call_id,
                "name": name,
                "input": text,
            }
        space = {} if tool is None or tool.namespace is None else {"namespace": tool.namespace}
        call = {"type": "function_call", "call_id": block.call_id, "name": name}
        return {**call, "arguments": text, **space}

    def _is_custom(self, block: Block) -> bool:
        tool = self._frame.tools.get(block.name or "")
        return tool is not None and tool.kind == "custom"

    def _item_id(self, block: Block) -> str:
        if self._is_custom(block):
            return f"ctc_{self._frame.request_id}_{block.index}"
        return f"{_ITEM_PREFIXES[block.kind]}_{self._frame.request_id}_{block.index}"

    def _event(self, name: str, /, **members: Any) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        body = _encode({"type": name, "sequence_number": number, **members})
        return b"event: " + name.encode() + b"\ndata: " + body + b"\n\n"

    def _within(self, name: str, block: Block, /, **members: Any) -> bytes:
        """An event of an item's content."""
        places: dict[str, Any] = {"item_id": self._item_id(block), "output_index": block.index}
        if block.kind != "tool_call":
            places["content_index"] = 0
        return self._event(f"response.{name}", **places, **members)

    def _events_of(self, event: BlockEvent) -> Iterator[bytes]:
        match event.kind:
            case "begin":
                return self._begun(event)
            case "text":
                return self._grown(event)
            case "end":
                return self._ended(event)

    def _begun(self, event: BlockEvent) -> Iterator[bytes]:
        block = event.block
        item = self._item(block)
        yield self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind != "tool_call":
            yield self._within("content_part.added", block, part=_part(block, ""))

    def _grown(self, event: BlockEvent) -> Iterator[bytes]:
        block = event.block
        rest: dict[str, Any] = {"logprobs": []} if block.kind == "content" else {}
        if self._is_custom(block):
            return  # its text is known at its end
        yield self._within(f"{_content_name(block)}.delta", block, delta=event.text, **rest)

    def _ended(self, event: BlockEvent) -> Iterator[bytes]:
        block, name = event.block, f"{_content_name(event.block)}.done"
        match block.kind:
            case "tool_call" if self._is_custom(block):
                text, name = text_of_input(block.text), "custom_tool_call_input"
                yield self._within(f"{name}.delta", block, delta=text)
                yield self._within(f"{name}.done", block, input=text)
            case "tool_call":
                called = self._call(block)["name"]
                yield self._within(name, block, name=called, arguments=block.text)
            case "reasoning":
                yield self._within(name, block, text=block.text)
            case "content":
                yield self._within(name, block, text=block.text, logprobs=[])
        if block.kind != "tool_call":
            yield self._within("content_part.done", block, part=_part(block, block.text))
        item = self._item(block)
        yield self._event("response.output_item.done", output_index=block.index, item=item)


def usage_object(usage: Usage) -> dict[str, Any]:
    """The usage of a response."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": sum(usage.cached.values()),
            "cache_write_tokens": 0,  # writing costs nothing, so that it is not counted
            **usage.cache_miss,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _content_name(block: Block) -> str:
    return _PART_TYPES.get(block.kind, "function_call_arguments")


def _part(block: Block, text: str) -> dict[str, Any]:
    rest: dict[str, Any] = {"annotations": [], "logprobs": []} if block.kind == "content" else {}
    return {"type": _PART_TYPES[block.kind], "text": text, **rest}


def _error_of_response(error: ApiError) -> dict[str, Any]:
    code = "invalid_prompt" if error.status == 400 else "server_error"
    return {"code": code, "message": error.message}
