"""`Family`: the settings of one `model_type` beyond those that all families share, and readers
of settings that several families have. `read` receives a `ModelConfig` with all shared settings.
Layer patterns are the shortest that repeat to the layers, so that equivalent files give equal
patterns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cadenza.errors import CheckpointError
from cadenza.json_object import JsonObject, shorten
from cadenza.models.layer_kind import LayerKind
from cadenza.models.model_config import MAX_EXPERTS, MAX_TOTAL_EXPERTS, ModelConfig
from cadenza.models.mtp_layout import MTPLayout
from cadenza.models.rope_config import (
    MAX_POSITIONS,
    RopeConfig,
    RopeRules,
    Sections,
    read_rope,
)

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"

LAYER_KEYS = frozenset({"sliding_window", "layer_types"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model family. Defaults are those of transformers for settings that the file omits."""

    model_type: str
    architecture: str
    # adds the family's own settings to a config with the shared ones
    read: Callable[[JsonObject, ModelConfig], ModelConfig]
    # settings that `read` handles, which are written for its models, too; others that change the
    # arithmetic are refused
    own_keys: frozenset[str] = frozenset()
    # reads the rope of layers without a window
    read_rope: Callable[[JsonObject, RopeRules], RopeConfig] = read_rope
    default_head_dim: int | None = None  # None is `hidden_size / num_attention_heads`
    has_kv_head_for_each_by_default: bool = False
    default_max_positions: int
    norm_eps_key: str = "rms_norm_eps"
    default_norm_eps: float = 1e-6
    default_rope_theta: float = 10_000.0
    default_original_positions: int | None = None  # see `RopeRules.default_original`
    may_be_partly_rotated: bool = False
    default_rotary_share: float = 1.0
    rope_sections: Sections | None = None
    # (alias, rope type) pairs in this family's files
    rope_aliases: tuple[tuple[str, str], ...] = ()
    activation_key: str = "hidden_act"
    default_activation: str = "silu"
    experts_key: str = "num_experts"
    width_key: str = "intermediate_size"  # the setting of the width of MLPs
    default_width: int | None = None  # None if files have to state it
    ties_by_default: bool = False
    mtp_layouts: tuple[MTPLayout, ...] = ()  # those that MTP layers beside the decoder may have


def read_attention_bias(raw: JsonObject, *, default: bool = False) -> dict[str, bool]:
    """`attention_bias`, which applies to q, k, v and o, as fields of a `ModelConfig`."""
    has_bias = raw.flag("attention_bias", default)
    return {"has_qkv_bias": has_bias, "has_attention_out_bias": has_bias}


def refuse_other_code(raw: JsonObject, name: str, published: frozenset[str]) -> None:
    """Raises CheckpointError if `auto_map` names code other than that `published` with the models
    `name`, which is not needed and never run."""
    auto_map = raw.child("auto_map")
    if auto_map is not None and not published.issuperset(map(str, auto_map.values.values())):
        raise CheckpointError(
            f"{raw.where}: auto_map names code other than {name}'s own; code from a checkpoint is "
            f"never run; use a checkpoint that needs none"
        )


def read_num_experts(raw: JsonObject, key: str, num_layers: int, default: int | None = None) -> int:
    num_experts = raw.integer(key, 1, MAX_EXPERTS, default)
    if (total := num_experts * num_layers) > MAX_TOTAL_EXPERTS:
        raise CheckpointError(
            f"{raw.where}: {num_layers} layers of {num_experts} experts ({key}) are {total} "
            f"experts; supported are {MAX_TOTAL_EXPERTS} in total"
        )
    return num_experts


def read_window(raw: JsonObject, default: int | None) -> int | None:
    """`sliding_window` in tokens; `default` if the key is absent, None if it is null."""
    if "sliding_window" not in raw.values:
        return default
    return raw.integer("sliding_window", 1, MAX_POSITIONS) if raw.has("sliding_window") else None


def read_used_window(raw: JsonObject, default: int | None) -> int | None:
    """`read_window`, or None unless `use_sliding_window` is set."""
    return read_window(raw, default) if raw.flag("use_sliding_window", False) else None


def read_layer_kinds(
    raw: JsonObject, are_sliding: Sequence[bool], window: int | None
) -> list[LayerKind]:
    """By `layer_types`, or by `are_sliding` (one per layer) if that is absent. Raises
    CheckpointError for other types, and for a sliding layer without a window."""
    default: list[object] = [SLIDING if is_sliding else FULL for is_sliding in are_sliding]
    types = raw.items_of("layer_types") if raw.has("layer_types") else default
    if len(types) < len(default):
        raise CheckpointError(
            f"{raw.where}: layer_types has {len(types)} entries for {len(default)} layers; "
            f"correct one of the two"
        )
    types = types[: len(default)]
    odd = [entry for entry in types if entry not in (FULL, SLIDING)]
    if odd:
        raise CheckpointError(
            f"{raw.where}: layer_types names {shorten(odd[0])}; supported are {FULL} and {SLIDING}"
        )
    if window is None and SLIDING in types:
        raise CheckpointError(
            f"{raw.where}: layer_types has {SLIDING}, but sliding_window is not set; "
            f"correct one of the two"
        )
    return [LayerKind(window=window if kind == SLIDING else None) for kind in types]


def shortest_pattern(kinds: Sequence[LayerKind]) -> tuple[LayerKind, ...]:
    for length in range(1, len(kinds)):
        if all(kind == kinds[index % length] for index, kind in enumerate(kinds)):
            return tuple(kinds[:length])
    return tuple(kinds)
