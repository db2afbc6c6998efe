"""Gemma 2, and the text models of Gemma 3 and 4. Embeddings are scaled by sqrt(hidden_size) in
float32 for every data type, norms come before and after attention and MLP, and windowed and full
layers alternate."""

import math
from collections.abc import Sequence
from dataclasses import replace

from cadenza.errors import CheckpointError
from cadenza.json_object import JsonObject, shorten
from cadenza.models.families.family import (
    FULL,
    LAYER_KEYS,
    SLIDING,
    Family,
    read_attention_bias,
    read_layer_kinds,
    read_num_experts,
    read_window,
    shortest_pattern,
)
from cadenza.models.layer_kind import HeadShape, LayerKind
from cadenza.models.model_config import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_VOCAB_SIZE,
    MAX_WIDTH,
    ExpertNames,
    ExpertsConfig,
    LayerInputsConfig,
    ModelConfig,
)
from cadenza.models.rope_config import RopeConfig, RopeRules, read_rope, read_rope_entry

_ATTENTION_CAP, LOGIT_CAP = "attn_logit_softcapping", "final_logit_softcapping"
_SCALAR = "query_pre_attn_scalar"
_DEFAULT_SCALAR = 256.0
_DEFAULT_WINDOW = 4096
_LOCAL_THETA = 10_000.0


def _read_common(raw: JsonObject, model: ModelConfig, *, interval: int) -> ModelConfig:
    """Without `layer_types` every `interval`-th layer is a full one."""
    are_sliding = [(index + 1) % interval != 0 for index in range(model.num_layers)]
    kinds = read_layer_kinds(raw, are_sliding, read_window(raw, _DEFAULT_WINDOW))
    return replace(
        model,
        layer_pattern=shortest_pattern(kinds),
        has_post_norms=True,
        norm_adds_one=True,
        **read_attention_bias(raw),
        attention_scale=1.0 / math.sqrt(raw.number(_SCALAR, 1e-3, 1e6, _DEFAULT_SCALAR)),
        embedding_scale=math.sqrt(model.hidden_size),
    )


def read_cap(raw: JsonObject, key: str, default: float | None) -> float | None:
    """A soft cap; `default` if the key is absent, None if it is null."""
    if key not in raw.values:
        return default
    return raw.number(key, 1e-3, 1e6) if raw.has(key) else None


def _read_gemma2(raw: JsonObject, model: ModelConfig) -> ModelConfig:
    return replace(
        _read_common(raw, model, interval=2),
        attention_soft_cap=read_cap(raw, _ATTENTION_CAP, 50.0),
        logit_soft_cap=read_cap(raw, LOGIT_CAP, 30.0),
    )


def _read_gemma3(raw: JsonObject, model: ModelConfig) -> ModelConfig:
    interval = raw.integer("sliding_window_pattern", 1, MAX_LAYERS, 6)
    rules = RopeRules(
        head_dim=model.head_dim,
        max_positions=model.max_position_embeddings,
        default_theta=_LOCAL_THETA,
        theta_key="rope_local_base_freq",
    )
    return replace(
        _read_common(raw, model, interval=interval),
        qk_norm="head",
        window_rope=_read_kind_of_rope(raw, rules, SLIDING),
        logit_soft_cap=read_cap(raw, LOGIT_CAP, None),
    )


def _read_gemma3_rope(raw: JsonObject, rules: RopeRules) -> RopeConfig:
    """The rope of full layers, to which the old `rope_theta` and `rope_scaling` apply."""
    if raw.has("rope_parameters"):
        return _read_kind_of_rope(raw, rules, FULL)
    return read_rope(raw, rules)


def _read_kind_of_rope(raw: JsonObject, rules: RopeRules, kind: str) -> RopeConfig:
    by_kind = raw.child("rope_parameters")
    if by_kind is None:
        return read_rope_entry(raw, JsonObject({}, raw.where), rules)
    if by_kind.has("rope_theta") or by_kind.has("rope_type"):
        raise CheckpointError(
            f"{by_kind.where} has one entry for all layers; models of type gemma3_text need one "
            f"for each of {FULL} and {SLIDING}"
        )
    return read_rope_entry(raw, by_kind.child(kind) or JsonObject({}, by_kind.where), rules)


# Norms multiply by 1 + weight; soft caps on scores and logits
GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    read=_read_gemma2,
    own_keys=LAYER_KEYS | {"attention_bias", _SCALAR, _ATTENTION_CAP, LOGIT_CAP},
    default_head_dim=256,
    default_max_positions=8192,
    activation_key="hidden_activation",
    default_activation="gelu_pytorch_tanh",
    ties_by_default=True,
)

# Norms query and key heads, and has a different rope base in windowed layers
GEMMA3 = replace(
    GEMMA2,
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    read=_read_gemma3,
    own_keys=LAYER_KEYS
    | {"attention_bias", _SCALAR, LOGIT_CAP, "sliding_window_pattern", "rope_local_base_freq"},
    read_rope=_read_gemma3_rope,
    default_max_positions=131_072,
    default_rope_theta=1_000_000.0,
)

_GEMMA4_INTERVAL = 6
_GEMMA4_WINDOW, _UNIFIED_WINDOW = 512, 1024
_DEFAULT_FULL_HEAD_DIM = 512
_DEFAULT_LAYER_INPUT = 256
_DEFAULT_VOCAB = 262_144
_ROPES: dict[str, dict[str, object]] = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
_OUTER_ROPE_KEYS = ("rope_scaling", "rope_theta", "partial_rotary_factor")
_INNER_ROPE_KEYS = ("rope_type", "rope_theta", "partial_rotary_factor")
_HEAD_KEYS = frozenset({"head_dim", "num_key_value_heads"})


def _read_gemma4(raw: JsonObject, model: ModelConfig) -> ModelConfig:
    if raw.get("use_bidirectional_attention") not in (None, "vision"):
        raise raw.wrong("use_bidirectional_attention", "absent or 'vision': text is causal")
    kinds = _with_own_heads(raw, model, _read_kinds(raw, model.num_layers))
    window_heads = next((kind.heads for kind in kinds if kind.window is not None), None)
    rules = RopeRules(
        head_dim=(window_heads or model.heads).head_dim,
        max_positions=model.max_position_embeddings,
    )
    experts = _read_experts(raw, model)
    kinds = [replace(kind, has_experts=experts is not None) for kind in kinds]
    return replace(
        model,
        layer_pattern=shortest_pattern(_with_shared_kv(raw, model, kinds)),
        window_rope=_read_rope(raw, rules, SLIDING),
        experts=experts,
        qk_norm="head",
        has_value_norm=True,
        has_post_norms=True,
        has_layer_scales=True,
        layer_inputs=_read_layer_inputs(raw),
        **read_attention_bias(raw),
        attention_scale=1.0,
        logit_soft_cap=read_cap(raw, LOGIT_CAP, None),
        embedding_scale=math.sqrt(model.hidden_size),
    )


def _read_unified(raw: JsonObject, model: ModelConfig) -> ModelConfig:
    own = {"hidden_size_per_layer_input": 0, "enable_moe_block": False}
    window = raw.get("sliding_window") or _UNIFIED_WINDOW
    values = {**raw.values, **own, "sliding_window": window}
    return _read_gemma4(JsonObject(values, raw.where), model)


def _read_kinds(raw: JsonObject, num_layers: int) -> list[LayerKind]:
    """By type; the last layer is a full one, whatever the file says."""
    are_sliding = [(index + 1) % _GEMMA4_INTERVAL != 0 for index in range(num_layers)]
    kinds = read_layer_kinds(raw, are_sliding, read_window(raw, _GEMMA4_WINDOW))
    return [*kinds[:-1], LayerKind()]


def _with_own_heads(
    raw: JsonObject, model: ModelConfig, kinds: Sequence[LayerKind]
) -> list[LayerKind]:
    """The layers with heads that are not the model's; full layers of the large models make their
    values of the keys (`attention_k_eq_v`). Raises CheckpointError if layers of one type have
    different heads."""
    shapes: dict[int | None, HeadShape] = {}
    found: list[LayerKind] = []
    for index, kind in enumerate(kinds):
        heads = _read_heads(raw, model, index, is_full=kind.window is None)
        if shapes.setdefault(kind.window, heads) != heads:
            raise CheckpointError(
                f"{raw.where}: per_layer_config gives layers of one type different heads, which is "
                f"not supported; use another checkpoint"
            )
        own = None if heads == model.heads else heads
        found.append(replace(kind, heads=own, keys_are_values=_shares_keys(raw, kind)))
    return found


def _shares_keys(raw: JsonObject, kind: LayerKind) -> bool:
    return kind.window is None and raw.flag("attention_k_eq_v", False)


def _read_heads(raw: JsonObject, model: ModelConfig, index: int, *, is_full: bool) -> HeadShape:
    """From `per_layer_config` of newer files, or `global_head_dim` and
    `num_global_key_value_heads`."""
    source, names = raw, ("global_head_dim", "num_global_key_value_heads")
    default = _DEFAULT_FULL_HEAD_DIM if is_full else model.head_dim
    by_layer = raw.child("per_layer_config")
    if by_layer is not None:
        source = by_layer.child(str(index)) or JsonObject({}, by_layer.where)
        names, default = ("head_dim", "num_key_value_heads"), model.head_dim
        odd = sorted(source.values.keys() - _HEAD_KEYS)
        if odd:
            raise CheckpointError(
                f"{source.where} has {shorten(odd[0])}; supported are {', '.join(_HEAD_KEYS)}"
            )
    elif not is_full:
        return model.heads
    head_dim = source.integer(names[0], 2, MAX_HEAD_DIM, default)
    num_kv_heads = model.num_kv_heads
    if by_layer is not None or raw.flag("attention_k_eq_v", False):
        num_kv_heads = source.integer(names[1], 1, MAX_HEADS, num_kv_heads)
    if head_dim % 2:
        raise source.wrong(names[0], "an even number")
    if model.num_heads % num_kv_heads:
        raise source.wrong(names[1], f"a divisor of num_attention_heads {model.num_heads}")
    return HeadShape(num_heads=model.num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)


def _with_shared_kv(
    raw: JsonObject, model: ModelConfig, kinds: Sequence[LayerKind]
) -> list[LayerKind]:
    """The last `num_kv_shared_layers` layers read the keys and values of the last earlier layer of
    their type, and their MLPs may be twice as wide."""
    num_shared = raw.integer("num_kv_shared_layers", 0, MAX_LAYERS, 0)
    first = len(kinds) - num_shared
    last_of_type = {kind.window: index for index, kind in enumerate(kinds[: max(first, 0)])}
    if any(kind.window not in last_of_type for kind in kinds):
        raise CheckpointError(
            f"{raw.where}: the last {num_shared} of {len(kinds)} layers share keys and values "
            f"(num_kv_shared_layers), but no layer before them is of each type; correct it or "
            f"layer_types"
        )
    is_wide = raw.flag("use_double_wide_mlp", False)
    width = 2 * model.intermediate_size if is_wide else None
    return [
        kind
        if index < first
        else replace(
            kind,
            kv_source=last_of_type[kind.window],
            keys_are_values=False,
            intermediate_size=width,
        )
        for index, kind in enumerate(kinds)
    ]


def _read_layer_inputs(raw: JsonObject) -> LayerInputsConfig | None:
    size = raw.integer("hidden_size_per_layer_input", 0, MAX_WIDTH, _DEFAULT_LAYER_INPUT)
    vocab = raw.integer("vocab_size_per_layer_input", 1, MAX_VOCAB_SIZE, _DEFAULT_VOCAB)
    return LayerInputsConfig(vocab_size=vocab, size=size) if size else None


def _read_experts(raw: JsonObject, model: ModelConfig) -> ExpertsConfig | None:
    if not raw.flag("enable_moe_block", False):
        return None
    num_experts = read_num_experts(raw, "num_experts", model.num_layers)
    return ExpertsConfig(
        num_experts=num_experts,
        num_chosen=raw.integer("top_k_experts", 1, num_experts),
        intermediate_size=raw.integer("moe_intermediate_size", 1, MAX_WIDTH),
        over_chosen=True,
        are_beside_mlp=True,
        names=ExpertNames(router="router.proj"),
    )


def _read_full_rope(raw: JsonObject, rules: RopeRules) -> RopeConfig:
    head_dim = raw.integer("global_head_dim", 2, MAX_HEAD_DIM, _DEFAULT_FULL_HEAD_DIM)
    by_layer = raw.child("per_layer_config")
    if by_layer is not None:
        last = raw.integer("num_hidden_layers", 1, MAX_LAYERS) - 1
        entry = by_layer.child(str(last)) or JsonObject({}, by_layer.where)
        head_dim = entry.integer("head_dim", 2, MAX_HEAD_DIM, rules.head_dim)
    return _read_rope(raw, replace(rules, head_dim=head_dim), FULL)


def _read_rope(raw: JsonObject, rules: RopeRules, kind: str) -> RopeConfig:
    """From the entry of a type of layer; no setting outside it applies."""
    by_kind = raw.child("rope_parameters") or JsonObject({}, raw.where)
    for source, keys in ((raw, _OUTER_ROPE_KEYS), (by_kind, _INNER_ROPE_KEYS)):
        for key in keys:
            if source.has(key):
                raise source.wrong(key, f"in rope_parameters: {FULL} or {SLIDING}")
    entry = by_kind.child(kind) or JsonObject(_ROPES[kind], by_kind.where)
    return read_rope_entry(JsonObject({}, raw.where), entry, rules)


_OWN_KEYS = (
    LAYER_KEYS
    | {"attention_bias", LOGIT_CAP, "use_bidirectional_attention", "per_layer_config"}
    | {"global_head_dim", "num_global_key_value_heads", "attention_k_eq_v"}
    | {"num_kv_shared_layers", "use_double_wide_mlp"}
)

# E2B and E4B, which have per-layer embeddings, the dense 31B, and the mixture 26B-A4B, whose layers
# have experts beside their MLP. Queries, keys and values are normed, norms multiply by the weight,
# and scores are not scaled. Windowed and full layers have heads and ropes of their own
GEMMA4 = replace(
    GEMMA2,
    model_type="gemma4_text",
    architecture="Gemma4ForCausalLM",
    read=_read_gemma4,
    own_keys=_OWN_KEYS
    | {"hidden_size_per_layer_input", "vocab_size_per_layer_input"}
    | {"enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size"},
    read_rope=_read_full_rope,
    default_max_positions=131_072,
)

# The dense 12B
GEMMA4_UNIFIED = replace(
    GEMMA4,
    model_type="gemma4_unified_text",
    architecture="Gemma4UnifiedForCausalLM",
    read=_read_unified,
    own_keys=_OWN_KEYS,
    default_max_positions=262_144,
)
