"""`FakeImages`: the image slots of the fake runner. An embedding is a hash of the image's pixels
and sides and of the placeholder's index in it, so that quanta out of order, mixed images, or a slot
of another image change the output."""

import hashlib
from collections.abc import Iterable

import numpy as np

from cadenza.core.image_cost import ImageWork
from cadenza.core.step_schema import ImageCall
from cadenza.errors import RunnerError
from cadenza.request import Attachment

UNSOUND = -11
"""In a slot that nobody may read."""

_QUANTUM_TOKENS = 4
"""Placeholders of each quantum."""


def image_value(part: Attachment, index: int, token_id: int) -> int:
    """What is stored of the placeholder `index` of an image; below all tokens."""
    text = b"%d %d %d %d " % (part.width, part.height, index, token_id)
    digest = hashlib.blake2b(text + part.payload, digest_size=7).digest()
    return -1000 - int.from_bytes(digest, "little")


def fake_image_work(part: Attachment) -> ImageWork:
    """Two quanta for each few placeholders: one of products, one of attention."""
    count = 2 * -(-part.rows * part.columns // _QUANTUM_TOKENS)
    kinds = np.arange(count, dtype=np.float64) % 2
    pixels = np.float64(part.width * part.height)
    return ImageWork(products=(1 - kinds) * pixels, attention=kinds * 2 * pixels)


class FakeImages:
    """`num_slots` slots; each has the image and index of a placeholder."""

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
        return UNSOUND if found is None else image_value(*found, token_id)

    def spoil(self, slots: Iterable[int]) -> None:
        """Overwrites slots that nobody may read."""
        for slot in slots:
            self._slots[slot] = None
