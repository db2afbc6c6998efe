"""Encoders: the bytes of answers and of streamed events. `BlockEncoder`: of APIs whose answers are
lists of blocks (reasoning, texts, calls). Invariant: a stream's events, joined, are the whole
answer."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec

from cadenza.frontend.output_processor import OutputProcessor
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.outputs import CompletionOutput, Logprob, OutputPart, PartKind, RequestOutput
from cadenza.server.calls.conversation import new_call_id
from cadenza.server.calls.record import AnswerTimes, Usage
from cadenza.server.errors import ApiError

KEEP_ALIVE = b": keep-alive\n\n"  # a comment
LEAST_LOGPROB = -9999.0  # JSON has no infinity

LogprobEntry = Mapping[int, Logprob]  # the chosen token of a position, first, and the likeliest

_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """What is known of an answer before it begins."""

    request_id: str
    created: int
    model: str
    text: TextFrontend  # the model's
    usage: Usage = field(default_factory=Usage)  # of the answer so far, as its times
    read_fingerprint: Callable[[], str | None] = lambda: None  # None until it is known
    times: Callable[[], AnswerTimes] = AnswerTimes
    # seconds since 1970, for the time of a chunk; None: `created` is that of all
    now: Callable[[], float] | None = None

    @property
    def system_fingerprint(self) -> str | None:
        return self.read_fingerprint()

    def fields(self, id_prefix: str, object_name: str) -> dict[str, Any]:
        return {
            "id": f"{id_prefix}{self.request_id}",
            "object": object_name,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


PromptInfo = RequestOutput | OutputProcessor
"""A prompt, and what is known of it: of a request that has ended, or of one that runs."""


class AnswerEncoder(ABC):
    """Makes the bytes of one answer; the usage already counts the outputs that it is given."""

    def __init__(self, head: AnswerHead) -> None:
        self.head = head

    @abstractmethod
    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        """For a call that is not streamed. On any thread. Raises ApiError if it was cancelled."""

    def close(self) -> None:  # noqa: B027  most answers leave nothing
        """The call has ended, perhaps before its answer."""


class WholeAnswer(AnswerEncoder):
    """Made by one function."""

    def __init__(
        self, head: AnswerHead, make: Callable[[AnswerHead, Sequence[RequestOutput]], bytes]
    ) -> None:
        super().__init__(head)
        self._make = make

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        return self._make(self.head, outputs)


class StreamEncoder(AnswerEncoder):
    """Also makes the events of a stream."""

    def opening(self) -> bytes:
        """The events that a stream begins with, before there is any token."""
        return b""

    @abstractmethod
    def take(self, prompt: int, request: PromptInfo, outputs: Sequence[CompletionOutput]) -> bytes:
        """The events of new outputs of a prompt, by its index in the call."""

    def silence(self) -> bytes:
        """Sent after a silence, so that no proxy closes the connection."""
        return KEEP_ALIVE

    @abstractmethod
    def closing(self) -> bytes:
        """The events that a stream ends with."""

    @abstractmethod
    def failure(self, error: ApiError) -> bytes:
        """The events that a failed stream ends with."""


def schema_mark(output: CompletionOutput) -> dict[str, bool]:
    """The member of an answer that was checked by its schema at its end."""
    found = output.is_schema_valid
    return {} if found is None else {"x_schema_valid": found}


@dataclass(slots=True, eq=False)
class Block:
    """One block; the text of a call is its arguments."""

    index: int  # in the answer
    kind: PartKind
    name: str | None = None  # the function that is called
    call_id: str = ""  # of a call
    is_ended: bool = False
    texts: list[str] = field(default_factory=list[str])

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def arguments(self) -> dict[str, Any]:
        """Of a call, as an object; a text that is no JSON object is its only member."""
        try:
            return msgspec.json.decode(self.text, type=dict[str, Any])
        except msgspec.DecodeError:
            return {"arguments": self.text}


class BlockEvent(NamedTuple):
    """A block begins, has more text, or ends."""

    kind: Literal["begin", "text", "end"]
    block: Block
    text: str = ""


class BlockReader:
    """Reads one sample's outputs as they come."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.mark: dict[str, bool] = {}

    def take(self, output: CompletionOutput) -> Iterator[BlockEvent]:
        """The events of an output; its end ends the last block."""
        parts = output.parts
        if parts is None:
            parts = (OutputPart("content", output.text),)
        for part in parts:
            if part.text or part.name is not None:
                yield from self._take_part(part)
        if output.finish_reason is not None:
            self.mark = schema_mark(output)
            yield from self._end()

    def _take_part(self, part: OutputPart) -> Iterator[BlockEvent]:
        if not self.blocks or self.blocks[-1].is_ended or self.blocks[-1].kind != part.kind:
            yield from self._end()
            yield self._begin(part)
        block = self.blocks[-1]
        block.texts.append(part.text)
        yield BlockEvent("text", block, part.text)
        if part.name is not None:
            yield from self._end()

    def _begin(self, part: OutputPart) -> BlockEvent:
        call_id = "" if part.name is None else new_call_id()
        block = Block(len(self.blocks), part.kind, name=part.name, call_id=call_id)
        self.blocks.append(block)
        return BlockEvent("begin", block)

    def _end(self) -> Iterator[BlockEvent]:
        if self.blocks and not self.blocks[-1].is_ended:
            self.blocks[-1].is_ended = True
            yield BlockEvent("end", self.blocks[-1])


class BlockEncoder(StreamEncoder):
    """Of one prompt; its events follow from those of its blocks."""

    def __init__(self, head: AnswerHead) -> None:
        super().__init__(head)
        self._reader = BlockReader()
        self.ended: CompletionOutput | None = None

    @abstractmethod
    def _whole_object(self) -> dict[str, Any]:
        """The answer, made of all blocks."""

    def _events_of(self, event: BlockEvent) -> Iterable[bytes]:
        raise NotImplementedError

    def _events(self, output: CompletionOutput) -> Iterable[bytes]:
        return [made for event in self._read(output) for made in self._events_of(event)]

    def take(self, prompt: int, request: PromptInfo, outputs: Sequence[CompletionOutput]) -> bytes:
        del prompt, request  # there is one prompt, which the answer does not contain
        return b"".join([made for output in outputs for made in self._events(output)])

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        for request in outputs:
            for output in request.outputs:
                for _ in self._read(output):
                    pass
        return msgspec.json.encode(self._whole_object())

    def _read(self, output: CompletionOutput) -> Iterator[BlockEvent]:
        if output.finish_reason is not None:
            self.ended = output
        yield from self._reader.take(output)


def event_bytes(name: str, members: dict[str, Any]) -> bytes:
    """A named event, whose data repeats its name."""
    body = msgspec.json.encode({"type": name, **members})
    return b"event: " + name.encode() + b"\ndata: " + body + b"\n\n"


def ranked(entry: LogprobEntry, num_top: int) -> list[tuple[int, Logprob]]:
    """The likeliest tokens of a position, the likeliest first."""
    found = [each for each in entry.items() if each[1].rank is not None]
    return sorted(found, key=lambda each: each[1].rank or 0)[:num_top]


def shown_token(token_id: int, found: Logprob) -> str:
    return token_name(token_id) if found.decoded_token is None else found.decoded_token


def token_name(token_id: int) -> str:
    """Unique, unlike the token's text."""
    return f"token_id:{token_id}"


def finite(found: Logprob) -> float:
    return max(found.logprob, LEAST_LOGPROB)
