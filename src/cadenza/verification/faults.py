"""Faults that the verifier must catch, and which models show them: of recurrent states, their
rollback, images and masks. They make a stream depend on other rows, drafts or steps, and are
planted in a step's inputs, the digests of images or a compiler of masks, so that they are the same
on every backend."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cadenza.batch.batch import Batch, BatchEntry, SeenImage
from cadenza.batch.packing import Packer
from cadenza.batch.step_schema import ModelInputs
from cadenza.config import EngineLimits
from cadenza.structured import CompileConstraint, Constraint, PendingConstraint
from cadenza.verification.workload import Arrival, has_turned_images
from cadenza.vision.processor import ImagePart

Spoil = Callable[[ModelInputs, Batch], None]  # changes the inputs of a step in place

MakePacker = Callable[[EngineLimits, int], Packer]


class FaultyPacker(Packer):
    """Spoils the inputs of steps."""

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
# By name, of models with recurrent states; the second kind is seen where drafts are verified.
DRAFT_FAULTS: Mapping[str, Spoil] = {
    "the state behind a rejected draft": _state_behind_a_rejected_draft
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultOfImages:
    """A fault of the inputs of steps, or of the digests of images. `needs_axes`: only a model whose
    positions have three coordinates shows it; `needs_turned`: only one that takes an image and the
    same with its sides exchanged."""

    spoil: Spoil | None = None
    needs_axes: bool = False
    needs_turned: bool = False

    def packer(self, limits: EngineLimits, vocab_size: int) -> Packer:
        if self.spoil is None:
            return Packer(limits, vocab_size)
        return FaultyPacker(limits, vocab_size, self.spoil)


def absent_faults(arrivals: Sequence[Arrival], *, has_axes: bool) -> Mapping[str, str]:
    """Those that a workload with images does not show, and why; `has_axes`: positions of rope have
    three coordinates."""
    found: dict[str, str] = {}
    is_turned = has_turned_images(arrivals)
    for name, fault in IMAGE_FAULTS.items():
        if fault.needs_axes and not has_axes:
            found[name] = "the model's positions of rope have one coordinate"
        elif fault.needs_turned and not is_turned:
            found[name] = "no image has the pixels of another with its sides exchanged"
    return found


def digest_without_sides(settings: bytes, part: ImagePart, pixels: bytes) -> bytes:
    return hashlib.sha256(settings + b"%d " % part.num_tokens + pixels).digest()


def _rows_of_a_neighbour(inputs: ModelInputs, batch: Batch) -> None:
    """The placeholders of a sequence read the slots of another one's image."""
    seeing = [entry for entry in batch.entries if entry.images]
    if len(seeing) < 2:
        return
    for entry, other in zip(seeing, (*seeing[1:], seeing[0]), strict=True):
        own = inputs.tokens.image_slots[places_of(inputs, entry)]
        own[own >= 0] = np.resize(other.images[0].image.slots, int((own >= 0).sum()))


def _span_off_by_one(inputs: ModelInputs, batch: Batch) -> None:
    """A step that begins inside an image reads the slot before its own for each placeholder."""
    for entry, seen in _begun_inside(batch):
        own = inputs.tokens.image_slots[places_of(inputs, entry)]
        rank = {slot: i for i, slot in enumerate(seen.image.slots.tolist())}
        for place, slot in enumerate(own.tolist()):
            if slot in rank:
                own[place] = seen.image.slots[rank[slot] - 1]


def _sides_exchanged(inputs: ModelInputs, batch: Batch) -> None:
    """A step that begins inside an image has its rows for columns in positions of rope."""
    for entry, seen in _begun_inside(batch):
        own = inputs.tokens.rope_positions[places_of(inputs, entry)]
        inside = own[: seen.attachment.end - entry.start]
        inside[:, 1:] = inside[:, :0:-1].copy()


def _lag_dropped(inputs: ModelInputs, batch: Batch) -> None:
    """Tokens that are decoded have their index as position of rope, whatever images are before."""
    for entry in batch.entries:
        if entry.start >= entry.sequence.num_prompt_tokens:
            places = places_of(inputs, entry)
            inputs.tokens.rope_positions[places] = inputs.tokens.positions[places, None]


def _begun_inside(batch: Batch) -> list[tuple[BatchEntry, SeenImage]]:
    """Entries whose first token is inside an image, not at its start."""
    return [
        (entry, seen)
        for entry in batch.entries
        for seen in entry.images[:1]
        if seen.attachment.start < entry.start < seen.attachment.end
    ]


# By name.
IMAGE_FAULTS: Mapping[str, FaultOfImages] = {
    "an image has a neighbour's rows": FaultOfImages(spoil=_rows_of_a_neighbour),
    "an image's span is off by one": FaultOfImages(spoil=_span_off_by_one),
    "rows and columns exchanged in rope": FaultOfImages(spoil=_sides_exchanged, needs_axes=True),
    "the lag of rope dropped at decode": FaultOfImages(spoil=_lag_dropped, needs_axes=True),
    "a digest without width and height": FaultOfImages(needs_turned=True),
}


@dataclass(slots=True, eq=False)
class _Shared:
    mask: bytes | None = None
    owner: object = None


@dataclass(slots=True, eq=False)
class _Faulty:
    inner: Constraint

    @property
    def is_complete(self) -> bool:
        return self.inner.is_complete

    @property
    def has_failed(self) -> bool:
        return self.inner.has_failed

    def accept(self, token_id: int) -> None:
        self.inner.accept(token_id)

    def allowed(self) -> bytes:
        return self.inner.allowed()

    def forced(self) -> Sequence[int]:
        return ()  # every token is sampled, under the mask with the fault

    def fork(self) -> Constraint | None:
        inner = self.inner.fork()
        return None if inner is None else replace(self, inner=inner)


@dataclass(slots=True, eq=False)
class _OneStepOld(_Faulty):
    last: bytes | None = None

    def allowed(self) -> bytes:
        mask = self.inner.allowed()
        found, self.last = self.last or mask, mask
        return found


@dataclass(slots=True, eq=False)
class _OfAnotherRow(_Faulty):
    shared: _Shared = field(default_factory=_Shared)

    def allowed(self) -> bytes:
        mask, shared = self.inner.allowed(), self.shared
        is_other = shared.owner is not self and shared.mask is not None
        found = shared.mask if is_other else mask
        shared.mask, shared.owner = mask, self
        assert found is not None
        return found


@dataclass(frozen=True, slots=True)
class _Pending:
    inner: PendingConstraint
    spoil: Callable[[Constraint], Constraint]

    def done(self) -> bool:
        return self.inner.done()

    def cancel(self) -> bool:
        return self.inner.cancel()

    def result(self, timeout: float | None = None) -> Constraint | None:
        found = self.inner.result(timeout)
        return None if found is None else self.spoil(found)


def _old_masks(compile: CompileConstraint) -> CompileConstraint:
    return lambda spec: _Pending(compile(spec), _OneStepOld)


def _masks_of_others(compile: CompileConstraint) -> CompileConstraint:
    shared = _Shared()
    return lambda spec: _Pending(compile(spec), lambda inner: _OfAnotherRow(inner, shared))


# Faults by name: each makes the compiler of one engine faulty.


MASK_FAULTS: Mapping[str, Callable[[CompileConstraint], CompileConstraint]] = {
    "a constraint's mask is one step old": _old_masks,
    "a row has the mask of another constraint": _masks_of_others,
}
