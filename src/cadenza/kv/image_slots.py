"""`ImageSlots`: where the embeddings of images are on the device, a slot for each placeholder. Owns
which slots an encoded image has, found by the salt of its request and its digest. Invariant: a slot
is free or of one image; none of an image that is pinned, or not yet encoded, is given away."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from cadenza.batch.batch import EncodedImage, ImageKey


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSlotCounts:
    """`live`: being encoded, in a launched step, or read next."""

    free: int
    cached: int
    live: int

    @property
    def by_state(self) -> dict[str, int]:
        return {"live": self.live, "cached": self.cached, "free": self.free}


class ImageSlots:
    """Images in `num_slots` slots, the least recently used first."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._images: OrderedDict[ImageKey, EncodedImage] = OrderedDict()
        self._leaving: list[EncodedImage] = []

    def find(self, key: ImageKey) -> EncodedImage | None:
        """The image of a key, which may still be being encoded."""
        return self._images.get(key)

    def is_ready(self, key: ImageKey) -> bool:
        found = self._images.get(key)
        return found is not None and found.is_ready

    def try_allocate(
        self, key: ImageKey, count: int, is_needed: Callable[[ImageKey], bool]
    ) -> EncodedImage | None:
        """None if too few are left after evicting images that are ready, unpinned and not
        needed."""
        assert key not in self._images, "an image has slots already"
        if count > len(self._free):
            missing, evicted = count - len(self._free), list[EncodedImage]()
            for image in self._images.values():
                if missing <= 0:
                    break
                if image.is_ready and not image.num_pins and not is_needed(image.key):
                    evicted.append(image)
                    missing -= len(image.slots)
            if missing > 0:
                return None
            for image in evicted:
                self.drop(image)
        taken = [self._free.pop() for _ in range(count)]
        image = self._images[key] = EncodedImage(key, np.array(taken, np.int32))
        return image

    def touch(self, image: EncodedImage) -> None:
        if not image.is_dropped:
            self._images.move_to_end(image.key)

    def pin(self, images: Iterable[EncodedImage]) -> None:
        for image in images:
            image.num_pins += 1

    def unpin(self, images: Iterable[EncodedImage]) -> None:
        for image in images:
            assert image.num_pins, "an image was unpinned and is not pinned"
            image.num_pins -= 1
            if image.is_dropped and not image.num_pins:
                self._leaving.remove(image)
                self._free += image.slots.tolist()

    def drop(self, image: EncodedImage) -> None:
        del self._images[image.key]
        image.is_dropped = True
        if image.num_pins:
            self._leaving.append(image)
        else:
            self._free += image.slots.tolist()

    def forget_all(self) -> None:
        for image in list(self._images.values()):
            self.drop(image)

    def counts(self, is_needed: Callable[[ImageKey], bool]) -> ImageSlotCounts:
        cached = sum(
            len(image.slots)
            for image in self._images.values()
            if image.is_ready and not image.num_pins and not is_needed(image.key)
        )
        free = len(self._free)
        return ImageSlotCounts(free=free, cached=cached, live=self.num_slots - free - cached)

    @property
    def free_slots(self) -> list[int]:
        return list(self._free)

    def check_invariants(self) -> None:
        held = [*self._images.values(), *self._leaving]
        slots = [slot for image in held for slot in image.slots.tolist()]
        assert sorted([*slots, *self._free]) == list(range(self.num_slots)), (
            "slots of images are lost or shared"
        )
        for key, image in self._images.items():
            assert image.key == key, "an image is found under another's key"
            assert not image.is_dropped, "a dropped image is found"
        for image in self._leaving:
            assert image.is_dropped, "an image that is found is leaving"
            assert image.num_pins, "a dropped image keeps its slots although nothing pins it"
        assert all(image.num_pins >= 0 for image in held)
