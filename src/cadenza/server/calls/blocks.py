"""Blocks of an answer (reasoning, texts, calls), and what encoders of APIs with such answers share.
Invariant: a streamed answer's blocks are those of the whole one."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec

from cadenza.outputs import CompletionOutput, OutputPart, PartKind, RequestOutput
from cadenza.server.calls.conversation import new_call_id
from cadenza.server.calls.encoder import AnswerHead, PromptInfo, StreamEncoder, schema_mark


@dataclass(slots=True, eq=False)
class Block:
    """One block; the text of a call is its arguments. `index`: its place in the answer. `name`: the
    function that is called. `call_id`: of a call."""

    index: int
    kind: PartKind
    name: str | None = None
    call_id: str = ""
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
        """Those of a stream."""
        raise NotImplementedError

    def _events(self, output: CompletionOutput) -> Iterable[bytes]:
        return [made for event in self._read(output) for made in self._events_of(event)]

    def take(self, place: int, request: PromptInfo, outputs: Sequence[CompletionOutput]) -> bytes:
        del place, request  # there is one prompt, which the answer does not contain
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
