"""`SlotModel`: a model of mlx-lm over dense slots, with two shapes of call: one token for every
slot (`decode`), and consecutive tokens of one slot in few sizes (`compute`); `StepSplit`: a step as
such calls. Invariants: a slot's results do not depend on the tokens of other slots; where bits
depend on cuts, a row's calls follow from its tokens' positions. Legend: B slots · V vocabulary."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from cadenza.backends.mlx.arrays import to_device
from cadenza.backends.mlx.slots import (
    RaggedCall,
    SlotCall,
    SlotSizes,
    Snapshot,
    depends_on_cuts,
    has_state,
    layers_of,
    new_slots,
)
from cadenza.batch.step_schema import ModelInputs
from cadenza.errors import RunnerError

Int32Array = npt.NDArray[np.int32]

CHUNK = 64  # tokens of the largest call. With recurrent layers prompts are cut at multiples of it.


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What a model's code allows, found by `probe.find_abilities`."""

    is_ragged: bool  # rows of different lengths can decode in one call; otherwise each has its own
    # a call may end with padding; otherwise every length has a call of its own size
    is_padded: bool


class SlotModel:
    """`sizes.fill` fills new slots. `chunk_sizes` are the padded sizes of calls, ascending."""

    def __init__(
        self, model: Any, caches: Sequence[Any], sizes: SlotSizes, chunk_sizes: tuple[int, ...]
    ) -> None:
        self._model = model
        self._sizes = sizes
        self._chunk_sizes = chunk_sizes
        self._slots = new_slots(caches, sizes)
        self._layers = [*layers_of(self._slots)]
        self.has_state = has_state(self._slots)
        self.depends_on_cuts = depends_on_cuts(model, self._slots)
        self.abilities = Abilities(is_ragged=True, is_padded=not self.has_state)
        self._lengths = np.zeros(sizes.num_slots, np.int64)  # [B], positions in use
        self._saved: dict[int, dict[Snapshot, int]] = {}  # slot to the tokens of its snapshots
        self._waiting: dict[int, tuple[int, mx.array]] = {}  # slot to start and tokens

    def decode(
        self,
        tokens: mx.array,
        positions: Int32Array,
        active: Sequence[int],
        ending: Sequence[int] = (),
    ) -> mx.array:
        """The logits [B, V] of tokens [B] at `positions` [B] of the slots `active`; those of other
        slots are arbitrary. A recurrent layer's first token must be given to `compute`. The slots
        `ending` keep their state before this token, the last of their prompt, for `copy`."""
        for slot in active:
            if not positions[slot]:
                self._restart(slot)
            self._compute_waiting(slot)
        for slot in ending if self.has_state else ():
            self._save(slot, "end", int(positions[slot]))
        if not self.abilities.is_ragged:
            return self._decode_in_turn(tokens, positions, active)
        is_active = np.zeros(self._sizes.num_slots, np.bool_)
        is_active[list(active)] = True
        call = RaggedCall(
            positions=mx.array(np.where(is_active, positions, 0).astype(np.int32)),
            write_positions=mx.array(
                np.where(is_active, positions, self._sizes.padding_position).astype(np.int32)
            ),
            is_active=to_device(is_active),
        )
        self._count(active, positions[list(active)] + 1)
        return self._run(tokens[:, None], call)[:, 0]

    def extend(self, slot: int, start: int, tokens: mx.array) -> None:
        """Computes tokens of a slot whose logits are not needed. Those of recurrent layers, whose
        bits depend on cuts, wait until they fill a call that begins at a multiple of the largest
        size, or until a later token's logits are needed, so that cuts follow from positions."""
        if not start:
            self._restart(slot)
        if not self.has_state:
            self.compute(slot, start, tokens)
            return
        if slot in self._waiting:
            start, waiting = self._waiting.pop(slot)
            tokens = mx.concatenate([waiting, tokens])
        size = self._chunk_sizes[-1]
        whole = max(0, (start + tokens.shape[0]) // size * size - start)
        if whole:
            self.compute(slot, start, tokens[:whole])
            self._save(slot, "border", start + whole)
        if whole < tokens.shape[0]:
            self._waiting[slot] = (start + whole, tokens[whole:])

    def compute(self, slot: int, start: int, tokens: mx.array) -> list[mx.array]:
        """The logits [·, V] of consecutive tokens of a slot from position `start` on, a call's
        each; they are computed only if they are evaluated."""
        if not start:
            self._restart(slot)
        self._compute_waiting(slot)
        count = tokens.shape[0]
        logits: list[mx.array] = []
        done = 0
        while done < count:
            size, padded = self._next_size(start + done, count - done)
            part = tokens[done : done + size]
            write_positions = np.full(padded, self._sizes.padding_position, np.int32)
            write_positions[:size] = np.arange(start + done, start + done + size)
            call = SlotCall(
                slot=slot,
                start=start + done,
                write_positions=mx.array(write_positions),
                is_fresh=not start + done,
            )
            part = mx.pad(part, (0, padded - size)) if padded > size else part
            logits.append(self._run(part[None], call)[0, :size])
            done += size
        self._count([slot], np.array([start + count]))
        return logits

    def copy(self, source: int, destination: int, num_tokens: int) -> None:
        """Copies the first `num_tokens` positions of a slot; onto itself, it drops the others.
        Raises RunnerError if a recurrent layer has no snapshot of `num_tokens` tokens."""
        nothing: dict[Snapshot, int] = {}
        saved = self._saved.get(source, nothing)
        found: list[Snapshot] = [each for each, length in saved.items() if length == num_tokens]
        if self.has_state and not found:
            raise RunnerError(
                f"slot {source} has no snapshot of {num_tokens} tokens, but of {saved}"
            )
        if source != destination:
            self._restart(destination)
            for each in self._layers:
                each.copy(source, destination, num_tokens)
        self._cut(destination, num_tokens)
        for each in self._layers:
            for snapshot in found[:1]:
                each.restore(destination, snapshot)
        border = saved.get("border", num_tokens + 1)
        self._saved[destination] = {"border": border} if border <= num_tokens else {}

    def arrays(self) -> list[mx.array]:
        return [array for each in self._layers for array in each.arrays()]

    def drop_slots(self) -> None:
        for each in self._layers:
            each.drop()
        self._lengths[:] = 0
        self._saved.clear()
        self._waiting.clear()

    def _compute_waiting(self, slot: int) -> None:
        if slot in self._waiting:
            start, tokens = self._waiting.pop(slot)
            self.compute(slot, start, tokens)

    def _decode_in_turn(
        self, tokens: mx.array, positions: Int32Array, active: Sequence[int]
    ) -> mx.array:
        own = {
            slot: self.compute(slot, int(positions[slot]), tokens[slot : slot + 1])[0]
            for slot in active
        }
        nothing = mx.zeros_like(next(iter(own.values())))
        return mx.concatenate([own.get(slot, nothing) for slot in range(self._sizes.num_slots)])

    def _next_size(self, start: int, count: int) -> tuple[int, int]:
        largest = self._chunk_sizes[-1]
        if not self.abilities.is_padded:
            size = min(count, largest - start % largest)
            return size, size
        fitting = next((size for size in self._chunk_sizes if size >= count), largest)
        return min(count, fitting), fitting

    def _run(self, tokens: mx.array, call: RaggedCall | SlotCall) -> mx.array:
        for each in self._layers:
            each.begin(call)
        output: mx.array = self._model(tokens, cache=self._slots)
        return output

    def _save(self, slot: int, snapshot: Snapshot, num_tokens: int) -> None:
        for each in self._layers:
            each.save(slot, snapshot)
        self._saved.setdefault(slot, {})[snapshot] = num_tokens

    def _restart(self, slot: int) -> None:
        self._saved.pop(slot, None)
        self._cut(slot, 0)

    def _cut(self, slot: int, num_tokens: int) -> None:
        self._waiting.pop(slot, None)
        length = int(self._lengths[slot])
        if length > num_tokens:
            for each in self._layers:
                each.clear(slot, num_tokens, length)
        self._lengths[slot] = num_tokens

    def _count(self, slots: Sequence[int], lengths: npt.NDArray[np.integer[Any]]) -> None:
        indices = list(slots)
        self._lengths[indices] = np.maximum(self._lengths[indices], lengths)


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
