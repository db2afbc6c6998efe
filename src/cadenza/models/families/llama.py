"""Llama 2 and 3 (SmolLM and SmolLM2 too), and the families that differ from it in a few
settings."""

from dataclasses import replace

from cadenza.errors import CheckpointError
from cadenza.json_object import JsonObject
from cadenza.models.families.family import (
    LAYER_KEYS,
    Family,
    read_attention_bias,
    read_layer_kinds,
    read_used_window,
    read_window,
    refuse_other_code,
    shortest_pattern,
)
from cadenza.models.layer_kind import LayerKind
from cadenza.models.model_config import MAX_LAYERS, ModelConfig
from cadenza.models.rope_config import (
    LongRopeScaling,
    RopeConfig,
    RopeRules,
    read_rope,
    read_rope_entry,
)

_BIAS_KEYS = frozenset({"attention_bias", "mlp_bias"})
_MULTIPLIERS = {
    "embedding_multiplier": "embedding_scale",
    "attention_multiplier": "attention_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_divisor",
}
MULTIPLIER_KEYS = frozenset(_MULTIPLIERS)
_MISTRAL_WINDOW = 4096
_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_SMOLLM3_INTERVAL = 4
_PHI3_CODE = frozenset({"configuration_phi3.Phi3Config", "modeling_phi3.Phi3ForCausalLM"})


def _read_biases(raw: JsonObject, model: ModelConfig) -> ModelConfig:
    """`mlp_bias` applies to gate, up and down."""
    return replace(model, **read_attention_bias(raw), has_mlp_bias=raw.flag("mlp_bias", False))


def _read_mistral(raw: JsonObject, model: ModelConfig) -> ModelConfig:
    window = read_window(raw, _MISTRAL_WINDOW)
    kinds = read_layer_kinds(raw, [window is not None] * model.num_layers, window)
    return replace(model, layer_pattern=shortest_pattern(kinds))


def _read_ministral3(raw: JsonObject, model: ModelConfig) -> ModelConfig:
    return replace(model, layer_pattern=(LayerKind(window=read_window(raw, None)),))


def _read_ministral3_rope(raw: JsonObject, rules: RopeRules) -> RopeConfig:
    rules = replace(rules, may_scale_queries=True)
    if raw.has("rope_parameters") or raw.has("rope_scaling"):
        return read_rope(raw, rules)
    return read_rope_entry(raw, JsonObject(_MINISTRAL3_ROPE, raw.where), rules)


def _read_smollm3(raw: JsonObject, model: ModelConfig) -> ModelConfig:
    window = read_used_window(raw, None)
    ropes = _read_ropes(raw, model.num_layers)
    kinds = read_layer_kinds(raw, [window is not None and not rope for rope in ropes], window)
    mixed = [replace(kind, has_rope=rope) for kind, rope in zip(kinds, ropes, strict=True)]
    return replace(_read_biases(raw, model), layer_pattern=shortest_pattern(mixed))


# SmolLM3 has layers without rotary positions. Despite its name, `no_rope_layers` has a 0 for each
# of them; without the list it is every `no_rope_layer_interval`-th. If `use_sliding_window` is set,
# the window applies to those layers
def _read_ropes(raw: JsonObject, num_layers: int) -> list[bool]:
    if not raw.has("no_rope_layers"):
        interval = raw.integer("no_rope_layer_interval", 1, MAX_LAYERS, _SMOLLM3_INTERVAL)
        return [(index + 1) % interval != 0 for index in range(num_layers)]
    listed = raw.items_of("no_rope_layers")
    if len(listed) < num_layers or any(entry not in (0, 1) for entry in listed):
        raise raw.wrong("no_rope_layers", f"a list of a 0 or a 1 for each of {num_layers} layers")
    return [bool(entry) for entry in listed[:num_layers]]


def _read_phi3(raw: JsonObject, model: ModelConfig) -> ModelConfig:
    refuse_other_code(raw, "Phi-3", _PHI3_CODE)
    if not isinstance(model.rope.scaling, LongRopeScaling | None):
        raise CheckpointError(
            f"{raw.where}: the rope of models of type phi3 is either default or longrope; "
            f"correct rope_scaling"
        )
    window = read_window(raw, None)
    return replace(model, layer_pattern=(LayerKind(window=window),), has_fused_tensors=True)


def _read_granite(raw: JsonObject, model: ModelConfig) -> ModelConfig:
    return replace(_read_biases(raw, model), **read_multipliers(raw))


def read_multipliers(raw: JsonObject) -> dict[str, float]:
    """Granite's factors of embeddings, scores, residuals and logits, as fields of a
    `ModelConfig`."""
    return {field: raw.number(key, 1e-6, 1e6, 1.0) for key, field in _MULTIPLIERS.items()}


def _read_olmo2(raw: JsonObject, model: ModelConfig) -> ModelConfig:
    return replace(
        model,
        qk_norm="all_heads",
        has_pre_norms=False,
        has_post_norms=True,
        **read_attention_bias(raw),
    )


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    read=_read_biases,
    own_keys=_BIAS_KEYS,
    has_kv_head_for_each_by_default=True,
    default_max_positions=2048,
)

# A sliding window in every layer, or in those of `layer_types`, as Ministral's
MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    read=_read_mistral,
    own_keys=LAYER_KEYS,
    default_max_positions=131_072,
)

MINISTRAL = replace(MISTRAL, model_type="ministral", architecture="MinistralForCausalLM")

# Also Devstral 2: full attention, YaRN, and queries that grow with their position
MINISTRAL3 = Family(
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    read=_read_ministral3,
    own_keys=frozenset({"sliding_window"}),
    read_rope=_read_ministral3_rope,
    default_head_dim=128,
    default_max_positions=262_144,
    default_norm_eps=1e-5,
    default_rope_theta=1_000_000.0,
)

SMOLLM3 = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    read=_read_smollm3,
    own_keys=_BIAS_KEYS
    | LAYER_KEYS
    | {"use_sliding_window", "no_rope_layers", "no_rope_layer_interval"},
    default_max_positions=32_768,
    default_rope_theta=2_000_000.0,
    ties_by_default=True,
)

# Phi-3, Phi-3.5 and Phi-4: fused tensors, partial rotary positions and LongRoPE. Their files name
# the original code in `auto_map`, which is not needed and never run; other code is refused
PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    read=_read_phi3,
    own_keys=frozenset({"sliding_window", "auto_map", "original_max_position_embeddings"}),
    has_kv_head_for_each_by_default=True,
    default_max_positions=4096,
    default_norm_eps=1e-5,
    default_original_positions=4096,
    may_be_partly_rotated=True,
    rope_aliases=(("su", "longrope"), ("yarn", "longrope")),
)

# Granite 3: multipliers of embeddings, scores and residuals, and a logit divisor
GRANITE = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    read=_read_granite,
    own_keys=_BIAS_KEYS | MULTIPLIER_KEYS,
    has_kv_head_for_each_by_default=True,
    default_max_positions=2048,
)

# Norms only after attention and MLP, and query and key norms over all heads
OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    read=_read_olmo2,
    own_keys=frozenset({"attention_bias"}),
    has_kv_head_for_each_by_default=True,
    default_max_positions=2048,
    default_norm_eps=1e-5,
)
