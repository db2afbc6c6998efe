"""`MlxReferenceModel`: a model of mlx-lm in float32 with mlx-lm's own caches, for one sequence,
with which `cadenza verify` compares the engine. Layers are mlx-lm's in both; no slot, mask, chunk,
offset or sampling code of the runner is used. Legend: V vocabulary."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from cadenza.backends.mlx.zoo import load_zoo_model, set_dtype

PREFILL_STEP = 2048  # tokens of a prompt in one call, as in mlx-lm


class MlxReferenceModel:
    """Belongs to the thread that makes it, like MLX's streams."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._loaded = load_zoo_model(folder)
        self._vocab_size = vocab_size
        self._caches: list[Any] = []
        set_dtype(self._loaded, "float32")

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def start(self) -> None:
        self._caches = self._loaded.new_caches()

    def append(self, token_ids: list[int]) -> npt.NDArray[np.float32]:
        logits = np.empty(0, np.float32)
        for begin in range(0, len(token_ids), PREFILL_STEP):
            part = mx.array([token_ids[begin : begin + PREFILL_STEP]])
            output: mx.array = self._loaded.model(part, cache=self._caches)
            logits = np.array(output[0, -1].astype(mx.float32))
        return logits
