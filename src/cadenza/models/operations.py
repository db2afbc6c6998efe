"""What a token costs by a model's shape alone: the parameters that it is multiplied with, and the
operations of attention. A multiplication and its sum are two operations. Norms, activations and
recurrences are not counted."""

from cadenza.models.declaration import (
    declare,
    declare_embedding,
    declare_head,
    declare_layer,
)
from cadenza.models.model_config import ModelConfig
from cadenza.weights.tensor_spec import (
    ExpertMLPSpec,
    ParallelMLPSpec,
    TensorSpec,
    tensors_of,
)


def token_operations(config: ModelConfig) -> int:
    """Of one token's products in all layers, in a mixture with its own experts only; without
    attention and the head."""
    experts = expert_tensors(config)
    apart = {spec.name for expert in experts for spec in expert}
    linear = [spec for spec in declare(config) if spec.kind in ("linear", "router")]
    parameters = sum(spec.num_elements for spec in linear if spec.name not in apart)
    if config.experts is not None and experts:
        one = sum(spec.num_elements for spec in experts[0])
        parameters += config.experts.num_chosen * one
    return 2 * parameters


def pair_operations(config: ModelConfig) -> int:
    """Attention of one query and one token of its context, in all layers."""
    return sum(_pairs_of_layers(config))


def attended_operations(config: ModelConfig, num_tokens: int) -> int:
    """Attention of a prompt in all layers; windows bound what is seen."""
    found = 0
    for kind, operations in zip(config.layer_kinds, _pairs_of_layers(config), strict=True):
        most = num_tokens if kind.window is None else min(kind.window, num_tokens)
        found += operations * (most * (most + 1) // 2 + (num_tokens - most) * most)
    return found


def _pairs_of_layers(config: ModelConfig) -> list[int]:
    found: list[int] = []
    for kind in config.layer_kinds:
        heads, operations = config.heads_of(kind), 0
        if kind.latent is not None:  # scores of all values, sums of those of the latent
            operations = 2 * heads.num_heads * (heads.head_dim + kind.latent.rank)
        elif kind.recurrence is None:
            operations = 4 * heads.query_size
        found.append(operations)
    return found


def head_tensor(config: ModelConfig) -> TensorSpec:
    """The tensor that the head multiplies with."""
    return declare_embedding(config) if config.tie_word_embeddings else declare_head(config)


def mixtures_of(config: ModelConfig) -> list[ExpertMLPSpec]:
    layers = [declare_layer(config, index).mlp for index in range(config.num_layers)]
    own = [mlp.experts if isinstance(mlp, ParallelMLPSpec) else mlp for mlp in layers]
    return [mlp for mlp in own if isinstance(mlp, ExpertMLPSpec)]


def expert_tensors(config: ModelConfig) -> list[list[TensorSpec]]:
    """The tensors of each expert in all layers that have experts."""
    return [
        [spec for expert in column for spec in tensors_of(expert)]
        for column in zip(*(mlp.experts for mlp in mixtures_of(config)), strict=True)
    ]
