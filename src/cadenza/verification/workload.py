"""Requests that arrive over time, greedy and sampled, of text and with images; a pure function.
Invariants: some prompts share a prefix of full pages, some cross an attention block, some a prefix
that ends after an image; there are more requests than rows; if they fit, three prompts are long:
with the first rows, mid-stream, and one that shares the first's tokens."""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cadenza.errors import ConfigError, InvalidRequestError
from cadenza.request import Attachment, Request, SamplingParams
from cadenza.sparse_prefill import LOOK_AHEAD, SparsePrefill, num_chunks
from cadenza.vision.processor import ImagePart, ImagePlan, ImageProcessor, Run, image_digest

NUM_LOGPROBS = 5
LONGEST_SHORT_PROMPT = 224
SHARED_PREFIX = 48

# Tokens by which the longest prompt exceeds spans and windows; so it is no multiple of a span, a
# block or a page.
BEYOND = 215

LONGEST_PROMPT = 2 * 512 + BEYOND  # where the backend is not known


def longest_prompt(span: int, windows: Iterable[int]) -> int:
    """Tokens of the longest prompt: more than two attention spans and more than each window."""
    return max((2 * span, *windows)) + BEYOND


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadShape:
    """`num_requests` is more than `rows`, which is `--max-num-seqs` of the batched runs;
    `max_tokens`: longest output; every prompt with its output fits the `context` (`max_model_len`);
    prompt tokens are below `vocab_size`; `longest`: tokens of the longest prompt, if the context
    allows; `sampled_share`: fraction of the requests that are sampled. Raises ConfigError where one
    is out of bounds."""

    num_requests: int
    rows: int
    max_tokens: int
    context: int
    vocab_size: int
    longest: int = LONGEST_PROMPT
    sampled_share: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rows < 2:
            raise ConfigError(f"--max-num-seqs {self.rows}: a batch needs at least 2 rows")
        if self.num_requests <= self.rows:
            raise ConfigError(
                f"--num-requests {self.num_requests} must be above --max-num-seqs {self.rows}, "
                f"so that rows are reused"
            )
        if self.max_tokens < 4 or self.context < 2 * self.max_tokens:
            raise ConfigError(
                f"--max-tokens {self.max_tokens} must be from 4 to half the context of "
                f"{self.context} tokens"
            )


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request and the step before which it is submitted."""

    step: int
    request: Request

    def asking(self, **changes: Any) -> "Arrival":
        """With other fields of the request."""
        return replace(self, request=replace(self.request, **changes))


def make_workload(shape: WorkloadShape) -> tuple[Arrival, ...]:
    """Ordered by step: the first `rows` at step 0, the others over later steps."""
    rng = random.Random(shape.seed)  # noqa: S311  a workload, not a secret
    longest = min(LONGEST_SHORT_PROMPT, shape.context - shape.max_tokens)
    prefix = [rng.randrange(shape.vocab_size) for _ in range(min(SHARED_PREFIX, longest // 2))]
    arrivals: list[Arrival] = []
    step = 0
    for index in range(shape.num_requests):
        if index >= shape.rows:
            step += rng.randint(0, 4)
        arrivals.append(Arrival(step, _make_request(rng, shape, index, prefix, longest)))
    for index, prompt in _long_prompts(rng, shape).items():
        params = arrivals[index].request.params
        params = replace(params, max_tokens=shape.max_tokens, ignore_eos=True)
        arrivals[index] = arrivals[index].asking(prompt_token_ids=prompt, params=params)
    return tuple(arrivals)


def _long_prompts(rng: random.Random, shape: WorkloadShape) -> dict[int, tuple[int, ...]]:
    longest = min(shape.longest, shape.context - shape.max_tokens)
    if longest <= LONGEST_SHORT_PROMPT:
        return {}
    tokens = tuple(rng.randrange(shape.vocab_size) for _ in range(longest))
    joining = tuple(rng.randrange(shape.vocab_size) for _ in range(longest * 3 // 5))
    shared, own = tokens[: longest * 2 // 3], joining[: longest // 4]
    return {1: tokens, shape.rows: joining, shape.num_requests - 1: shared + own}


def _make_request(
    rng: random.Random, shape: WorkloadShape, index: int, prefix: list[int], longest: int
) -> Request:
    length = rng.choice((rng.randint(1, 24), rng.randint(1, longest), longest))
    shared = prefix[: rng.choice((0, len(prefix)))][:length]
    prompt = shared + [rng.randrange(shape.vocab_size) for _ in range(length - len(shared))]
    is_sampled = (index * 0x9E3779B9 >> 7) % 1000 < shape.sampled_share * 1000
    return Request(
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(
            max_tokens=rng.randint(max(1, shape.max_tokens // 3), shape.max_tokens),
            temperature=rng.choice((1.0, 1.0, 0.7, 1.3)) if is_sampled else 0.0,
            top_k=rng.choice((0, 0, 40)),
            top_p=rng.choice((1.0, 1.0, 0.9)),
            min_p=rng.choice((0.0, 0.0, 0.02)),
            seed=rng.randrange(1 << 40),
            logprobs=NUM_LOGPROBS,
            ignore_eos=rng.random() < 0.5,
        ),
    )


EVERY = 3  # of the prompts that can be pruned, one of so many is not


def with_sparse_prompts(arrivals: tuple[Arrival, ...], keep: float) -> tuple[Arrival, ...]:
    """Most of the prompts in which scores decide something keep so much, or as little more as
    leaves a choice."""
    found: list[Arrival] = []
    num_able = 0
    for each in arrivals:
        sparse = _sparse_of(each.request, keep)
        num_able += sparse is not None
        is_pruned = sparse is not None and num_able % EVERY
        found.append(each.asking(sparse_prefill=sparse) if is_pruned else each)
    return tuple(found)


def _sparse_of(request: Request, keep: float) -> SparsePrefill | None:
    params, num_tokens = request.params, len(request.prompt_token_ids)
    needs_all = request.attachments or request.needs_prompt_rows or request.pooling is not None
    if needs_all or params.repetition_penalty != 1.0 or (params.max_tokens or 0) < LOOK_AHEAD:
        return None
    count = num_chunks(num_tokens)
    num_forced = len(SparsePrefill(keep=keep).forced_chunks(num_tokens))
    wanted = max(keep, (num_forced + 1) / count)
    sparse = SparsePrefill(keep=min(1.0, wanted))
    return sparse if num_forced < sparse.num_kept_chunks(num_tokens) < count else None


# Of images, in pixels; those are taken whose tokens are few enough.
SIZES = (
    *((side, side) for side in (32, 64, 96, 160, 256, 448)),
    *((64, 32), (32, 64), (128, 48), (48, 128), (200, 120), (320, 200), (200, 320)),
)

MOST_OF_CONTEXT = 4  # an image takes no more than this part of the context, as a divisor

NUM_IMAGES = 4
SHARED_TOKENS = 5  # before the image that several prompts begin with; fewer than a page has

DigestOf = Callable[[bytes, ImagePart, bytes], bytes]


@dataclass(frozen=True, slots=True)
class _Prompt:
    """Tokens and images: a whole prompt, or a piece of one."""

    token_ids: tuple[int, ...] = ()
    attachments: tuple[Attachment, ...] = ()

    def plus(self, *pieces: "Sequence[int] | _Prompt") -> "_Prompt":
        tokens, parts = self.token_ids, self.attachments
        for each in pieces:
            piece = each if isinstance(each, _Prompt) else _Prompt(tuple(each))
            start = len(tokens)
            parts += tuple(replace(part, start=start + part.start) for part in piece.attachments)
            tokens += piece.token_ids
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
    """With images in six requests of seven; steps and options are kept."""
    rng = random.Random(f"images {shape.seed}")  # noqa: S311  a workload, not a secret
    make = _Maker(shape, rng)
    kinds = (make.text, make.shared, make.behind, make.twice, make.first, make.turned, make.several)
    played: list[Arrival] = []
    for index, arrival in enumerate(without_placeholders(arrivals, shape)):
        request = arrival.request
        room = shape.context - (request.params.max_tokens or 1)
        prompt = kinds[index % len(kinds)]([*request.prompt_token_ids], room)
        played.append(
            arrival.asking(prompt_token_ids=prompt.token_ids, attachments=prompt.attachments)
        )
    return tuple(played)


def without_placeholders(arrivals: Sequence[Arrival], shape: ImageShape) -> tuple[Arrival, ...]:
    return tuple(
        each.asking(prompt_token_ids=tuple(map(shape.text_token, each.request.prompt_token_ids)))
        for each in arrivals
    )


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

    def _next_turned(self) -> _Prompt:
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
        """With as much text after it as fits, at least a token."""
        most = max(1, room - len(prompt.token_ids))
        return prompt.plus(own[:most] or [self._token()])

    def _token(self) -> int:
        return self._shape.text_token(self._rng.randrange(self._shape.vocab_size))

    def _turned_images(self) -> tuple[_Prompt, _Prompt]:
        plans = [plan for plan in self._shape.plans if len(plan.parts) == 1]
        by_sides = {(plan.parts[0].width, plan.parts[0].height): plan for plan in plans}
        for (width, height), plan in by_sides.items():
            if width != height and (height, width) in by_sides:
                pixels = self._pixels(plan.parts[0])
                turned = by_sides[height, width]
                return self._placed(plan, [pixels]), self._placed(turned, [pixels])
        return self._images[0], self._images[1]

    def _image(self, plan: ImagePlan, index: int) -> _Prompt:
        parts = [self._pixels(part) for part in plan.parts]
        if index == 1:  # tiles of which two are equal
            parts = [parts[0] if len(each) == len(parts[0]) else each for each in parts]
        return self._placed(plan, parts)

    def _pixels(self, part: ImagePart) -> bytes:
        return self._rng.randbytes(part.num_bytes)

    def _placed(self, plan: ImagePlan, pixels: Sequence[bytes]) -> _Prompt:
        """As tokens; each text is two of them."""
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
        return _Prompt(tuple(tokens), tuple(sorted(parts, key=lambda each: each.start)))


def _num_tokens(plan: ImagePlan) -> int:
    return plan.num_tokens + sum(2 for piece in plan.pieces if not isinstance(piece, Run))


def _chosen(plans: Sequence[ImagePlan]) -> tuple[ImagePlan, ...]:
    """Plans of `NUM_IMAGES` images: of few tokens and of many."""
    places = {i * (len(plans) - 1) // max(1, NUM_IMAGES - 1) for i in range(NUM_IMAGES)}
    return tuple(plans[place] for place in sorted(places))
