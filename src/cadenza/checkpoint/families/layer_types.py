"""Which layers have a window: `sliding_window` and `layer_types`, as several families state them.

Knows no family. Invariant: a pattern is the shortest one that, repeated, gives every layer's kind,
so that files that mean the same give equal patterns.
"""

from collections.abc import Sequence

from cadenza.checkpoint.json_object import JsonObject, shorten
from cadenza.checkpoint.model_config import LayerKind, ModelConfig
from cadenza.checkpoint.rope_config import MAX_POSITIONS
from cadenza.errors import CheckpointError

FULL, SLIDING = "full_attention", "sliding_attention"

LAYER_KEYS = frozenset({"sliding_window", "layer_types"})


def read_window(raw: JsonObject, default: int | None) -> int | None:
    """`sliding_window` in tokens; `default` where the key is absent, None where it is null."""
    if "sliding_window" not in raw.values:
        return default
    return raw.whole("sliding_window", 1, MAX_POSITIONS) if raw.has("sliding_window") else None


def read_layer_types(raw: JsonObject, default: Sequence[str]) -> list[str]:
    """`layer_types` with one entry for each layer, or else `default`, which has one for each."""
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
    """Each layer's kind. Raises CheckpointError where a sliding layer has no window."""
    if window is None and SLIDING in types:
        raise CheckpointError(
            f"{raw.where}: layer_types names {SLIDING}, but no sliding_window is in use; "
            f"correct one of the two"
        )
    return [LayerKind(window=window if kind == SLIDING else None) for kind in types]


def shortest_pattern(kinds: Sequence[LayerKind]) -> tuple[LayerKind, ...]:
    """The shortest pattern that gives `kinds` when it is repeated."""
    for length in range(1, len(kinds)):
        if all(kind == kinds[index % length] for index, kind in enumerate(kinds)):
            return tuple(kinds[:length])
    return tuple(kinds)


def layer_types_of(config: ModelConfig) -> list[str]:
    """`layer_types` of a model, to be written."""
    return [FULL if kind.window is None else SLIDING for kind in config.layer_kinds]


def window_of(config: ModelConfig) -> int | None:
    """`sliding_window` of a model, to be written: that of all layers that have one."""
    windows = (kind.window for kind in config.layer_pattern)
    return next((window for window in windows if window is not None), None)
