"""DeepSeek-V3 (R1, Kimi-K2-like) and GLM-4.7-Flash: attention over latents, and mixtures chosen by
sigmoids with a bias. Layers before `first_k_dense_replace` have no experts; GLM's newer files list
them in `mlp_layer_types`. The scores' factor has YaRN's magnitude of `mscale_all_dim`, squared.
Shared experts are one MLP of their joined widths."""

from dataclasses import replace

from cadenza.errors import CheckpointError
from cadenza.json_object import JsonObject, shorten
from cadenza.models.families.family import (
    Family,
    read_attention_bias,
    read_num_experts,
    refuse_other_code,
    shortest_pattern,
)
from cadenza.models.host_math import log
from cadenza.models.layer_kind import LatentShape, LayerKind
from cadenza.models.model_config import (
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    MAX_LAYERS,
    MAX_WIDTH,
    ExpertNames,
    ExpertsConfig,
    ModelConfig,
    SigmoidChoice,
)
from cadenza.models.mtp_layout import DEEPSEEK_MTP
from cadenza.models.rope_config import RopeConfig, RopeRules, YarnRopeScaling, read_rope

DENSE, SPARSE = "dense", "sparse"

_ROTARY_SIZE = 64
_NAMES = ExpertNames(shared="mlp.shared_experts")
_CODE = frozenset(
    {
        "configuration_deepseek.DeepseekV3Config",
        "modeling_deepseek.DeepseekV3Model",
        "modeling_deepseek.DeepseekV3ForCausalLM",
    }
)
_KEYS = frozenset(
    "kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim rope_interleave "
    "n_routed_experts n_shared_experts num_experts_per_tok moe_intermediate_size "
    "n_group topk_group norm_topk_prob routed_scaling_factor scoring_func topk_method "
    "first_k_dense_replace attention_bias".split()
)


def _read_rope(raw: JsonObject, rules: RopeRules) -> RopeConfig:
    """The rope of the rotated part of a head, whatever `head_dim` says."""
    size = raw.integer("qk_rope_head_dim", 2, MAX_HEAD_DIM, _ROTARY_SIZE)
    rope = read_rope(raw, replace(rules, head_dim=size))
    if not isinstance(rope.scaling, YarnRopeScaling | None):
        raise CheckpointError(
            f"{raw.where}: the rope of models with latents is either default or yarn; correct "
            f"rope_parameters"
        )
    return rope


def _read_latents(raw: JsonObject, model: ModelConfig, default: LatentShape) -> ModelConfig:
    for key, supported in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if raw.text(key) not in (None, supported):
            raise CheckpointError(
                f"{raw.where}: {key} is {shorten(raw.get(key))}; supported is {supported}; use "
                f"another checkpoint"
            )
    query_rank = default.query_rank
    if "q_lora_rank" in raw.values:
        has_rank = raw.has("q_lora_rank")
        query_rank = raw.integer("q_lora_rank", 1, MAX_WIDTH) if has_rank else None
    shape = LatentShape(
        num_heads=model.num_heads,
        rank=raw.integer("kv_lora_rank", 1, MAX_WIDTH, default.rank),
        query_rank=query_rank,
        plain_size=raw.integer("qk_nope_head_dim", 1, MAX_HEAD_DIM, default.plain_size),
        rotary_size=model.rope.rotary_dim,
        value_size=raw.integer("v_head_dim", 1, MAX_HEAD_DIM, default.value_size),
        pairs_neighbours=raw.flag("rope_interleave", True),
    )
    return replace(
        model,
        num_kv_heads=model.num_heads,  # whatever the file says: latents give each head keys
        head_dim=shape.rotary_size,
        layer_pattern=(LayerKind(latent=shape),),
        attention_scale=shape.query_size**-0.5 * _magnitude(model.rope) ** 2,
        **read_attention_bias(raw),
    )


def _magnitude(rope: RopeConfig) -> float:
    """YaRN's; queries and keys are in effect multiplied by it."""
    scaling = rope.scaling
    if not isinstance(scaling, YarnRopeScaling) or scaling.factor <= 1.0:
        return 1.0
    return 0.1 * scaling.mscale_all_dim * log(scaling.factor) + 1.0


def _read_mixture(
    raw: JsonObject, model: ModelConfig, default: ExpertsConfig, has_experts: list[bool]
) -> ModelConfig:
    num_experts = read_num_experts(raw, "n_routed_experts", model.num_layers, default.num_experts)
    width = raw.integer("moe_intermediate_size", 1, MAX_WIDTH, default.intermediate_size)
    experts = ExpertsConfig(
        num_experts=num_experts,
        num_chosen=raw.integer(
            "num_experts_per_tok", 1, num_experts, min(default.num_chosen, num_experts)
        ),
        intermediate_size=width,
        over_chosen=raw.flag("norm_topk_prob", True),
        shared_size=width * raw.integer("n_shared_experts", 0, MAX_EXPERTS, 1),
        sigmoid_choice=_read_choice(raw, default, num_experts),
        weight_scale=raw.number("routed_scaling_factor", 1e-6, 1e6, default.weight_scale),
        names=_NAMES,
    )
    _check_choice(raw, experts)
    (kind,) = model.layer_pattern
    kinds = [replace(kind, has_experts=has) for has in has_experts]
    return replace(model, layer_pattern=shortest_pattern(kinds), experts=experts)


def _read_choice(raw: JsonObject, default: ExpertsConfig, num_experts: int) -> SigmoidChoice:
    assumed = default.sigmoid_choice or SigmoidChoice()
    num_groups = raw.integer("n_group", 1, num_experts, assumed.num_groups)
    chosen = raw.integer("topk_group", 1, num_groups, min(assumed.num_chosen_groups, num_groups))
    return SigmoidChoice(num_groups=num_groups, num_chosen_groups=chosen)


def _check_choice(raw: JsonObject, experts: ExpertsConfig) -> None:
    choice = experts.sigmoid_choice
    assert choice is not None, "the mixture is chosen by sigmoids"
    size, rest = divmod(experts.num_experts, choice.num_groups)
    if rest or (choice.num_groups > 1 and size < 2):
        raise CheckpointError(
            f"{raw.where}: n_group {choice.num_groups} does not divide the {experts.num_experts} "
            f"experts into groups of two or more; correct one of the two"
        )
    if size * choice.num_chosen_groups < experts.num_chosen:
        raise CheckpointError(
            f"{raw.where}: topk_group {choice.num_chosen_groups} groups have "
            f"{size * choice.num_chosen_groups} experts, fewer than the {experts.num_chosen} of a "
            f"token (num_experts_per_tok); correct one of the two"
        )


_V3_LATENTS = LatentShape(
    num_heads=128, rank=512, query_rank=1536, plain_size=128, rotary_size=64, value_size=128
)
_V3_EXPERTS = ExpertsConfig(
    num_experts=256,
    num_chosen=8,
    intermediate_size=2048,
    over_chosen=True,
    sigmoid_choice=SigmoidChoice(num_groups=8, num_chosen_groups=4),
    weight_scale=2.5,
)
_GLM_LATENTS = LatentShape(
    num_heads=20, rank=512, query_rank=768, plain_size=192, rotary_size=64, value_size=256
)
_GLM_EXPERTS = ExpertsConfig(
    num_experts=64,
    num_chosen=4,
    intermediate_size=1536,
    over_chosen=True,
    sigmoid_choice=SigmoidChoice(),
    weight_scale=1.8,
)


def _read_deepseek_v3(raw: JsonObject, model: ModelConfig) -> ModelConfig:
    refuse_other_code(raw, "DeepSeek-V3", _CODE)
    num_dense = raw.integer("first_k_dense_replace", 0, MAX_LAYERS, 3)
    has_experts = [index >= num_dense for index in range(model.num_layers)]
    latents = _read_latents(raw, model, _V3_LATENTS)
    return _read_mixture(raw, latents, _V3_EXPERTS, has_experts)


def _read_glm4_moe_lite(raw: JsonObject, model: ModelConfig) -> ModelConfig:
    latents = _read_latents(raw, model, _GLM_LATENTS)
    return _read_mixture(raw, latents, _GLM_EXPERTS, _read_mlp_types(raw, model.num_layers))


def _read_mlp_types(raw: JsonObject, num_layers: int) -> list[bool]:
    """For each layer, whether its MLP is a mixture of experts."""
    if not raw.has("mlp_layer_types"):
        num_dense = raw.integer("first_k_dense_replace", 0, MAX_LAYERS, 1)
        return [index >= num_dense for index in range(num_layers)]
    types = raw.items_of("mlp_layer_types")
    if len(types) < num_layers or any(each not in (DENSE, SPARSE) for each in types):
        raise raw.wrong("mlp_layer_types", f"{DENSE} or {SPARSE} for each of {num_layers} layers")
    return [each == SPARSE for each in types[:num_layers]]


DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    read=_read_deepseek_v3,
    read_rope=_read_rope,
    own_keys=_KEYS | {"auto_map"},
    experts_key="n_routed_experts",
    default_head_dim=_ROTARY_SIZE,
    has_kv_head_for_each_by_default=True,
    default_max_positions=4096,
    mtp_layouts=(DEEPSEEK_MTP,),
)

GLM4_MOE_LITE = Family(
    model_type="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    read=_read_glm4_moe_lite,
    read_rope=_read_rope,
    own_keys=_KEYS | {"mlp_layer_types"},
    experts_key="n_routed_experts",
    default_head_dim=_ROTARY_SIZE,
    has_kv_head_for_each_by_default=True,
    default_max_positions=202_752,
    default_norm_eps=1e-5,
    mtp_layouts=(DEEPSEEK_MTP,),
)
