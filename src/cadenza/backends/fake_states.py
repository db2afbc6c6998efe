"""`FakeStates`: the recurrent states of the fake runner, each of which stores all its tokens, and
the newest in a shifted window, as a short convolution does. Whoever reads a slot that was never
written, or that another row of the step writes, gets a state that belongs to no prefix."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from cadenza.batch.step_schema import NO_STATE, ModelInputs
from cadenza.errors import RunnerError

WINDOW = 3
_NO_TOKEN = -5
_UNSOUND = -9
EMPTY = (_NO_TOKEN,) * WINDOW  # the state before the first token: an empty window, and no tokens
UNSOUND = (_UNSOUND,) * WINDOW  # a state of no prefix


def step(state: tuple[int, ...], token: int) -> tuple[int, ...]:
    return (*state[1:WINDOW], token, *state[WINDOW:], token)


def state_of(history: Sequence[int]) -> tuple[int, ...]:
    window = (*EMPTY, *history)[-WINDOW:]
    return (*window, *history)


class FakeStates:
    """x"""

    def __init__(self, num_slots: int, max_tokens: int) -> None:
        self._words = np.empty((num_slots, 1 + WINDOW + max_tokens), np.int64)
        self.spoil(range(num_slots))

    def __len__(self) -> int:
        return len(self._words)

    def spoil(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._write(slot, UNSOUND)

    def run(self, inputs: ModelInputs, token_ids: Sequence[int]) -> list[tuple[int, ...]]:
        starts, kept = inputs.rows.query_starts, inputs.tokens.state_slots
        after: list[tuple[int, ...]] = []
        for row, state in self._first_states(inputs).items():
            own = token_ids[starts[row] : starts[row + 1]]
            after += list(accumulate(own, step, initial=state))[1:]
        written: set[int] = set()
        for index, state in enumerate(after):
            slot = int(kept[index])
            if slot != NO_STATE:
                self._write(slot, UNSOUND if slot in written else state)
                written.add(slot)
        return after

    def read(self, slots: Sequence[int]) -> list[bytes]:
        return [self._words[slot].tobytes() for slot in slots]

    def write(self, slots: Sequence[int], contents: Sequence[bytes]) -> None:
        for slot, content in zip(slots, contents, strict=True):
            if len(content) != self._words[slot].nbytes:
                raise RunnerError(
                    f"a state has {self._words[slot].nbytes} bytes, not {len(content)}"
                )
            self._words[slot] = np.frombuffer(content, np.int64)

    def _first_states(self, inputs: ModelInputs) -> dict[int, tuple[int, ...]]:
        starts, kept = inputs.rows.query_starts, inputs.tokens.state_slots
        rows = [row for row in range(len(starts) - 1) if starts[row] < starts[row + 1]]
        writers: dict[int, set[int]] = {}
        for row in rows:
            for slot in kept[starts[row] : starts[row + 1]].tolist():
                writers.setdefault(slot, set()).add(row)
        states: dict[int, tuple[int, ...]] = {}
        for row in rows:
            slot = int(inputs.rows.state_starts[row])
            if slot == NO_STATE:
                states[row] = EMPTY
            elif writers.get(slot, {row}) == {row}:
                words = self._words[slot]
                states[row] = tuple(words[1 : 1 + words[0]].tolist())
            else:
                states[row] = UNSOUND
        return states

    def _write(self, slot: int, state: tuple[int, ...]) -> None:
        self._words[slot, 0] = len(state)
        self._words[slot, 1 : 1 + len(state)] = state
        self._words[slot, 1 + len(state) :] = _UNSOUND
