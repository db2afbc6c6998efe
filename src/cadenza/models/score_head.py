"""`ScoreHead`: the head of models that score a text, such as rerankers, in place of a vocabulary's.
transformers saves them (`Qwen3ForSequenceClassification`) with the decoder's tensor names and
`score.weight`. The weights that the engine loads lack the head: it is applied to the last hidden
state of a text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cadenza.errors import CheckpointError
from cadenza.json_object import JsonObject
from cadenza.models.declaration import HEAD
from cadenza.models.model_config import ModelConfig
from cadenza.weights.weights import Weights

WEIGHT, BIAS = "score.weight", "score.bias"
SCORE_NAMES = (WEIGHT, None), (BIAS, None)  # neither is a tensor of the decoder

# where config.json may name the activation of a score; without a name it is the sigmoid
_ACTIVATIONS = (
    ("sentence_transformers", "activation_fn"),
    (None, "sbert_ce_default_activation_function"),
)
_NONE = "Identity"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreHead:
    """One weight for each element of a hidden state, and what follows."""

    weights: tuple[float, ...]
    bias: float
    is_bounded: bool  # the score goes through the sigmoid

    def score(self, state: Sequence[float]) -> float:
        """Of a hidden state, not scaled. The sum is exactly rounded."""
        products = [w * value for w, value in zip(self.weights, state, strict=True)]
        found = math.fsum([*products, self.bias])
        return _sigmoid(found) if self.is_bounded else found


def _sigmoid(x: float) -> float:
    """Without an overflow."""
    if x >= 0:
        return 1.0 / (1.0 + math.exp(-x))
    return math.exp(x) / (1.0 + math.exp(x))


def read_score_head(raw: JsonObject, config: ModelConfig, weights: Weights) -> ScoreHead | None:
    """The score head of a model, if it has one and no other. Raises CheckpointError if the head
    does not give one score."""
    if WEIGHT not in weights or HEAD in weights:
        return None
    shape = weights.shape(WEIGHT)
    if shape != (1, config.hidden_size):
        raise CheckpointError(
            f"{WEIGHT} has the shape {list(shape)}; only a head of one score is supported, of the "
            f"shape [1, {config.hidden_size}]: use a reranker"
        )
    parts = [name for name in (WEIGHT, BIAS) if name in weights]
    numbers = {name: np.asarray(weights.array(name)).astype(np.float32) for name in parts}
    return ScoreHead(
        weights=tuple(numbers[WEIGHT][0].tolist()),
        bias=float(numbers[BIAS].reshape(-1)[0]) if BIAS in numbers else 0.0,
        is_bounded=not _activation(raw).endswith(_NONE),
    )


def _activation(raw: JsonObject) -> str:
    for section, key in _ACTIVATIONS:
        settings = raw if section is None else raw.child(section)
        found = None if settings is None else settings.text(key)
        if found:
            return found
    return ""
