"""Writes a config.json: `format_model_config`, the inverse of `config_json.parse_model_config`, and
checkpoints of configs that no shape has. A family's own settings are those of `Family.own_keys`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from cadenza.checkpoint import random_checkpoint
from cadenza.checkpoint.random_checkpoint import Shape
from cadenza.models.config_json import ACTIVATIONS, CONFIG_FILE
from cadenza.models.families import FAMILIES
from cadenza.models.families.deepseek import DENSE, SPARSE
from cadenza.models.families.family import FULL, LINEAR, SLIDING
from cadenza.models.families.hybrid import CONV
from cadenza.models.layer_kind import ConvShape, DeltaShape, LayerKind, ScanShape
from cadenza.models.model_config import ModelConfig
from cadenza.models.rope_config import LongRopeScaling, format_rope
from cadenza.models.towers.reader import IMAGE_PROCESSOR_FILE
from cadenza.models.wrapped_text import NEWER_OUTSIDE, SHARED, TEXT_CONFIG, WRAPPERS
from cadenza.vision.idefics3 import Idefics3Processor
from cadenza.vision.tower_config import VisionConfig
from cadenza.vision.whole_images import Gemma3Images, Gemma4Images
from cadenza.weights.safetensors_file import DEFAULT_SHARD_BYTES
from cadenza.weights.weight_format import WeightDType


def format_model_config(config: ModelConfig) -> dict[str, object]:
    """The content of a config.json from which `parse_model_config` restores `config`."""
    family = FAMILIES[config.family]
    eos = config.eos_token_ids
    # That of gpt-oss, clamped_swiglu, has no name: its files say silu.
    names = (name for name, known in ACTIVATIONS.items() if known == config.activation)
    name = next(names, "silu")
    shared: dict[str, object] = {
        "architectures": [family.architecture],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        family.activation_key: name,
        family.norm_eps_key: config.rms_norm_eps,
        "rope_parameters": _format_ropes(config),
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "dtype": config.dtype,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
        "bos_token_id": config.bos_token_id,
        "pad_token_id": None,
    }
    own = {key: value for key, value in _settings(config).items() if key in family.own_keys}
    if config.experts is not None:
        own[family.experts_key] = config.experts.num_experts
    if config.mtp_layout is not None:
        own[config.mtp_layout.count_key] = config.num_mtp_layers
    return {**shared, **own}


def format_files(config: ModelConfig) -> dict[str, dict[str, object]]:
    """The settings of a model's folder by file: config.json, and those of the image processor of a
    model that sees."""
    vision, text = config.vision, format_model_config(config)
    if vision is None:
        return {CONFIG_FILE: text}
    return _with_vision(vision, text)


def _with_vision(vision: VisionConfig, text: dict[str, object]) -> dict[str, dict[str, object]]:
    """The files of the shape of this family that has the most of this tower's settings, with those
    that tests change."""
    tower, processor = vision.tower, vision.processor
    files = max(
        (shape for shape in _seeing_shapes() if shape.config.vision.family == vision.family),
        key=lambda shape: sum(
            getattr(shape.config.vision.tower, field.name) == getattr(tower, field.name)
            for field in fields(tower)
        ),
    ).files
    stored: Any = files[CONFIG_FILE]
    side = None if tower.table is None else tower.table.side
    whole = {
        "image_token_id": vision.image_token_id,
        "image_token_index": vision.image_token_id,
        "scale_factor": tower.merge,
        "mm_tokens_per_image": vision.max_part_tokens,
    }
    inner = {
        "hidden_size": tower.hidden_size,
        "intermediate_size": tower.intermediate_size,
        "num_hidden_layers": tower.num_layers,
        "num_attention_heads": tower.num_heads,
        "image_size": side and side * tower.patch_size,
        "position_embedding_size": side,
        "mm_posemb_size": side,
        "patch_size": tower.patch_size if tower.num_layers else None,  # else that of a token
        "window_size": tower.windows and tower.windows.side * tower.patch_size * tower.merge,
        "out_hidden_size": text["hidden_size"],
    }
    images: dict[str, object] = {}
    if isinstance(processor, Idefics3Processor):
        edges = {"size": processor.longest_edge, "max_image_size": processor.tile}
        images = {key: {"longest_edge": edge} for key, edge in edges.items()}
    elif isinstance(processor, Gemma3Images):
        images["size"] = dict.fromkeys(("height", "width"), processor.side)
    elif isinstance(processor, Gemma4Images):
        images["max_soft_tokens"] = processor.max_tokens
    outside = {*NEWER_OUTSIDE, *SHARED, TEXT_CONFIG, "architectures", "model_type"}
    own: dict[str, Any] = {
        key: value for key, value in _changed(stored, whole).items() if key not in outside
    }
    own["vision_config"] = _changed(stored["vision_config"], inner)
    if not tower.num_layers:  # of transformers' own classes, which have another default
        own["vision_config"] |= {"output_proj_dims": tower.hidden_size}
    for key in ("use_bidirectional_attention", "pad_token_id"):
        text[key] = stored[TEXT_CONFIG].get(key)
    return {
        CONFIG_FILE: wrap_config(vision.family, text, own),
        IMAGE_PROCESSOR_FILE: {**files[IMAGE_PROCESSOR_FILE], **images},
    }


@cache
def _seeing_shapes() -> Sequence[Any]:
    shapes = map(random_checkpoint.read_shape, random_checkpoint.shape_names())
    return [shape for shape in shapes if shape.config.vision is not None]


def _changed(stored: Mapping[str, object], changes: Mapping[str, object]) -> dict[str, object]:
    """Where a setting is stated, and there is another."""
    return {
        key: value if (new := changes.get(key)) is None else new for key, value in stored.items()
    }


def write_random_checkpoint(
    config: ModelConfig,
    folder: Path,
    *,
    seed: int,
    dtype: WeightDType,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """As `random_checkpoint.write_random_checkpoint`, of any config."""
    random_checkpoint.write_random_checkpoint(
        shape_of(config), folder, seed=seed, dtype=dtype, max_shard_bytes=max_shard_bytes
    )


def shape_of(config: ModelConfig) -> Shape:
    """The shape of any config."""
    return Shape(config=config, files=format_files(config))


def wrap_config(
    model_type: str, text: Mapping[str, object], own: Mapping[str, object]
) -> dict[str, object]:
    """The config.json of a whole model whose text model's is `text`: the inverse of
    `unwrap_config`. `own` are its settings beside those."""
    wrapper = WRAPPERS[model_type]
    inner = {key: value for key, value in text.items() if key != "architectures"}
    inner["model_type"] = (*wrapper.aliases, inner["model_type"])[0]
    outer = {key: text[key] for key in (*NEWER_OUTSIDE, *SHARED) if key in text}
    return {
        "architectures": [wrapper.architecture],
        "model_type": model_type,
        TEXT_CONFIG: inner,
        **outer,
        **own,
    }


def _format_ropes(config: ModelConfig) -> dict[str, object]:
    """One entry, or one for each kind of layer."""
    if config.window_rope is None:
        share = config.rope.rotary_dim / config.head_dim
        stated = format_rope(config.rope, config.head_dim)
        if FAMILIES[config.family].default_rotary_share != 1.0:
            stated.setdefault("partial_rotary_factor", share)
        return stated
    ropes = {FULL: config.rope, SLIDING: config.window_rope}
    kinds = {_type_of(kind): kind for kind in config.layer_kinds}
    heads = {name: config.heads_of(kind) for name, kind in kinds.items()}
    return {
        name: format_rope(rope, heads.get(name, config.heads).head_dim)
        for name, rope in ropes.items()
    }


def _settings(config: ModelConfig) -> dict[str, object]:
    """The settings that only some families have."""
    kinds, scaling, experts = config.layer_kinds, config.rope.scaling, config.experts
    window = next((kind.window for kind in kinds if kind.window is not None), None)
    found: dict[str, object] = {
        "attention_bias": config.has_qkv_bias,
        "mlp_bias": config.has_mlp_bias,
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": [_type_of(kind) for kind in kinds],
        "no_rope_layers": [int(kind.has_rope) for kind in kinds],
        "query_pre_attn_scalar": _scalar_of(config.attention_scale or config.head_dim**-0.5),
        "attn_logit_softcapping": config.attention_soft_cap,
        "final_logit_softcapping": config.logit_soft_cap,
        "embedding_multiplier": config.embedding_scale,
        "attention_multiplier": config.attention_scale,
        "residual_multiplier": config.residual_scale,
        "logits_scaling": config.logit_divisor,
    }
    found |= _recurrence_settings(config)
    if isinstance(scaling, LongRopeScaling):
        found["original_max_position_embeddings"] = scaling.original_max_position_embeddings
    if experts is not None:
        plain = [index for index, kind in enumerate(kinds) if not kind.has_experts]
        found |= {
            "num_experts_per_tok": experts.num_chosen,
            "moe_intermediate_size": experts.intermediate_size,
            "norm_topk_prob": experts.over_chosen,
            "decoder_sparse_step": 1,
            "mlp_only_layers": plain,
            "shared_expert_intermediate_size": experts.shared_size,
            "top_k_experts": experts.num_chosen,
            "n_shared_experts": experts.shared_size // experts.intermediate_size,
            "routed_scaling_factor": experts.weight_scale,
        }
        if (choice := experts.sigmoid_choice) is not None:
            found |= {
                "scoring_func": "sigmoid",
                "topk_method": "noaux_tc",
                "n_group": choice.num_groups,
                "topk_group": choice.num_chosen_groups,
                "first_k_dense_replace": _num_leading(plain),
                "num_dense_layers": _num_leading(plain),
                "use_expert_bias": choice.has_bias,
                "mlp_layer_types": [SPARSE if kind.has_experts else DENSE for kind in kinds],
            }
    if (latent := config.latent) is not None:
        found |= {
            "kv_lora_rank": latent.rank,
            "q_lora_rank": latent.query_rank,
            "qk_nope_head_dim": latent.plain_size,
            "qk_rope_head_dim": latent.rotary_size,
            "v_head_dim": latent.value_size,
            "rope_interleave": latent.pairs_neighbours,
        }
    return found | _settings_of_kinds(config)


def _settings_of_kinds(config: ModelConfig) -> dict[str, object]:
    """What full layers have of their own, and layers without keys of their own."""
    kinds, inputs, experts = config.layer_kinds, config.layer_inputs, config.experts
    full = next((kind for kind in kinds if _type_of(kind) == FULL), kinds[0])
    return {
        "global_head_dim": config.heads_of(full).head_dim,
        "num_global_key_value_heads": config.heads_of(full).num_kv_heads,
        "attention_k_eq_v": any(kind.keys_are_values for kind in kinds),
        "num_kv_shared_layers": sum(kind.kv_source is not None for kind in kinds),
        "use_double_wide_mlp": any(kind.intermediate_size is not None for kind in kinds),
        "hidden_size_per_layer_input": 0 if inputs is None else inputs.size,
        "vocab_size_per_layer_input": None if inputs is None else inputs.vocab_size,
        "enable_moe_block": experts is not None and experts.are_beside_mlp,
    }


def _num_leading(layers: list[int]) -> int:
    """How many layers are listed before the first that is not."""
    return next((place for place, layer in enumerate(layers) if layer != place), len(layers))


def _type_of(kind: LayerKind) -> str:
    """The name of a layer's kind in `layer_types`."""
    if isinstance(kind.recurrence, ConvShape):
        return CONV
    if kind.recurrence is not None:
        return LINEAR
    return FULL if kind.window is None else SLIDING


def _recurrence_settings(config: ModelConfig) -> dict[str, object]:
    """The settings of a model's recurrences."""
    shape = config.recurrence
    if isinstance(shape, DeltaShape):
        return {
            "attn_output_gate": config.has_attention_gate,
            "linear_num_key_heads": shape.num_key_heads,
            "linear_num_value_heads": shape.num_value_heads,
            "linear_key_head_dim": shape.key_size,
            "linear_value_head_dim": shape.value_size,
            "linear_conv_kernel_dim": shape.num_inputs,
        }
    if isinstance(shape, ConvShape):
        return {
            "conv_L_cache": shape.num_inputs,
            "conv_bias": shape.has_bias,
            "block_auto_adjust_ff_dim": False,
        }
    if not isinstance(shape, ScanShape):
        return {}
    ropes = [kind.has_rope for kind in config.layer_kinds if kind.recurrence is None]
    return {
        "position_embedding_type": "rope" if any(ropes) else None,
        "num_local_experts": 0,  # unless there are any: their number is written last
        "shared_intermediate_size": config.experts.shared_size
        if config.experts
        else config.intermediate_size,
        "mamba_n_heads": shape.num_heads,
        "mamba_d_head": shape.value_size,
        "mamba_n_groups": shape.num_groups,
        "mamba_d_state": shape.key_size,
        "mamba_d_conv": shape.num_inputs,
        "mamba_expand": shape.value_width // config.hidden_size,
        "mamba_conv_bias": shape.has_conv_bias,
        "mamba_proj_bias": shape.has_bias,
    }


def _scalar_of(scale: float) -> float:
    """The number whose inverse square root is the factor of the scores; an integer if exact."""
    scalar = round(scale**-2)
    return scalar if scalar and 1.0 / math.sqrt(scalar) == scale else scale**-2
