"""The memory of images in an engine: `image_memory_of` a model, and `plan_images`. The largest part
of an image always has slots, and the tower's workspace holds it."""

from dataclasses import dataclass
from typing import TypedDict

from cadenza.backends.base import BackendTraits, ModelMemory
from cadenza.checkpoint.folder import Checkpoint
from cadenza.config import ImageLimits
from cadenza.errors import ConfigError
from cadenza.models.model_config import ModelConfig
from cadenza.request import Attachment
from cadenza.vision.quanta import Workspace
from cadenza.vision.tower_config import VisionConfig
from cadenza.weights.dtypes import WeightDType, item_bytes

MOST_SLOTS = 1 << 17  # 32 images of the largest size; more would not help


USUAL_SIZE = 640, 480  # width and height in pixels


class ImageMemory(TypedDict):
    """Fields of a `ModelMemory`."""

    image_slot_bytes: int
    image_work_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePlanned:
    """Image slots, the bytes of these and of the tower's workspace, and the engine's `limits`."""

    num_slots: int = 0
    num_bytes: int = 0
    limits: ImageLimits | None = None


def image_memory_of(model: ModelConfig, dtype: WeightDType) -> ImageMemory:
    """Of a model whose activations are in `dtype`; zeros if it has no vision."""
    vision, size = model.vision, item_bytes(dtype)
    if vision is None:
        return ImageMemory(image_slot_bytes=0, image_work_bytes=0)
    width = model.hidden_size
    # The stream of a span that is computed in passes, and as much for blocks that end after it.
    span_bytes = 2 * vision.whole_span * width * item_bytes("float32")
    return ImageMemory(
        image_slot_bytes=vision.slot_values(width) * size,
        image_work_bytes=Workspace.of(vision).num_bytes(vision, width, size) + span_bytes,
    )


def plan_images(
    checkpoint: Checkpoint, traits: BackendTraits, memory: ModelMemory, cache_bytes: int
) -> ImagePlanned:
    """The slots that fit `cache_bytes`; none for a model without vision, or whose images the
    backend does not encode. Raises ConfigError if the largest part of an image does not fit."""
    vision = checkpoint.config.vision if checkpoint.is_known else None
    if vision is None or "attachments" not in traits.capabilities:
        return ImagePlanned()
    least, num_slots = vision.max_part_tokens, cache_bytes // memory.image_slot_bytes
    if num_slots < least:
        raise ConfigError(
            f"--image-cache-bytes {cache_bytes} holds {num_slots} tokens of images, and an image "
            f"of this model has up to {least}; set --image-cache-bytes "
            f"{least * memory.image_slot_bytes}, or --no-images"
        )
    num_slots = min(num_slots, MOST_SLOTS)
    return ImagePlanned(
        num_slots=num_slots,
        num_bytes=num_slots * memory.image_slot_bytes + memory.image_work_bytes,
        limits=ImageLimits(
            token_id=vision.image_token_id,
            num_slots=num_slots,
            has_rope_axes=checkpoint.config.has_rope_axes,
        ),
    )


def usual_part(vision: VisionConfig) -> Attachment:
    """The first part of a black image of `USUAL_SIZE`, whose encoding is timed."""
    part = vision.processor.plan(*USUAL_SIZE).parts[0]
    return Attachment(
        start=0,
        length=part.num_tokens,
        digest=b"usual",
        payload=bytes(part.num_bytes),
        width=part.width,
        height=part.height,
        rows=part.rows,
        columns=part.columns,
    )
