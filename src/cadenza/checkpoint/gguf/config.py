"""The `ModelConfig` of a GGUF file's metadata: `read_config`.

Owns what llama.cpp's converter writes for each architecture, and what its program takes as given.
Invariant: the metadata become the entries of a config.json, which is read as strictly as one; a key
of the architecture that is not known here is refused by its name.

Source: llama.cpp's conversion/ and src/models/.
"""

import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace

from cadenza.checkpoint.config_json import parse_model_config
from cadenza.checkpoint.families.family import FULL, LINEAR, SLIDING
from cadenza.checkpoint.families.hybrid import MAX_TAPS
from cadenza.checkpoint.gguf import hybrids, latents
from cadenza.checkpoint.gguf.gemma4 import ROPE_FREQUENCIES, read_gemma4_settings
from cadenza.checkpoint.gguf.rope_axes import ROPE_SECTIONS, VISION_KEYS, read_axes
from cadenza.checkpoint.gguf.settings import Settings
from cadenza.checkpoint.layer_kind import DeltaShape, LayerKind, ScanShape
from cadenza.checkpoint.model_config import (
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_WIDTH,
    ModelConfig,
)
from cadenza.checkpoint.other_folders import adapter_text
from cadenza.checkpoint.rope_config import (
    MAX_POSITIONS,
    LinearRopeScaling,
    LongRopeScaling,
    RopeConfig,
    RopeScaling,
    YarnRopeScaling,
    format_rope,
)
from cadenza.errors import CheckpointError

EMBEDDING = "token_embd.weight"
HEAD = "output.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"

_DEFAULT_THETA = 10_000.0
_GEMMA3_THETA = 1_000_000.0
_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS = 46, 62
"""Gemma's models of 27B scale their scores by the width per head; the metadata do not say so."""

_SMOLLM3_ROPE_INTERVAL = 4
_SOFTMAX_GATING = 1

_COMMON_KEYS = frozenset(
    "block_count context_length embedding_length feed_forward_length vocab_size "
    "attention.head_count attention.head_count_kv attention.key_length attention.value_length "
    "attention.layer_norm_rms_epsilon rope.freq_base rope.dimension_count rope.scaling.type "
    "rope.scaling.factor rope.scaling.original_context_length rope.scaling.finetuned "
    "rope.scaling.attn_factor "
    "rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow tensor_data_layout "
    "pooling_type".split()
)
_EXPERT_KEYS = frozenset(
    "expert_count expert_used_count expert_feed_forward_length expert_weights_norm "
    "expert_gating_func".split()
)
_LOG_MULTIPLIER, _TEMPERATURE = "rope.scaling.yarn_log_multiplier", "attention.temperature_scale"
_WINDOW = "attention.sliding_window"
_PATTERN = "attention.sliding_window_pattern"

_RECURRENT = "attention.recurrent_layers"
_SSM_HEADS = "ssm.time_step_rank"
_HYBRID_KEYS = frozenset(
    "ssm.conv_kernel ssm.state_size ssm.group_count ssm.inner_size full_attention_interval "
    "nextn_predict_layers".split()
) | {_RECURRENT, _SSM_HEADS, ROPE_SECTIONS}

_SHARED_WIDTH = "expert_shared_feed_forward_length"
_MULTIPLIER_KEYS = frozenset(
    {"attention.scale", "embedding_scale", "residual_scale", "logit_scale"}
)

_DTYPES = {"F32": "float32", "F16": "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How llama.cpp stores the models of one `general.architecture`.

    Args:
        read: the entries of config.json beyond those that all architectures share.
        keys: the keys that `read` takes care of.
        adapt: the config of what is stored in another way than in the Hugging Face layout.
        has_layers_without_kv: layers with a recurrence have 0 heads of keys and values.
        has_paired_rows: a head's rows of q and k are stored in the order 0, D / 2, 1, D / 2 + 1, …,
            for a rotation of neighbours.
    """

    read: Callable[[Settings], dict[str, object]]
    keys: frozenset[str] = frozenset()
    adapt: Callable[[ModelConfig], ModelConfig] = lambda config: config
    has_layers_without_kv: bool = False
    has_paired_rows: bool = False


_BASE_NAME = "general.base_model.0.name"


def architectures() -> tuple[str, ...]:
    """The names of those that can be read."""
    return tuple(_ARCHITECTURES)


def read_config(settings: Settings) -> tuple[ModelConfig, Architecture]:
    """The model's config and how its tensors are stored.

    Raises:
        CheckpointError: a setting is missing, out of bounds or not supported.
    """
    architecture = _ARCHITECTURES.get(settings.architecture)
    metadata, where = settings.metadata, settings.metadata.where
    if metadata.get("general.type") == "adapter":
        base = metadata.get("general.base_model.0.repo_url")
        raise CheckpointError(adapter_text(where, base or metadata.get(_BASE_NAME)))
    if architecture is None:
        raise CheckpointError(
            f"{where}: the architecture {settings.architecture[:80]!r} is not supported; supported "
            f"are {', '.join(_ARCHITECTURES)}"
        )
    unknown = sorted(settings.keys() - _COMMON_KEYS - architecture.keys)
    if unknown:
        raise CheckpointError(
            f"{where}: {settings.architecture}.{unknown[0][:120]} is set, which is not supported "
            f"for models of this architecture; use another checkpoint"
        )
    values = {**_read_common(settings, architecture), **architecture.read(settings)}
    config = parse_model_config(values, where=f"the metadata of {where}")
    # Norms that multiply by 1 + weight are stored as that sum.
    return architecture.adapt(replace(config, norm_adds_one=False)), architecture


def _read_common(settings: Settings, architecture: Architecture) -> dict[str, object]:
    embedding = settings.tensors.get(EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(
            f"{settings.metadata.where} has no tensor {EMBEDDING} with two axes; a file of a "
            f"vocabulary, an adapter or a projector alone cannot be served"
        )
    num_heads = settings.integer("attention.head_count", 1, MAX_HEADS)
    head_dim = _head_dim(settings)
    value_size = settings.integer("attention.value_length", 1, MAX_WIDTH, head_dim)
    if value_size != head_dim and not settings.has("attention.kv_lora_rank"):
        raise settings.wrong("attention.value_length", f"{head_dim}, like the keys' length")
    rope = _read_rope(settings)
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": settings.integer("embedding_length", 1, MAX_WIDTH),
        "intermediate_size": _width(settings),
        "num_hidden_layers": _num_layers(settings),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _num_kv_heads(settings, architecture, num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": settings.integer("context_length", 1, MAX_POSITIONS),
        "rms_norm_eps": settings.number("attention.layer_norm_rms_epsilon", 1e-12, 1.0),
        "rope_parameters": format_rope(rope, head_dim),
        "original_max_position_embeddings": _original_length(settings) if rope.scaling else None,
        "tie_word_embeddings": HEAD not in settings.tensors,
        "dtype": _DTYPES.get(embedding.type.name, "bfloat16"),
    }


def _num_kv_heads(settings: Settings, architecture: Architecture, num_heads: int) -> int:
    if architecture.has_layers_without_kv:
        return hybrids.num_kv_heads(settings, num_heads)
    return _shared_or_first(settings, hybrids.KV_HEADS, MAX_HEADS, num_heads)


def _width(settings: Settings) -> int | None:
    """Of the MLPs; a model may have experts alone."""
    key = "feed_forward_length"
    if not settings.has(key) and settings.has("expert_count"):
        return None
    return _shared_or_first(settings, key, MAX_WIDTH)


def _shared_or_first(settings: Settings, key: str, most: int, default: int | None = None) -> int:
    """The number of all layers; the first one's, if the architecture's may differ."""
    if settings.architecture in _VARYING:
        return settings.integer_of_layer(key, 0, (1, most), default)
    return settings.integer(key, 1, most, default)


def _num_layers(settings: Settings) -> int:
    """Without the MTP layers behind the model's own."""
    count = settings.integer("block_count", 1, MAX_LAYERS)
    return count - settings.integer("nextn_predict_layers", 0, count - 1, 0)


def _head_dim(settings: Settings) -> int:
    width = settings.integer("embedding_length", 1, MAX_WIDTH)
    per_head = width // settings.integer("attention.head_count", 1, MAX_HEADS)
    return settings.integer("attention.key_length", 2, MAX_HEAD_DIM, per_head)


def _read_rope(settings: Settings, default_theta: float = _DEFAULT_THETA) -> RopeConfig:
    rotary_dim = settings.integer("rope.dimension_count", 2, MAX_HEAD_DIM, _head_dim(settings))
    return RopeConfig(
        theta=settings.number("rope.freq_base", 1.0, 1e15, default_theta),
        rotary_dim=rotary_dim,
        scaling=_read_scaling(settings, rotary_dim),
        axes=read_axes(settings, rotary_dim // 2),
    )


def _read_scaling(settings: Settings, rotary_dim: int) -> RopeScaling | None:
    frequencies = settings.factors(ROPE_FREQUENCIES, rotary_dim // 2)
    long = settings.factors(LONG_FACTORS, rotary_dim // 2)
    short = settings.factors(SHORT_FACTORS, rotary_dim // 2)
    if frequencies is not None or (long is not None and short is not None):
        return LongRopeScaling(
            short_factor=frequencies or short or (),
            long_factor=frequencies or long or (),
            original_max_position_embeddings=_original_length(settings),
            attention_factor=1.0 if frequencies else _long_attention_factor(settings),
        )
    kind = settings.text("rope.scaling.type") or "none"
    if kind == "linear":
        return LinearRopeScaling(factor=settings.number("rope.scaling.factor", 1.0, 1e6))
    if kind == "yarn":
        factor = settings.number("rope.scaling.factor", 1.0, 1e6)
        return YarnRopeScaling(
            factor=factor,
            original_max_position_embeddings=_original_length(settings),
            attention_factor=0.1 * math.log(factor) + 1.0,
            beta_fast=settings.number("rope.scaling.yarn_beta_fast", 1e-6, 1e6, 32.0),
            beta_slow=settings.number("rope.scaling.yarn_beta_slow", 1e-6, 1e6, 1.0),
            truncate=True,
        )
    if kind != "none":
        allowed = f"none, linear, yarn, or longrope with {LONG_FACTORS} and {SHORT_FACTORS}"
        raise settings.wrong("rope.scaling.type", allowed)
    return None


def _long_attention_factor(settings: Settings) -> float:
    original = _original_length(settings)
    scale = settings.integer("context_length", 1, MAX_POSITIONS) / original
    default = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 < original else 1.0
    return settings.number("rope.scaling.attn_factor", 1e-3, 1e3, default)


def _original_length(settings: Settings) -> int:
    trained = settings.integer("context_length", 1, MAX_POSITIONS)
    return settings.integer("rope.scaling.original_context_length", 1, MAX_POSITIONS, trained)


def _window(settings: Settings) -> int | None:
    """The sliding window in tokens; 0 stands for none."""
    return settings.integer(_WINDOW, 0, MAX_POSITIONS, 0) or None


def _has_bias(settings: Settings, tensor: str) -> bool:
    return f"blk.0.{tensor}.bias" in settings.tensors


def _read_llama(settings: Settings) -> dict[str, object]:
    """Llama, Mistral and Mixtral, which the metadata do not tell apart."""
    if settings.integer("expert_count", 0, MAX_EXPERTS, 0):
        experts = _read_experts(settings)
        return {"model_type": "mixtral", "sliding_window": _window(settings), **experts}
    if _window(settings) is not None:
        return {"model_type": "mistral", "sliding_window": _window(settings)}
    return {"model_type": "llama", **_biases(settings)}


def _read_mistral3(settings: Settings) -> dict[str, object]:
    """Mistral Small 3.1 without, and Ministral 3 with factors of its queries."""
    beta = settings.number(_TEMPERATURE, 0.0, 1e3, 0.0)
    if not beta:
        return {"model_type": "mistral", "sliding_window": None}
    rope = _read_rope(settings)
    if not isinstance(rope.scaling, YarnRopeScaling):
        raise settings.wrong("rope.scaling.type", f"yarn beside {_TEMPERATURE}")
    multiplier = settings.number(_LOG_MULTIPLIER, 0.0, 1e3, 0.0)
    magnitude = 1.0 + 0.1 * multiplier * math.log(rope.scaling.factor)
    factor = rope.scaling.attention_factor / magnitude
    scaling = replace(rope.scaling, query_beta=beta, attention_factor=factor)
    return {
        "model_type": "ministral3",
        "rope_parameters": format_rope(replace(rope, scaling=scaling), _head_dim(settings)),
    }


def _biases(settings: Settings) -> dict[str, object]:
    return {
        "attention_bias": _has_bias(settings, "attn_q"),
        "mlp_bias": _has_bias(settings, "ffn_up"),
    }


def _read_experts(settings: Settings) -> dict[str, object]:
    if settings.integer("expert_gating_func", 0, 8, _SOFTMAX_GATING) != _SOFTMAX_GATING:
        raise settings.wrong("expert_gating_func", f"{_SOFTMAX_GATING} (softmax)")
    return {
        "num_local_experts": settings.integer("expert_count", 1, MAX_EXPERTS),
        "num_experts_per_tok": settings.integer("expert_used_count", 1, MAX_EXPERTS),
    }


def _read_granite(settings: Settings) -> dict[str, object]:
    return {"model_type": "granite", **_biases(settings), **_multipliers(settings)}


def _multipliers(settings: Settings) -> dict[str, object]:
    scale = settings.number("attention.scale", 1e-6, 1e6, _head_dim(settings) ** -0.5)
    return {
        "attention_multiplier": scale,
        "embedding_multiplier": settings.number("embedding_scale", 1e-6, 1e6, 1.0),
        "residual_multiplier": settings.number("residual_scale", 1e-6, 1e6, 1.0),
        "logits_scaling": settings.number("logit_scale", 1e-6, 1e6, 1.0),
    }


def _read_granite_hybrid(settings: Settings) -> dict[str, object]:
    types, tensors = hybrids.types_of_layers(settings, LINEAR), settings.tensors
    num_heads = settings.integer(_SSM_HEADS, 1, MAX_HEADS)
    width = settings.integer("ssm.inner_size", 1, MAX_WIDTH)
    has_experts = settings.integer("expert_count", 0, MAX_EXPERTS, 0) > 0
    shared = _SHARED_WIDTH if has_experts else "feed_forward_length"
    return {
        "model_type": "granitemoehybrid",
        "layer_types": types,
        "attention_bias": any(f"blk.{at}.attn_q.bias" in tensors for at in range(len(types))),
        **_multipliers(settings),
        **(_read_experts(settings) if has_experts else {"num_local_experts": 0}),
        "shared_intermediate_size": settings.integer(shared, 1, MAX_WIDTH),
        "position_embedding_type": "rope"
        if settings.flag("rope.scaling.finetuned", False)
        else None,
        "mamba_n_heads": num_heads,
        "mamba_d_head": width // num_heads,
        "mamba_expand": width // settings.integer("embedding_length", 1, MAX_WIDTH),
        "mamba_n_groups": settings.integer("ssm.group_count", 1, MAX_HEADS),
        "mamba_d_state": settings.integer("ssm.state_size", 1, MAX_HEAD_DIM),
        "mamba_d_conv": settings.integer("ssm.conv_kernel", 2, MAX_TAPS),
        "mamba_conv_bias": _is_in_recurrent(tensors, types, "ssm_conv1d.bias"),
        "mamba_proj_bias": _is_in_recurrent(tensors, types, "ssm_in.bias"),
    }


def _is_in_recurrent(tensors: Container[str], types: list[str], name: str) -> bool:
    return any(f"blk.{at}.{name}" in tensors for at, each in enumerate(types) if each == LINEAR)


def _granite_as_stored(config: ModelConfig) -> ModelConfig:
    """Gate and up are two tensors, and decays are stored as rates."""
    names = replace(config.names, gate_up=None)
    return replace(config, names=names, layer_pattern=_with_rates(config.layer_pattern))


def _read_smollm3(settings: Settings) -> dict[str, object]:
    interval = {"no_rope_layer_interval": _SMOLLM3_ROPE_INTERVAL}
    return {"model_type": "smollm3", **_biases(settings), **interval}


def _read_qwen3(settings: Settings) -> dict[str, object]:
    return {"model_type": "qwen3", "attention_bias": _has_bias(settings, "attn_q")}


def _read_qwen3_moe(settings: Settings) -> dict[str, object]:
    return {
        "model_type": "qwen3_moe",
        "attention_bias": _has_bias(settings, "attn_q"),
        **_read_experts(settings),
        "moe_intermediate_size": settings.integer("expert_feed_forward_length", 1, MAX_WIDTH),
        "norm_topk_prob": settings.flag("expert_weights_norm", True),
    }


def _read_qwen35(settings: Settings) -> dict[str, object]:
    num_layers, num_heads = _num_layers(settings), settings.integer(_SSM_HEADS, 1, MAX_HEADS)
    width = settings.integer("ssm.inner_size", 1, MAX_WIDTH)
    return {
        "model_type": "qwen3_5_text",
        "attention_bias": False,
        "layer_types": _hybrid_layer_types(settings, num_layers),
        "linear_conv_kernel_dim": settings.integer("ssm.conv_kernel", 2, MAX_HEADS),
        "linear_key_head_dim": settings.integer("ssm.state_size", 1, MAX_HEAD_DIM),
        "linear_value_head_dim": width // num_heads,
        "linear_num_key_heads": settings.integer("ssm.group_count", 1, MAX_HEADS),
        "linear_num_value_heads": num_heads,
    }


def _hybrid_layer_types(settings: Settings, num_layers: int) -> list[str]:
    if settings.is_array(_RECURRENT):
        count = settings.integer("block_count", 1, MAX_LAYERS)
        are_recurrent = settings.flags_of_layers(_RECURRENT, count)[:num_layers]
    else:
        interval = settings.integer("full_attention_interval", 1, MAX_LAYERS, 4)
        are_recurrent = [(index + 1) % interval != 0 for index in range(num_layers)]
    return [LINEAR if is_recurrent else FULL for is_recurrent in are_recurrent]


def _read_qwen35_moe(settings: Settings) -> dict[str, object]:
    return {
        **_read_qwen35(settings),
        "model_type": "qwen3_5_moe_text",
        **_read_experts(settings),
        "moe_intermediate_size": settings.integer("expert_feed_forward_length", 1, MAX_WIDTH),
        "shared_expert_intermediate_size": settings.integer(_SHARED_WIDTH, 1, MAX_WIDTH),
    }


def _qwen35_as_stored(config: ModelConfig) -> ModelConfig:
    """The value heads of one key head lie apart, and decays are stored as rates."""
    kinds = [
        replace(kind, recurrence=replace(kind.recurrence, is_tiled=True))
        if isinstance(kind.recurrence, DeltaShape)
        else kind
        for kind in config.layer_pattern
    ]
    return replace(config, layer_pattern=_with_rates(kinds))


def _with_rates(kinds: Sequence[LayerKind]) -> tuple[LayerKind, ...]:
    return tuple(
        replace(kind, recurrence=replace(kind.recurrence, has_rates=True))
        if isinstance(kind.recurrence, DeltaShape | ScanShape)
        else kind
        for kind in kinds
    )


def _read_olmoe(settings: Settings) -> dict[str, object]:
    weighting = {"norm_topk_prob": settings.flag("expert_weights_norm", False)}
    return {"model_type": "olmoe", **_read_experts(settings), **weighting}


def _read_gpt_oss(settings: Settings) -> dict[str, object]:
    """Its rope is not truncated, which llama.cpp has no key for; transformers' config says so."""
    rope = _read_rope(settings)
    if isinstance(rope.scaling, YarnRopeScaling):
        rope = replace(rope, scaling=replace(rope.scaling, truncate=False))
    return {
        "model_type": "gpt_oss",
        "attention_bias": _has_bias(settings, "attn_q"),
        "num_local_experts": settings.integer("expert_count", 1, MAX_EXPERTS),
        "num_experts_per_tok": settings.integer("expert_used_count", 1, MAX_EXPERTS),
        "intermediate_size": settings.integer("expert_feed_forward_length", 1, MAX_WIDTH),
        "sliding_window": _window(settings),
        "layer_types": _layer_types(settings, _num_layers(settings), full_every=2),
        "rope_parameters": format_rope(rope, _head_dim(settings)),
    }


def _read_phi3(settings: Settings) -> dict[str, object]:
    return {"model_type": "phi3", "sliding_window": _window(settings)}


def _read_gemma(settings: Settings, *, full_every: int, layers_of_27b: int) -> dict[str, object]:
    num_layers = _num_layers(settings)
    scalar = _head_dim(settings)
    if num_layers == layers_of_27b:
        width = settings.integer("embedding_length", 1, MAX_WIDTH)
        scalar = width // settings.integer("attention.head_count", 1, MAX_HEADS)
    cap = "final_logit_softcapping"
    return {
        "sliding_window": _window(settings),
        "layer_types": _layer_types(settings, num_layers, full_every),
        "query_pre_attn_scalar": scalar,
        cap: settings.number(cap, 1e-3, 1e6) if settings.has(cap) else None,
    }


def _layer_types(settings: Settings, num_layers: int, full_every: int) -> list[str]:
    if _window(settings) is None:
        return [FULL] * num_layers
    if settings.is_array(_PATTERN):
        are_sliding = settings.flags_of_layers(_PATTERN, num_layers)
    else:
        interval = settings.integer(_PATTERN, 1, MAX_LAYERS, full_every)
        are_sliding = [(index + 1) % interval != 0 for index in range(num_layers)]
    return [SLIDING if is_sliding else FULL for is_sliding in are_sliding]


def _read_gemma2(settings: Settings) -> dict[str, object]:
    cap = "attn_logit_softcapping"
    return {
        "model_type": "gemma2",
        **_read_gemma(settings, full_every=2, layers_of_27b=_GEMMA2_27B_LAYERS),
        cap: settings.number(cap, 1e-3, 1e6) if settings.has(cap) else None,
    }


def _read_gemma3(settings: Settings) -> dict[str, object]:
    head_dim = _head_dim(settings)
    full = _read_rope(settings, _GEMMA3_THETA)
    local_theta = settings.number("rope.freq_base_swa", 1.0, 1e15, _DEFAULT_THETA)
    return {
        "model_type": "gemma3_text",
        **_read_gemma(settings, full_every=6, layers_of_27b=_GEMMA3_27B_LAYERS),
        "rope_parameters": {
            FULL: format_rope(full, head_dim),
            SLIDING: format_rope(replace(full, theta=local_theta, scaling=None), head_dim),
        },
    }


_VARYING = frozenset({"gemma4"})
"""Architectures whose layers may have other widths and numbers of heads than the first."""

_ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(read=_read_llama, keys=_EXPERT_KEYS | {_WINDOW}, has_paired_rows=True),
    "mistral3": Architecture(
        read=_read_mistral3, keys=frozenset({_LOG_MULTIPLIER, _TEMPERATURE}), has_paired_rows=True
    ),
    "qwen2": Architecture(read=lambda _: {"model_type": "qwen2"}),
    "qwen3": Architecture(read=_read_qwen3),
    "qwen3moe": Architecture(read=_read_qwen3_moe, keys=_EXPERT_KEYS),
    "qwen2vl": Architecture(read=lambda _: {"model_type": "qwen2"}, keys=VISION_KEYS),
    "qwen3vl": Architecture(read=_read_qwen3, keys=VISION_KEYS),
    "qwen3vlmoe": Architecture(read=_read_qwen3_moe, keys=_EXPERT_KEYS | VISION_KEYS),
    "qwen35": Architecture(read=_read_qwen35, keys=_HYBRID_KEYS, adapt=_qwen35_as_stored),
    "qwen35moe": Architecture(
        read=_read_qwen35_moe,
        keys=_HYBRID_KEYS | _EXPERT_KEYS | {_SHARED_WIDTH},
        adapt=_qwen35_as_stored,
    ),
    "deepseek2": Architecture(
        read=lambda settings: latents.read_latents(settings, _read_rope(settings)),
        keys=latents.KEYS | _EXPERT_KEYS,
    ),
    "smollm3": Architecture(read=_read_smollm3, has_paired_rows=True),
    "gemma2": Architecture(
        read=_read_gemma2,
        keys=frozenset({_WINDOW, _PATTERN, "attn_logit_softcapping", "final_logit_softcapping"}),
    ),
    "gemma3": Architecture(
        read=_read_gemma3,
        keys=frozenset({_WINDOW, _PATTERN, "rope.freq_base_swa", "final_logit_softcapping"}),
    ),
    "gemma4": Architecture(
        read=read_gemma4_settings,
        keys=_EXPERT_KEYS
        | {_WINDOW, _PATTERN, "rope.freq_base_swa", "rope.dimension_count_swa"}
        | {"attention.key_length_swa", "attention.value_length_swa", "attention.shared_kv_layers"}
        | {"embedding_length_per_layer_input", "final_logit_softcapping"},
    ),
    "phi3": Architecture(read=_read_phi3, keys=frozenset({_WINDOW, "rope.scaling.attn_factor"})),
    "olmo2": Architecture(read=lambda _: {"model_type": "olmo2"}),
    "olmoe": Architecture(read=_read_olmoe, keys=_EXPERT_KEYS),
    "gpt-oss": Architecture(read=_read_gpt_oss, keys=_EXPERT_KEYS | {_WINDOW, _PATTERN}),
    "granite": Architecture(
        read=_read_granite,
        keys=_MULTIPLIER_KEYS,
        has_paired_rows=True,
    ),
    "granitehybrid": Architecture(
        read=_read_granite_hybrid,
        keys=_MULTIPLIER_KEYS | _HYBRID_KEYS | _EXPERT_KEYS | {_SHARED_WIDTH},
        adapt=_granite_as_stored,
        has_layers_without_kv=True,
        has_paired_rows=True,
    ),
    "lfm2": Architecture(
        read=hybrids.read_lfm2_settings,
        keys=hybrids.LFM2_KEYS,
        has_layers_without_kv=True,
    ),
    "lfm2moe": Architecture(
        read=hybrids.read_lfm2_mixture_settings,
        keys=_EXPERT_KEYS | hybrids.LFM2_MOE_KEYS,
        has_layers_without_kv=True,
    ),
}
