"""`LineEncoder`: the objects and the lines of answers in Ollama's API.

`chat_shape` and `prompt_shape` are the two forms of what an answer holds. Invariant: the lines of a
stream, put together, are the whole answer; each line is one JSON object.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from cadenza.outputs import CompletionOutput, Logprob, RequestOutput
from cadenza.server.dialect import ollama_error
from cadenza.server.endpoints.blocks import Block, BlockReader
from cadenza.server.endpoints.generating import LogprobEntry, finite, ranked, shown_token
from cadenza.server.errors import ApiError
from cadenza.server.request_log import Usage
from cadenza.server.sse import AnswerHead, PromptInfo

NS = 1e9

_encode = msgspec.json.encode

Members = dict[str, Any]


AnswerShape = Callable[[str, str, Sequence[Members]], Members]
"""Makes the object that holds an answer's content, thinking and calls."""


def chat_shape(content: str, thinking: str, calls: Sequence[Members]) -> Members:
    """/api/chat: in a message."""
    message: Members = {"role": "assistant", "content": content}
    if thinking:
        message["thinking"] = thinking
    if calls:
        message["tool_calls"] = calls
    return {"message": message}


def prompt_shape(content: str, thinking: str, calls: Sequence[Members]) -> Members:
    """/api/generate: in the object itself."""
    del calls  # there are no tools
    return {"response": content, **({"thinking": thinking} if thinking else {})}


class LineEncoder:
    """A `StreamEncoder` whose events are lines.

    Args:
        num_top_logprobs: the number of likeliest tokens to show; None: no log probabilities.
    """

    def __init__(
        self, head: AnswerHead, usage: Usage, shape: AnswerShape, num_top_logprobs: int | None
    ) -> None:
        self.usage = usage
        self._head = head
        self._shape = shape
        self._num_top_logprobs = num_top_logprobs
        self._reader = BlockReader()
        self._reason: str | None = None

    def opening(self) -> bytes:
        return b""

    def take(self, place: int, request: PromptInfo, outputs: Sequence[CompletionOutput]) -> bytes:
        del place, request  # there is one prompt, which the answer does not contain
        made: list[bytes] = []
        for output in outputs:
            held = list(self._parts(output))
            logprobs = self._logprobs(output)
            if logprobs:
                held = held or [self._shape("", "", ())]
                held[-1]["logprobs"] = logprobs
            made += [self._line({**each, "done": False}) for each in held]
        return b"".join(made)

    def silence(self) -> bytes:
        """Clients read every line as an object, so it is one that adds nothing."""
        return self._line({**self._shape("", "", ()), "done": False})

    def closing(self) -> bytes:
        return self._line({**self._shape("", "", ()), **self._end()})

    def failure(self, error: ApiError) -> bytes:
        return _encode(ollama_error(error)) + b"\n"

    def whole(self, outputs: Iterable[RequestOutput]) -> bytes:
        logprobs: list[Members] = []
        for request in outputs:
            for output in request.outputs:
                for _ in self._parts(output):
                    pass
                logprobs += self._logprobs(output)
        blocks = self._reader.blocks
        calls = [block for block in blocks if block.kind == "tool_call"]
        held = self._shape(
            _text_of(blocks, "content"),
            _text_of(blocks, "reasoning"),
            [_call(number, block) for number, block in enumerate(calls)],
        )
        shown = {"logprobs": logprobs} if logprobs else {}
        return _encode({**_about(self._head), **held, **shown, **self._end()})

    def close(self) -> None:
        """Nothing is left of an answer."""

    def _parts(self, output: CompletionOutput) -> Iterator[Members]:
        for event in self._reader.take(output):
            if event.kind != "text":
                continue
            block, text = event.block, event.text
            if block.kind == "tool_call":
                number = sum(each.kind == "tool_call" for each in self._reader.blocks) - 1
                yield self._shape("", "", [_call(number, block)])
            elif block.kind == "reasoning":
                yield self._shape("", text, ())
            else:
                yield self._shape(text, "", ())
        self._reason = output.finish_reason or self._reason

    def _logprobs(self, output: CompletionOutput) -> list[Members]:
        num_top = self._num_top_logprobs
        if num_top is None:
            return []
        entries = zip(output.token_ids, output.logprobs or (), strict=True)
        return [_logprob(token_id, entry, num_top) for token_id, entry in entries]

    def _end(self) -> Members:
        end = {"done": True, "done_reason": self._reason, **self._reader.mark}
        return {**end, **metrics(self._head, self.usage)}

    def _line(self, members: Members) -> bytes:
        return _encode({**_about(self._head), **members}) + b"\n"


def loaded(head: AnswerHead, shape: AnswerShape) -> bytes:
    """The answer to a prompt that asks for no more than that the model is loaded."""
    end = {"done": True, "done_reason": "load"}
    return _encode({**_about(head), **shape("", "", ()), **end})


def metrics(head: AnswerHead, usage: Usage) -> Members:
    """Tokens, and nanoseconds; none is 0, since clients divide by them."""
    times = head.times()
    return {
        "total_duration": _ns(times.total_s),
        "load_duration": 0,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": _ns(times.prompt_s),
        "eval_count": usage.completion_tokens,
        "eval_duration": _ns(times.decode_s),
    }


def time_of(seconds: float) -> str:
    """As Go writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _about(head: AnswerHead) -> Members:
    return {"model": head.model, "created_at": time_of(head.created)}


def _ns(seconds: float) -> int:
    return max(1, round(seconds * NS))


def _text_of(blocks: Sequence[Block], kind: str) -> str:
    return "".join(block.text for block in blocks if block.kind == kind)


def _call(number: int, block: Block) -> Members:
    function = {"index": number, "name": block.name, "arguments": block.arguments}
    return {"id": block.call_id, "function": function}


def _logprob(token_id: int, entry: LogprobEntry, num_top: int) -> Members:
    shown = _token(token_id, entry[token_id])
    if num_top:
        shown["top_logprobs"] = [_token(*found) for found in ranked(entry, num_top)]
    return shown


def _token(token_id: int, found: Logprob) -> Members:
    text = shown_token(token_id, found)
    raw = None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
    return {"token": text, "logprob": finite(found), "bytes": raw}
