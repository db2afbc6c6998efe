"""Reads models that were saved without their head, as embedding models are: `as_decoder`.

transformers' base models, such as `Qwen3Model`, name their tensors without the prefix that they
have within the model that generates. Invariant: names change only where none of them has the
prefix.
"""

from dataclasses import replace

from cadenza.checkpoint.declaration import EMBEDDING, HEAD
from cadenza.checkpoint.model_config import ModelConfig
from cadenza.checkpoint.weights import Weights

PREFIX = "model."


def as_decoder(config: ModelConfig, weights: Weights) -> tuple[ModelConfig, Weights, bool]:
    """The same model under the declared names, and whether it can generate.

    One that cannot has the embedding as its head, which nothing reads.
    """
    is_base = EMBEDDING.removeprefix(PREFIX) in weights
    if not is_base or any(name.startswith(PREFIX) for name in weights):
        return config, weights, True
    parts = {
        name: [replace(weights.entry(name), name=f"{PREFIX}{name}")]
        for name in weights
        if name != HEAD
    }
    can_generate = config.tie_word_embeddings or HEAD in weights
    if not can_generate:
        config = replace(config, tie_word_embeddings=True)
    return config, weights.with_parts(parts), can_generate
