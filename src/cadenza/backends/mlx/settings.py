"""`settings_for_mlx_lm`: config.json's settings under the names that mlx-lm reads, since
transformers 5 writes some under others, and mlx-lm takes its default for an absent name. Invariant:
a setting under a name that mlx-lm reads stays, except where transformers would compute something
else."""

import math
from collections.abc import Callable, Mapping
from typing import Any

Settings = dict[str, Any]
_Reader = Callable[[Mapping[str, Any]], Settings]

TEXT_CONFIG = "text_config"

# Text models by themselves, and the type of mlx-lm that reads their settings and tensors.
TEXT_TYPES: Mapping[str, str] = {
    "gemma4_unified_text": "gemma4_text",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5_moe",
}

_FULL, _SLIDING = "full_attention", "sliding_attention"

_GRANITE_LAYERS = {"linear_attention": "mamba", _FULL: "attention"}


def settings_for_mlx_lm(config: Mapping[str, Any]) -> Settings:
    changes = _own_settings(config)
    if config.get("model_type") in TEXT_TYPES:
        changes["model_type"] = TEXT_TYPES[config["model_type"]]
    inner = config.get(TEXT_CONFIG)
    if not isinstance(inner, dict):
        return changes
    inner_changes = _own_settings(inner)
    if "tie_word_embeddings" in config:
        inner_changes["tie_word_embeddings"] = config["tie_word_embeddings"]
    if inner_changes:
        changes[TEXT_CONFIG] = {**inner, **inner_changes}
    if "vocab_size" in inner and "vocab_size" not in config:
        changes["vocab_size"] = inner["vocab_size"]
    return changes


def _own_settings(config: Mapping[str, Any]) -> Settings:
    model_type = config.get("model_type")
    changes = _rope_settings(config)
    if isinstance(model_type, str) and model_type in _BY_TYPE:
        changes |= _BY_TYPE[model_type](config)
    return changes


def _rope_settings(config: Mapping[str, Any]) -> Settings:
    # Most models of mlx-lm read `rope_theta` and `rope_scaling`; some know a scaling as `type`
    # only.
    parameters = config.get("rope_parameters")
    if not isinstance(parameters, dict):
        return {}
    full, sliding = parameters.get(_FULL, parameters), parameters.get(_SLIDING)
    if not isinstance(full, dict):
        return {}
    changes: Settings = {}
    scaled = _with_mscale(full)
    if full is parameters and scaled is not full:
        changes["rope_parameters"] = scaled
    found = {key: full[key] for key in ("rope_theta", "partial_rotary_factor") if key in full}
    if isinstance(sliding, dict) and "rope_theta" in sliding:
        found["rope_local_base_freq"] = sliding["rope_theta"]
    if full.get("rope_type", "default") != "default":
        found["rope_scaling"] = {"type": full["rope_type"], **scaled}
    return changes | {key: value for key, value in found.items() if config.get(key) is None}


def _with_mscale(scaling: Settings) -> Settings:
    """A yarn scaling whose `mscale` gives its `attention_factor`, which mlx-lm does not read."""
    wanted, factor = scaling.get("attention_factor"), scaling.get("factor")
    is_yarn = scaling.get("rope_type") == "yarn"
    if not is_yarn or not isinstance(wanted, int | float) or not isinstance(factor, int | float):
        return scaling
    if scaling.get("mscale_all_dim") or factor <= 1:
        return scaling
    return {**scaling, "mscale": (wanted - 1) / (0.1 * math.log(factor)), "mscale_all_dim": 0}


def _granite_settings(config: Mapping[str, Any]) -> Settings:
    changes: Settings = {"time_step_limit": [0.0, math.inf]}
    types = config.get("layer_types")
    if isinstance(types, list):
        changes["layer_types"] = [_GRANITE_LAYERS.get(str(each), each) for each in types]
    if config.get("position_embedding_type") is None:
        changes["position_embedding_type"] = "nope"
    if config.get("num_local_experts") == 0 and "shared_intermediate_size" in config:
        changes["intermediate_size"] = config["shared_intermediate_size"]
    return changes


def _interval(name: str) -> _Reader:
    def read(config: Mapping[str, Any]) -> Settings:
        types = config.get("layer_types")
        if not isinstance(types, list) or _FULL not in types:
            return {}
        return {name: types.index(_FULL) + 1}

    return read


def _absent(defaults: Callable[[Mapping[str, Any]], Settings]) -> _Reader:
    """Defaults of transformers for settings that mlx-lm requires, or for which it takes others."""
    return lambda config: {
        key: value for key, value in defaults(config).items() if key not in config
    }


def _glm_settings(config: Mapping[str, Any]) -> Settings:
    """How many of the first layers have no experts, which newer files list."""
    types = config.get("mlp_layer_types")
    if not isinstance(types, list) or "sparse" not in types:
        return {}
    return {"first_k_dense_replace": types.index("sparse")}


_GEMMA = _absent(lambda _: {"num_kv_shared_layers": 0, "use_double_wide_mlp": False})
_GEMMA_UNIFIED = _absent(
    lambda _: {
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "hidden_size_per_layer_input": 0,
    }
)
_LFM2 = _absent(
    lambda config: {
        "block_dim": config.get("hidden_size"),
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
        "conv_L_cache": 3,
        "conv_bias": False,
        "norm_eps": 1e-5,
    }
)

_BY_TYPE: Mapping[str, _Reader] = {
    "gemma3_text": _interval("sliding_window_pattern"),
    "gemma4_text": _GEMMA,
    "gemma4_unified_text": _GEMMA_UNIFIED,
    "glm4_moe_lite": _glm_settings,
    "granitemoehybrid": _granite_settings,
    "lfm2": _LFM2,
    "qwen3_5_text": _interval("full_attention_interval"),
    "qwen3_5_moe_text": _interval("full_attention_interval"),
}
