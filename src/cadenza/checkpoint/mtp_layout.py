"""How the MTP layers (multi-token prediction) of a family are stored and fed: `MTPLayout`.

Owns the names of their tensors, and what differs between families before the layer's block. Knows
no model's sizes. Names are without `.weight`; `{layer}` in them is the number of the MTP layer, and
`{place}` that number counted on from the decoder's layers.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPLayout:
    """The MTP layers of one family.

    Args:
        count_key: the setting of config.json that has their number.
        owned: what the names of their tensors begin with.
        block: the prefix of the names of the layer's block.
        hidden_norm: the norm of the hidden state.
        embedding_norm: the norm of the embedding.
        input_proj: the linear of both, [E, 2 E].
        final_norm: the norm before the head.
        puts_hidden_first: the hidden state comes before the embedding in the input of that linear.
    """

    count_key: str
    owned: str
    block: str
    hidden_norm: str
    embedding_norm: str
    input_proj: str
    final_norm: str
    puts_hidden_first: bool


MIMO_MTP = MTPLayout(
    count_key="num_nextn_predict_layers",
    owned="model.mtp_layers.{layer}.",
    block="model.mtp_layers.{layer}.",
    hidden_norm="model.mtp_layers.{layer}.hidden_layernorm",
    embedding_norm="model.mtp_layers.{layer}.token_layernorm",
    input_proj="model.mtp_layers.{layer}.input_proj",
    final_norm="model.mtp_layers.{layer}.final_layernorm",
    puts_hidden_first=True,
)
"""MiMo's (`MiMoMTPLayers` of its `modeling_mimo.py`)."""
