"""Tiny random models of mlx-lm, one for each kind of cache and of weights."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCAB_SIZE = 131

_DENSE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "dtype": "float32",
}

_LATENTS = _DENSE | {
    "model_type": "glm4_moe_lite",
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 32,
    "v_head_dim": 16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """`bits` of the weights; None is float32. `is_ragged` if rows can decode in one call;
    `slot_unit` as in `BackendTraits`."""

    config: Mapping[str, Any]
    bits: int | None = None
    is_ragged: bool = True
    slot_unit: int = 1


KINDS: dict[str, Kind] = {
    "full": Kind(config=_DENSE | {"model_type": "llama", "tie_word_embeddings": True}),
    "4 bits": Kind(
        config=_DENSE | {"model_type": "qwen3", "tie_word_embeddings": False, "rope_theta": 1e4},
        bits=4,
    ),
    "rotating": Kind(
        config=_DENSE
        | {
            "model_type": "gemma3_text",
            "sliding_window": 8,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 16,
        }
    ),
    "recurrent": Kind(
        config={
            "model_type": "mamba2",
            "num_heads": 4,
            "head_dim": 16,
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 32,
            "intermediate_size": 64,
            "state_size": 16,
            "num_hidden_layers": 2,
            "layer_norm_epsilon": 1e-5,
            "conv_kernel": 4,
            "n_groups": 2,
            "use_bias": False,
            "use_conv_bias": True,
            "tie_word_embeddings": True,
            "time_step_limit": [0.0, 1e9],
            "time_step_rank": "auto",
            "dtype": "float32",
        },
        slot_unit=64,
    ),
    "hybrid": Kind(
        config=_DENSE
        | {
            "model_type": "qwen3_next",
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 1,
            "shared_expert_intermediate_size": 32,
            "mlp_only_layers": [],
            "moe_intermediate_size": 32,
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "full_attention_interval": 3,
        },
        slot_unit=64,
    ),
    "gated delta": Kind(
        config=_DENSE
        | {
            "model_type": "qwen3_5",
            "num_hidden_layers": 4,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4,
            "tie_word_embeddings": True,
            "full_attention_interval": 2,
        },
        slot_unit=64,
    ),
    "convolutions": Kind(
        config=_DENSE
        | {
            "model_type": "lfm2",
            "num_hidden_layers": 4,
            "norm_eps": 1e-5,
            "conv_bias": False,
            "conv_L_cache": 3,
            "block_dim": 64,
            "block_multiple_of": 16,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
        },
        slot_unit=64,
    ),
    "scans": Kind(
        config=_DENSE
        | {
            "model_type": "granitemoehybrid",
            "attention_bias": False,
            "embedding_multiplier": 2.0,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.5,
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_proj_bias": False,
            "mamba_d_state": 32,
            "mamba_d_conv": 4,
            "mamba_n_groups": 1,
            "mamba_conv_bias": True,
        },
        slot_unit=64,
    ),
    "shared keys": Kind(
        config=_DENSE
        | {
            "model_type": "gemma4_text",
            "num_hidden_layers": 6,
            "global_head_dim": 32,
            "sliding_window": 9,
            "sliding_window_pattern": 3,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE,
        }
    ),
    "sinks": Kind(
        config=_DENSE
        | {
            "model_type": "gpt_oss",
            "num_hidden_layers": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
        }
    ),
    "growing queries": Kind(
        config=_DENSE
        | {
            "model_type": "ministral3",
            "rope_parameters": {
                "type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "llama_4_scaling_beta": 0.1,
            },
        }
    ),
    "latents": Kind(config=_LATENTS, slot_unit=64),
    "latents in 4 bits": Kind(config=_LATENTS, bits=4, slot_unit=64),
    "one offset": Kind(
        config=_DENSE
        | {
            "model_type": "llama",
            "tie_word_embeddings": True,
            "rope_scaling": {"type": "dynamic", "factor": 2.0},
        },
        is_ragged=False,
    ),
}


# The kinds whose streams are compared in `make test`; the others' are in `make soak`.
QUICK_KINDS = frozenset({"full", "4 bits", "recurrent"})


def write_tiny_model(kind: Kind, folder: Path) -> Path:
    import mlx.core as mx
    from mlx import nn
    from mlx.utils import tree_flatten, tree_map

    from cadenza.backends.mlx.zoo import open_zoo

    config = dict(kind.config)
    with open_zoo()._imported() as utils:
        model_class, args_class = utils._get_classes(config)
    model = model_class(args_class.from_dict(config))
    key = iter(mx.random.split(mx.random.key(7), 4096))
    model.update(
        tree_map(
            lambda each: each + mx.random.normal(each.shape, key=next(key)) * 0.08,
            model.parameters(),
        )
    )
    if kind.bits is not None:
        nn.quantize(model, group_size=32, bits=kind.bits)
        config["quantization"] = {"group_size": 32, "bits": kind.bits}
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(
        str(folder / "model.safetensors"),
        dict(tree_flatten(model.parameters())),
        metadata={"format": "mlx"},
    )
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
