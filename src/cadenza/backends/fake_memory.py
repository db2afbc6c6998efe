"""What the fake runner keeps beside tokens: recurrent states, each of which stores all its tokens,
and the newest in a shifted window, as a short convolution does; images; spans. Whoever reads what
was never written, or out of order, gets what belongs to no prefix, or a RunnerError."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from cadenza.batch.image_cost import ImageWork
from cadenza.batch.step_schema import NO_STATE, ImageCall, ModelInputs, SpanCall
from cadenza.batch.whole_spans import SpanShape
from cadenza.errors import RunnerError
from cadenza.request import Attachment

WINDOW = 3
_NO_TOKEN = -5
_UNSOUND = -9
EMPTY = (_NO_TOKEN,) * WINDOW  # the state before the first token: an empty window, and no tokens
UNSOUND = (_UNSOUND,) * WINDOW  # a state of no prefix
UNSOUND_IMAGE = -11  # in a slot that nobody may read
_QUANTUM_TOKENS = 4  # placeholders of each quantum
_NUM_PASSES, _BLOCK_ROWS = 3, 4


def step(state: tuple[int, ...], token: int) -> tuple[int, ...]:
    return (*state[1:WINDOW], token, *state[WINDOW:], token)


def state_of(history: Sequence[int]) -> tuple[int, ...]:
    window = (*EMPTY, *history)[-WINDOW:]
    return (*window, *history)


class FakeStates:
    """A slot that was never written, or that another row of the step writes, has a state of no
    prefix."""

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


def image_value(part: Attachment, index: int, token_id: int) -> int:
    """What is stored of the placeholder `index` of an image; below all tokens."""
    text = b"%d %d %d %d " % (part.width, part.height, index, token_id)
    digest = hashlib.blake2b(text + part.payload, digest_size=7).digest()
    return -1000 - int.from_bytes(digest, "little")


def fake_image_work(part: Attachment) -> ImageWork:
    count = 2 * -(-part.rows * part.columns // _QUANTUM_TOKENS)
    kinds = np.arange(count, dtype=np.float64) % 2
    pixels = np.float64(part.width * part.height)
    return ImageWork(products=(1 - kinds) * pixels, attention=kinds * 2 * pixels)


class FakeImages:
    """An embedding is a hash of the image's pixels, its sides and the placeholder's index in it."""

    def __init__(self, num_slots: int) -> None:
        self._slots: list[tuple[Attachment, int] | None] = [None] * num_slots
        self._current: Attachment | None = None
        self._num_done = 0
        self.num_quanta = 0

    def encode(self, call: ImageCall) -> None:
        """Raises RunnerError if a call is not the next one of its image."""
        part, work = call.attachment, fake_image_work(call.attachment)
        if call.start == 0:
            self._current, self._num_done = part, 0
        is_next = self._current is not None and self._current.digest == part.digest
        if not is_next or call.start != self._num_done or not call.start < call.stop <= len(work):
            raise RunnerError(f"quanta {call.start} to {call.stop} of an image are out of order")
        if len(call.slots) != part.rows * part.columns:
            raise RunnerError(f"{len(call.slots)} slots for {part.rows * part.columns} tokens")
        self._num_done = call.stop
        self.num_quanta += call.stop - call.start
        if call.stop == len(work):
            self._current = None
            for index, slot in enumerate(call.slots.tolist()):
                self._slots[slot] = part, index

    def value_at(self, slot: int, token_id: int) -> int:
        found = self._slots[slot]
        return UNSOUND_IMAGE if found is None else image_value(*found, token_id)

    def spoil(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._slots[slot] = None


def fake_span_shape(max_rows: int) -> SpanShape:
    return SpanShape(num_passes=_NUM_PASSES, max_rows=max_rows, block_rows=_BLOCK_ROWS)


@dataclass(slots=True, eq=False)
class FakeSpans:
    """The slots of a span's rows, and how many passes each had. Rows out of order, a pass begun
    before the one before it is complete, or a displaced span raise RunnerError; the last pass alone
    writes."""

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
