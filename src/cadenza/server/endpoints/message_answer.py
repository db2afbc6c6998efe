"""`MessageEncoder`: the object and the events of a message (Anthropic's Messages API).

Owns the forms of content blocks, and the order of events. Invariant: the blocks of a stream, put
together, are those of the whole message.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from cadenza.outputs import CompletionOutput, RequestOutput
from cadenza.server.dialect import anthropic_error
from cadenza.server.endpoints.blocks import Block, BlockEvent, BlockReader
from cadenza.server.errors import ApiError
from cadenza.server.request_log import Usage
from cadenza.server.sse import KEEP_ALIVE, AnswerHead, PromptInfo

MESSAGE_PREFIX = "msg_"

_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageOptions:
    """What an answer depends on besides its tokens.

    Args:
        max_tokens: those that were asked for at most; None: what is left of the context.
        stop_sequences: those of which one may have ended it.
        shows_thinking: whether blocks of thinking have their text.
    """

    max_tokens: int | None
    stop_sequences: tuple[str, ...]
    shows_thinking: bool


class MessageEncoder:
    """A `StreamEncoder`."""

    def __init__(self, head: AnswerHead, usage: Usage, options: MessageOptions) -> None:
        self.usage = usage
        self._head = head
        self._options = options
        self._reader = BlockReader()
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None

    def opening(self) -> bytes:
        return _event("message_start", message=self._object([])) + _event("ping")

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
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        usage = usage_of_message(self.usage)
        mark = self._reader.mark
        return _event("message_delta", delta=delta, usage=usage, **mark) + _event("message_stop")

    def failure(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + self._error(error) + b"\n\n"

    def whole(self, outputs: Iterable[RequestOutput]) -> bytes:
        for request in outputs:
            for output in request.outputs:
                for _ in self._read(output):
                    pass
        return _encode(self._object([self._block(block) for block in self._reader.blocks]))

    def close(self) -> None:
        """Nothing is left of a message."""

    def _error(self, error: ApiError) -> bytes:
        return _encode(anthropic_error(error, self._head.request_id))

    def _read(self, output: CompletionOutput) -> Iterator[BlockEvent]:
        yield from self._reader.take(output)
        if output.finish_reason is not None:
            self._end(output)

    def _end(self, output: CompletionOutput) -> None:
        match output.finish_reason:
            case "stop" if output.stop_reason in self._options.stop_sequences:
                self._stop_reason = "stop_sequence"
                self._stop_sequence = str(output.stop_reason)
            case "stop":
                has_calls = any(block.kind == "tool_call" for block in self._reader.blocks)
                self._stop_reason = "tool_use" if has_calls else "end_turn"
            case "length":
                most = self._options.max_tokens
                is_full = most is None or output.num_generated_tokens < most
                self._stop_reason = "model_context_window_exceeded" if is_full else "max_tokens"
            case _:  # it was cancelled
                self._stop_reason = "pause_turn"

    def _object(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": MESSAGE_PREFIX + self._head.request_id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": content,
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
            "usage": usage_of_message(self.usage),
            **self._reader.mark,
        }

    def _block(self, block: Block) -> dict[str, Any]:
        match block.kind:
            case "tool_call":
                return {**_started(block), "input": _arguments(block.text)}
            case "reasoning":
                text = block.text if self._options.shows_thinking else ""
                return {**_started(block), "thinking": text}
            case "content":
                return {**_started(block), "text": block.text}

    def _events_of(self, event: BlockEvent) -> Iterator[bytes]:
        block = event.block
        match event.kind:
            case "begin":
                started = _started(block)
                yield _event("content_block_start", index=block.index, content_block=started)
            case "text" if block.kind != "reasoning" or self._options.shows_thinking:
                delta = _delta(block, event.text)
                yield _event("content_block_delta", index=block.index, delta=delta)
            case "text":
                return
            case "end":
                yield _event("content_block_stop", index=block.index)


def _started(block: Block) -> dict[str, Any]:
    """A block without its text. Thinking is plain text, which needs no signature."""
    match block.kind:
        case "tool_call":
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}
        case "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "content":
            return {"type": "text", "text": ""}


def _delta(block: Block, text: str) -> dict[str, Any]:
    match block.kind:
        case "tool_call":
            return {"type": "input_json_delta", "partial_json": text}
        case "reasoning":
            return {"type": "thinking_delta", "thinking": text}
        case "content":
            return {"type": "text_delta", "text": text}


def _arguments(text: str) -> dict[str, Any]:
    """A call's arguments as an object; what is none stands in one."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError:
        return {"arguments": text}


def usage_of_message(usage: Usage) -> dict[str, Any]:
    """The usage of a message, whose input tokens are those that were computed."""
    num_cached = sum(usage.cached.values())
    return {
        "input_tokens": usage.prompt_tokens - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        **usage.cache_miss,
    }


def _event(name: str, /, **members: Any) -> bytes:
    body = _encode({"type": name, **members})
    return b"event: " + name.encode() + b"\ndata: " + body + b"\n\n"
