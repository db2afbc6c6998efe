"""LFM2 and Granite 4: layers with a recurrence beside layers with attention."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from cadenza.errors import CheckpointError
from cadenza.json_object import JsonObject, shorten
from cadenza.models.families.experts import read_experts
from cadenza.models.families.family import (
    FULL,
    LINEAR,
    Family,
    read_attention_bias,
    shortest_pattern,
)
from cadenza.models.families.llama import MULTIPLIER_KEYS, read_multipliers
from cadenza.models.layer_kind import ConvShape, LayerKind, ScanShape
from cadenza.models.model_config import (
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_WIDTH,
    ExpertNames,
    ModelConfig,
    SigmoidChoice,
    TensorNames,
)

CONV = "conv"
MAX_TAPS = 64  # of a causal convolution

_LANES = 16  # channels computed side by side; sizes of states are multiples of it


def _read_lfm2(raw: JsonObject, model: ModelConfig) -> ModelConfig:
    width = raw.integer("block_ff_dim", 1, MAX_WIDTH, model.intermediate_size)
    return replace(_read_convs(raw, model), intermediate_size=_adjusted_width(raw, width))


def _read_lfm2_moe(raw: JsonObject, model: ModelConfig) -> ModelConfig:
    num_dense = raw.integer("num_dense_layers", 0, MAX_LAYERS, 2)
    model = _read_convs(raw, model)
    kinds = [
        replace(kind, has_experts=index >= num_dense)
        for index, kind in enumerate(model.layer_kinds)
    ]
    experts = replace(
        read_experts(raw, model, 32, 4),
        intermediate_size=raw.integer("moe_intermediate_size", 1, MAX_WIDTH, 1792),
        over_chosen=raw.flag("norm_topk_prob", True),
        sigmoid_choice=SigmoidChoice(
            has_bias=raw.flag("use_expert_bias", True), least_sum=_LFM2_LEAST_SUM
        ),
        weight_scale=raw.number("routed_scaling_factor", 1e-6, 1e6, 1.0),
        names=_LFM2_EXPERTS,
    )
    return replace(model, layer_pattern=shortest_pattern(kinds), experts=experts)


def _read_convs(raw: JsonObject, model: ModelConfig) -> ModelConfig:
    """What dense models and mixtures share: gated short convolutions. Older files have
    `block_ff_dim` and `tie_embedding` in place of settings with common names."""
    _check_lanes(raw, {"hidden_size": model.hidden_size})
    shape = ConvShape(
        num_channels=model.hidden_size,
        num_inputs=raw.integer("conv_L_cache", 2, MAX_TAPS, 3),
        has_bias=raw.flag("conv_bias", False),
    )
    return replace(
        model,
        names=_LFM2_NAMES,
        layer_pattern=_read_pattern(
            raw,
            _lfm2_types(raw, model.num_layers),
            {CONV: LayerKind(has_rope=False, recurrence=shape), FULL: LayerKind()},
        ),
        qk_norm="head",
        tie_word_embeddings=raw.flag("tie_embedding", model.tie_word_embeddings),
    )


def _lfm2_types(raw: JsonObject, num_layers: int) -> list[object]:
    """The layers' types if `layer_types` is absent: attention in those of `full_attn_idxs`, or in
    all."""
    if not raw.has("full_attn_idxs"):
        return [FULL] * num_layers
    listed = raw.items_of("full_attn_idxs")
    return [FULL if index in listed else CONV for index in range(num_layers)]


def _adjusted_width(raw: JsonObject, width: int) -> int:
    if not raw.flag("block_auto_adjust_ff_dim", True):
        return width
    width = int(2 * width / 3)
    if "block_ffn_dim_multiplier" not in raw.values or raw.has("block_ffn_dim_multiplier"):
        width = int(raw.number("block_ffn_dim_multiplier", 1e-3, 1e3, 1.0) * width)
        unit = raw.integer("block_multiple_of", 1, MAX_WIDTH, 256)
        width = unit * -(-width // unit)
    if not 1 <= width <= MAX_WIDTH:
        raise CheckpointError(
            f"{raw.where}: the width of the MLPs is {width} by block_ffn_dim_multiplier; supported "
            f"are 1 to {MAX_WIDTH}; correct the settings"
        )
    return width


def _read_granite_hybrid(raw: JsonObject, model: ModelConfig) -> ModelConfig:
    _check_granite(raw, model)
    scan = LayerKind(has_rope=False, recurrence=_read_scan_shape(raw, model.hidden_size))
    attention = LayerKind(has_rope=raw.text("position_embedding_type") == "rope")
    types = raw.items_of("layers_block_type") or [LINEAR] * model.num_layers
    kinds = {LINEAR: scan, "mamba": scan, FULL: attention, "attention": attention}
    model = replace(
        model,
        names=_GRANITE_NAMES,
        layer_pattern=_read_pattern(raw, types, kinds),
        **read_attention_bias(raw),
        **read_multipliers(raw),
    )
    shared = raw.integer("shared_intermediate_size", 1, MAX_WIDTH, 1024)
    if raw.integer("num_local_experts", 0, MAX_EXPERTS, 8) == 0:
        return replace(model, intermediate_size=shared)
    experts = read_experts(raw, model, 8, 2)
    return replace(
        model,
        layer_pattern=tuple(replace(kind, has_experts=True) for kind in model.layer_pattern),
        experts=replace(experts, names=_GRANITE_EXPERTS, shared_size=shared),
    )


def _check_granite(raw: JsonObject, model: ModelConfig) -> None:
    if raw.text("position_embedding_type") not in (None, "nope", "rope"):
        raise raw.wrong("position_embedding_type", "rope, or nope for none")
    if model.activation != "silu":
        raise raw.wrong("hidden_act", "silu, the activation of the convolutions")
    limit = raw.items_of("time_step_limit") or [0.0, math.inf]
    if limit[0] != 0 or limit[1:] not in ([math.inf], [{"__float__": "Infinity"}]):
        raise raw.wrong("time_step_limit", "absent, or 0 and infinity")


def _read_scan_shape(raw: JsonObject, hidden_size: int) -> ScanShape:
    width = raw.integer("mamba_expand", 1, 64, 2) * hidden_size
    num_heads = raw.integer("mamba_n_heads", 1, MAX_HEADS, 128)
    is_auto = raw.get("mamba_d_head") in (None, "auto")
    value_size = width // num_heads
    if not is_auto:
        value_size = raw.integer("mamba_d_head", 1, MAX_HEAD_DIM)
    if num_heads * value_size != width:
        raise CheckpointError(
            f"{raw.where}: mamba_n_heads {num_heads} of {value_size} values are not mamba_expand "
            f"times hidden_size, {width}; correct one of them"
        )
    shape = ScanShape(
        num_heads=num_heads,
        num_groups=raw.integer("mamba_n_groups", 1, num_heads, 1),
        key_size=raw.integer("mamba_d_state", 1, MAX_HEAD_DIM, 256),
        value_size=value_size,
        num_inputs=raw.integer("mamba_d_conv", 2, MAX_TAPS, 4),
        has_conv_bias=raw.flag("mamba_conv_bias", True),
        has_bias=raw.flag("mamba_proj_bias", False),
    )
    if num_heads % shape.num_groups:
        raise CheckpointError(
            f"{raw.where}: mamba_n_heads {num_heads} is not a multiple of mamba_n_groups "
            f"{shape.num_groups}; correct one of the two"
        )
    _check_lanes(raw, {"mamba_d_state": shape.key_size, "mamba_d_head": value_size})
    return shape


def _check_lanes(raw: JsonObject, sizes: Mapping[str, int]) -> None:
    for key, size in sizes.items():
        if size % _LANES:
            raise CheckpointError(
                f"{raw.where}: {key} is {size}; supported for models of this type are multiples of "
                f"{_LANES}; use another checkpoint"
            )


def _read_pattern(
    raw: JsonObject, default: Sequence[object], kinds: Mapping[str, LayerKind]
) -> tuple[LayerKind, ...]:
    """By the names in `layer_types`, or in `default` if that is absent."""
    names = raw.items_of("layer_types") if raw.has("layer_types") else default
    odd = [name for name in names if not isinstance(name, str) or name not in kinds]
    if odd:
        raise CheckpointError(
            f"{raw.where}: layer_types names {shorten(odd[0])}; supported are {', '.join(kinds)}"
        )
    num_layers = raw.integer("num_hidden_layers", 1, MAX_WIDTH)
    if len(names) < num_layers:
        raise CheckpointError(
            f"{raw.where}: layer_types has {len(names)} entries for {num_layers} layers; correct "
            f"one of the two"
        )
    return shortest_pattern([kinds[str(name)] for name in names[:num_layers]])


_LFM2_NAMES = TensorNames(
    final_norm="model.embedding_norm",
    mixer_norm="operator_norm",
    mlp_norm="ffn_norm",
    query_norm="q_layernorm",
    key_norm="k_layernorm",
    attention_out="out_proj",
    recurrence="conv",
    mlp="feed_forward",
    gate="w1",
    up="w3",
    down="w2",
)
_LFM2_EXPERTS = ExpertNames(
    block="feed_forward", choice_bias="expert_bias", gate="w1", up="w3", down="w2"
)
_LFM2_LEAST_SUM = 1e-6
_GRANITE_EXPERTS = ExpertNames(block="block_sparse_moe", router="router.layer", shared="shared_mlp")
_GRANITE_NAMES = TensorNames(
    recurrence="mamba", mlp="shared_mlp", gate_up="input_linear", down="output_linear"
)

# The width of its MLPs is a share of what the file names (`block_auto_adjust_ff_dim`), rounded up
LFM2 = Family(
    model_type="lfm2",
    architecture="Lfm2ForCausalLM",
    read=_read_lfm2,
    own_keys=frozenset(
        "layer_types full_attn_idxs conv_L_cache conv_bias block_ff_dim tie_embedding "
        "block_auto_adjust_ff_dim block_ffn_dim_multiplier block_multiple_of".split()
    ),
    norm_eps_key="norm_eps",
    default_width=12_288,
    default_max_positions=128_000,
    default_norm_eps=1e-5,
    default_rope_theta=1_000_000.0,
    ties_by_default=True,
)

# Its mixtures are chosen by sigmoids with a bias, in all layers but the first `num_dense_layers`
LFM2_MOE = Family(
    model_type="lfm2_moe",
    architecture="Lfm2MoeForCausalLM",
    read=_read_lfm2_moe,
    own_keys=frozenset(
        "layer_types conv_L_cache conv_bias tie_embedding num_dense_layers num_experts "
        "num_experts_per_tok moe_intermediate_size norm_topk_prob use_expert_bias "
        "routed_scaling_factor".split()
    ),
    norm_eps_key="norm_eps",
    default_width=7168,
    default_max_positions=128_000,
    default_norm_eps=1e-5,
    default_rope_theta=1_000_000.0,
    ties_by_default=True,
)

# Selective scans (Mamba-2), attention without rotary positions unless `position_embedding_type` is
# rope, the multipliers of Granite 3, and one MLP for all tokens beside experts, or alone if
# `num_local_experts` is 0. Files name the types of its layers in two ways
GRANITE_HYBRID = Family(
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    read=_read_granite_hybrid,
    own_keys=MULTIPLIER_KEYS.union(
        "layer_types layers_block_type attention_bias shared_intermediate_size "
        "num_local_experts num_experts_per_tok "
        "position_embedding_type time_step_limit mamba_n_heads mamba_n_groups mamba_d_state "
        "mamba_d_head mamba_d_conv mamba_expand mamba_conv_bias mamba_proj_bias".split()
    ),
    experts_key="num_local_experts",
    default_width=11_008,
    has_kv_head_for_each_by_default=True,
    default_max_positions=2048,
)
