"""A model's MTP layer (multi-token prediction) as a decoder of one layer: `mtp_head_of`. Of hidden
state h of token t and embedding e of t + 1 it reads x = input_proj([hidden_norm(h),
embedding_norm(e)]) (`ModelConfig.reads_hidden`), and predicts token t + 2 by
lm_head(final_norm(block(x))). `mtp_layout` has what differs between families."""

from collections.abc import Iterator
from dataclasses import replace

from cadenza.checkpoint.folder import Checkpoint
from cadenza.errors import CheckpointError
from cadenza.models.declaration import (
    EMBEDDING,
    EMBEDDING_NORM,
    FINAL_NORM,
    HEAD,
    HIDDEN_NORM,
    INPUT_PROJ,
    are_equal,
    check_weights,
    declare,
)
from cadenza.models.layer_kind import LayerKind
from cadenza.models.model_config import ModelConfig
from cadenza.models.mtp_layout import MTP_LAYOUTS
from cadenza.weights.tensor_spec import TensorSpec
from cadenza.weights.weights import Weights

_LAYER = "model.layers.0."


def mtp_head_of(checkpoint: Checkpoint) -> Checkpoint:
    """The first MTP layer of a model, under the declared names of a decoder. Raises CheckpointError
    if the model has none, or it cannot be read."""
    config, weights = checkpoint.config, checkpoint.weights
    if not config.num_mtp_layers:
        keys = " or ".join(dict.fromkeys(each.count_key for each in MTP_LAYOUTS))
        raise CheckpointError(
            f"this model, of type {config.family}, has no MTP layers ({keys}); use one that has "
            f"them, as MiMo-7B"
        )
    if checkpoint.scheme is not None:
        raise CheckpointError(
            f"the MTP layers of a checkpoint that is quantised as {checkpoint.scheme.name} are not "
            f"supported; use the unquantised checkpoint"
        )
    head = config_of_head(config)
    stored = {stored_name(config, spec.name, 0): spec.name for spec in declare(head)}
    copies = _check_copies(config, weights)
    of_layer = [name for name in _of_first_layer(config, weights) if name not in copies]
    unknown = next((name for name in of_layer if name not in stored), None)
    if unknown is not None:
        raise CheckpointError(
            f"the MTP layer of this model has {unknown}, which is not computed in models of type "
            f"{config.family}; use another method"
        )
    missing = next((name for name in stored if name not in weights), None)
    if missing is not None:
        raise CheckpointError(
            f"the weights lack {missing}, which config.json promises as part of an MTP layer; use "
            f"the checkpoint as it was published"
        )
    own = weights.renamed(stored.get)
    check_weights(head, own)
    return replace(checkpoint, known=(head, own))


def config_of_head(config: ModelConfig) -> ModelConfig:
    """The block is a layer of the model's own type, with full attention; its MLP is a mixture if
    any of the model's is."""
    kind = LayerKind(has_experts=config.experts is not None, latent=config.latent)
    return replace(
        config,
        num_layers=1,
        layer_pattern=(kind,),
        num_mtp_layers=0,
        reads_hidden=True,
        vision=None,
    )


def declare_mtp_layers(config: ModelConfig) -> tuple[TensorSpec, ...]:
    own = [spec for spec in declare(config_of_head(config)) if spec.name not in (EMBEDDING, HEAD)]
    stored = {
        stored_name(config, spec.name, layer): spec
        for layer in range(config.num_mtp_layers)
        for spec in own
    }  # in some layouts layers share what is around their blocks
    return tuple(replace(spec, name=name) for name, spec in stored.items())


def stored_name(config: ModelConfig, name: str, layer: int) -> str:
    """The stored name of what is `name` in the head of an MTP layer."""
    layout = config.mtp_layout
    assert layout is not None, "the model has no MTP layers"
    if name in (EMBEDDING, HEAD):
        return name
    around = {
        HIDDEN_NORM: layout.hidden_norm,
        EMBEDDING_NORM: layout.embedding_norm,
        INPUT_PROJ: layout.input_proj,
        FINAL_NORM: layout.final_norm,
    }
    stored = (
        f"{around[name]}.weight" if name in around else layout.block + name.removeprefix(_LAYER)
    )
    return stored.format(layer=layer, index=config.num_layers + layer)


def _check_copies(config: ModelConfig, weights: Weights) -> set[str]:
    """The stored copies of the model's embedding and head in its first MTP layer. Raises
    CheckpointError if one of them differs."""
    layout = config.mtp_layout
    assert layout is not None, "the model has no MTP layers"
    head = EMBEDDING if config.tie_word_embeddings else HEAD
    copies = {
        f"{name}.weight".format(layer=0, index=config.num_layers): own
        for name, own in ((layout.embedding, EMBEDDING), (layout.head, head))
        if name is not None
    }
    found = {name: own for name, own in copies.items() if name in weights}
    for name, own in found.items():
        if not are_equal(weights, name, own):
            raise CheckpointError(
                f"{name} of the MTP layer differs from {own}; an embedding or a head of its own is "
                f"not supported; use another method"
            )
    return set(found)


def _of_first_layer(config: ModelConfig, weights: Weights) -> Iterator[str]:
    """The stored names of the first MTP layer, and of what all of them share."""
    layout = config.mtp_layout
    assert layout is not None, "the model has no MTP layers"
    owned = layout.owned.format(layer=0, index=config.num_layers)
    others = tuple(
        layout.block.format(layer=layer, index=config.num_layers + layer)
        for layer in range(1, config.num_mtp_layers)
    )
    for name in weights:
        if name.startswith(owned) and not (others and name.startswith(others)):
            yield name
