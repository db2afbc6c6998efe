"""Layers with a recurrence in GGUF files: which ones they are, and LFM2's settings.

Owns llama.cpp's architectures `lfm2` and `lfm2moe`. A layer without heads of keys and values is
recurrent.

Source: llama.cpp's conversion/lfm2.py, conversion/granite.py and src/models/lfm2.cpp.
"""

from cadenza.checkpoint.families.family import FULL
from cadenza.checkpoint.families.hybrid import CONV, MAX_TAPS
from cadenza.checkpoint.gguf.latents import SIGMOID_GATING
from cadenza.checkpoint.gguf.settings import Settings
from cadenza.checkpoint.model_config import MAX_EXPERTS, MAX_HEADS, MAX_LAYERS, MAX_WIDTH

KV_HEADS = "attention.head_count_kv"

_TAPS = "shortconv.l_cache"
_NUM_DENSE = "leading_dense_block_count"
LFM2_KEYS = frozenset({_TAPS})
LFM2_MOE_KEYS = LFM2_KEYS | {_NUM_DENSE}


def num_kv_heads(settings: Settings, num_heads: int) -> int:
    """Of the layers that have any. Raises CheckpointError if they differ."""
    counts = _kv_heads_of_layers(settings)
    if counts is None:
        return settings.integer(KV_HEADS, 1, MAX_HEADS, num_heads)
    found = {count for count in counts if count}
    if len(found) > 1:
        raise settings.wrong(KV_HEADS, "the same for all layers with attention, 0 for others")
    return found.pop() if found else num_heads


def types_of_layers(settings: Settings, recurrent: str) -> list[str]:
    """`layer_types`, of which `recurrent` is the one of layers with a recurrence."""
    counts = _kv_heads_of_layers(settings) or [1] * _num_layers(settings)
    return [FULL if count else recurrent for count in counts]


def _kv_heads_of_layers(settings: Settings) -> list[int] | None:
    return settings.integers_of_layers(KV_HEADS, _num_layers(settings))


def _num_layers(settings: Settings) -> int:
    return settings.integer("block_count", 1, MAX_LAYERS)


def read_lfm2_settings(settings: Settings) -> dict[str, object]:
    """The entries of config.json beyond those that all architectures share."""
    return {
        "model_type": "lfm2",
        "layer_types": types_of_layers(settings, CONV),
        "conv_L_cache": settings.integer(_TAPS, 2, MAX_TAPS),
        "block_auto_adjust_ff_dim": False,
        "norm_eps": settings.number("attention.layer_norm_rms_epsilon", 1e-12, 1.0),
    }


def read_lfm2_mixture_settings(settings: Settings) -> dict[str, object]:
    """As `read_lfm2_settings`."""
    if settings.integer("expert_gating_func", 0, 8, SIGMOID_GATING) != SIGMOID_GATING:
        raise settings.wrong("expert_gating_func", f"{SIGMOID_GATING} (sigmoid)")
    return {
        **read_lfm2_settings(settings),
        "model_type": "lfm2_moe",
        "num_experts": settings.integer("expert_count", 1, MAX_EXPERTS),
        "num_experts_per_tok": settings.integer("expert_used_count", 1, MAX_EXPERTS),
        "moe_intermediate_size": settings.integer("expert_feed_forward_length", 1, MAX_WIDTH),
        "num_dense_layers": settings.integer(_NUM_DENSE, 0, MAX_LAYERS),
        "use_expert_bias": any(name.endswith(".exp_probs_b.bias") for name in settings.tensors),
    }
