"""Reads config.json: `parse_model_config`, and `read_outline` of unknown families. Settings that
change a model's arithmetic are listed: one with a value other than its neutral ones is read by the
family or refused by name; settings not on the list are ignored."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cadenza.errors import CheckpointError
from cadenza.json_object import JsonObject, shorten
from cadenza.models.families import FAMILIES, Family
from cadenza.models.model_config import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_VOCAB_SIZE,
    MAX_WIDTH,
    Activation,
    ModelConfig,
)
from cadenza.models.rope_config import MAX_POSITIONS, RopeRules
from cadenza.models.wrapped_text import unwrap_config
from cadenza.weights.weight_format import WEIGHT_DTYPES, WeightDType

CONFIG_FILE = "config.json"
MAX_EOS_IDS = 64

_SUPPORTED = "supported are " + ", ".join(family.architecture for family in FAMILIES.values())

# settings that are refused unless a family reads them; `open_checkpoint` reads those of quantised
# weights
_REFUSED: dict[str, str] = {
    "auto_map": "code from a checkpoint is never run; use a checkpoint that needs none",
    "quantization_config": "a shape has no quantised weights; remove the setting",
    "compression_config": "a shape has no quantised weights; remove the setting",
    "is_encoder_decoder": "encoder-decoder models are not supported",
    "vision_config": "models with image input are not supported; use a text-only checkpoint",
    "audio_config": "models with audio input are not supported; use a text-only checkpoint",
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts"),
        "models of this type have no experts; use a checkpoint without them",
    ),
    **dict.fromkeys(
        (
            "n_shared_experts",
            "num_shared_experts",
            "shared_expert_intermediate_size",
            "shared_intermediate_size",
        ),
        "shared experts are not supported; use a checkpoint without them",
    ),
}

# settings that change the arithmetic, with their neutral values
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "qkv_bias": (False,),
    "use_bias": (False,),
    "lm_head_bias": (False,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "swiglu_alpha": (),
    "swiglu_limit": (),
    "attention_multiplier": (),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "logits_scaling": (1,),
    "logit_scale": (1,),
    "scale_emb": (1,),
    "scale_depth": (),
    "dim_model_base": (),
    "mup_base_width": (),
    "sliding_window": (),
    "sliding_window_pattern": (),
    "no_rope_layers": ([],),
    "no_rope_layer_interval": (0,),
    "attention_chunk_size": (),
    "attn_temperature_tuning": (False,),
    "attn_output_gate": (False,),
    "mtp_use_dedicated_embeddings": (False,),
    "clip_qkv": (),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "use_bidirectional_attention": (False,),
    "is_causal": (True,),
    "alibi": (False,),
    "use_mrope": (False,),
    "rope_interleaved": (False,),
    "position_embedding_type": ("rope",),
    "rope_local_base_freq": (),
    "rotary_pct": (1,),
    "kv_lora_rank": (),
    "index_topk": (),
    "q_lora_rank": (),
    "use_parallel_residual": (False,),
    "parallel_attn": (False,),
    "full_attn_mod": (1,),
    "scoring_func": ("softmax",),
    "topk_method": ("greedy",),
    "n_group": (1,),
    "topk_group": (1,),
    "routed_scaling_factor": (1,),
    "first_k_dense_replace": (0,),
    "moe_layer_freq": (1,),
    "use_expert_bias": (False,),
    "moe_router_enable_expert_bias": (False,),
    "zero_expert_num": (0,),
    "global_head_dim": (),
    "num_global_key_value_heads": (),
    "per_layer_config": ({},),
    "attention_k_eq_v": (False,),
    "num_kv_shared_layers": (0,),
    "use_double_wide_mlp": (False,),
    "hidden_size_per_layer_input": (0,),
    "enable_moe_block": (False,),
}

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
}


def parse_model_config(values: Mapping[str, object], where: str = CONFIG_FILE) -> ModelConfig:
    """The `ModelConfig` of a config.json's content, with old or new names of its settings; `where`
    names its origin in errors. Raises CheckpointError if a setting is missing, out of bounds or not
    supported."""
    raw = unwrap_config(JsonObject(values, where))
    family = _find_family(raw)
    _refuse_unsupported(raw, family)
    model = _read_mtp_layers(raw, family, _read_shared(raw, family))
    return family.read(raw, model)


def read_token_ids(raw: JsonObject, key: str, vocab_size: int) -> tuple[int, ...]:
    """A token id or a list of token ids as a sorted tuple without duplicates. Raises
    CheckpointError for ids outside [0, `vocab_size`)."""
    value = raw.get(key)
    ids = raw.items_of(key) if isinstance(value, list) else [] if value is None else [value]
    if len(ids) > MAX_EOS_IDS:
        raise raw.wrong(key, f"at most {MAX_EOS_IDS} token ids")
    found: set[int] = set()
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise raw.wrong(key, "a token id or a list of token ids")
        if not 0 <= token_id < vocab_size:
            raise CheckpointError(
                f"{raw.where}: {key} has token id {shorten(token_id)}, which is outside the "
                f"vocabulary of {vocab_size} tokens; correct it or vocab_size"
            )
        found.add(token_id)
    return tuple(sorted(found))


def _find_family(raw: JsonObject) -> Family:
    architectures = raw.items_of("architectures")
    model_type = raw.text("model_type")
    if len(architectures) > 1:
        raise raw.wrong("architectures", "a list with one name")
    if architectures:
        name = architectures[0]
        family = next((each for each in FAMILIES.values() if name in _names_of(each)), None)
        if family is None:
            raise CheckpointError(
                f"{raw.where}: architecture {shorten(name)} is not supported; {_SUPPORTED}"
            )
        if model_type not in (None, family.model_type):
            raise CheckpointError(
                f"{raw.where}: architecture {name} does not match model_type "
                f"{shorten(model_type)}; correct one of the two"
            )
        return family
    if model_type is None:
        raise CheckpointError(f"{raw.where} has neither architectures nor model_type; add one")
    if model_type not in FAMILIES:
        raise CheckpointError(
            f"{raw.where}: model_type {shorten(model_type)} is not supported; {_SUPPORTED}"
        )
    return FAMILIES[model_type]


def _names_of(family: Family) -> tuple[str, ...]:
    """Of the class that generates, of its base model, which has no head, and of the one that
    scores."""
    stem = family.architecture.removesuffix("ForCausalLM")
    return family.architecture, f"{stem}Model", f"{stem}ForSequenceClassification"


def _refuse_unsupported(raw: JsonObject, family: Family) -> None:
    for key, reason in _REFUSED.items():
        if key not in family.own_keys and raw.get(key) not in (None, False, 0, {}, []):
            raise CheckpointError(f"{raw.where}: {key} is set; {reason}")
    for key, neutral in _NEUTRAL.items():
        if key not in family.own_keys and raw.has(key) and raw.get(key) not in neutral:
            allowed = f"supported is {shorten(neutral[0])}" if neutral else "it must be absent"
            raise CheckpointError(
                f"{raw.where}: {key} is {shorten(raw.get(key))}, which is not supported for models "
                f"of type {family.model_type}; {allowed}; use another checkpoint"
            )
    if "layer_types" not in family.own_keys:
        for layer_type in raw.items_of("layer_types"):
            if layer_type != "full_attention":
                raise CheckpointError(
                    f"{raw.where}: layer_types has {shorten(layer_type)}; models of type "
                    f"{family.model_type} support only full_attention"
                )


def _read_shared(raw: JsonObject, family: Family) -> ModelConfig:
    num_heads = raw.integer("num_attention_heads", 1, MAX_HEADS)
    hidden_size = raw.integer("hidden_size", 1, MAX_WIDTH)
    vocab_size = raw.integer("vocab_size", 1, MAX_VOCAB_SIZE)
    head_dim = _read_head_dim(raw, family, hidden_size, num_heads)
    max_positions = raw.integer(
        "max_position_embeddings", 1, MAX_POSITIONS, family.default_max_positions
    )
    rules = RopeRules(
        head_dim=head_dim,
        max_positions=max_positions,
        default_theta=family.default_rope_theta,
        default_original=family.default_original_positions,
        may_be_partial=family.may_be_partly_rotated,
        default_share=family.default_rotary_share,
        sections=family.rope_sections,
        aliases=family.rope_aliases,
    )
    return ModelConfig(
        family=family.model_type,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=raw.integer(family.width_key, 1, MAX_WIDTH, family.default_width),
        num_layers=raw.integer("num_hidden_layers", 1, MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=_read_num_kv_heads(raw, family, num_heads),
        head_dim=head_dim,
        rms_norm_eps=raw.number(family.norm_eps_key, 1e-12, 1.0, family.default_norm_eps),
        rope=family.read_rope(raw, rules),
        activation=_read_activation(raw, family),
        tie_word_embeddings=raw.flag("tie_word_embeddings", family.ties_by_default),
        max_position_embeddings=max_positions,
        dtype=read_dtype(raw),
        eos_token_ids=read_token_ids(raw, "eos_token_id", vocab_size),
        bos_token_id=next(iter(read_token_ids(raw, "bos_token_id", vocab_size)), None),
    )


def _read_mtp_layers(raw: JsonObject, family: Family, model: ModelConfig) -> ModelConfig:
    """Raises CheckpointError if a model has MTP layers in two layouts."""
    counts = {
        layout: raw.integer(layout.count_key, 0, MAX_LAYERS, 0) for layout in family.mtp_layouts
    }
    found = [layout for layout, count in counts.items() if count]
    if len(found) > 1:
        raise CheckpointError(
            f"{raw.where}: {' and '.join(layout.count_key for layout in found)} are both set; MTP "
            f"layers in two layouts are not supported; remove one of the settings"
        )
    if not found:
        return model
    return replace(model, num_mtp_layers=counts[found[0]], mtp_layout=found[0])


def _read_activation(raw: JsonObject, family: Family) -> Activation:
    key = family.activation_key
    name = raw.text(key) or family.default_activation
    if name not in ACTIVATIONS:
        raise CheckpointError(
            f"{raw.where}: {key} {shorten(name)} is not supported; "
            f"supported are {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def _read_head_dim(raw: JsonObject, family: Family, hidden_size: int, num_heads: int) -> int:
    default = family.default_head_dim
    if default is None and not raw.has("head_dim"):
        if hidden_size % num_heads:
            raise CheckpointError(
                f"{raw.where}: hidden_size {hidden_size} is not a multiple of num_attention_heads "
                f"{num_heads}; add head_dim"
            )
        default = hidden_size // num_heads
    head_dim = raw.integer("head_dim", 2, MAX_HEAD_DIM, default)
    if head_dim % 2 or not 2 <= head_dim <= MAX_HEAD_DIM:
        raise CheckpointError(
            f"{raw.where}: head_dim is {head_dim}; rotary positions need an even number from 2 to "
            f"{MAX_HEAD_DIM}; correct head_dim or num_attention_heads"
        )
    return head_dim


def _read_num_kv_heads(raw: JsonObject, family: Family, num_heads: int) -> int:
    default = num_heads if family.has_kv_head_for_each_by_default else None
    num_kv_heads = raw.integer("num_key_value_heads", 1, MAX_HEADS, default)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"{raw.where}: num_attention_heads {num_heads} is not a multiple of "
            f"num_key_value_heads {num_kv_heads}; correct one of the two"
        )
    return num_kv_heads


def read_dtype(raw: JsonObject) -> WeightDType:
    """`dtype`, or its old name `torch_dtype`; float32 if neither is given."""
    key = "dtype" if raw.has("dtype") else "torch_dtype"
    name = (raw.text(key) or "float32").removeprefix("torch.")
    for dtype in WEIGHT_DTYPES:
        if dtype == name:
            return dtype
    raise raw.wrong(key, "one of " + ", ".join(WEIGHT_DTYPES))


DEFAULT_POSITIONS = 1 << 20  # of models that state none, such as purely recurrent ones

_POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOutline:
    """The facts of a model beyond its arithmetic. `windows` are the attention windows of its
    layers, in tokens, as far as they are known."""

    family: str
    vocab_size: int
    max_position_embeddings: int
    dtype: WeightDType
    eos_token_ids: tuple[int, ...]
    windows: tuple[int, ...] = ()


def outline_of(config: ModelConfig) -> ModelOutline:
    return ModelOutline(
        family=config.family,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        dtype=config.dtype,
        eos_token_ids=config.eos_token_ids,
        windows=tuple(kind.window or 0 for kind in config.layer_kinds),
    )


def read_outline(values: Mapping[str, object]) -> ModelOutline:
    """The outline of a config.json's content; nested settings are those of `text_config`. Raises
    CheckpointError if a setting is missing or out of bounds."""
    raw = JsonObject(values, CONFIG_FILE)
    inner = raw.child("text_config") or raw
    sized = inner if inner.has("vocab_size") else raw
    vocab_size = sized.integer("vocab_size", 1, MAX_VOCAB_SIZE)
    key = next((each for each in _POSITION_KEYS if inner.has(each)), _POSITION_KEYS[0])
    window = inner.integer("sliding_window", 0, MAX_POSITIONS, 0)
    stated = inner if inner.has("dtype") or inner.has("torch_dtype") else raw
    eos = inner if inner.has("eos_token_id") else raw
    return ModelOutline(
        family=raw.text("model_type") or "unnamed",
        vocab_size=vocab_size,
        max_position_embeddings=inner.integer(key, 1, MAX_POSITIONS, DEFAULT_POSITIONS),
        dtype=read_dtype(stated),
        eos_token_ids=read_token_ids(eos, "eos_token_id", vocab_size),
        windows=(window,) if window else (),
    )
