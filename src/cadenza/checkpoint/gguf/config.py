"""The `ModelConfig` of a GGUF file's metadata: `read_config`. Owns what all architectures share,
and ropes. The metadata become the entries of a config.json, which is read as strictly as one; an
unknown key is refused by its name."""

import math
import re
from dataclasses import replace

from cadenza.checkpoint.gguf.architectures import ARCHITECTURES, SECTIONS, Architecture
from cadenza.checkpoint.gguf.gemma4 import ROPE_FREQUENCIES
from cadenza.checkpoint.gguf.settings import Row, Settings
from cadenza.errors import CheckpointError
from cadenza.models.config_json import parse_model_config
from cadenza.models.model_config import (
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_WIDTH,
    ModelConfig,
)
from cadenza.models.rope_config import (
    MAX_POSITIONS,
    LinearRopeScaling,
    LongRopeScaling,
    RopeConfig,
    RopeScaling,
    Sections,
    YarnRopeScaling,
    axes_of,
    format_rope,
)
from cadenza.weights.weight_format import WeightDType
from cadenza.weights.weights import adapter_text

_TOWER = ("v.", "mm.", "a.")  # how the names of an encoder's and a projector's tensors start
_TOWER_ALONE = (
    "the tower and the projector of a model alone, which cannot be served; name the model's own "
    "file, and this one by --mmproj"
)
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
_NUM_SECTIONS = 4  # of which the last is not used
FLOAT_DTYPES: dict[str, WeightDType] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

_KV_HEADS, _NEXTN, _GATING = (
    *("attention.head_count_kv", "nextn_predict_layers", "expert_gating_func"),
)
_SCALING, _FACTOR, _ATTENTION_FACTOR, _ORIGINAL = (
    f"rope.scaling.{name}" for name in ("type", "factor", "attn_factor", "original_context_length")
)
_ANY_KEYS = frozenset(
    "block_count vocab_size attention.head_count attention.head_count_kv attention.key_length "
    "attention.value_length rope.freq_base rope.dimension_count rope.scaling.yarn_beta_fast "
    "rope.scaling.yarn_beta_slow rope.scaling.finetuned tensor_data_layout pooling_type".split()
) | {_SCALING, _FACTOR, _ORIGINAL, _ATTENTION_FACTOR}
_COMMON = (
    Row("hidden_size", "embedding_length", 1, MAX_WIDTH),
    Row("intermediate_size", "feed_forward_length", 1, MAX_WIDTH),
    Row("max_position_embeddings", "context_length", 1, MAX_POSITIONS),
    Row("rms_norm_eps", "attention.layer_norm_rms_epsilon", 1e-12, 1.0),
)
# keys, and what the names of tensors contain whose shapes follow from them
_NEEDED_BY = {
    "attention.key_length": ".attn_q.",
    "attention.key_length_swa": ".attn_q.",
    _KV_HEADS: ".attn_",
    "attention.recurrent_layers": ".ssm_alpha.",
    "attention.key_length_mla": ".attn_k_b.",
    "attention.value_length_mla": ".attn_v_b.",
    "attention.q_lora_rank": ".attn_q_a.",
    "rope.dimension_count": "rope_factors_",
    "expert_count": "_exps.",
    "embedding_length_per_layer_input": "per_layer_token_embd.",
}


def architectures() -> tuple[str, ...]:
    return tuple(ARCHITECTURES)


def read_config(settings: Settings) -> tuple[ModelConfig, Architecture]:
    """The model's config and how its tensors are stored. Raises CheckpointError if a setting is
    missing, out of bounds or not supported."""
    architecture = _find(settings)
    own = {row.entry for row in architecture.rows}
    rows = (*architecture.rows, *(row for row in _COMMON if row.entry not in own))
    rope = _read_rope(settings, architecture)
    values = {
        "model_type": architecture.model_type,
        **settings.entries(rows),
        **{entry: settings.is_in_layers(name) for entry, name in architecture.stored},
        **_read_common(settings, architecture, rope),
        **architecture.read(settings, rope),
    }
    try:
        config = parse_model_config(values, where=f"the metadata of {settings.metadata.where}")
    except CheckpointError as error:
        keys = [row.key for row in rows if re.search(rf"\b{row.entry}\b", str(error))]
        named = ", ".join(f"{settings.architecture}.{key}" for key in keys)
        raise CheckpointError(f"{error} ({named})" if keys else str(error)) from error
    # Norms that multiply by 1 + weight are stored as that sum.
    return architecture.adapt(replace(config, norm_adds_one=False)), architecture


def with_absent_keys(error: CheckpointError, settings: Settings) -> CheckpointError:
    """The error, with the absent keys that its tensors' shapes follow."""
    prefix, known = settings.architecture, _known_keys(_find(settings))
    absent = [
        f"{prefix}.{key}"
        for key, part in _NEEDED_BY.items()
        if key in known and not settings.has(key) and any(part in each for each in settings.tensors)
    ]
    if not absent or any(key in str(error) for key in absent):
        return error
    return CheckpointError(f"{error}; the file does not say {', '.join(absent)}")


def _known_keys(architecture: Architecture) -> frozenset[str]:
    rows = (row.key for row in (*_COMMON, *architecture.rows))
    return _ANY_KEYS.union(rows, architecture.keys, [SECTIONS] if architecture.sections else [])


def _find(settings: Settings) -> Architecture:
    metadata, where = settings.metadata, settings.metadata.where
    architecture = ARCHITECTURES.get(settings.architecture)
    if metadata.get("general.type") == "adapter":
        name = metadata.get("general.base_model.0.name")
        raise CheckpointError(
            adapter_text(where, metadata.get("general.base_model.0.repo_url") or name)
        )
    if architecture is None and settings.architecture == "clip":
        raise CheckpointError(f"{where} has {_TOWER_ALONE}")
    if architecture is None:
        raise CheckpointError(
            f"{where}: the architecture {settings.architecture[:80]!r} is not supported; supported "
            f"are {', '.join(ARCHITECTURES)}"
        )
    unknown = sorted(settings.keys() - _known_keys(architecture))
    if unknown:
        raise CheckpointError(
            f"{where}: {settings.architecture}.{unknown[0][:120]} is set, which is not supported "
            f"for models of this architecture; use another checkpoint"
        )
    if any(".nextn." in name for name in settings.tensors):
        settings.require(_NEXTN)
    return architecture


def _fault_of_embedding(settings: Settings) -> str:
    embedding, names = settings.tensors.get(EMBEDDING), settings.tensors.keys()
    if embedding is not None:
        return f"has {EMBEDDING} with {len(embedding.shape)} axes; it must have 2"
    if not names:
        return "has no tensors: it is of a vocabulary alone, which cannot be served"
    if all(name.startswith(_TOWER) for name in names):
        return f"has {_TOWER_ALONE}"
    return f"has no tensor {EMBEDDING}; it is a part of a model: name the whole, or its first file"


def _read_common(
    settings: Settings, architecture: Architecture, rope: RopeConfig
) -> dict[str, object]:
    embedding = settings.tensors.get(EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{settings.metadata.where} {_fault_of_embedding(settings)}")
    head_dim, gating = settings.head_dim, architecture.gating
    value_size = settings.integer("attention.value_length", 1, MAX_WIDTH, head_dim)
    if value_size != head_dim and not settings.has("attention.kv_lora_rank"):
        raise settings.wrong("attention.value_length", f"{head_dim}, like the keys' length")
    has_experts = settings.integer("expert_count", 0, MAX_EXPERTS, 0) > 0
    if has_experts and gating and settings.integer(_GATING, 0, 8, gating) != gating:
        raise settings.wrong(_GATING, f"{gating} ({'softmax' if gating == 1 else 'sigmoid'})")
    return {
        "vocab_size": embedding.shape[0],
        "num_hidden_layers": settings.num_layers,
        "num_attention_heads": settings.num_heads,
        "num_key_value_heads": _num_kv_heads(settings, architecture),
        "head_dim": head_dim,
        "rope_parameters": format_rope(rope, head_dim),
        "original_max_position_embeddings": _original_length(settings, architecture)
        if rope.scaling
        else None,
        "tie_word_embeddings": HEAD not in settings.tensors,
        "dtype": FLOAT_DTYPES.get(embedding.type.name, "bfloat16"),
    }


def _num_kv_heads(settings: Settings, architecture: Architecture) -> int:
    if settings.architecture == "gemma4":
        return settings.integer_of_layer(_KV_HEADS, 0, (1, MAX_HEADS), settings.num_heads)
    counts = settings.integers_of_layers(_KV_HEADS) if architecture.has_layers_without_kv else None
    if counts is None:
        return settings.integer(_KV_HEADS, 1, MAX_HEADS, settings.num_heads)
    found = {count for count in counts if count}
    if len(found) > 1:
        raise settings.wrong(_KV_HEADS, "the same for all layers with attention, 0 for others")
    return found.pop() if found else settings.num_heads


def _read_rope(settings: Settings, architecture: Architecture) -> RopeConfig:
    rotary_dim = settings.integer("rope.dimension_count", 2, MAX_HEAD_DIM, settings.head_dim)
    return RopeConfig(
        theta=settings.number("rope.freq_base", 1.0, 1e15, architecture.theta),
        rotary_dim=rotary_dim,
        scaling=_read_scaling(settings, architecture, rotary_dim),
        axes=_read_axes(settings, architecture.sections, rotary_dim // 2),
    )


def _read_axes(settings: Settings, kind: Sections | None, num_pairs: int) -> tuple[int, ...]:
    if kind is None or not settings.has(SECTIONS):
        return ()
    sections = settings.integers_of_layers(SECTIONS, _NUM_SECTIONS)
    if sections is None or (kind == "joined" and sum(sections[:3]) != num_pairs):
        raise settings.wrong(SECTIONS, f"{_NUM_SECTIONS} numbers, of {num_pairs} pairs")
    return axes_of(sections[:3], num_pairs, kind)


def _read_scaling(
    settings: Settings, architecture: Architecture, rotary_dim: int
) -> RopeScaling | None:
    names = (ROPE_FREQUENCIES, LONG_FACTORS, SHORT_FACTORS)
    divisors, long, short = (settings.factors(name, rotary_dim // 2) for name in names)
    original = _original_length(settings, architecture)
    if divisors is not None or (long is not None and short is not None):
        return LongRopeScaling(
            short_factor=divisors or short or (),
            long_factor=divisors or long or (),
            original_max_position_embeddings=original,
            attention_factor=1.0 if divisors else _long_attention_factor(settings, original),
        )
    if settings.number(_ATTENTION_FACTOR, 0.0, 1e6, 1.0) != 1.0:
        raise settings.wrong(_ATTENTION_FACTOR, f"1 without {LONG_FACTORS}")
    kind = settings.text(_SCALING) or (architecture.scaling if settings.has(_FACTOR) else "none")
    if kind == "linear":
        return LinearRopeScaling(factor=settings.number(_FACTOR, 1.0, 1e6))
    if kind == "yarn":
        factor = settings.number(_FACTOR, 1.0, 1e6)
        return YarnRopeScaling(
            factor=factor,
            original_max_position_embeddings=original,
            attention_factor=0.1 * math.log(factor) + 1.0,
            beta_fast=settings.number("rope.scaling.yarn_beta_fast", 1e-6, 1e6, 32.0),
            beta_slow=settings.number("rope.scaling.yarn_beta_slow", 1e-6, 1e6, 1.0),
            truncate=True,
        )
    if kind != "none":
        allowed = f"none, linear, yarn, or longrope with {LONG_FACTORS} and {SHORT_FACTORS}"
        raise settings.wrong(_SCALING, allowed)
    return None


def _long_attention_factor(settings: Settings, original: int) -> float:
    scale = settings.integer("context_length", 1, MAX_POSITIONS) / original
    default = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 < original else 1.0
    return settings.number(_ATTENTION_FACTOR, 1e-3, 1e3, default)


def _original_length(settings: Settings, architecture: Architecture) -> int:
    assumed = architecture.original or settings.integer("context_length", 1, MAX_POSITIONS)
    return settings.integer(_ORIGINAL, 1, MAX_POSITIONS, assumed)
