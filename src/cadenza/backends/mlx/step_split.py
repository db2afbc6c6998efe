"""`StepSplit`: a step's tokens as calls of a `SlotModel`. Invariant: a row samples from logits of
one kind of call, and where bits depend on cuts (`slots.depends_on_cuts`) a row's calls follow from
its tokens' positions alone."""

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cadenza.batch.step_schema import ModelInputs

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpan:
    """Consecutive tokens of a row; `wanted` are the indices of those whose logits are needed."""

    row: int
    slot: int
    start: int
    token_ids: Int32Array
    wanted: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedToken:
    """A token of a row that is computed together with those of other rows, or by itself."""

    row: int
    slot: int
    position: int
    token_id: int
    ends_prompt: bool
    is_wanted: bool


@dataclass(slots=True, kw_only=True)
class StepSplit:
    """A step as calls: spans, then single tokens, then one token of each decoding row. With
    `has_cuts`, single tokens are generated ones that are computed again, and prompt tokens whose
    logits are needed. `sources` index the logits of spans, single tokens and slots [B],
    concatenated."""

    spans: list[TokenSpan] = field(default_factory=list[TokenSpan])
    single: list[DecodedToken] = field(default_factory=list[DecodedToken])
    decoding: list[DecodedToken] = field(default_factory=list[DecodedToken])
    sources: Int32Array

    @classmethod
    def of(
        cls, inputs: ModelInputs, slot_of_row: npt.NDArray[np.intp], *, has_cuts: bool
    ) -> "StepSplit":
        # A row's last token is decoded if its logits are needed, so that the call that gives them
        # has one shape; with cuts the first token of all is not.
        starts = inputs.rows.query_starts
        indices = inputs.logits.token_indices[: inputs.num_logits].tolist()
        split, wanted = cls(sources=np.zeros(len(indices), np.int32)), frozenset(indices)
        in_spans: list[int] = []  # the tokens whose logits are needed, as indices of the step's
        among_single: list[int] = []
        for row in np.flatnonzero(starts[1:] > starts[:-1]).tolist():
            tokens = _RowTokens(inputs=inputs, row=row, slot=int(slot_of_row[row]), wanted=wanted)
            single_from, stop = tokens.cut(has_cuts=has_cuts)
            if single_from > tokens.begin:
                split.spans.append(tokens.span(single_from))
                in_spans += [index for index in range(tokens.begin, single_from) if index in wanted]
            split.single += map(tokens.decoded, range(single_from, stop))
            among_single += [index for index in range(single_from, stop) if index in wanted]
            split.decoding += map(tokens.decoded, range(stop, tokens.end))
        computed = [*in_spans, *among_single]
        source_of = {index: source for source, index in enumerate(computed)}
        for each in split.decoding:
            source_of[int(starts[each.row + 1]) - 1] = len(computed) + each.slot
        split.sources[:] = [source_of[index] for index in indices]
        return split


@dataclass(frozen=True, slots=True, kw_only=True)
class _RowTokens:
    inputs: ModelInputs
    row: int
    slot: int
    wanted: Collection[int]

    @property
    def begin(self) -> int:
        return int(self.inputs.rows.query_starts[self.row])

    @property
    def end(self) -> int:
        return int(self.inputs.rows.query_starts[self.row + 1])

    @property
    def start(self) -> int:
        return int(self.inputs.tokens.positions[self.begin])

    def cut(self, *, has_cuts: bool) -> tuple[int, int]:
        begin, start, last = self.begin, self.start, self.end - 1
        is_decoded = last in self.wanted and not (has_cuts and start + last == begin)
        stop = last if is_decoded else self.end
        if not has_cuts:
            return stop, stop
        first_single = max(int(self.inputs.rows.decode_starts[self.row]), 1)
        return min(stop, begin + max(0, first_single - start)), stop

    def span(self, end: int) -> TokenSpan:
        return TokenSpan(
            row=self.row,
            slot=self.slot,
            start=self.start,
            token_ids=self.inputs.tokens.ids[self.begin : end],
            wanted=[at for at in range(end - self.begin) if self.begin + at in self.wanted],
        )

    def decoded(self, index: int) -> DecodedToken:
        position = self.start + index - self.begin
        return DecodedToken(
            row=self.row,
            slot=self.slot,
            position=position,
            token_id=int(self.inputs.tokens.ids[index]),
            ends_prompt=position == self.inputs.rows.prompt_lens[self.row] - 1,
            is_wanted=index in self.wanted,
        )
