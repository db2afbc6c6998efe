"""A model's MTP layer (multi-token prediction) as a model of its own: `mtp_head_of`.

An MTP layer predicts the token after next: from the hidden state h of token t, as it is before the
decoder's final norm, and the embedding e of token t + 1,

    x = input_proj([hidden_layernorm(h), token_layernorm(e)])
    logits = lm_head(final_layernorm(layer(x)))

predicts token t + 2. So it is a decoder of one layer, with embedding and head of the model that it
belongs to, whose first input is x (`ModelConfig.reads_hidden`). Source: MiMo's `modeling_mimo.py`
(`MiMoMTPLayers`), and for the place of h `mimo.py` of its authors' vLLM, whose decoder hands over
the residual stream and norms it only for its own logits. Knows no files.
"""

from dataclasses import replace

from cadenza.checkpoint.declaration import (
    EMBEDDING,
    EMBEDDING_NORM,
    FINAL_NORM,
    HEAD,
    HIDDEN_NORM,
    INPUT_PROJ,
    TensorSpec,
    check_weights,
    declare,
)
from cadenza.checkpoint.folder import Checkpoint
from cadenza.checkpoint.model_config import LayerKind, ModelConfig
from cadenza.checkpoint.tensor_file import TensorEntry
from cadenza.errors import CheckpointError

_LAYER = "model.layers.0."


def mtp_head_of(checkpoint: Checkpoint) -> Checkpoint:
    """The first MTP layer of a model, under the declared names of a decoder.

    Raises:
        CheckpointError: the model has none, or it cannot be read.
    """
    config, weights = checkpoint.config, checkpoint.weights
    if not config.num_mtp_layers:
        raise CheckpointError(
            f"this model, of type {config.family}, has no MTP layers (num_nextn_predict_layers); "
            f"use one that has them, as MiMo-7B"
        )
    if checkpoint.scheme is not None:
        raise CheckpointError(
            f"the MTP layers of a checkpoint that is quantised as {checkpoint.scheme.name} are not "
            f"supported; use the unquantised checkpoint"
        )
    head = config_of_head(config)
    stored = {stored_name(config, spec.name, 0): spec.name for spec in declare(head)}
    missing = next((name for name in stored if name not in weights), None)
    if missing is not None:
        raise CheckpointError(
            f"the weights lack {missing}, which config.json promises as part of an MTP layer; use "
            f"the checkpoint as it was published"
        )
    parts: dict[str, list[TensorEntry]] = {name: [] for name in weights if name not in stored}
    parts |= {
        name: [replace(weights.entry(name), name=own)]
        for name, own in stored.items()
        if name != own
    }
    own = weights.with_parts(parts)
    check_weights(head, own)
    return replace(checkpoint, known=(head, own))


def config_of_head(config: ModelConfig) -> ModelConfig:
    """The arithmetic of an MTP layer of a model."""
    return replace(
        config, num_layers=1, layer_pattern=(LayerKind(),), num_mtp_layers=0, reads_hidden=True
    )


def declare_mtp_layers(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """Every tensor of a model's MTP layers, as it is stored."""
    own = [spec for spec in declare(config_of_head(config)) if spec.name not in (EMBEDDING, HEAD)]
    return tuple(
        replace(spec, name=stored_name(config, spec.name, layer))
        for layer in range(config.num_mtp_layers)
        for spec in own
    )


def stored_name(config: ModelConfig, name: str, layer: int) -> str:
    """The name in the file of what is `name` in the head of an MTP layer of a model."""
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
    return stored.format(layer=layer, place=config.num_layers + layer)
