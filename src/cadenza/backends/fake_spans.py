"""`FakeSpans`: spans of the fake runner in passes. Rows out of order, a pass begun before the one
before it is complete, or a span that another one has displaced raise RunnerError; the rows' slots
are written by the last pass alone."""

from dataclasses import dataclass, field

import numpy as np

from cadenza.core.step_schema import SpanCall
from cadenza.core.whole_spans import SpanShape
from cadenza.errors import RunnerError

_NUM_PASSES, _BLOCK_ROWS = 3, 4


def fake_span_shape(max_rows: int) -> SpanShape:
    return SpanShape(num_passes=_NUM_PASSES, max_rows=max_rows, block_rows=_BLOCK_ROWS)


@dataclass(slots=True, eq=False)
class FakeSpans:
    """The span that is being computed: the slots of its rows, and the passes that each had."""

    slots: list[int] = field(default_factory=list[int])
    num_done: list[int] = field(default_factory=list[int])
    num_calls: int = 0

    def compute(self, call: SpanCall, values: list[int]) -> dict[int, int]:
        """What a call stores in slots, of rows with these values."""
        tokens, rows, count = call.groups.tokens, call.groups.rows, len(values)
        positions, slots = tokens.positions[:count].tolist(), tokens.slots[:count].tolist()
        start, stop = positions[0] - call.first, int(rows.kv_lens.max())
        if positions != list(range(positions[0], positions[0] + count)) or count > stop - start:
            raise RunnerError(f"rows at {positions} of a span from {start} to {stop}")
        if np.any(tokens.reaches[:count] != stop - 1):
            raise RunnerError("the rows of a span do not see all of it")
        if call.pass_index == 0 and call.first == 0:
            self.slots, self.num_done = [-1] * (stop - start), [0] * (stop - start)
        if call.pass_index and min(self.num_done, default=0) < call.pass_index:
            raise RunnerError(f"pass {call.pass_index} begins before the one before it ends")
        for row, slot in enumerate(slots, call.first):
            if self.num_done[row] != call.pass_index or self.slots[row] not in (-1, slot):
                raise RunnerError(f"row {row} of a span is out of order")
            self.slots[row], self.num_done[row] = slot, call.pass_index + 1
        self.num_calls += 1
        if call.pass_index + 1 < _NUM_PASSES:
            return {}
        return dict(zip(slots, values, strict=True))
