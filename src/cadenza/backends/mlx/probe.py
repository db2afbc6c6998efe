"""What a model of mlx-lm allows and takes, found at load time. Some models take one offset for all
rows, some count padding as tokens: short sequences are computed with mlx-lm's own caches and
together in slots, and a model whose slots cannot reproduce mlx-lm's logits is refused. Legend: V
vocabulary."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from cadenza.backends.base import ModelMemory
from cadenza.backends.mlx.device import CACHE_BYTES
from cadenza.backends.mlx.slot_model import CHUNK, Abilities, SlotModel
from cadenza.backends.mlx.slots import SlotSizes, depends_on_cuts, new_slots
from cadenza.backends.mlx.zoo import ZooModel, load_zoo_model, set_dtype
from cadenza.config import PAGE_SIZE_UNIT
from cadenza.errors import CheckpointError
from cadenza.json_object import shorten
from cadenza.weights.weight_format import WeightDType

# Token ids, of different lengths; their last two are decoded together.
SEQUENCES = ((3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5), (2, 7, 1, 8))

NUM_DECODED = 2
CHUNK_SIZES = (16,)
CAPACITY = 32

TOLERANCES = {mx.float32: 1e-3}
# Largest deviation of a logit, relative to the spread of a token's logits; for 16-bit types.
TOLERANCE = 0.06


# What a model's code raises that takes an array for a number (as its offset), or the reverse:
# Python's own errors, those of numpy, and those of MLX, which are the last three.
REFUSALS = (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError)
LOGIT_COPIES = 6  # arrays [R, V] of float32 that exist at the same time while tokens are chosen


def find_abilities(loaded: ZooModel) -> Abilities:
    """What the slots of `loaded` can compute together. Raises CheckpointError if not even one token
    of one slot at a time gives mlx-lm's own logits."""
    expected = [_own_logits(loaded, each) for each in SEQUENCES]
    for is_ragged, is_padded in product((True, False), (True, False)):
        abilities = Abilities(is_ragged=is_ragged, is_padded=is_padded)
        model = SlotModel(
            loaded.model,
            loaded.new_caches(),
            SlotSizes(num_slots=3, capacity=CAPACITY),
            CHUNK_SIZES,
        )
        if model.has_state and is_padded:
            continue
        model.abilities = abilities
        if _agrees(lambda model=model: _slot_logits(model), expected):
            return abilities
    raise CheckpointError(
        "the model's logits in slots are not those of mlx-lm's own caches, even for one request at "
        "a time; use another model, or another --backend"
    )


def _agrees(compute: Callable[[], list[mx.array]], expected: Sequence[mx.array]) -> bool:
    try:
        found = compute()
        mx.eval(*found)
    except REFUSALS:
        return False
    return all(_is_close(one, other) for one, other in zip(found, expected, strict=True))


def _is_close(found: mx.array, expected: mx.array) -> bool:
    tolerance = TOLERANCES.get(expected.dtype, TOLERANCE)
    ours, theirs = (np.array(each.astype(mx.float32)) for each in (found, expected))
    spread = theirs.std(axis=-1, keepdims=True) + 1e-6
    return bool((np.abs(ours - theirs) <= tolerance * spread).all())


def _own_logits(loaded: ZooModel, token_ids: Sequence[int]) -> mx.array:
    caches, rows = loaded.new_caches(), []
    head = token_ids[:-NUM_DECODED]
    loaded.model(mx.array([head]), cache=caches)
    for token_id in token_ids[-NUM_DECODED:]:
        rows.append(loaded.model(mx.array([[token_id]]), cache=caches)[0])
    return mx.concatenate(rows)


def _slot_logits(model: SlotModel) -> list[mx.array]:
    slots = (2, 0)
    for slot, token_ids in zip(slots, SEQUENCES, strict=True):
        model.extend(slot, 0, mx.array(token_ids[:-NUM_DECODED]))
    rows: list[list[mx.array]] = [[], []]
    for back in range(NUM_DECODED, 0, -1):
        tokens, positions = np.zeros(3, np.int32), np.zeros(3, np.int32)
        for slot, token_ids in zip(slots, SEQUENCES, strict=True):
            tokens[slot], positions[slot] = token_ids[-back], len(token_ids) - back
        logits = model.decode(mx.array(tokens), positions, slots)
        for found, slot in zip(rows, slots, strict=True):
            found.append(logits[slot : slot + 1])
    return [mx.concatenate(each) for each in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredModel:
    """`memory` by compute type; `depends_on_cuts` as `slots.depends_on_cuts`."""

    memory: Mapping[WeightDType, ModelMemory]
    depends_on_cuts: bool


def measure_model(folder: Path, vocab_size: int, dtypes: Sequence[WeightDType]) -> MeasuredModel:
    """What a checkpoint takes in each compute type, from the shapes of a model that is built and
    called without being evaluated. Raises CheckpointError if mlx-lm cannot compute it, or its
    caches have no slots."""
    loaded = load_zoo_model(folder)
    try:
        memory: dict[WeightDType, ModelMemory] = {
            dtype: _measure(loaded, vocab_size, dtype) for dtype in dtypes
        }
    except REFUSALS as error:
        raise CheckpointError(
            f"mlx-lm cannot compute the model in {str(folder)!r} "
            f"({type(error).__name__}: {shorten(str(error))}); use a checkpoint that mlx-lm "
            f"supports, or another --backend"
        ) from error
    return MeasuredModel(
        memory=memory,
        depends_on_cuts=depends_on_cuts(
            loaded.model, new_slots(loaded.new_caches(), SlotSizes(num_slots=1, capacity=1))
        ),
    )


def _measure(loaded: ZooModel, vocab_size: int, dtype: WeightDType) -> ModelMemory:
    set_dtype(loaded, dtype)
    parameters: Any = tree_flatten(loaded.model.parameters())
    weight_bytes = sum(each.nbytes for _, each in parameters)
    short, long = (_slot_bytes(loaded.model, loaded.new_caches(), size) for size in (32, 64))
    per_token = (long - short) // 32
    state_bytes = max(0, short - 32 * per_token)
    logit_bytes = LOGIT_COPIES * vocab_size * 4
    return ModelMemory(
        weight_bytes=weight_bytes,
        kv_bytes_per_token=per_token,
        row_bytes=state_bytes + PAGE_SIZE_UNIT * per_token + logit_bytes,
        scratch_bytes=CACHE_BYTES + CHUNK * per_token * 4,
    )


def _slot_bytes(model: Any, caches: Sequence[Any], capacity: int) -> int:
    slots = SlotModel(model, caches, SlotSizes(num_slots=1, capacity=capacity), (CHUNK,))
    slots.compute(0, 0, mx.zeros(1, mx.int32))
    return int(np.sum([each.nbytes for each in slots.arrays()]))
