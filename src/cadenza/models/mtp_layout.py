"""How the MTP layers (multi-token prediction) of a family are stored and fed: `MTPLayout`. Names
are without `.weight`; `{layer}` in them is the number of the MTP layer, and `{index}` that number
counted on from the decoder's layers."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPLayout:
    """The MTP layers of one family."""

    count_key: str  # the setting of config.json that has their number
    owned: str  # what the names of their tensors begin with
    block: str  # the prefix of the names of the layer's block
    hidden_norm: str  # the norm of the hidden state
    embedding_norm: str  # the norm of the embedding
    input_proj: str  # the linear of both, [E, 2 E]
    final_norm: str  # the norm before the head
    # the hidden state comes before the embedding in the input of that linear
    puts_hidden_first: bool
    takes_normed: bool  # the model's hidden states are taken after its final norm; else before it
    # the embedding is zero in the layer's first position, that of the second token
    zeroes_first: bool = False
    # embedding, head: copies of the model's own, if they are stored
    embedding: str | None = None
    head: str | None = None


# `MiMoMTPLayers` of MiMo's `modeling_mimo.py`, and for the position of the hidden state `mimo.py`
# of its authors' vLLM, whose decoder hands over the residual stream and norms it only for its own
# logits
MIMO_MTP = MTPLayout(
    count_key="num_nextn_predict_layers",
    owned="model.mtp_layers.{layer}.",
    block="model.mtp_layers.{layer}.",
    hidden_norm="model.mtp_layers.{layer}.hidden_layernorm",
    embedding_norm="model.mtp_layers.{layer}.token_layernorm",
    input_proj="model.mtp_layers.{layer}.input_proj",
    final_norm="model.mtp_layers.{layer}.final_layernorm",
    puts_hidden_first=True,
    takes_normed=False,
)

# Qwen3-Next's and Qwen3.5's: vLLM's `qwen3_next_mtp.py`, which is given what `Qwen3NextModel`
# returns, the hidden state after the norm. For Qwen3.5 others measured that fewer drafts are
# accepted with the state before it (LightLLM#1402, vllm-mlx#660)
QWEN_MTP = MTPLayout(
    count_key="mtp_num_hidden_layers",
    owned="mtp.",
    block="mtp.layers.{layer}.",
    hidden_norm="mtp.pre_fc_norm_hidden",
    embedding_norm="mtp.pre_fc_norm_embedding",
    input_proj="mtp.fc",
    final_norm="mtp.norm",
    puts_hidden_first=False,
    takes_normed=True,
)

# DeepSeek-V3's and GLM-4.5's: vLLM's `deepseek_mtp.py` and `glm4_moe_mtp.py`, which are given what
# the models' `forward` return, the hidden state after the norm; so is the layer of DeepSeek's own
# `modeling_deepseek.py`, as quoted in ROCm/ATOM#1764. For further drafts the layer's output is
# taken after its norm, as in vLLM since #45895 and in SGLang's `deepseek_nextn.py`; vLLM took it
# before
DEEPSEEK_MTP = MTPLayout(
    count_key="num_nextn_predict_layers",
    owned="model.layers.{index}.",
    block="model.layers.{index}.",
    hidden_norm="model.layers.{index}.hnorm",
    embedding_norm="model.layers.{index}.enorm",
    input_proj="model.layers.{index}.eh_proj",
    final_norm="model.layers.{index}.shared_head.norm",
    puts_hidden_first=False,
    takes_normed=True,
    zeroes_first=True,
    embedding="model.layers.{index}.embed_tokens",
    head="model.layers.{index}.shared_head.head",
)

MTP_LAYOUTS = (MIMO_MTP, QWEN_MTP, DEEPSEEK_MTP)
