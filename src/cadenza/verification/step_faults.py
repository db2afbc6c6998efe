"""Faults of recurrent states and their rollback, which the verifier must catch. They, and those of
images, are planted in a step's inputs, so that they are the same on every backend.
"""

from collections.abc import Callable, Mapping

import numpy as np

from cadenza.config import EngineLimits
from cadenza.core.batch import Batch, BatchEntry
from cadenza.core.packing import Packer
from cadenza.core.step_schema import ModelInputs

Spoil = Callable[[ModelInputs, Batch], None]
"""Changes the inputs of a step in place."""

MakePacker = Callable[[EngineLimits, int], Packer]


class FaultyPacker(Packer):
    """Packs steps, then spoils their inputs."""

    def __init__(self, limits: EngineLimits, vocab_size: int, spoil: Spoil) -> None:
        super().__init__(limits, vocab_size)
        self._spoil = spoil

    def pack(self, batch: Batch, bucket: int, *, masks_follow: bool = False) -> ModelInputs:
        inputs = super().pack(batch, bucket, masks_follow=masks_follow)
        self._spoil(inputs, batch)
        return inputs


def places_of(inputs: ModelInputs, entry: BatchEntry) -> slice:
    start = int(inputs.rows.query_starts[entry.row])
    return slice(start, start + entry.num_new_tokens)


def _state_of_another_row(inputs: ModelInputs, batch: Batch) -> None:
    """Each row begins with the state in the slot of the next one, if several have one."""
    begun = [entry for entry in batch.entries if entry.state_start is not None]
    for entry, other in zip(begun, (*begun[1:], *begun[:1]), strict=True):
        inputs.rows.state_starts[entry.row] = other.state_start


def _state_behind_a_rejected_draft(inputs: ModelInputs, batch: Batch) -> None:
    """What is kept as the state after a token is that after the next one, a draft."""
    for entry in batch.entries:
        if entry.drafts:
            stop = places_of(inputs, entry).stop
            kept = inputs.tokens.state_slots[stop - len(entry.drafts) - 1 : stop]
            kept[:] = np.roll(kept, 1)


STATES = "recurrent states"

STATE_FAULTS: Mapping[str, Spoil] = {"the state of another row": _state_of_another_row}
DRAFT_FAULTS: Mapping[str, Spoil] = {
    "the state behind a rejected draft": _state_behind_a_rejected_draft
}
"""By name, of models with recurrent states; the second kind is seen where drafts are verified."""
