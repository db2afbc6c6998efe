"""Settings under the names of transformers 5 are added under those that mlx-lm reads."""

import math
from typing import Any

import pytest

from cadenza.backends.mlx.zoo import settings_for_mlx_lm

YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 16.0}
FULL = {"rope_type": "proportional", "rope_theta": 1e6}


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        ({"model_type": "llama"}, {}),
        ({"model_type": "llama", "rope_theta": 7.0, "rope_scaling": {"type": "linear"}}, {}),
        (
            {"model_type": "llama", "rope_parameters": {"rope_theta": 5e5}},
            {"rope_theta": 5e5},
        ),
        (
            {"model_type": "llama", "rope_theta": 7.0, "rope_parameters": {"rope_theta": 5e5}},
            {},
        ),
        (
            {"model_type": "gpt_oss", "rope_parameters": YARN},
            {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", **YARN}},
        ),
        (
            {
                "model_type": "gemma3_text",
                "rope_parameters": {
                    "full_attention": FULL,
                    "sliding_attention": {"rope_theta": 1e4},
                },
            },
            {
                "rope_theta": 1e6,
                "rope_local_base_freq": 1e4,
                "rope_scaling": {"type": "proportional", **FULL},
            },
        ),
        (
            {
                "model_type": "gemma3_text",
                "layer_types": [*["sliding_attention"] * 2, "full_attention"],
            },
            {"sliding_window_pattern": 3},
        ),
        ({"model_type": "qwen3_5_moe_text"}, {"model_type": "qwen3_5_moe"}),
        (
            {
                "model_type": "qwen3_5_text",
                "layer_types": ["linear_attention", "full_attention"] * 2,
            },
            {"model_type": "qwen3_5", "full_attention_interval": 2},
        ),
        (
            {"model_type": "glm4_moe_lite", "mlp_layer_types": ["dense", "dense", "sparse"]},
            {"first_k_dense_replace": 2},
        ),
        (
            {
                "model_type": "granitemoehybrid",
                "layer_types": ["linear_attention", "full_attention", "mamba"],
                "num_local_experts": 0,
                "shared_intermediate_size": 40,
            },
            {
                "layer_types": ["mamba", "attention", "mamba"],
                "intermediate_size": 40,
                "position_embedding_type": "nope",
                "time_step_limit": [0.0, math.inf],
            },
        ),
        (
            {"model_type": "lfm2", "hidden_size": 64, "conv_L_cache": 5, "conv_bias": True},
            {
                "block_dim": 64,
                "block_multiple_of": 256,
                "block_ffn_dim_multiplier": 1.0,
                "block_auto_adjust_ff_dim": True,
                "norm_eps": 1e-5,
            },
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_settings_that_mlx_lm_needs_are_added_and_others_stay(
    config: dict[str, Any], changes: dict[str, Any]
):
    assert settings_for_mlx_lm(config) == changes


def test_a_magnitude_of_yarn_is_given_as_the_scale_that_mlx_lm_reads():
    parameters = {**YARN, "attention_factor": 1.5}
    changes = settings_for_mlx_lm({"model_type": "ministral3", "rope_parameters": parameters})
    scaling = changes["rope_parameters"]
    assert changes["rope_scaling"] == {"type": "yarn", **scaling}
    assert 0.1 * scaling["mscale"] * math.log(16.0) + 1 == pytest.approx(1.5)
    assert scaling["mscale_all_dim"] == 0
    assert "mscale" not in parameters


def test_a_text_models_settings_are_changed_within_those_of_its_wrapper():
    inner = {"model_type": "gemma4_unified_text", "vocab_size": 40}
    config = {"model_type": "gemma4_unified", "text_config": inner, "tie_word_embeddings": False}
    assert settings_for_mlx_lm(config) == {
        "vocab_size": 40,
        "text_config": {
            **inner,
            "num_kv_shared_layers": 0,
            "use_double_wide_mlp": False,
            "hidden_size_per_layer_input": 0,
            "tie_word_embeddings": False,
        },
    }
