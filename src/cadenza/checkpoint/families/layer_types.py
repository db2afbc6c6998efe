"""Reads and writes `sliding_window` and `layer_types`, which several families share.

Knows no family. Invariant: patterns are the shortest that repeat to the layers' kinds, so that
equivalent files give equal patterns.
"""

from collections.abc import Sequence

from cadenza.checkpoint.json_object import JsonObject, shorten
from cadenza.checkpoint.model_config import LayerKind, ModelConfig
from cadenza.checkpoint.rope_config import MAX_POSITIONS
from cadenza.errors import CheckpointError

FULL, SLIDING = "full_attention", "sliding_attention"

LAYER_KEYS = frozenset({"sliding_window", "layer_types"})


def read_window(raw: JsonObject, default: int | None) -> int | None:
    """`sliding_window` in tokens; `default` if the key is absent, None if it is null."""
    if "sliding_window" not in raw.values:
        return default
    return raw.integer("sliding_window", 1, MAX_POSITIONS) if raw.has("sliding_window") else None


def read_layer_types(raw: JsonObject, default: Sequence[str]) -> list[str]:
    """The first entries of `layer_types`, one per layer; `default` (one per layer) if absent."""
    found = raw.items_of("layer_types") if raw.has("layer_types") else list(default)
    if len(found) < len(default):
        raise CheckpointError(
            f"{raw.where}: layer_types has {len(found)} entries for {len(default)} layers; "
            f"correct one of the two"
        )
    types: list[str] = []
    for entry in found[: len(default)]:
        if entry not in (FULL, SLIDING):
            raise CheckpointError(
                f"{raw.where}: layer_types names {shorten(entry)}; "
                f"supported are {FULL} and {SLIDING}"
            )
        types.append(str(entry))
    return types


def windowed_kinds(raw: JsonObject, types: Sequence[str], window: int | None) -> list[LayerKind]:
    """Each layer's kind. Raises CheckpointError if there is a sliding layer but no window."""
    if window is None and SLIDING in types:
        raise CheckpointError(
            f"{raw.where}: layer_types has {SLIDING}, but sliding_window is not set; "
            f"correct one of the two"
        )
    return [LayerKind(window=window if kind == SLIDING else None) for kind in types]


def shortest_pattern(kinds: Sequence[LayerKind]) -> tuple[LayerKind, ...]:
    """The shortest pattern that repeats to `kinds`."""
    for length in range(1, len(kinds)):
        if all(kind == kinds[index % length] for index, kind in enumerate(kinds)):
            return tuple(kinds[:length])
    return tuple(kinds)


def layer_types_of(config: ModelConfig) -> list[str]:
    """The `layer_types` setting for a model."""
    return [FULL if kind.window is None else SLIDING for kind in config.layer_kinds]


def window_of(config: ModelConfig) -> int | None:
    """The `sliding_window` setting for a model: the window that its windowed layers share."""
    windows = (kind.window for kind in config.layer_pattern)
    return next((window for window in windows if window is not None), None)
