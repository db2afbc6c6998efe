"""Requests with images: random pixels and texts, the model's sizes and tokens. A pure function of
its parameters. Invariants: every prompt with its output fits the context; at least two requests
share a prefix that ends after an image; some requests are text alone.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cadenza.errors import ConfigError, InvalidRequestError
from cadenza.request import Attachment
from cadenza.verification.workload import Arrival
from cadenza.vision.processor import ImagePart, ImagePlan, ImageProcessor, Run, image_digest

SIZES = (
    *((side, side) for side in (32, 64, 96, 160, 256, 448)),
    *((64, 32), (32, 64), (128, 48), (48, 128), (200, 120), (320, 200), (200, 320)),
)
"""Of images, in pixels; those are taken whose tokens are few enough."""

MOST_OF_CONTEXT = 4
"""An image takes no more than this part of the context, as a divisor."""

NUM_IMAGES = 4
SHARED_TOKENS = 5
"""Before the image that several prompts begin with; fewer than a page has."""

DigestOf = Callable[[bytes, ImagePart, bytes], bytes]


@dataclass(frozen=True, slots=True)
class _Image:
    """Its tokens in a prompt, and its parts from the first of them on."""

    token_ids: tuple[int, ...]
    parts: tuple[Attachment, ...]


@dataclass(frozen=True, slots=True)
class _Prompt:
    token_ids: tuple[int, ...] = ()
    attachments: tuple[Attachment, ...] = ()

    def plus(self, *pieces: "Sequence[int] | _Image") -> "_Prompt":
        tokens, parts = self.token_ids, self.attachments
        for piece in pieces:
            if isinstance(piece, _Image):
                start = len(tokens)
                parts += tuple(replace(each, start=start + each.start) for each in piece.parts)
                tokens += piece.token_ids
            else:
                tokens += tuple(piece)
        return _Prompt(tokens, parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageShape:
    """`token_id`: of placeholders; text tokens are below `vocab_size`. `context`: `max_model_len`.
    `page_size`: tokens of a page of KV; some prompts end just before the end of one. `seed`: of the
    pixels and texts. `digest_of`: of a part with its pixels; another one than `image_digest` is a
    fault."""

    processor: ImageProcessor
    token_id: int
    vocab_size: int
    context: int
    page_size: int = 16
    seed: int = 0
    digest_of: DigestOf = image_digest

    def text_token(self, token_id: int) -> int:
        """A token of text: a placeholder becomes its neighbour."""
        is_placeholder = token_id == self.token_id
        return (token_id + 1) % self.vocab_size if is_placeholder else token_id

    @property
    def plans(self) -> tuple[ImagePlan, ...]:
        """Of `SIZES`, one for each number of tokens and shape, few tokens first; at least one.
        Raises ConfigError if no image fits the context."""
        found: dict[tuple[ImagePart, ...], ImagePlan] = {}
        for width, height in SIZES:
            try:
                plan = self.processor.plan(width, height)
            except InvalidRequestError:  # a shape that the model does not take
                continue
            found.setdefault(plan.parts, plan)
        most = self.context // MOST_OF_CONTEXT
        fitting = [plan for plan in found.values() if _num_tokens(plan) <= most]
        if not fitting:
            least = min((_num_tokens(plan) for plan in found.values()), default=0)
            raise ConfigError(
                f"the model's images have at least {least} tokens, and a context of {self.context} "
                f"is to hold {MOST_OF_CONTEXT}; raise --max-model-len"
            )
        return tuple(sorted(fitting, key=_num_tokens))


def largest_span(shape: ImageShape) -> int:
    return max(part.num_tokens for plan in _chosen(shape.plans) for part in plan.parts)


def has_turned_images(arrivals: Sequence[Arrival]) -> bool:
    """Whether parts of two requests have equal bytes and another shape."""
    found: dict[bytes, tuple[int, int]] = {}
    parts = [each for arrival in arrivals for each in arrival.request.attachments]
    return any(
        found.setdefault(each.payload, (each.width, each.height)) != (each.width, each.height)
        for each in parts
    )


def make_image_workload(arrivals: Sequence[Arrival], shape: ImageShape) -> tuple[Arrival, ...]:
    """The arrivals, with images in six requests of seven; steps and options are kept."""
    rng = random.Random(f"images {shape.seed}")  # noqa: S311  a workload, not a secret
    make = _Maker(shape, rng)
    kinds = (make.text, make.shared, make.behind, make.twice, make.first, make.turned, make.several)
    played: list[Arrival] = []
    for index, arrival in enumerate(arrivals):
        request = arrival.request
        own = [shape.text_token(each) for each in request.prompt_token_ids]
        room = shape.context - (request.params.max_tokens or 1)
        prompt = kinds[index % len(kinds)](own, room)
        request = replace(
            request, prompt_token_ids=prompt.token_ids, attachments=prompt.attachments
        )
        played.append(replace(arrival, request=request))
    return tuple(played)


def without_placeholders(arrivals: Sequence[Arrival], shape: ImageShape) -> tuple[Arrival, ...]:
    played: list[Arrival] = []
    for arrival in arrivals:
        tokens = tuple(shape.text_token(each) for each in arrival.request.prompt_token_ids)
        played.append(replace(arrival, request=replace(arrival.request, prompt_token_ids=tokens)))
    return tuple(played)


class _Maker:
    """Prompts with images, of the tokens of a prompt without; each fits `room` tokens."""

    def __init__(self, shape: ImageShape, rng: random.Random) -> None:
        self._shape = shape
        self._rng = rng
        plans = _chosen(shape.plans)
        self._images = [self._image(plans[i % len(plans)], i) for i in range(NUM_IMAGES)]
        opening = [self._token() for _ in range(SHARED_TOKENS)]
        self._shared = _Prompt().plus(opening, self._images[-1])
        self._turns = self._shared
        self._turned = self._turned_images()

    def text(self, own: list[int], room: int) -> _Prompt:
        return _Prompt().plus(own[: self._before_page_end(min(len(own), room))])

    def shared(self, own: list[int], room: int) -> _Prompt:
        return self._fit(self._shared, own, room)

    def behind(self, own: list[int], room: int) -> _Prompt:
        """A further turn after an earlier one, at times with an image of its own."""
        turns = self._fit(self._turns, own[:20], room)
        image = self._rng.choice(self._images)
        if self._rng.random() < 0.5 and len(turns.token_ids) + len(image.token_ids) < room:
            turns = turns.plus(image, [self._token()])
        is_short = len(turns.token_ids) < room // 2
        self._turns = turns if is_short else self._shared
        return turns

    def twice(self, own: list[int], room: int) -> _Prompt:
        image = self._rng.choice(self._images)
        return self._fit(_Prompt().plus(own[:7], image, own[7:10], image), own[10:], room)

    def first(self, own: list[int], room: int) -> _Prompt:
        prompt = _Prompt().plus(self._next_turned())
        num_tokens = len(prompt.token_ids)
        return self._fit(prompt, own, self._before_page_end(min(num_tokens + len(own), room)))

    def turned(self, own: list[int], room: int) -> _Prompt:
        return self._fit(_Prompt().plus(own[:3], self._next_turned()), own[3:], room)

    def _next_turned(self) -> _Image:
        image, other = self._turned
        self._turned = other, image
        return image

    def several(self, own: list[int], room: int) -> _Prompt:
        """Two images, the last of which ends the prompt."""
        one, other = self._rng.sample(self._images, 2)
        most = room - len(one.token_ids) - len(other.token_ids)
        return _Prompt().plus(own[: max(1, min(30, most))], one, other)

    def _before_page_end(self, num_tokens: int) -> int:
        """Of a prompt with a page or more, the length up to the last token before the end of one:
        what it generates soon needs another page, so that a tight pool preempts."""
        size = self._shape.page_size
        return num_tokens if num_tokens < size else num_tokens - (num_tokens + 1) % size

    def _fit(self, prompt: _Prompt, own: list[int], room: int) -> _Prompt:
        """The prompt with as much text after it as fits, at least a token."""
        most = max(1, room - len(prompt.token_ids))
        return prompt.plus(own[:most] or [self._token()])

    def _token(self) -> int:
        return self._shape.text_token(self._rng.randrange(self._shape.vocab_size))

    def _turned_images(self) -> tuple[_Image, _Image]:
        plans = [plan for plan in self._shape.plans if len(plan.parts) == 1]
        by_sides = {(plan.parts[0].width, plan.parts[0].height): plan for plan in plans}
        for (width, height), plan in by_sides.items():
            if width != height and (height, width) in by_sides:
                pixels = self._pixels(plan.parts[0])
                turned = by_sides[height, width]
                return self._placed(plan, [pixels]), self._placed(turned, [pixels])
        return self._images[0], self._images[1]

    def _image(self, plan: ImagePlan, index: int) -> _Image:
        parts = [self._pixels(part) for part in plan.parts]
        if index == 1:  # tiles of which two are equal
            parts = [parts[0] if len(each) == len(parts[0]) else each for each in parts]
        return self._placed(plan, parts)

    def _pixels(self, part: ImagePart) -> bytes:
        return self._rng.randbytes(part.num_bytes)

    def _placed(self, plan: ImagePlan, pixels: Sequence[bytes]) -> _Image:
        """The pieces of a plan as tokens; each text is two of them."""
        shape, tokens = self._shape, list[int]()
        places: dict[int, tuple[int, int]] = {}
        for piece in plan.pieces:
            if isinstance(piece, Run):
                start, _ = places.get(piece.part, (len(tokens), 0))
                tokens += [shape.token_id] * piece.count
                places[piece.part] = start, len(tokens)
            else:
                tokens += [self._token(), self._token()]
        parts = [
            Attachment(
                start=places[index][0],
                length=places[index][1] - places[index][0],
                digest=shape.digest_of(shape.processor.settings, part, pixels[index]),
                payload=pixels[index],
                width=part.width,
                height=part.height,
                rows=part.rows,
                columns=part.columns,
            )
            for index, part in enumerate(plan.parts)
        ]
        return _Image(tuple(tokens), tuple(sorted(parts, key=lambda each: each.start)))


def _num_tokens(plan: ImagePlan) -> int:
    return plan.num_tokens + sum(2 for piece in plan.pieces if not isinstance(piece, Run))


def _chosen(plans: Sequence[ImagePlan]) -> tuple[ImagePlan, ...]:
    """Plans of `NUM_IMAGES` images: of few tokens and of many."""
    places = {i * (len(plans) - 1) // max(1, NUM_IMAGES - 1) for i in range(NUM_IMAGES)}
    return tuple(plans[place] for place in sorted(places))
