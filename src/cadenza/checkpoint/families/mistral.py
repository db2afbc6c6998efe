"""Mistral and Ministral: Llama with a sliding window.

Mistral has the window in every layer, Ministral in those of `layer_types`. A Mistral file with
`layer_types` is read like Ministral's.
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
from cadenza.checkpoint.json_object import JsonObject
from cadenza.checkpoint.model_config import ModelConfig

_DEFAULT_WINDOW = 4096


def _read(raw: JsonObject, model: ModelConfig) -> ModelConfig:
    window = read_window(raw, _DEFAULT_WINDOW)
    types = read_layer_types(raw, [FULL if window is None else SLIDING] * model.num_layers)
    return replace(model, layer_pattern=shortest_pattern(windowed_kinds(raw, types, window)))


def _format(config: ModelConfig) -> dict[str, object]:
    values: dict[str, object] = {"sliding_window": window_of(config)}
    if len(config.layer_pattern) > 1:
        values["layer_types"] = layer_types_of(config)
    return values


MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    read=_read,
    format=_format,
    own_keys=LAYER_KEYS,
    default_max_positions=131_072,
)

MINISTRAL = replace(MISTRAL, model_type="ministral", architecture="MinistralForCausalLM")
