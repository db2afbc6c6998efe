"""What an engine takes beside a model's weights and KV, images included: `footprint_of`. Only
private memory counts: the system takes back the page cache. Sizes of Python objects were measured
and rounded up (`tests/native/test_memory_plan.py` compares with servers under load). No term
depends on free memory."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self, TypedDict

from cadenza.backends.base import BackendTraits, ModelMemory
from cadenza.batch.step_schema import NUM_EXTRA_LOGIT_ROWS
from cadenza.batch.token_rules import RuleLayout
from cadenza.checkpoint.folder import Checkpoint
from cadenza.config import (
    MAX_NUM_QUEUED_REQS_BOUND,
    MAX_NUM_QUEUED_TOKENS_BOUND,
    EngineConfig,
    EngineLimits,
    ImageLimits,
)
from cadenza.errors import ConfigError
from cadenza.models.model_config import ModelConfig
from cadenza.request import Attachment
from cadenza.vision.quanta import Workspace
from cadenza.vision.tower_config import VisionConfig
from cadenza.weights.weight_format import WeightDType, item_bytes

QUEUED_PER_ROW = 4  # requests per row that may always wait

# The shares of the available memory that waiting requests take by default, if everything else
# leaves so much: all of them, and of that the requests; the rest is for the tokens of their prompts
QUEUE_SHARE, REQUESTS_PART = 1 / 128, 1 / 4

LEAST_QUEUED_REQS, LEAST_QUEUED_TOKENS = 1024, 1 << 18  # so many may wait by default

# both processes; 38,000 and 48 measured with 1,000
QUEUED_REQUEST_BYTES, QUEUED_TOKEN_BYTES = 48_000, 64

FRONT_END_BYTES = 56_000_000  # of a front end that has loaded a small tokenizer and serves nothing

FRONT_END_TOKENIZER_FACTOR = 28
# Bytes that a process holds for each byte of tokenizer.json: vocabulary, merges, and in the engine
# the trie of structured outputs. Vocabularies of 49,152 and 262,144 tokens took 22 to 27, and 32 to
# 35
ENGINE_TOKENIZER_FACTOR = 36

FRONT_END_REQUEST_BYTES = 40_000
ENGINE_REQUEST_BYTES = 24_000  # of an open request with its connection and text

# Of a token in the pool, in both processes: its id in the request, in its sequence and in its
# page's key. 100 were measured with full rows of 1,500 tokens
SLOT_HOST_BYTES = 112

_WORD = 4
_PANEL = 32
_LOGIT_ROW_WORDS = 128  # a logit row's settings and result, in the step's buffer and beside it

_ROPE_COPIES = 2  # the factors, and those from which they are made

_SCRATCH_COPIES = 2  # a step's arrays on the device, and as much for the memory of the threads


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes beside weights and KV."""

    fixed_bytes: int = 0  # of arrays whose size follows from the model alone
    context_bytes: int = 0  # of each token of the longest context: rope tables, gathered keys
    row_bytes: int = 0  # of each row: its rules, its logits
    # of each row, for each page of the longest context: its part of the page table
    table_bytes: int = 0
    step_token_bytes: int = 0  # of each token of the largest step
    slot_bytes: int = 0  # of each token in the KV pool, beside its keys and values
    process_bytes: int = 0  # of the engine's process: libraries, programs, tokenizer
    front_end_bytes: int = 0  # of the front end's process
    bodies_bytes: int = 0  # there, of all bodies that are being read at the same time
    # in both processes, of the requests of a row: the one that runs, and those that wait for which
    # there is always room
    request_bytes: int = 0

    def beside(self, num_others: int) -> "Footprint":
        """With the arrays of the other models' runners; the rows of all have the same requests."""
        count = 1 + num_others
        return replace(
            self,
            fixed_bytes=count * self.fixed_bytes,
            context_bytes=count * self.context_bytes,
            row_bytes=count * self.row_bytes,
            table_bytes=count * self.table_bytes,
            step_token_bytes=count * self.step_token_bytes,
        )

    def at(self, context: int, page_size: int) -> "Footprint":
        """With what a longest context of `context` tokens takes."""
        return replace(
            self,
            fixed_bytes=self.fixed_bytes + context * self.context_bytes,
            context_bytes=0,
            row_bytes=self.row_bytes + -(-context // page_size) * self.table_bytes,
            table_bytes=0,
        )

    def start_bytes(self, *, num_rows: int, num_step_tokens: int) -> int:
        """The part of `scratch_bytes` that is taken before the first request comes."""
        return (
            self.fixed_bytes + num_rows * self.row_bytes + num_step_tokens * self.step_token_bytes
        )

    def scratch_bytes(self, *, num_rows: int, num_step_tokens: int, num_slots: int) -> int:
        """What belongs to no process and is neither weights nor KV; of a footprint `at` a
        context."""
        return (
            self.start_bytes(num_rows=num_rows, num_step_tokens=num_step_tokens)
            + num_rows * self.request_bytes
            + num_slots * self.slot_bytes
        )


def footprint_of(
    checkpoint: Checkpoint,
    traits: BackendTraits,
    dtype: WeightDType,
    memory: ModelMemory,
    bodies_bytes: int = 0,
) -> Footprint:
    """A device's own memory holds no process and no request."""
    on_host = traits.device_memory_bytes is None
    tokenizer_bytes = _tokenizer_bytes(checkpoint) if on_host else 0
    request_bytes = (1 + QUEUED_PER_ROW) * (FRONT_END_REQUEST_BYTES + ENGINE_REQUEST_BYTES)
    arrays = Footprint(fixed_bytes=memory.scratch_bytes, row_bytes=memory.row_bytes)
    if traits.memory is None:
        arrays = _array_footprint(checkpoint.config, traits, dtype)
    return replace(
        arrays,
        slot_bytes=arrays.slot_bytes + (SLOT_HOST_BYTES if on_host else 0),
        process_bytes=traits.process_bytes + ENGINE_TOKENIZER_FACTOR * tokenizer_bytes
        if on_host
        else 0,
        front_end_bytes=front_end_bytes_of(checkpoint) if on_host else 0,
        bodies_bytes=bodies_bytes if on_host else 0,
        request_bytes=request_bytes if on_host else 0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueBounds:
    """The most requests that may wait, the most tokens of their prompts, and the bytes planned for
    them."""

    num_reqs: int
    num_tokens: int
    num_bytes: int

    @classmethod
    def of(cls, config: EngineConfig, available_bytes: int, left_bytes: int) -> Self:
        """As asked for; otherwise by what is left of the available memory."""
        left_bytes = max(0, left_bytes)
        share_bytes = min(available_bytes * QUEUE_SHARE, left_bytes)
        requests_bytes = share_bytes * REQUESTS_PART
        num_reqs = max(LEAST_QUEUED_REQS, int(requests_bytes / QUEUED_REQUEST_BYTES))
        tokens_bytes = share_bytes - requests_bytes
        num_tokens = max(LEAST_QUEUED_TOKENS, int(tokens_bytes / QUEUED_TOKEN_BYTES))
        num_reqs = config.max_num_queued_reqs or min(num_reqs, MAX_NUM_QUEUED_REQS_BOUND)
        num_tokens = config.max_num_queued_tokens or min(num_tokens, MAX_NUM_QUEUED_TOKENS_BOUND)
        num_bytes = num_reqs * QUEUED_REQUEST_BYTES + num_tokens * QUEUED_TOKEN_BYTES
        return cls(
            num_reqs=num_reqs, num_tokens=num_tokens, num_bytes=min(num_bytes, int(share_bytes))
        )

    def bound(self, limits: EngineLimits) -> EngineLimits:
        return replace(
            limits, max_num_queued_reqs=self.num_reqs, max_num_queued_tokens=self.num_tokens
        )


def front_end_bytes_of(checkpoint: Checkpoint) -> int:
    return FRONT_END_BYTES + FRONT_END_TOKENIZER_FACTOR * _tokenizer_bytes(checkpoint)


def _array_footprint(model: ModelConfig, traits: BackendTraits, dtype: WeightDType) -> Footprint:
    rotary_dims = [
        rope.rotary_dim + rope.has_query_factors for rope in model.ropes if rope is not None
    ]
    logit_row_bytes = (
        _WORD * (RuleLayout(model.vocab_size).num_words + _LOGIT_ROW_WORDS)
        + _WORD * traits.logit_copies * (model.vocab_size + _PANEL)
        + _WORD * model.hidden_size
    )
    return Footprint(
        fixed_bytes=NUM_EXTRA_LOGIT_ROWS * logit_row_bytes + traits.workspace_bytes,
        context_bytes=_ROPE_COPIES * _WORD * sum(rotary_dims)
        + traits.gathered_layers * 2 * _WORD * model.widest_heads.kv_size,
        row_bytes=logit_row_bytes,
        table_bytes=2 * _WORD,  # on the device and the host
        step_token_bytes=_SCRATCH_COPIES * _token_bytes(model, dtype)
        + (_WORD * _widest_product(model) if traits.has_float_results else 0),
        slot_bytes=_WORD,
    )


def _token_bytes(model: ModelConfig, dtype: WeightDType) -> int:
    """A token's arrays while a layer is computed: the residual sum, the layer's input and the
    widest of what is computed from it."""
    partial_bytes = 0
    if model.experts is not None:
        partial_bytes = _WORD * model.experts.num_chosen * model.hidden_size
    heads, recurrence = model.widest_heads, model.recurrence
    widest = max(_inner_width(model), heads.query_size + 2 * heads.kv_size, model.hidden_size)
    if recurrence is not None:
        widest = max(widest, recurrence.num_channels + recurrence.value_width)
    inputs = model.layer_inputs
    if inputs is not None:
        partial_bytes += _WORD * model.num_layers * inputs.size
    if (latent := model.latent) is not None:
        of_head = latent.query_size + 2 * latent.rank  # absorbed queries, and what they attend to
        widest = max(widest, latent.num_heads * of_head + 2 * heads.head_dim)
    return (
        _WORD * model.hidden_size + item_bytes(dtype) * (model.hidden_size + widest) + partial_bytes
    )


def _widest_product(model: ModelConfig) -> int:
    """Columns of a layer's widest product: gate and up of its MLP or of the chosen experts, or
    queries, keys and values."""
    heads = model.widest_heads
    return max(2 * _inner_width(model), heads.query_size + 2 * heads.kv_size, model.hidden_size)


def _inner_width(model: ModelConfig) -> int:
    """Of the widest MLP of a layer, or of the experts that a token has."""
    inner = max(kind.intermediate_size or model.intermediate_size for kind in model.layer_kinds)
    if model.experts is None:
        return inner
    chosen = model.experts.num_chosen * model.experts.intermediate_size
    return max(inner, chosen, model.experts.shared_size)


def _tokenizer_bytes(checkpoint: Checkpoint) -> int:
    source = checkpoint.tokenizer_source
    if source is None:
        return 0
    return source.stat().st_size if isinstance(source, Path) else source.num_bytes


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
