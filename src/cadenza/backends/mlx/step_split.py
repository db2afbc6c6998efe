"""`StepSplit`: a step's tokens as calls of a `SlotModel`.

Knows rows and slots, no arrays of MLX. Invariant: the logits from which a row samples always come
from the same kind of call, and with recurrent layers the calls of a row follow from its tokens'
positions alone.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cadenza.core.step_schema import ModelInputs

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpan:
    """Consecutive tokens of a row; `wanted` are the places of those whose logits are needed."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleToken:
    """A token that is computed by itself."""

    token: DecodedToken
    is_wanted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSplit:
    """A step as calls: spans of tokens, then single ones, then one token of each decoding row.

    Single tokens are those that a recurrent layer computes again, or all whose logits it needs.
    `sources` are the places of the logit rows [N] in the logits of the spans, of the single tokens
    and of the slots [B], one after the other, as far as they are wanted.
    """

    spans: list[TokenSpan]
    single: list[SingleToken]
    decoding: list[DecodedToken]
    sources: Int32Array

    @classmethod
    def of(
        cls, inputs: ModelInputs, slot_of_row: npt.NDArray[np.intp], *, is_recurrent: bool
    ) -> "StepSplit":
        """A row's last token is decoded if its logits are needed, so that the shape of the call
        that gives them is always the same; a recurrent layer's first token is not."""
        starts = inputs.rows.query_starts
        indices = inputs.logits.token_indices[: inputs.num_logits].tolist()
        wanted = frozenset(indices)
        rows = [
            _RowSplit.of(inputs, row, int(slot_of_row[row]), wanted, is_recurrent=is_recurrent)
            for row in np.flatnonzero(starts[1:] > starts[:-1]).tolist()
        ]
        places = [index for each in rows for index in each.wanted_in_span]
        places += [index for each in rows for index in each.wanted_single]
        place_of = {index: place for place, index in enumerate(places)}
        decoding = [each.decoded for each in rows if each.decoded is not None]
        for each in decoding:
            place_of[int(starts[each.row + 1]) - 1] = len(places) + each.slot
        return cls(
            spans=[each.span for each in rows if each.span is not None],
            single=[token for each in rows for token in each.single],
            decoding=decoding,
            sources=np.array([place_of[index] for index in indices], np.int32),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _RowSplit:
    """The tokens of one row; `wanted_in_span` and `wanted_single` are indices into the step's."""

    span: TokenSpan | None
    single: list[SingleToken]
    decoded: DecodedToken | None
    wanted_in_span: list[int]
    wanted_single: list[int]

    @classmethod
    def of(
        cls,
        inputs: ModelInputs,
        row: int,
        slot: int,
        wanted: Collection[int],
        *,
        is_recurrent: bool,
    ) -> "_RowSplit":
        tokens, starts = inputs.tokens, inputs.rows.query_starts
        begin, end = int(starts[row]), int(starts[row + 1])
        start, last = int(tokens.positions[begin]), end - 1

        def decoded(index: int) -> DecodedToken:
            position = start + index - begin
            return DecodedToken(
                row=row,
                slot=slot,
                position=position,
                token_id=int(tokens.ids[index]),
                ends_prompt=position == inputs.rows.prompt_lens[row] - 1,
            )

        is_decoded = last in wanted and not (is_recurrent and start + last == begin)
        stop = last if is_decoded else end
        span_end = stop
        if is_recurrent:
            first_single = max(int(inputs.rows.decode_starts[row]), 1)
            span_end = min(stop, begin + max(0, first_single - start))
        in_span = [index for index in range(begin, span_end) if index in wanted]
        span = TokenSpan(
            row=row,
            slot=slot,
            start=start,
            token_ids=tokens.ids[begin:span_end],
            wanted=[index - begin for index in in_span],
        )
        rest = range(span_end, stop)
        return cls(
            span=span if span_end > begin else None,
            single=[SingleToken(token=decoded(index), is_wanted=index in wanted) for index in rest],
            decoded=decoded(last) if is_decoded else None,
            wanted_in_span=in_span,
            wanted_single=[index for index in rest if index in wanted],
        )
