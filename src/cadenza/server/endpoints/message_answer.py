"""`MessageEncoder`: the object and the events of a message (Anthropic's Messages API).

Invariant: the blocks of a stream, put together, are those of the whole message.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from cadenza.outputs import CompletionOutput, PartKind
from cadenza.server.dialect import anthropic_error
from cadenza.server.endpoints.blocks import Block, BlockEncoder, BlockEvent, event_bytes
from cadenza.server.errors import ApiError
from cadenza.server.request_log import Usage
from cadenza.server.sse import AnswerHead

MESSAGE_PREFIX = "msg_"

_TEXT_BLOCKS: dict[PartKind, dict[str, Any]] = {
    "content": {"type": "text", "text": ""},
    "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
}
"""Blocks without their texts. Thinking is plain text, which needs no signature."""
_DELTAS: dict[PartKind, tuple[str, str]] = {
    "content": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "tool_call": ("input_json_delta", "partial_json"),
}
"""The type of a delta, and the member that has its text."""


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


class MessageEncoder(BlockEncoder):
    """A `StreamEncoder`."""

    def __init__(self, head: AnswerHead, usage: Usage, options: MessageOptions) -> None:
        super().__init__(usage)
        self._head = head
        self._options = options
        self._ended: CompletionOutput | None = None

    def opening(self) -> bytes:
        started = event_bytes("message_start", {"message": self._object([])})
        return started + event_bytes("ping", {})

    def closing(self) -> bytes:
        usage = usage_of_message(self.usage)
        delta = {"delta": self._stop(), "usage": usage, **self._reader.mark}
        return event_bytes("message_delta", delta) + event_bytes("message_stop", {})

    def failure(self, error: ApiError) -> bytes:
        body = msgspec.json.encode(anthropic_error(error, self._head.request_id))
        return b"event: error\ndata: " + body + b"\n\n"

    def _whole_object(self) -> dict[str, Any]:
        return self._object([self._block(block) for block in self._reader.blocks])

    def _take_end(self, output: CompletionOutput) -> None:
        self._ended = output

    def _stop(self) -> dict[str, str | None]:
        """Why the message ended, if it has."""
        output = self._ended
        if output is None:
            return {"stop_reason": None, "stop_sequence": None}
        match output.finish_reason:
            case "stop" if output.stop_reason in self._options.stop_sequences:
                return {"stop_reason": "stop_sequence", "stop_sequence": str(output.stop_reason)}
            case "stop":
                has_calls = any(block.kind == "tool_call" for block in self._reader.blocks)
                reason = "tool_use" if has_calls else "end_turn"
            case "length":
                most = self._options.max_tokens
                is_full = most is None or output.num_generated_tokens < most
                reason = "model_context_window_exceeded" if is_full else "max_tokens"
            case _:  # it was cancelled
                reason = "pause_turn"
        return {"stop_reason": reason, "stop_sequence": None}

    def _object(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": MESSAGE_PREFIX + self._head.request_id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": content,
            **self._stop(),
            "usage": usage_of_message(self.usage),
            **self._reader.mark,
        }

    def _block(self, block: Block) -> dict[str, Any]:
        started = _started(block)
        if block.kind == "tool_call":
            return {**started, "input": block.arguments}
        is_shown = block.kind != "reasoning" or self._options.shows_thinking
        return {**started, started["type"]: block.text if is_shown else ""}

    def _events_of(self, event: BlockEvent) -> Iterator[bytes]:
        block, index = event.block, {"index": event.block.index}
        match event.kind:
            case "begin":
                started = {**index, "content_block": _started(block)}
                yield event_bytes("content_block_start", started)
            case "text" if block.kind != "reasoning" or self._options.shows_thinking:
                kind, member = _DELTAS[block.kind]
                delta = {**index, "delta": {"type": kind, member: event.text}}
                yield event_bytes("content_block_delta", delta)
            case "text":
                return
            case "end":
                yield event_bytes("content_block_stop", index)


def _started(block: Block) -> dict[str, Any]:
    """A block without its text."""
    if block.kind == "tool_call":
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}
    return {**_TEXT_BLOCKS[block.kind]}


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
