"""`ImageQueue`: which image is encoded next, and how much of it a step encodes. A sequence is
computed up to its first image that is not encoded, and starts when its next one is. Invariant: what
a running sequence needs next is never evicted; so a pool that holds the largest image of each
request completes them all."""

from bisect import bisect_right
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from itertools import islice
from operator import attrgetter

from cadenza.batch.batch import Batch, EncodedImage, ImageKey, SeenImage
from cadenza.batch.image_cost import ImageCost, ImageLoad, ImageWork
from cadenza.batch.sequence import Sequence, SequenceStatus, WaitReason
from cadenza.batch.step_schema import ImageCall
from cadenza.config import ImageLimits
from cadenza.events import Preparing
from cadenza.figures import Figure
from cadenza.kv.image_slots import ImageSlotCounts, ImageSlots
from cadenza.kv.kv_cache_manager import KVCacheManager
from cadenza.kv.prefix_cache import Prefix
from cadenza.request import Attachment, Request
from cadenza.scheduler.fair_share import FairShare
from cadenza.scheduler.step_budget import PromptPart
from cadenza.scheduler.step_work import StepDuration, StepPlan, StepWork

# Waiting sequences, in start order, whose next images are encoded before they have a row.
NUM_AHEAD = 8

MAX_QUANTA = 4096  # Of a step

# Of a step whose time is not bounded: alongside tokens, and without any.
FREE_QUANTA, FREE_QUANTA_ALONE = 32, 256

_end_of = attrgetter("end")


@dataclass(frozen=True, slots=True)
class ImageEncoding:
    """Of a runner: `check` raises InvalidRequestError for what is no image, `work_of` says what an
    image takes from its size alone; `cost` is None if it was not measured."""

    check: Callable[[Attachment], None]
    work_of: Callable[[Attachment], ImageWork]
    cost: ImageCost | None = None


@dataclass(slots=True, eq=False)
class _Encoding:
    sequence: Sequence
    attachment: Attachment
    image: EncodedImage
    work: ImageWork
    num_done: int = 0


@dataclass(slots=True, kw_only=True)
class ImageCounts:
    """Never decrease. `num_failed`: encodings lost with a failed step, or given up.
    `num_slot_hits`: images found in the slots; `num_prefix_hits`: whose tokens were all in the
    prefix cache."""

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


class ImageQueue(StepWork):
    """The images of one scheduler's sequences."""

    def __init__(
        self,
        limits: ImageLimits,
        kv_cache: KVCacheManager,
        fair_share: FairShare,
        encoder: ImageEncoding,
    ) -> None:
        self.slots = ImageSlots(limits.num_slots)
        self.cost = encoder.cost or ImageCost()
        self.counts = ImageCounts()
        self._kv_cache = kv_cache
        self._fair_share = fair_share
        self._encoder = encoder
        # Those with images that have not ended, in the order of arrival
        self._sequences: dict[Sequence, None] = {}
        self._next: dict[Sequence, Attachment | None] = {}
        self._encoding: _Encoding | None = None
        self._num_looked_up = 0
        self._is_turn_of_retried = False
        # The step encodes alongside its tokens; otherwise only if it has none
        self._is_beside = False

    @property
    def figures(self) -> tuple["ImageQueue", tuple[Figure["ImageQueue"], ...]]:
        return self, IMAGE_FIGURES

    @property
    def encoding_for(self) -> Sequence | None:
        current = self._encoding
        return None if current is None or not current.num_done else current.sequence

    def check(self, request: Request) -> None:
        for part in request.attachments:
            self._encoder.check(part)

    def add(self, sequence: Sequence) -> None:
        if sequence.request.attachments:
            self._sequences[sequence] = None

    def remove(self, sequence: Sequence) -> None:
        """Also gives up an image that is encoded for no other sequence."""
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
        self._give_up()
        self.slots.forget_all()

    def reachable(self, sequence: Sequence, start: int) -> int:
        """The end of the tokens before the first image, from `start` on, that is not encoded."""
        attachments = sequence.request.attachments
        if not attachments:
            return sequence.num_tokens
        for each in attachments[bisect_right(attachments, start, key=_end_of) :]:
            if not self.slots.is_ready(_key_of(sequence, each)):
                return max(start, each.start)
        return sequence.num_tokens

    def can_go_on(self, sequence: Sequence) -> bool:
        start = sequence.num_computed_tokens
        return not sequence.request.attachments or self.reachable(sequence, start) > start

    def ready(self, running: SequenceOf[Sequence]) -> SequenceOf[Sequence]:
        return [each for each in running if self.can_go_on(each)] if self._sequences else running

    def limit(self, part: PromptPart, sequence: Sequence) -> PromptPart:
        if not sequence.request.attachments:
            return part
        return replace(part, num_left=self.reachable(sequence, part.start) - part.start)

    def wait_reason(self, sequence: Sequence) -> WaitReason | None:
        if not sequence.request.attachments or not self._lacks(sequence, self._next.get(sequence)):
            return None
        self._num_looked_up += 1
        return WaitReason.IMAGE if self._num_looked_up > NUM_AHEAD else None

    def wait_reason_behind(self, sequence: Sequence, prefix: Prefix) -> WaitReason | None:
        if not sequence.request.attachments:
            return None
        needed = self._next[sequence] = _next_of(sequence, prefix.num_tokens)
        return WaitReason.IMAGE if self._lacks(sequence, needed) else None

    def start(self, sequence: Sequence, prefix: Prefix) -> None:
        attachments = sequence.request.attachments
        if not attachments:
            return
        self._next.pop(sequence, None)
        if not sequence.has_started and not prefix.is_fork:
            found = bisect_right(attachments, prefix.num_tokens, key=_end_of)
            self.counts.num_prefix_hits += found

    def _seen(
        self, batch: Batch, sequence: Sequence, start: int, end: int
    ) -> tuple[SeenImage, ...]:
        found = self._images_of(batch, sequence, start, end)
        for each, image in found:
            self.slots.touch(image)
            if image.first_user is None:
                image.first_user = sequence.request_id
            elif each.end <= end and image.first_user != sequence.request_id:
                self.counts.num_slot_hits += 1
        return found

    def _images_of(
        self, batch: Batch, sequence: Sequence, start: int, end: int
    ) -> tuple[SeenImage, ...]:
        found: list[SeenImage] = []
        attachments = sequence.request.attachments
        for each in attachments[bisect_right(attachments, start, key=_end_of) :]:
            if each.start >= end:
                break
            image = self.slots.find(_key_of(sequence, each))
            assert image is not None, "a step computes tokens of an image without slots"
            assert image.is_ready, "a step computes tokens of an image that is not encoded"
            found.append(SeenImage(each, image))
        self._pin(batch, [each.image for each in found])
        return tuple(found)

    def begin(self, plan: StepPlan) -> None:
        """A retried sequence's images are encoded without tokens."""
        self._is_beside = False
        if not self._sequences:
            return
        self._num_looked_up = 0
        retried = plan.turns.retried
        if retried is None:
            self._is_beside = self._begin(plan)
        else:
            self._begin_for(retried, plan)
        if self._is_beside:
            plan.keep_share()

    def _begin_for(self, retried: Sequence, plan: StepPlan) -> None:
        needed, current = self._look_up(retried), self._encoding
        if needed is None or not self._lacks(retried, needed):
            return
        if current is None and self._try_begin(retried, needed, self._next_of_running()):
            current = self._encoding
        is_own = current is not None and current.sequence is retried
        self._is_turn_of_retried = is_own and not self._is_turn_of_retried
        self._is_beside = current is not None and not is_own
        plan.passed = retried
        plan.has_tokens = not self._is_turn_of_retried

    def has_work(self, plan: StepPlan) -> bool:
        return self._begin(plan, may_evict_next=not plan.running)

    def fill(self, plan: StepPlan, batch: Batch) -> None:
        if not self._sequences:
            return
        self._see(batch)
        if self._encoding is None or ((batch.entries or batch.span) and not self._is_beside):
            return
        left_ms = plan.left_ms(batch)
        while self._encode_current(batch, left_ms) and plan.passed is None:
            if not self._begin(plan):
                break

    def _see(self, batch: Batch) -> None:
        for entry in batch.entries:
            if entry.sequence.request.attachments:
                entry.images = self._seen(batch, entry.sequence, entry.start, entry.end)
                batch.has_images |= bool(entry.images)
        span = batch.span
        if span is not None:
            find = self._seen if span.is_first else self._images_of
            images = find(batch, span.sequence, span.start, span.stop)
            batch.span = replace(span, images=images)

    def _encode_current(self, batch: Batch, left_ms: float | None) -> bool:
        """What takes `left_ms`, at least one item; a fixed number without a bound. Whether the
        image is done."""
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

    def unpin(self, batch: Batch) -> None:
        self.slots.unpin(batch.images)

    def observe(self, batch: Batch, duration: StepDuration) -> None:
        if not batch.image_calls:
            return
        image_ms, measured_ms = self.cost.predict_ms(batch.image_load), duration.measured_ms
        if duration.others_ms is None:
            self.counts.encoder_ms += min(image_ms, measured_ms)
            return
        self.counts.encoder_ms += measured_ms * image_ms / (image_ms + duration.others_ms)
        self.cost = self.cost.corrected(batch.image_load, duration.others_ms, measured_ms)

    def predict_ms(self, batch: Batch) -> float:
        return self.cost.predict_ms(batch.image_load) if batch.image_calls else 0.0

    def slot_counts(self) -> ImageSlotCounts:
        needed = self._next_of_running() | self._next_of_waiting()
        return self.slots.counts(needed.__contains__)

    def check_invariants(self, sequences: SequenceOf[Sequence]) -> None:
        self.slots.check_invariants()
        present = {each for each in sequences if each.request.attachments}
        assert present == set(self._sequences), "sequences with images are missing, or have ended"
        waiting = {each for each in present if each.status is SequenceStatus.WAITING}
        assert set(self._next) <= waiting, "a sequence that does not wait awaits an image"
        current = self._encoding
        if current is not None:
            assert current.sequence in present, "an image is encoded for a sequence that has ended"
            assert self.slots.find(current.image.key) is current.image, "its slots are another's"
            assert not current.image.is_ready, "an image that is encoded is being encoded"

    def _begin(self, plan: StepPlan, *, may_evict_next: bool = False) -> bool:
        """Begins the first image that is needed and gets its slots; the tenant that has had least
        is first. Those that run come next: they hold pages, which it may wait for in turn."""
        if self._encoding is not None or not self._sequences:
            return self._encoding is not None
        blocked = self._blocked_running()
        candidates = [*blocked, *self._blocked_waiting(plan)]
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
        self._encoding = _Encoding(sequence, needed, image, self._encoder.work_of(needed))
        return True

    def _awaiting(self, key: ImageKey) -> list[Preparing]:
        ids = {
            sequence.request_id: None
            for sequence, needed in self._next.items()
            if needed is not None and _key_of(sequence, needed) == key
        }
        return [Preparing(request_id=each) for each in ids]

    def _blocked_running(self) -> list[tuple[Sequence, Attachment]]:
        found: list[tuple[Sequence, Attachment]] = []
        for sequence in self._sequences:
            if sequence.status is not SequenceStatus.RUNNING:
                continue
            needed = _next_of(sequence, sequence.num_computed_tokens)
            if needed is not None and self._lacks(sequence, needed):
                found.append((sequence, needed))
        return found

    def _blocked_waiting(self, plan: StepPlan) -> list[tuple[Sequence, Attachment]]:
        if all(each.status is SequenceStatus.RUNNING for each in self._sequences):
            return []
        found: list[tuple[Sequence, Attachment]] = []
        own = (each for each in plan.turns.startable() if each in self._sequences)
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
        if not sequence.request.attachments:
            return None
        if sequence.status is SequenceStatus.RUNNING:
            return _next_of(sequence, sequence.num_computed_tokens)
        num_tokens = self._kv_cache.find_prefix(sequence).num_tokens
        needed = self._next[sequence] = _next_of(sequence, num_tokens)
        return needed

    def _lacks(self, sequence: Sequence, needed: Attachment | None) -> bool:
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
        if is_bounded:
            self._fair_share.charge_ms(current.sequence, self.cost.predict_ms(load))
        else:
            num_tokens = len(current.image.slots) * load.num_quanta / len(current.work)
            self._fair_share.charge_tokens(current.sequence, num_tokens)


def _next_of(sequence: Sequence, start: int) -> Attachment | None:
    attachments = sequence.request.attachments
    index = bisect_right(attachments, start, key=_end_of)
    return attachments[index] if index < len(attachments) else None


def _key_of(sequence: Sequence, attachment: Attachment) -> ImageKey:
    return sequence.request.cache_salt, attachment.digest
