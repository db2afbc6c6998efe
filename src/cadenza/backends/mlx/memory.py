"""The memory that a model of mlx-lm takes: it is built and called without being evaluated, which
gives the shapes of weights, KV and state without allocating any. Legend: V vocabulary."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from cadenza.backends.base import ModelMemory
from cadenza.backends.mlx.device import CACHE_BYTES
from cadenza.backends.mlx.probe import REFUSALS
from cadenza.backends.mlx.slot_model import CHUNK, SlotModel
from cadenza.backends.mlx.slots import SlotSizes, depends_on_cuts, new_slots
from cadenza.backends.mlx.zoo import ZooModel, load_zoo_model, set_dtype
from cadenza.config import PAGE_SIZE_UNIT
from cadenza.errors import CheckpointError
from cadenza.json_object import shorten
from cadenza.weights.dtypes import WeightDType

LOGIT_COPIES = 6  # arrays [R, V] of float32 that exist at the same time while tokens are chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredModel:
    """`memory` by compute type; `depends_on_cuts` as `slots.depends_on_cuts`."""

    memory: Mapping[WeightDType, ModelMemory]
    depends_on_cuts: bool


def measure_model(folder: Path, vocab_size: int, dtypes: Sequence[WeightDType]) -> MeasuredModel:
    """What a checkpoint takes in each compute type. Raises CheckpointError if mlx-lm cannot compute
    the model, or its caches have no slots."""
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
