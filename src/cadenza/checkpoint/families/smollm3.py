"""SmolLM3: Llama with some layers without rotary positions.

Despite its name, `no_rope_layers` has a 0 for each layer without rope; without the list it is every
`no_rope_layer_interval`-th. If `use_sliding_window` is set, the window applies to those layers.
"""

from dataclasses import replace

from cadenza.checkpoint.families.family import Family
from cadenza.checkpoint.families.layer_types import (
    FULL,
    LAYER_KEYS,
    SLIDING,
    layer_types_of,
    read_layer_types,
    read_window,
    shortest_pattern,
    window_of,
    windowed_kinds,
)
from cadenza.checkpoint.families.llama import BIAS_KEYS, format_biases, read_biases
from cadenza.checkpoint.json_object import JsonObject
from cadenza.checkpoint.model_config import MAX_LAYERS, ModelConfig

_DEFAULT_INTERVAL = 4


def _read(raw: JsonObject, model: ModelConfig) -> ModelConfig:
    window = read_window(raw, None) if raw.flag("use_sliding_window", False) else None
    ropes = _read_ropes(raw, model.num_layers)
    default = [FULL if window is None or has_rope else SLIDING for has_rope in ropes]
    kinds = windowed_kinds(raw, read_layer_types(raw, default), window)
    mixed = [replace(kind, has_rope=rope) for kind, rope in zip(kinds, ropes, strict=True)]
    return replace(read_biases(raw, model), layer_pattern=shortest_pattern(mixed))


def _read_ropes(raw: JsonObject, num_layers: int) -> list[bool]:
    if not raw.has("no_rope_layers"):
        interval = raw.integer("no_rope_layer_interval", 1, MAX_LAYERS, _DEFAULT_INTERVAL)
        return [(index + 1) % interval != 0 for index in range(num_layers)]
    listed = raw.items_of("no_rope_layers")
    if len(listed) < num_layers or any(entry not in (0, 1) for entry in listed):
        raise raw.wrong("no_rope_layers", f"a list of a 0 or a 1 for each of {num_layers} layers")
    return [bool(entry) for entry in listed[:num_layers]]


def _format(config: ModelConfig) -> dict[str, object]:
    window = window_of(config)
    return {
        **format_biases(config),
        "no_rope_layers": [int(kind.has_rope) for kind in config.layer_kinds],
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": layer_types_of(config),
    }


SMOLLM3 = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    read=_read,
    format=_format,
    own_keys=BIAS_KEYS | LAYER_KEYS | {"no_rope_layers", "no_rope_layer_interval"},
    default_max_positions=32_768,
    default_rope_theta=2_000_000.0,
    ties_by_default=True,
)
