"""Requests with images in tests, and what nobody may read of their slots."""

import hashlib
import random
from collections.abc import Sequence

from cadenza.backends.fake import FakeRunner
from cadenza.config import EngineLimits, ImageLimits
from cadenza.engine.core import EngineCore
from cadenza.request import Attachment, Request
from cadenza.scheduler.image_queue import ImageQueue
from tests.engine.recurrent import spoil_free_states
from tests.engine.solo import IMAGE_TOKEN_ID

BREAK = 7
"""Ends a row of placeholders in an image with breaks."""

Prompt = tuple[tuple[int, ...], tuple[Attachment, ...]]


def image_at(start: int, seed: int, rows: int, columns: int, *, has_breaks: bool = False) -> Prompt:
    """The tokens of an image, and what is behind them."""
    row = (IMAGE_TOKEN_ID,) * columns
    rest = ((BREAK, *row) if has_breaks else row) * (rows - 1)
    tokens = (*row, *rest)
    width, height = 2 * columns, 2 * rows
    payload = random.Random(f"image {seed} {rows} {columns}").randbytes(width * height * 3)
    digest = hashlib.sha256(b"%d %d " % (width, height) + payload).digest()
    part = Attachment(
        start=start,
        length=len(tokens),
        digest=digest,
        payload=payload,
        width=width,
        height=height,
        rows=rows,
        columns=columns,
    )
    return tokens, (part,)


def prompt_of(*pieces: Sequence[int] | tuple[int, int, int]) -> Prompt:
    """Texts (lists of tokens) and images (tuples of a seed, rows and columns), joined."""
    tokens: tuple[int, ...] = ()
    parts: tuple[Attachment, ...] = ()
    for piece in pieces:
        if isinstance(piece, tuple):
            own, found = image_at(len(tokens), *piece)
            tokens, parts = tokens + own, parts + found
        else:
            tokens += tuple(piece)
    return tokens, parts


def without_placeholders(tokens: Sequence[int]) -> tuple[int, ...]:
    return tuple(each - (each == IMAGE_TOKEN_ID) for each in tokens)


def can_see(request: Request, images: ImageLimits | None) -> bool:
    """Whether the slots hold each image of the request by itself."""
    if images is None:
        return not request.attachments
    return all(part.rows * part.columns <= images.num_slots for part in request.attachments)


def sees_with(limits: EngineLimits) -> dict[str, int]:
    """What the fake runner needs to see."""
    images = limits.images
    if images is None:
        return {}
    return {"num_image_slots": images.num_slots, "image_token_id": images.token_id}


def can_ever_fit(request: Request, limits: EngineLimits) -> bool:
    """Whether context and pool hold the request when it is alone; the last token needs no KV."""
    num_prompt_tokens = len(request.prompt_token_ids)
    most = request.params.max_tokens
    num_tokens = limits.max_model_len if most is None else num_prompt_tokens + most
    if not 0 < num_prompt_tokens < num_tokens + (most == 0):
        return False
    if not can_see(request, limits.images):
        return False
    num_computed = max(num_prompt_tokens, num_tokens - 1)
    return num_tokens <= limits.max_model_len and num_computed <= (
        request.tenant.most_pages(limits.num_pages) * limits.page_size
    )


def spoil_free_image_slots(engine: EngineCore) -> None:
    """Overwrites the embeddings in all slots that nobody may read any more."""
    runner = engine.runner
    if isinstance(runner, FakeRunner) and runner.num_image_slots:
        runner.images.spoil(engine.scheduler.work(ImageQueue).slots.free_slots)


def spoil_free_slots(engine: EngineCore) -> None:
    """Those of images and of recurrent states."""
    spoil_free_image_slots(engine)
    spoil_free_states(engine)
