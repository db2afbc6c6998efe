"""Finds at load time what a model's code allows: some models of mlx-lm take one offset for all
rows, some count padding as tokens. Short sequences are computed with mlx-lm's own caches and
together in slots; a model whose slots cannot reproduce mlx-lm's logits in any way is refused."""

from collections.abc import Callable, Sequence
from itertools import product

import mlx.core as mx
import numpy as np

from cadenza.backends.mlx.slot_model import Abilities, SlotModel
from cadenza.backends.mlx.slots import SlotSizes
from cadenza.backends.mlx.zoo import ZooModel
from cadenza.errors import CheckpointError

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
