"""Qwen2, Qwen2.5, Qwen3, Qwen3.5 and its mixtures, and MiMo. The text models of Qwen2-VL and 2.5-VL
are Qwen2, those of Qwen3-VL are Qwen3; positions of three axes share out the pairs of a head
(`mrope_section`)."""

from dataclasses import replace

from cadenza.errors import CheckpointError
from cadenza.json_object import JsonObject, shorten
from cadenza.models.families.experts import EXPERT_KEYS, read_experts
from cadenza.models.families.family import (
    FULL,
    LAYER_KEYS,
    LINEAR,
    Family,
    read_attention_bias,
    read_layer_kinds,
    read_used_window,
    refuse_other_code,
    shortest_pattern,
)
from cadenza.models.layer_kind import DeltaShape, LayerKind
from cadenza.models.model_config import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_WIDTH,
    ModelConfig,
)
from cadenza.models.mtp_layout import DEEPSEEK_MTP, MIMO_MTP, QWEN_MTP

_DEFAULT_WINDOW = 4096
_DEFAULT_FULL_LAYERS = 28
_KEYS = LAYER_KEYS | {"use_sliding_window"}
_MIMO_CODE = frozenset(
    {
        "configuration_mimo.MiMoConfig",
        "modeling_mimo.MiMoModel",
        "modeling_mimo.MiMoForCausalLM",
    }
)


# The window applies only if `use_sliding_window` is set: to the sliding layers of `layer_types`, or
# without that list to the layers from `max_window_layers` on
def _read_layers(raw: JsonObject, model: ModelConfig) -> ModelConfig:
    window = read_used_window(raw, _DEFAULT_WINDOW)
    num_full = raw.integer("max_window_layers", 0, MAX_LAYERS, _DEFAULT_FULL_LAYERS)
    are_sliding = [window is not None and i >= num_full for i in range(model.num_layers)]
    kinds = read_layer_kinds(raw, are_sliding, window)
    return replace(model, layer_pattern=shortest_pattern(kinds))


def _read_qwen2(raw: JsonObject, model: ModelConfig) -> ModelConfig:
    return replace(_read_layers(raw, model), has_qkv_bias=True)


def _read_qwen3(raw: JsonObject, model: ModelConfig) -> ModelConfig:
    return replace(_read_layers(raw, model), qk_norm="head", **read_attention_bias(raw))


def _read_qwen35(raw: JsonObject, model: ModelConfig) -> ModelConfig:
    if not raw.flag("attn_output_gate", True):
        raise CheckpointError(
            f"{raw.where}: attn_output_gate is false; supported is true; use another checkpoint"
        )
    shape = _read_delta_shape(raw)
    kinds = [
        LayerKind(recurrence=shape if each == LINEAR else None)
        for each in _read_hybrid_types(raw, model.num_layers)
    ]
    return replace(
        model,
        layer_pattern=shortest_pattern(kinds),
        qk_norm="head",
        norm_adds_one=True,
        has_attention_gate=True,
        **read_attention_bias(raw),
    )


def _read_qwen35_moe(raw: JsonObject, model: ModelConfig) -> ModelConfig:
    model = _read_qwen35(raw, model)
    kinds = [replace(kind, has_experts=True) for kind in model.layer_pattern]
    experts = replace(
        read_experts(raw, model, 256, 8),
        intermediate_size=raw.integer("moe_intermediate_size", 1, MAX_WIDTH, 512),
        shared_size=raw.integer("shared_expert_intermediate_size", 1, MAX_WIDTH, 512),
        has_shared_gate=True,
    )
    return replace(model, layer_pattern=tuple(kinds), experts=experts)


def _read_delta_shape(raw: JsonObject) -> DeltaShape:
    shape = DeltaShape(
        num_key_heads=raw.integer("linear_num_key_heads", 1, MAX_HEADS, 16),
        num_value_heads=raw.integer("linear_num_value_heads", 1, MAX_HEADS, 32),
        key_size=raw.integer("linear_key_head_dim", 1, MAX_HEAD_DIM, 128),
        value_size=raw.integer("linear_value_head_dim", 1, MAX_HEAD_DIM, 128),
        num_inputs=raw.integer("linear_conv_kernel_dim", 2, MAX_HEADS, 4),
    )
    if shape.num_value_heads % shape.num_key_heads:
        raise CheckpointError(
            f"{raw.where}: linear_num_value_heads {shape.num_value_heads} is not a multiple of "
            f"linear_num_key_heads {shape.num_key_heads}; correct one of the two"
        )
    return shape


def _read_hybrid_types(raw: JsonObject, num_layers: int) -> list[object]:
    """By `layer_types`, or all but every `full_attention_interval`-th are linear."""
    interval = raw.integer("full_attention_interval", 1, MAX_LAYERS, 4)
    default: list[object] = [
        FULL if (index + 1) % interval == 0 else LINEAR for index in range(num_layers)
    ]
    types = raw.items_of("layer_types") if raw.has("layer_types") else default
    odd = [each for each in types if each not in (FULL, LINEAR)]
    if odd or len(types) != num_layers:
        found = shorten(odd[0]) if odd else f"{len(types)} entries for {num_layers} layers"
        raise CheckpointError(
            f"{raw.where}: layer_types has {found}; supported is {FULL} or {LINEAR} for each layer"
        )
    return types


def _read_mimo(raw: JsonObject, model: ModelConfig) -> ModelConfig:
    refuse_other_code(raw, "MiMo", _MIMO_CODE)
    return _read_qwen2(raw, model)


# Biases on q, k and v
QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    read=_read_qwen2,
    own_keys=_KEYS,
    default_max_positions=32_768,
    rope_sections="joined",
    rope_aliases=(("mrope", "default"),),
)

# Norms each query and key head. It may have MTP layers beside it, as Qwen3-Next or DeepSeek-V3
# stores them, which only speculation reads
QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    read=_read_qwen3,
    own_keys=_KEYS | {"attention_bias"},
    default_head_dim=128,
    default_max_positions=32_768,
    rope_sections="interleaved",
    mtp_layouts=(QWEN_MTP, DEEPSEEK_MTP),
)

# Qwen2 with MTP layers (multi-token prediction), and with its biases whatever `attention_bias`
# says; the published files name code in `auto_map`, which is not needed and never run
MIMO = Family(
    model_type="mimo",
    architecture="MiMoForCausalLM",
    read=_read_mimo,
    own_keys=_KEYS | {"auto_map", "attention_bias"},
    default_max_positions=32_768,
    mtp_layouts=(MIMO_MTP,),
)

_HYBRID_KEYS = frozenset(
    {"layer_types", "full_attention_interval", "attn_output_gate", "attention_bias"}
    | {"linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"}
    | {"linear_num_key_heads", "linear_num_value_heads"}
)

# Gated delta nets in place of attention in most layers, gated outputs of attention, norms that
# multiply by 1 + weight, and a rope of a quarter of the head
QWEN35 = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    read=_read_qwen35,
    own_keys=_HYBRID_KEYS,
    default_head_dim=256,
    default_max_positions=32_768,
    may_be_partly_rotated=True,
    default_rotary_share=0.25,
    rope_sections="interleaved",
    mtp_layouts=(QWEN_MTP,),
)

# Mixtures with an expert for all tokens that has a gate of its own
QWEN35_MOE = replace(
    QWEN35,
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    read=_read_qwen35_moe,
    own_keys=_HYBRID_KEYS
    | EXPERT_KEYS
    | {"moe_intermediate_size", "shared_expert_intermediate_size"},
    width_key="moe_intermediate_size",
    default_width=512,
)
