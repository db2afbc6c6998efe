"""`ImageQueue`: which image is encoded next, and how much of it a step encodes.

Owns the image slots, the image that is being encoded, and what encoding costs. A sequence needs the
image of its next placeholder that is not computed: it is computed up to the first image that is not
encoded, and does not start before its next one is. Only images that somebody needs next are
encoded, one after the other, those of running sequences first.

Invariant: whoever holds pages gets the slots for its next image sooner or later. What a running
sequence needs next is never evicted; all else is evicted for it. So one that runs goes on, and a
pool that holds the largest image of each request ends them all.
"""

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

from cadenza.config import ImageLimits
from cadenza.core.batch import Batch, SeenImage
from cadenza.core.fair_share import FairShare
from cadenza.core.image_cost import ImageCost, ImageLoad, ImageWork
from cadenza.core.image_slots import EncodedImage, ImageKey, ImageSlotCounts, ImageSlots
from cadenza.core.kv_cache_manager import KVCacheManager
from cadenza.core.prefix import Prefix
from cadenza.core.sequence import Sequence, SequenceStatus
from cadenza.core.step_budget import SHORT_SHARE
from cadenza.core.step_cost import StepBound
from cadenza.core.step_schema import ImageCall
from cadenza.events import Preparing
from cadenza.figures import Figure
from cadenza.request import Attachment

NUM_AHEAD = 8
"""Waiting sequences, in the order in which they start, whose next images are encoded before they
have a row; and those that the start of a step looks up again although they are not ready."""

MAX_QUANTA = 4096
"""Of a step."""

FREE_QUANTA, FREE_QUANTA_ALONE = 32, 256
"""Of a step whose time is not bounded: beside tokens, and without any."""

WorkOf = Callable[[Attachment], ImageWork]

_end_of = attrgetter("end")


@dataclass(slots=True, eq=False)
class _Encoding:
    """The image that is being encoded, for a sequence; its first `num_done` quanta are launched."""

    sequence: Sequence
    attachment: Attachment
    image: EncodedImage
    work: ImageWork
    num_done: int = 0


@dataclass(slots=True, kw_only=True)
class ImageCounts:
    """Counters that never decrease.

    Args:
        num_encoded: images.
        num_failed: images whose encoding was lost with a failed step, or given up.
        num_slot_hits: images that a request found in the slots.
        num_prefix_hits: images whose tokens were all in the prefix cache when a request started.
        encoder_ms: what steps took for encoding, by the predictions corrected so far.
    """

    num_encoded: int = 0
    num_failed: int = 0
    num_slot_hits: int = 0
    num_prefix_hits: int = 0
    encoder_ms: float = 0.0


IMAGE_FIGURES: tuple[Figure["ImageQueue"], ...] = (
    Figure(
        "image_slots",
        "Slots of embeddings of images, one for each token of them, by their state.",
        lambda images: images.slot_counts().by_state,
        ("state",),
        type="gauge",
    ),
    Figure(
        "images_encoded",
        "Images, or tiles of them, encoded.",
        lambda images: images.counts.num_encoded,
    ),
    Figure(
        "images_given_up",
        "Images whose encoding was begun and lost, with a failed step or its last request.",
        lambda images: images.counts.num_failed,
    ),
    Figure(
        "image_hits",
        "Images that a request found encoded, or whose tokens were all in the prefix cache.",
        lambda images: {
            "slots": images.counts.num_slot_hits,
            "prefix_cache": images.counts.num_prefix_hits,
        },
        ("place",),
    ),
    Figure(
        "image_encoder_seconds",
        "Seconds of steps for encoding images.",
        lambda images: images.counts.encoder_ms / 1000,
    ),
)


def _none_startable() -> Iterable[Sequence]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepImages:
    """What a step encodes.

    Args:
        running, startable: as given to `ImageQueue.plan`.
        is_beside: it encodes beside its tokens; otherwise only if it has none.
        passed: a sequence that has no tokens in it: it is retried, and its image is not encoded.
        has_tokens: whether it may have any.
    """

    running: Collection[Sequence] = ()
    startable: Callable[[], Iterable[Sequence]] = _none_startable
    is_beside: bool = False
    passed: Sequence | None = None
    has_tokens: bool = True

    @property
    def share(self) -> float:
        """Of the time that decodes leave, what prompts leave to it."""
        return SHORT_SHARE if self.is_beside else 0.0


NO_IMAGES = StepImages()


class ImageQueue:
    """The images of one scheduler's sequences."""

    def __init__(
        self,
        limits: ImageLimits | None,
        kv_cache: KVCacheManager,
        fair_share: FairShare,
        work_of: WorkOf | None,
        cost: ImageCost | None = None,
    ) -> None:
        self.slots = ImageSlots(0 if limits is None else limits.num_slots)
        self.cost = cost or ImageCost()
        self.counts = ImageCounts()
        self._kv_cache = kv_cache
        self._fair_share = fair_share
        self._work_of = work_of
        self._sequences: dict[Sequence, None] = {}
        """Those with images that have not ended, in the order of arrival."""
        self._next: dict[Sequence, Attachment | None] = {}
        """What waiting ones need next, as it was when they were last looked at."""
        self._encoding: _Encoding | None = None
        self._num_looked_up = 0
        self._is_turn_of_retried = False

    @property
    def is_used(self) -> bool:
        """Whether there is a sequence with images."""
        return bool(self._sequences)

    @property
    def encoding_for(self) -> Sequence | None:
        """The sequence of the image of which some quanta are launched, but not all."""
        current = self._encoding
        return None if current is None or not current.num_done else current.sequence

    def add(self, sequence: Sequence) -> None:
        """A sequence has come."""
        if sequence.request.attachments:
            assert self._work_of is not None, "the engine encodes no images"
            self._sequences[sequence] = None

    def remove(self, sequence: Sequence) -> None:
        """A sequence has ended. An image that is being encoded for nobody else is given up."""
        if self._sequences.pop(sequence, 0) is not None:
            return
        self._next.pop(sequence, None)
        current = self._encoding
        if current is None or current.sequence is not sequence:
            return
        heir = self._other_in_need(current.image.key)
        if heir is None:
            self._give_up()
        else:
            current.sequence = heir

    def restart(self) -> None:
        """The device has lost all slots."""
        self._give_up()
        self.slots.forget_all()

    def reachable(self, sequence: Sequence, start: int) -> int:
        """Up to which of its tokens a sequence can be computed from `start` on: all before the
        first image that is not encoded."""
        attachments = sequence.request.attachments
        if not attachments:
            return sequence.num_tokens
        for each in attachments[bisect_right(attachments, start, key=_end_of) :]:
            if not self.slots.is_ready(_key_of(sequence, each)):
                return max(start, each.start)
        return sequence.num_tokens

    def can_go_on(self, sequence: Sequence) -> bool:
        """Whether the next token of a running sequence can be computed."""
        start = sequence.num_computed_tokens
        return not sequence.request.attachments or self.reachable(sequence, start) > start

    def is_known_to_wait(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence waits for an image, without a look at the prefix cache; so for
        those behind the first `NUM_AHEAD` that a step has looked up."""
        if not sequence.request.attachments or not self._lacks(sequence, self._next.get(sequence)):
            return False
        self._num_looked_up += 1
        return self._num_looked_up > NUM_AHEAD

    def may_start(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether a waiting sequence may start behind a prefix of `num_tokens` tokens."""
        if not sequence.request.attachments:
            return True
        needed = self._next[sequence] = _next_of(sequence, num_tokens)
        return not self._lacks(sequence, needed)

    def is_awaited_by(self, sequence: Sequence) -> bool:
        """Whether the next image that a waiting sequence needs is not encoded."""
        return bool(sequence.request.attachments) and self._lacks(sequence, self._look_up(sequence))

    def note_start(self, sequence: Sequence, prefix: Prefix, *, is_fork: bool) -> None:
        """A sequence starts behind a prefix."""
        attachments = sequence.request.attachments
        if not attachments:
            return
        self._next.pop(sequence, None)
        if not sequence.has_started and not is_fork:
            found = bisect_right(attachments, prefix.num_tokens, key=_end_of)
            self.counts.num_prefix_hits += found

    def seen(self, sequence: Sequence, start: int, end: int) -> tuple[SeenImage, ...]:
        """The images of a sequence's tokens [start, end), which are encoded and used now."""
        found = self.images_of(sequence, start, end)
        for each, image in found:
            self.slots.touch(image)
            if image.first_user is None:
                image.first_user = sequence.request_id
            elif each.end <= end and image.first_user != sequence.request_id:
                self.counts.num_slot_hits += 1
        return found

    def images_of(self, sequence: Sequence, start: int, end: int) -> tuple[SeenImage, ...]:
        """The images of a sequence's tokens [start, end), which are encoded."""
        found: list[SeenImage] = []
        attachments = sequence.request.attachments
        for each in attachments[bisect_right(attachments, start, key=_end_of) :]:
            if each.start >= end:
                break
            image = self.slots.find(_key_of(sequence, each))
            assert image is not None, "a step computes tokens of an image without slots"
            assert image.is_ready, "a step computes tokens of an image that is not encoded"
            found.append(SeenImage(each, image))
        return tuple(found)

    def plan(
        self,
        running: Collection[Sequence],
        retried: Sequence | None,
        startable: Callable[[], Iterable[Sequence]],
    ) -> StepImages:
        """What the next step encodes, before its tokens are known.

        Images of `retried`, whose steps are its own, are encoded without tokens, and every other
        step is for the rest.

        Args:
            startable: gives waiting sequences that could start if there was room, in their order.
        """
        if not self._sequences:
            return NO_IMAGES
        self._num_looked_up = 0
        if retried is None:
            is_beside = self._begin(startable)
            return StepImages(running=running, startable=startable, is_beside=is_beside)
        needed = self._look_up(retried)
        if needed is None or not self._lacks(retried, needed):
            return StepImages(running=running, startable=startable)
        current = self._encoding
        if current is None and self._try_begin(retried, needed, self._next_of_running()):
            current = self._encoding
        is_own = current is not None and current.sequence is retried
        self._is_turn_of_retried = is_own and not self._is_turn_of_retried
        return StepImages(
            running=running,
            startable=startable,
            is_beside=current is not None and not is_own,
            passed=retried,
            has_tokens=not self._is_turn_of_retried,
        )

    def may_encode(self, plan: StepImages) -> bool:
        """Whether the planned step, in which no token can be computed, encodes something."""
        return self._begin(plan.startable, may_evict_next=not plan.running)

    def encode(
        self, plan: StepImages, batch: Batch, bound: StepBound | None, span_ms: float = 0.0
    ) -> None:
        """Adds quanta to a step: of as many images as there is time for beside its tokens, and
        beside the quanta of a span, which take `span_ms`."""
        if self._encoding is None or ((batch.entries or batch.span) and not plan.is_beside):
            return
        left_ms = None if bound is None else bound.left_ms(batch.load) - span_ms
        while self._encode_current(batch, left_ms) and plan.passed is None:
            if not self._begin(plan.startable):
                break

    def _encode_current(self, batch: Batch, left_ms: float | None) -> bool:
        """Adds quanta of the image that is being encoded: what takes `left_ms`, and at least one;
        without a bound a fixed number. Returns whether the image is encoded then."""
        current = self._encoding
        assert current is not None, "no image is being encoded"
        start, work = current.num_done, current.work
        if left_ms is None:
            most = FREE_QUANTA if batch.entries else FREE_QUANTA_ALONE
            count = max(0, most - batch.image_load.num_quanta)
        else:
            left_ms -= self.cost.predict_ms(batch.image_load)
            count = self.cost.num_within(work, start, MAX_QUANTA, left_ms)
        if not batch.image_calls:
            count = max(1, count)
        stop = min(len(work), start + count)
        if stop == start:
            return False
        image, load = current.image, work.load(start, stop)
        batch.image_calls.append(
            ImageCall(
                attachment=current.attachment, start=start, stop=stop, slots=image.slots.copy()
            )
        )
        batch.quanta_for.append(current.sequence)
        if start == 0:
            batch.preparing += self._awaiting(image.key)
        batch.image_load = batch.image_load.plus(load)
        self._pin(batch, [image])
        self._charge(current, load, is_bounded=left_ms is not None)
        current.num_done = stop
        if stop < len(work):
            return False
        image.is_ready = True
        self.counts.num_encoded += 1
        self._encoding = None
        return True

    def pin(self, batch: Batch) -> None:
        """Pins the images that a step reads, until it is read itself."""
        if batch.has_images:
            for entry in batch.entries:
                self._pin(batch, [each.image for each in entry.images])
        if batch.span is not None:
            self._pin(batch, [each.image for each in batch.span.images])

    def unpin(self, batch: Batch) -> None:
        """A launched step was read, or dropped."""
        self.slots.unpin(batch.images)

    def observe(self, batch: Batch, text_ms: float | None, measured_ms: float) -> None:
        """A step with image calls took `measured_ms`; all else in it was to take `text_ms`, if that
        is known."""
        image_ms = self.cost.predict_ms(batch.image_load)
        if text_ms is None:
            self.counts.encoder_ms += min(image_ms, measured_ms)
            return
        self.counts.encoder_ms += measured_ms * image_ms / (image_ms + text_ms)
        self.cost = self.cost.corrected(batch.image_load, text_ms, measured_ms)

    def predict_ms(self, batch: Batch) -> float:
        """What encoding adds to a step."""
        return self.cost.predict_ms(batch.image_load) if batch.image_calls else 0.0

    def slot_counts(self) -> ImageSlotCounts:
        """Slots by state."""
        needed = self._next_of_running() | self._next_of_waiting()
        return self.slots.counts(needed.__contains__)

    def check_invariants(self, waiting: Iterable[Sequence], running: Iterable[Sequence]) -> None:
        """Raises AssertionError if slots are lost, or sequences are missing."""
        self.slots.check_invariants()
        present = {each for each in (*waiting, *running) if each.request.attachments}
        assert present == set(self._sequences), "sequences with images are missing, or have ended"
        assert set(self._next) <= set(waiting), "a sequence that does not wait awaits an image"
        current = self._encoding
        if current is not None:
            assert current.sequence in present, "an image is encoded for a sequence that has ended"
            assert self.slots.find(current.image.key) is current.image, "its slots are another's"
            assert not current.image.is_ready, "an image that is encoded is being encoded"

    def _begin(
        self, startable: Callable[[], Iterable[Sequence]], *, may_evict_next: bool = False
    ) -> bool:
        """Whether an image is being encoded: begins the first that is needed and gets its slots.

        Where several tenants need some, the one that has had least is first. If it does not get its
        slots, those that run come: they hold pages, which it may wait for in turn.

        Args:
            may_evict_next: for one that waits also what others wait for that cannot start.
        """
        if self._encoding is not None or not self._sequences:
            return self._encoding is not None
        blocked = self._blocked_running()
        candidates = [*blocked, *self._blocked_waiting(startable)]
        if not candidates:
            return False
        counter_of = self._fair_share.counter_of
        first, needed = min(candidates, key=lambda each: counter_of(each[0]))
        kept = self._next_of_running()
        if first.status is not SequenceStatus.RUNNING and not may_evict_next:
            kept |= self._next_of_waiting()
        return self._try_begin(first, needed, kept) or any(
            self._try_begin(sequence, attachment, self._next_of_running())
            for sequence, attachment in blocked
        )

    def _try_begin(self, sequence: Sequence, needed: Attachment, kept: set[ImageKey]) -> bool:
        key = _key_of(sequence, needed)
        count = needed.rows * needed.columns
        image = self.slots.try_allocate(key, count, kept.__contains__)
        if image is None:
            return False
        assert self._work_of is not None
        self._encoding = _Encoding(sequence, needed, image, self._work_of(needed))
        return True

    def _awaiting(self, key: ImageKey) -> list[Preparing]:
        """The waiting requests that need the image of a key next."""
        ids = {
            sequence.request_id: None
            for sequence, needed in self._next.items()
            if needed is not None and _key_of(sequence, needed) == key
        }
        return [Preparing(request_id=each) for each in ids]

    def _blocked_running(self) -> list[tuple[Sequence, Attachment]]:
        """Running sequences whose next image is not encoded."""
        found: list[tuple[Sequence, Attachment]] = []
        for sequence in self._sequences:
            if sequence.status is not SequenceStatus.RUNNING:
                continue
            needed = _next_of(sequence, sequence.num_computed_tokens)
            if needed is not None and self._lacks(sequence, needed):
                found.append((sequence, needed))
        return found

    def _blocked_waiting(
        self, startable: Callable[[], Iterable[Sequence]]
    ) -> list[tuple[Sequence, Attachment]]:
        """The same of the first `NUM_AHEAD` waiting ones that do not wait for something else."""
        if all(each.status is SequenceStatus.RUNNING for each in self._sequences):
            return []
        found: list[tuple[Sequence, Attachment]] = []
        own = (each for each in startable() if each in self._sequences)
        for sequence in islice(own, NUM_AHEAD):
            if sequence.is_expecting_source or self._kv_cache.is_prefix_coming(sequence):
                continue
            needed = self._next.get(sequence)
            if needed is None or self._lacks(sequence, needed):
                needed = self._look_up(sequence)
            if needed is not None and self._lacks(sequence, needed):
                found.append((sequence, needed))
        return found

    def _look_up(self, sequence: Sequence) -> Attachment | None:
        """What a sequence needs next behind what it has, or would find in the prefix cache."""
        if not sequence.request.attachments:
            return None
        if sequence.status is SequenceStatus.RUNNING:
            return _next_of(sequence, sequence.num_computed_tokens)
        num_tokens = self._kv_cache.find_prefix(sequence).num_tokens
        needed = self._next[sequence] = _next_of(sequence, num_tokens)
        return needed

    def _lacks(self, sequence: Sequence, needed: Attachment | None) -> bool:
        """Whether what a sequence needs next is not encoded."""
        return needed is not None and not self.slots.is_ready(_key_of(sequence, needed))

    def _next_of_running(self) -> set[ImageKey]:
        return {
            _key_of(sequence, needed)
            for sequence in self._sequences
            if sequence.status is SequenceStatus.RUNNING
            and (needed := _next_of(sequence, sequence.num_computed_tokens)) is not None
        }

    def _next_of_waiting(self) -> set[ImageKey]:
        return {
            _key_of(sequence, needed)
            for sequence, needed in self._next.items()
            if needed is not None
        }

    def _other_in_need(self, key: ImageKey) -> Sequence | None:
        """A sequence that still has to compute tokens of the image of a key."""
        for sequence in self._sequences:
            start = sequence.num_computed_tokens
            for each in sequence.request.attachments:
                if each.end > start and _key_of(sequence, each) == key:
                    return sequence
        return None

    def _give_up(self) -> None:
        current, self._encoding = self._encoding, None
        if current is not None:
            self.slots.drop(current.image)
            self.counts.num_failed += 1

    def _pin(self, batch: Batch, images: list[EncodedImage]) -> None:
        self.slots.pin(images)
        batch.images += images

    def _charge(self, current: _Encoding, load: ImageLoad, *, is_bounded: bool) -> None:
        """The tenant that the image is encoded for pays by time, or by tokens where no time is
        known."""
        if is_bounded:
            self._fair_share.charge_ms(current.sequence, self.cost.predict_ms(load))
        else:
            num_tokens = len(current.image.slots) * load.num_quanta / len(current.work)
            self._fair_share.charge_tokens(current.sequence, num_tokens)


def _next_of(sequence: Sequence, start: int) -> Attachment | None:
    """The first attachment of which tokens from `start` on are to be computed."""
    attachments = sequence.request.attachments
    index = bisect_right(attachments, start, key=_end_of)
    return attachments[index] if index < len(attachments) else None


def _key_of(sequence: Sequence, attachment: Attachment) -> ImageKey:
    return sequence.request.cache_salt, attachment.digest
