"""Blocks of an answer: its reasoning, its texts and its calls, in their order.

Owns how the parts of an output become blocks, for APIs whose answers are lists of these. Knows no
API. Invariant: the blocks of a streamed answer are those of the whole one.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from cadenza.outputs import CompletionOutput, OutputPart, PartKind
from cadenza.server.endpoints.conversation import new_call_id
from cadenza.server.sse import schema_mark


@dataclass(slots=True, eq=False)
class Block:
    """One of them; of a call the text are the arguments.

    Args:
        index: its place in the answer.
        name: the function that is called.
        call_id: of a call.
    """

    index: int
    kind: PartKind
    name: str | None = None
    call_id: str = ""
    is_ended: bool = False
    texts: list[str] = field(default_factory=list[str])

    @property
    def text(self) -> str:
        return "".join(self.texts)


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
        """`schema_mark` of the output, once it has ended."""

    def take(self, output: CompletionOutput) -> Iterator[BlockEvent]:
        """What is new; the end of the output ends its last block."""
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
